//! Every verb and option is documented in the pages and completed by shells.

#[macro_use]
extern crate freestone_testkit;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use freestone_manuals::{NAME, parser, reference, write};
use tempfile::TempDir;

fn written() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path()).unwrap();
    dir
}

/// Returns the words of a page without roff markup.
fn words(page: &str) -> String {
    let mut text = String::new();
    for line in page.lines() {
        let line =
            line.strip_prefix('.').map_or(line, |request| request.split_once(' ').unwrap_or_default().1);
        text += line;
        text.push(' ');
    }
    for font in ["\\fB", "\\fI", "\\fR", "\\&"] {
        text = text.replace(font, "");
    }
    let text = text.replace("\\-", "-").replace("\\*(Aq", "'").replace("\\(aq", "'").replace("\\\\", "\\");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn plain(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns a built command and all its subcommands.
fn commands(command: &clap::Command) -> Vec<clap::Command> {
    let below = command.get_subcommands().flat_map(commands);
    [command.clone()].into_iter().chain(below).collect()
}

#[test]
fn every_verb_and_option_is_documented() {
    let dir = written();
    let pages = dir.path().join("man");
    let all = commands(&parser());
    assert!(all.len() > 40, "{}", all.len());
    let mut names = BTreeSet::new();
    for command in &all {
        let name = format!("{}.1", command.get_display_name().unwrap_or(NAME));
        let page = fs::read_to_string(pages.join(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let page = words(&page);
        let has = |what: &str| assert!(page.contains(&plain(what)), "{name} lacks {what:?}: {page}");
        has(&command.get_about().unwrap_or_else(|| panic!("{name}: no text")).to_string());
        for arg in command.get_arguments() {
            let help = arg.get_long_help().or_else(|| arg.get_help());
            let help = help.unwrap_or_else(|| panic!("{name}: {} has no text", arg.get_id())).to_string();
            assert!(!help.trim().is_empty(), "{name}: {} has no text", arg.get_id());
            has(&help);
            if let Some(long) = arg.get_long() {
                has(&format!("--{long}"));
            }
        }
        if let Some(after) = command.get_after_help() {
            for line in after.to_string().lines().filter(|line| !line.ends_with(':')) {
                has(line);
            }
        }
        names.insert(name);
    }
    names.insert(format!("{NAME}-devices.7"));
    let there = fs::read_dir(&pages).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(there.collect::<BTreeSet<_>>(), names);
}

#[test]
fn examples_keep_their_lines() {
    let dir = written();
    let page = fs::read_to_string(dir.path().join("man/freestone-fork.1")).unwrap();
    let (_, examples) = page.split_once(".SH EXAMPLES\n").expect("a heading");
    let first = examples.lines().take(2).collect::<Vec<_>>();
    assert_eq!(first, [".nf", "  freestone fork golden job \\-\\-nbd unix:/run/job.sock"]);
    assert!(examples.contains("\n.fi\n"), "{examples}");
}

/// Returns the output of a shell.
fn said(shell: &mut Command) -> String {
    let output = shell.stdin(Stdio::null()).env("LC_ALL", "C").output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && complaint.is_empty(), "{shell:?}: {}: {complaint}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Returns all verbs, and the long options of `serve`.
fn to_complete() -> (Vec<String>, Vec<String>) {
    let parser = parser();
    let verbs = parser.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    let serve = parser.find_subcommand("serve").unwrap();
    (verbs, serve.get_arguments().filter_map(|arg| Some(format!("--{}", arg.get_long()?))).collect())
}

fn each_is_offered(offered: &str, wanted: &[String]) {
    let words: BTreeSet<_> = offered.split_whitespace().collect();
    let missing: Vec<_> = wanted.iter().filter(|word| !words.contains(word.as_str())).collect();
    assert!(missing.is_empty() && !wanted.is_empty(), "{missing:?} of {wanted:?} are not offered: {offered}");
}

#[test]
fn bash_completes_verbs_and_options() {
    let dir = written();
    let (verbs, options) = to_complete();
    let offered = |words: &str, now: usize| {
        let script = format!(
            "source {}; COMP_WORDS=({words} ''); COMP_CWORD={now}; COMP_WORDS[{now}]=${{COMP_WORDS[{now}]:-}}; \
             _{NAME} {NAME} \"${{COMP_WORDS[{now}]}}\" \"${{COMP_WORDS[{now}-1]}}\"; echo \"${{COMPREPLY[@]}}\"",
            dir.path().join("bash").join(NAME).display()
        );
        said(Command::new("bash").args(["--norc", "--noprofile", "-c", &script]))
    };
    each_is_offered(&offered(NAME, 1), &verbs);
    each_is_offered(&offered("freestone serve --", 2), &options);
    assert_eq!(offered("freestone unpub", 1).trim(), "unpublish");
}

#[test]
fn fish_completes_verbs_and_options() {
    let dir = written();
    let (verbs, options) = to_complete();
    let file = dir.path().join("fish").join(format!("{NAME}.fish"));
    let offered = |line: &str| {
        let script = format!("source {}; complete --do-complete '{line}'", file.display());
        let mut fish = Command::new(freestone_testkit::tools::find("fish"));
        // fish stores history and variables in its home directory.
        fish.env("HOME", dir.path()).env("XDG_CONFIG_HOME", dir.path()).env("XDG_DATA_HOME", dir.path());
        said(fish.args(["--no-config", "--command", &script]))
    };
    each_is_offered(&offered("freestone "), &verbs);
    each_is_offered(&offered("freestone serve --"), &options);
    assert!(offered("freestone unpub").starts_with("unpublish\t"));
}

#[test]
fn zsh_completes_verbs_and_options() {
    let dir = written();
    let (verbs, options) = to_complete();
    // zsh completes only at a terminal, so the script provides one and prints one completion per
    // line.
    let offered = |line: &str| {
        let script = include_str!("offered.zsh");
        let mut zsh = Command::new(freestone_testkit::tools::find("zsh"));
        zsh.env("ZDOTDIR", dir.path()).env("TERM", "dumb");
        said(zsh.args(["-f", "-c", script, "zsh"]).arg(dir.path().join("zsh")).arg(line))
    };
    each_is_offered(&offered("freestone "), &verbs);
    each_is_offered(&offered("freestone serve --"), &options);
    assert!(Path::new("/usr/share/zsh").is_dir());
}

#[test]
fn reference_tables_are_up_to_date() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    for (page, tables) in reference::PAGES {
        let expected = reference::rendered(&docs, page, tables).unwrap();
        let text = fs::read_to_string(docs.join(page)).unwrap();
        assert!(text == expected, "docs/{page} differs: cargo run -p freestone-manuals -- --docs docs");
    }
}

#[test]
fn each_device_key_is_described_in_the_reference() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference");
    let pages = fs::read_dir(docs).unwrap().map(|entry| entry.unwrap().path());
    let text: String = pages
        .filter(|path| !path.ends_with("keys.md"))
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    let rows = freestone_cli::reference::topics().flat_map(|topic| topic.rows);
    let keys: Vec<String> = rows.map(|(keys, _)| keys).collect();
    let names = keys.iter().flat_map(|keys| keys.split(", ")).filter_map(|key| Some(key.split_once('=')?.0));
    let is_missing =
        |name: &&str| !text.contains(&format!("`{name}`")) && !text.contains(&format!("`{name}="));
    let missing: Vec<_> = names.filter(is_missing).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
