//! Rendering the manual pages of the program, of each verb, and of the device kinds.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use crate::NAME;

/// Heading for help text below the options that does not begin with a heading.
const NOTES: &str = "NOTES";

/// Writes the manual page of `command` to `dir`, and those of all its visible subcommands. The command must
/// be built.
pub fn write_all(command: &Command, dir: &Path) -> Result<()> {
    for verb in shown(command) {
        write_all(verb, dir)?;
    }
    let man = Man::new(command.clone())
        .source(concat!("freestone ", env!("CARGO_PKG_VERSION")))
        .manual("Freestone");
    let path = dir.join(man.get_filename());
    let cannot = || format!("cannot write {}", path.display());
    let mut page = Vec::new();
    let is_verb = command.get_display_name().is_some_and(|name| name != NAME);
    man.render_title(&mut page).with_context(cannot)?;
    man.render_name_section(&mut page).with_context(cannot)?;
    man.render_synopsis_section(&mut page).with_context(cannot)?;
    man.render_description_section(&mut page).with_context(cannot)?;
    man.render_options_section(&mut page).with_context(cannot)?;
    if shown(command).next().is_some() {
        man.render_subcommands_section(&mut page).with_context(cannot)?;
    }
    let mut rest = Roff::new();
    if let Some(text) = command.get_after_long_help().or_else(|| command.get_after_help()) {
        below_the_options(&mut rest, &text.to_string());
    }
    rest.control("SH", ["SEE ALSO"]);
    if is_verb {
        rest.text([roman(format!("{NAME}(1), and all that it names."))]);
    }
    rest.text([roman(format!("The documentation is in /usr/share/doc/{NAME}."))]);
    rest.to_writer(&mut page).with_context(cannot)?;
    fs::write(&path, page).with_context(cannot)
}

/// Writes the manual page `freestone-devices(7)`, which describes the kinds of devices and their keys.
pub fn write_devices(dir: &Path) -> Result<()> {
    let command = Command::new("freestone-devices").about("Kinds of device and their keys");
    let man = Man::new(command)
        .section("7")
        .source(concat!("freestone ", env!("CARGO_PKG_VERSION")))
        .manual("Freestone");
    let path = dir.join(man.get_filename());
    let cannot = || format!("cannot write {}", path.display());
    let mut page = Vec::new();
    man.render_title(&mut page).with_context(cannot)?;
    man.render_name_section(&mut page).with_context(cannot)?;
    let mut keys = Roff::new();
    keys.control("SH", ["DEVICES"]);
    keys.control("nf", []);
    keys.text([roman(freestone_cli::device_help())]);
    keys.control("fi", []);
    keys.to_writer(&mut page).with_context(cannot)?;
    fs::write(&path, page).with_context(cannot)
}

/// Returns the subcommands of `command` that are not hidden.
fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|verb| !verb.is_hide_set())
}

/// Renders the help text below the options. A line of one word and a colon is a heading; indented lines are
/// printed as they are; other lines are filled.
fn below_the_options(roff: &mut Roff, text: &str) {
    let mut has_heading = false;
    let mut as_it_is = false;
    for line in text.lines() {
        let heading = line.strip_suffix(':').filter(|word| word.chars().all(char::is_alphabetic));
        if heading.is_none() && !has_heading {
            roff.control("SH", [NOTES]);
        }
        has_heading = true;
        let indented = heading.is_none() && (line.starts_with(' ') || (as_it_is && line.is_empty()));
        if indented != as_it_is {
            roff.control(if indented { "nf" } else { "fi" }, []);
            as_it_is = indented;
        }
        match heading {
            Some(word) => roff.control("SH", [word.to_uppercase().as_str()]),
            None if line.is_empty() && !as_it_is => roff.control("PP", []),
            None => roff.text([roman(line)]),
        };
    }
    if as_it_is {
        roff.control("fi", []);
    }
}
