//! Texts of `--help`: groups of subcommands, kinds of devices, examples.

pub mod devices;
pub mod examples;

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Command;

/// Subcommands by purpose, as headings with names. The first group contains those that most users need first.
pub const GROUPS: &[(&str, &[&str])] = &[
    (
        "Common commands",
        &["serve", "list", "stat", "create", "set", "fork", "snapshot", "rewind", "remove", "shutdown"],
    ),
    ("Server", &["wait", "top", "apply", "dump", "jobs", "cancel", "upgrade", "hold"]),
    ("Devices", &["get", "mount", "umount", "publish", "unpublish", "reset", "ublk-owner"]),
    ("Snapshots and forks", &["merge", "delta", "save", "restore"]),
    ("RAM disk maintenance", &["compact", "idle", "writeback", "recompress", "block-state"]),
    ("Testing", &["explore", "zones", "power-cut", "mark", "release"]),
    ("Images in object storage", &["push", "pull", "images", "prune", "trace"]),
];

/// Replaces the list of subcommands in the help of the program by groups with headings ([`GROUPS`]).
pub fn grouped(parser: Command) -> Command {
    let mut text = String::new();
    for (heading, verbs) in GROUPS {
        let _ = writeln!(text, "{heading}:");
        for verb in *verbs {
            let about = parser.find_subcommand(verb).and_then(Command::get_about);
            let _ = writeln!(text, "  {verb:<12} {}", about.map(ToString::to_string).unwrap_or_default());
        }
        text.push('\n');
    }
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{text}\
         `freestone help COMMAND` describes a command, `freestone help KIND` a kind of device.\n\n\
         Options:\n{{options}}{{after-help}}"
    );
    parser.help_template(template)
}

/// Prints a help text on standard output. Returns success even if the reader has closed the pipe.
pub fn print(text: &str) -> ExitCode {
    // Fails if the reader has closed the pipe, which is not an error.
    let _ = io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::GROUPS;
    use crate::cli::Cli;

    #[test]
    fn groups_hold_each_subcommand_once() {
        let mut grouped: Vec<_> = GROUPS.iter().flat_map(|(_, verbs)| *verbs).copied().collect();
        let parser = Cli::command();
        let mut verbs: Vec<_> = parser.get_subcommands().map(clap::Command::get_name).collect();
        grouped.sort_unstable();
        verbs.sort_unstable();
        assert_eq!(grouped, verbs);
    }
}
