//! Checks that options, keys and parameters of an earlier release are still accepted.

use crate::harness::prelude::*;

const INPUTS: &str = include_str!("0.1.0/inputs.txt");
/// A word that is not an option, key or parameter of any release.
const UNKNOWN: &str = "no_such_word";
/// Methods, and the required parameters without which they do not check the names of other
/// parameters.
const REQUIRED: [(&str, &str); 4] = [
    ("fork", r#"{ "base": "drive", "name": "x" }"#),
    ("publish", r#"{ "name": "drive", "template": true, "nbd": "unix:x" }"#),
    ("push", r#"{ "name": "drive", "url": "file:///nowhere" }"#),
    ("pull", r#"{ "name": "x", "url": "file:///nowhere" }"#),
];

/// Returns the rows of `inputs.txt` that begin with `table`: the name after `table`, and the words
/// after the colon.
fn rows(table: &str) -> impl Iterator<Item = (&'static str, Vec<&'static str>)> {
    let lines = INPUTS.lines().filter_map(move |line| line.strip_prefix(table)?.split_once(':'));
    lines.map(|(name, words)| (name.trim(), words.split_whitespace().collect()))
}

#[test]
fn release_options_are_accepted() {
    let dir = tempdir().unwrap();
    // `--help` ends each command without running it. An unknown option before `--help` is an error.
    let error = |subcommand: &str, options: &[String]| {
        finish(freestone(dir.path()).args(subcommand.split(' ')).args(options).arg("--help")).2
    };
    assert!(error("list", &["--no-such-option".into()]).contains("unexpected argument '--no-such-option'"));
    assert!(error("no-such-command", &[]).contains("unrecognized subcommand"));
    let mut options = 0;
    for (subcommand, words) in rows("option ") {
        let (values, flags): (Vec<_>, Vec<_>) = words.into_iter().partition(|word| word.ends_with('='));
        options += values.len() + flags.len();
        let flags: Vec<_> = flags.into_iter().map(str::to_owned).collect();
        assert_eq!(error(subcommand, &flags), "", "{subcommand} {flags:?}");
        for option in values {
            // The value 1 may be invalid for the option, which is a different error.
            let error = error(subcommand, &[format!("{option}1")]);
            assert!(
                !error.contains("unexpected") && !error.contains("unrecognized"),
                "{subcommand}: {error}"
            );
        }
    }
    assert!(options > 200, "{options}");
}

#[test]
fn release_keys_are_accepted() {
    let dir = tempdir().unwrap();
    let check = |args: &[&str]| finish(freestone(dir.path()).arg("serve").args(args).arg("--check")).2;
    let unknown = format!("unknown key {UNKNOWN:?}");
    for (kind, keys) in rows("key ") {
        // The program reports an unknown key before any invalid value, so only `UNKNOWN` may be
        // reported.
        let error = check(&[&format!("x={kind},{}=?,{UNKNOWN}=?", keys.join("=?,"))]);
        assert!(error.contains(&unknown), "{kind}: {error}");
    }
    for (key, before) in [("config", ""), ("export", "[[device]]\nname = 'x'\nkind = 'null'\nexport = ")] {
        for key_of_file in rows(key).flat_map(|(_, keys)| keys).chain([UNKNOWN]) {
            // No key accepts a fraction as its value, so a known key always causes an error about
            // the value.
            let pair = format!("{key_of_file} = 0.5");
            let file = if before.is_empty() { pair } else { format!("{before}{{ {pair} }}") };
            fs::write(dir.path().join("f.toml"), file + "\n").unwrap();
            let error = check(&["--config", "f.toml"]);
            assert_ne!(error, "", "{key_of_file}");
            assert_eq!(error.contains("unknown key"), key_of_file == UNKNOWN, "{key_of_file}: {error}");
        }
    }
}

#[test]
fn release_parameters_are_accepted() {
    let serve = Serve::start(&["drive=null,size=1M"]);
    let control = serve.control();
    for (method, parameters) in rows("parameter ") {
        let required = REQUIRED.iter().find(|(of, _)| *of == method);
        // An array in an array is invalid for every parameter. Device keys must be strings, and no
        // device key accepts the value `?`.
        let wrong = if required.is_some() { json!("?") } else { json!([[]]) };
        for parameter in parameters.into_iter().chain([UNKNOWN]) {
            let mut params: Value =
                serde_json::from_str(required.map_or("{}", |(_, params)| params)).unwrap();
            params[parameter] = wrong.clone();
            let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
            let reply = ask(&control, request.to_string().as_bytes());
            let message = reply["error"]["message"].as_str().unwrap_or_else(|| panic!("{method}: {reply}"));
            let unknown = message.contains("unknown field") || message.contains("unknown key");
            assert_eq!(unknown, parameter == UNKNOWN, "{method}: {parameter}: {message}");
        }
    }
}
