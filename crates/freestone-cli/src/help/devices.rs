//! Reference of the kinds of devices and their keys: `freestone help KIND` and `freestone serve
//! --help-devices`.

use clap::Command;
use freestone_spec::schema::{self, Topic};

/// Column at which the sentences begin.
const ABOUT_COLUMN: usize = 44;
/// Width of a line.
const COLUMNS: usize = 120;

const RULES: &str = "\
Put a device after the devices that it uses. Write a comma inside a value twice.";

/// Returns a line of the help, and further lines if the sentence needs them.
fn line(key: &str, about: &str) -> String {
    let mut text = key.to_owned();
    let mut width = key.len();
    for (number, word) in about.split_whitespace().enumerate() {
        let gap = if number == 0 {
            " ".repeat(ABOUT_COLUMN.saturating_sub(key.len()).max(3))
        } else if width + 1 + word.len() <= COLUMNS {
            " ".to_owned()
        } else {
            width = 0;
            format!("\n{}", " ".repeat(ABOUT_COLUMN))
        };
        width += gap.trim_start_matches('\n').len() + word.len();
        text += &gap;
        text += word;
    }
    text + "\n"
}

/// Returns the lines about keys, without the line break at the end.
fn lines(rows: &[(String, &str)]) -> String {
    let lines: String = rows.iter().map(|(keys, about)| line(&format!("  {keys}"), about)).collect();
    lines.trim_end().to_owned()
}

fn text(topic: &Topic) -> String {
    let (heading, about) = &topic.heading;
    let note = if topic.note.is_empty() { String::new() } else { format!("\n  {}", topic.note) };
    format!("{}{}{note}", line(heading, about), lines(&topic.rows))
}

/// Returns the help about the keys of every device, also part of the help of each command that creates devices.
pub fn common_keys() -> String {
    let topics: Vec<_> = schema::topics().take(2).map(|topic| text(&topic)).collect();
    topics.join("\n")
}

/// Returns the help about the keys of a fork or snapshot for the command of that name.
pub fn keys_of(kind: &str) -> String {
    schema::topics().find(|topic| topic.name == kind).map(|topic| lines(&topic.rows)).unwrap_or_default()
}

/// Returns the help of a topic, or None if the topic is unknown or a subcommand has its name.
pub fn topic(name: &str, parser: &Command) -> Option<String> {
    let topic = schema::topics().skip(2).find(|topic| topic.name == name)?;
    let is_verb = parser.get_subcommands().any(|verb| verb.get_name() == name);
    (!is_verb).then(|| format!("{}\n\n{}\n\n{RULES}\n", text(&topic), common_keys()))
}

/// Returns the help of all topics, as printed by `freestone serve --help-devices`.
pub fn all() -> String {
    let topics: Vec<_> = schema::topics().skip(2).map(|topic| text(&topic)).collect();
    format!("{}\n\n{}\n\n{RULES}\n", topics.join("\n\n"), common_keys())
}

#[cfg(test)]
mod tests {
    use super::all;

    #[test]
    fn help_of_devices_fits_120_columns() {
        for line in all().lines() {
            assert!(line.len() <= 120, "{line}");
        }
    }
}
