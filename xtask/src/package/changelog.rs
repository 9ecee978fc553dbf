//! Converts CHANGELOG.md, which is written by hand, to Debian's changelog.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::cargo::output;

const CHANGELOG: &str = "CHANGELOG.md";

/// Maximum length of a line of a change, in characters. Debian's changelog indents the line, and allows 80 characters
/// in total.
const LINE_MAX_CHARS: usize = 76;

/// A version of the changelog. The newest version is the first in the file.
#[derive(Debug, PartialEq, Eq)]
struct Entry<'a> {
    version: &'a str,
    /// Year, month, day.
    date: &'a str,
    /// Lines of each change.
    changes: Vec<Vec<&'a str>>,
}

/// Returns the changelog in Debian's format. Fails unless the newest version of the changelog is `version`.
pub fn debian(package: &str, version: &str, maintainer: &str) -> Result<String> {
    let text = fs::read_to_string(CHANGELOG).with_context(|| format!("cannot read {CHANGELOG}"))?;
    let entries = entries(&text)?;
    let newest = entries.first().map(|entry| entry.version);
    ensure!(newest == Some(version), "{CHANGELOG} begins with {newest:?}, and this is version {version}");
    let mut debian = String::new();
    for entry in &entries {
        let date = ["-u", "-R", "-d", entry.date];
        let date = output(Command::new("date").args(date).env("LC_ALL", "C"))?;
        debian += &of_version(entry, package, maintainer, &date);
    }
    Ok(debian)
}

fn of_version(entry: &Entry<'_>, package: &str, maintainer: &str, date: &str) -> String {
    let mut text = format!("{package} ({}) unstable; urgency=medium\n\n", entry.version);
    for change in &entry.changes {
        for (number, line) in change.iter().enumerate() {
            text += if number == 0 { "  * " } else { "    " };
            text += line;
            text.push('\n');
        }
    }
    text + &format!("\n -- {maintainer}  {date}\n\n")
}

/// Parses the versions: a heading `## VERSION (DATE)`, then changes that begin with `* ` and continue indented.
fn entries(text: &str) -> Result<Vec<Entry<'_>>> {
    let mut entries: Vec<Entry<'_>> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let wrong = |what: &str| format!("{CHANGELOG}:{number}: {what}");
        if let Some(heading) = line.strip_prefix("## ") {
            let parts = heading.strip_suffix(')').and_then(|heading| heading.split_once(" ("));
            let (version, date) = parts.with_context(|| wrong("the heading is not VERSION (DATE)"))?;
            entries.push(Entry { version, date, changes: Vec::new() });
            continue;
        }
        // Text before the first version is not part of Debian's changelog.
        let Some(entry) = entries.last_mut() else { continue };
        ensure!(line.chars().skip(2).count() <= LINE_MAX_CHARS, wrong("this line is too long"));
        match (line.strip_prefix("* "), line.strip_prefix("  "), entry.changes.last_mut()) {
            (Some(change), _, _) => entry.changes.push(vec![change]),
            (None, Some(more), Some(change)) => change.push(more.trim_start()),
            (None, None, _) if line.is_empty() => {}
            _ => bail!(wrong("the line is neither a change (\"* ...\") nor a continuation of one")),
        }
    }
    if let Some(entry) = entries.iter().find(|entry| entry.changes.is_empty()) {
        bail!("{CHANGELOG}: version {} has no change", entry.version);
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::{CHANGELOG, Entry, entries, of_version};

    const TEXT: &str = "# Changes\n\nSince ever.\n\n## 0.2.0 (2027-01-02)\n\n* One\n  that is long.\n* Two.\n\n## 0.1.0 (2026-11-26)\n\n* All.\n";

    #[test]
    fn entries_convert_to_debian_format() {
        let read = entries(TEXT).unwrap();
        let two = vec![vec!["One", "that is long."], vec!["Two."]];
        assert_eq!(read[0], Entry { version: "0.2.0", date: "2027-01-02", changes: two });
        assert_eq!(read[1], Entry { version: "0.1.0", date: "2026-11-26", changes: vec![vec!["All."]] });
        let debian = of_version(&read[0], "p", "N <n@example.org>", "Sat, 02 Jan 2027 00:00:00 +0000");
        let wanted = "p (0.2.0) unstable; urgency=medium\n\n  * One\n    that is long.\n  * Two.\n\n -- N <n@example.org>  Sat, 02 Jan 2027 00:00:00 +0000\n\n";
        assert_eq!(debian, wanted);
    }

    #[test]
    fn invalid_changelog_is_refused() {
        for wrong in ["## 0.1.0\n\n* a\n", "## 0.1.0 (2026-11-26)\nwords\n", "## 0.1.0 (2026-11-26)\n"] {
            assert!(entries(wrong).is_err(), "{wrong}");
        }
        let long = |chars: usize| format!("## 0.1.0 (2026-11-26)\n\n* {}\n", "a".repeat(chars));
        assert!(entries(&long(76)).is_ok() && entries(&long(77)).is_err());
    }

    #[test]
    fn newest_version_is_that_of_the_workspace() {
        let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../CHANGELOG.md")).unwrap();
        assert_eq!(entries(&text).unwrap()[0].version, env!("CARGO_PKG_VERSION"), "{CHANGELOG}");
    }
}
