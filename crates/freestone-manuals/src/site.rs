//! Pages for the site of the documentation: one for each command and each kind of device.
//!
//! The tables are those of the reference pages. A command's page also has the examples and notes that `freestone help`
//! prints.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use clap::Command;
use freestone_cli::reference::{GROUPS, topics};

use crate::reference::{describe, key_table};
use crate::{NAME, parser, subdirectory};

/// Writes `verbs/COMMAND.md` and `kinds/KIND.md` below `dir`.
///
/// # Errors
/// A directory cannot be created, or a file cannot be written.
pub fn write(dir: &Path) -> Result<()> {
    let put = |path: &Path, text: &str| {
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    let (parser, verbs) = (parser(), subdirectory(dir, "verbs")?);
    for (group, names) in GROUPS {
        for name in *names {
            let Some(command) = parser.find_subcommand(name) else { continue };
            put(&verbs.join(format!("{name}.md")), &verb_page(group, command))?;
        }
    }
    let kinds = subdirectory(dir, "kinds")?;
    for topic in topics() {
        if topic.name.is_empty() || topic.name.contains(' ') {
            continue;
        }
        let name = topic.name;
        let table = key_table(&topic);
        let text = format!(
            "# {name}\n\n{table}\n`{NAME} help {name}` prints the same. [Device keys](../keys.md) has the keys of every\n\
             kind, and [Devices](../devices.md) explains them.\n"
        );
        put(&kinds.join(format!("{name}.md")), &text)?;
    }
    Ok(())
}

/// Returns the page of a command and its visible subcommands.
fn verb_page(group: &str, command: &Command) -> String {
    let mut text = String::new();
    describe(&mut text, command, 1);
    for command in
        [command].into_iter().chain(command.get_subcommands()).filter(|command| !command.is_hide_set())
    {
        let Some(notes) = command.get_after_long_help().or_else(|| command.get_after_help()) else {
            continue;
        };
        let name = command.get_bin_name().unwrap_or(NAME);
        let _ = writeln!(text, "\n## Notes on {name}\n");
        // Indented text is code in Markdown, whatever it contains.
        for line in notes.to_string().trim_end().lines() {
            let _ = writeln!(text, "    {line}");
        }
    }
    let _ = writeln!(text, "\nGroup: {group}. [Commands](../commands.md) lists all commands.");
    text.trim_start().to_owned()
}

#[cfg(test)]
mod tests {
    use super::verb_page;
    use crate::parser;

    #[test]
    fn page_has_the_options_and_examples_of_a_command() {
        let parser = parser();
        let page = verb_page("Forks", parser.find_subcommand("fork").unwrap());
        assert!(page.starts_with("# freestone fork\n\n"), "{page}");
        for part in ["`--count <N>`", "## Notes on freestone fork", "    freestone fork ", "Group: Forks."] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }
}
