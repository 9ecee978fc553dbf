//! Rendering the reference tables of the documentation: commands, device keys, metrics and error codes.
//!
//! A page contains each table between `<!-- reference NAME -->` and `<!-- /reference NAME -->`. [`update`]
//! renders the table from the program and replaces the text between these two lines. A test fails if a page
//! in the tree differs from the rendered one.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use clap::{Arg, Command};
use freestone_cli::reference::{self, Topic};

use crate::{NAME, parser};

/// A table: its name in the markers of the page, and the function that renders it.
type Table = (&'static str, fn() -> String);

/// Pages with tables, relative to the directory of the documentation, and the tables of each page.
pub const PAGES: [(&str, &[Table]); 4] = [
    ("reference/commands.md", &[("commands", commands)]),
    ("reference/keys.md", &[("keys", keys)]),
    ("reference/metrics.md", &[("metrics", metrics)]),
    ("reference/control.md", &[("codes", codes), ("errno", errnos)]),
];

/// Returns the content of a page with all its tables rendered again.
///
/// # Errors
/// The page cannot be read, or lacks the markers of a table.
pub fn rendered(docs: &Path, page: &str, tables: &[Table]) -> Result<String> {
    let path = docs.join(page);
    let mut text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    for (name, table) in tables {
        let (begin, end) = (format!("<!-- reference {name} -->\n"), format!("<!-- /reference {name} -->"));
        let Some((before, (_, after))) =
            text.split_once(&begin).and_then(|(before, rest)| Some((before, rest.split_once(&end)?)))
        else {
            bail!("{}: no table {name}", path.display());
        };
        text = format!("{before}{begin}\n{}\n{end}{after}", table().trim_end());
    }
    Ok(text)
}

/// Renders all tables in the pages below `docs`, and writes the pages.
///
/// # Errors
/// A page cannot be read or written, or lacks the markers of a table.
pub fn update(docs: &Path) -> Result<()> {
    for (page, tables) in PAGES {
        let path = docs.join(page);
        let text = rendered(docs, page, tables)?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Escapes a text for a cell of a Markdown table.
fn cell(text: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    words.join(" ").replace('|', "\\|").replace('<', "&lt;")
}

fn code(text: &str) -> String {
    format!("`{}`", text.replace('|', "\\|"))
}

fn commands() -> String {
    let parser = parser();
    let mut text = String::from("Options of every command:\n\n");
    text += &options(&parser, true);
    for (group, verbs) in reference::GROUPS {
        let _ = writeln!(text, "\n## {group}");
        for verb in *verbs {
            let Some(command) = parser.find_subcommand(verb) else { continue };
            describe(&mut text, command, 3);
        }
    }
    text
}

/// Appends sections about a command and its visible subcommands to `text`, with headings of this level.
pub(crate) fn describe(text: &mut String, command: &Command, level: usize) {
    let name = command.get_bin_name().unwrap_or(NAME);
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let _ = writeln!(text, "\n{} {name}\n\n{about}.", "#".repeat(level));
    let mut command = command.clone();
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").lines().map(str::trim).collect::<Vec<_>>().join("\n    ");
    let _ = writeln!(text, "\n    {usage}");
    let options = options(&command, false);
    if !options.is_empty() {
        let _ = writeln!(text, "\n{options}");
    }
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        describe(text, below, level);
    }
}

/// Returns a Markdown table of the options of a command: the global ones if `is_global` is true, otherwise its own.
fn options(command: &Command, is_global: bool) -> String {
    let is_shown = |arg: &&Arg| {
        let is_help = matches!(arg.get_id().as_str(), "help" | "version");
        !arg.is_hide_set() && !is_help && arg.is_global_set() == is_global
    };
    let mut text = String::new();
    for arg in command.get_arguments().filter(is_shown) {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(text, "| {} | {} |", code(&arg.to_string()), cell(&help));
    }
    if text.is_empty() { text } else { format!("| option | meaning |\n|---|---|\n{text}") }
}

fn keys() -> String {
    let mut text = String::new();
    for topic in reference::topics() {
        if !topic.name.is_empty() {
            let _ = writeln!(text, "## {}\n", topic.name);
        }
        text += &key_table(&topic);
        text.push('\n');
    }
    text
}

/// Returns the form of a kind's specification, the table of its keys and the note below it.
pub(crate) fn key_table(topic: &Topic) -> String {
    let (heading, about) = &topic.heading;
    let mut text = if about.is_empty() { format!("{heading}\n") } else { format!("`{heading}`: {about}\n") };
    text += "\n| key | meaning |\n|---|---|\n";
    for (keys, about) in &topic.rows {
        let _ = writeln!(text, "| {} | {} |", code(keys), cell(about));
    }
    if !topic.note.is_empty() {
        let _ = writeln!(text, "\n{}", topic.note);
    }
    text
}

fn metrics() -> String {
    let mut text = String::from("| name | type | labels | meaning |\n|---|---|---|---|\n");
    for metric in reference::metrics() {
        let labels: Vec<_> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let (name, of, help) = (metric.name, metric.of.name(), cell(metric.help));
        let _ = writeln!(text, "| `{name}` | {of} | {} | {help} |", labels.join(", "));
    }
    text
}

fn codes() -> String {
    let mut text = String::from("| code | meaning | exit status of `freestone` |\n|---|---|---|\n");
    for (code, meaning, status) in reference::CODES {
        let _ = writeln!(text, "| {code} | {meaning} | {status} |");
    }
    text
}

fn errnos() -> String {
    let mut text = String::from("| `errno` | meaning |\n|---|---|\n");
    for errno in reference::Errno::ALL {
        let _ = writeln!(text, "| {errno:?} | {} |", cell(errno.meaning()));
    }
    text
}
