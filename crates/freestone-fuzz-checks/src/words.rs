//! Parsers of device words on a command line, and of configuration files of `serve --config`.
//!
//! The first byte of an input selects the parser. Properties:
//! * An error is one sentence.
//! * The words of a device, converted to TOML, give the same device with the same result of its check.

use std::fmt::Write as _;

use freestone_cli::inputs::config_file;
use freestone_spec::check_input::{ParsedDevice, device_words};

/// Asserts that an error is one line. An error may quote the input, so several lines are allowed if the input
/// has line breaks or TOML escapes of line breaks.
fn assert_sentence(text: &str, parsed: &str) {
    let lines = parsed.contains(['\n', '\\']);
    assert!(!text.is_empty() && (lines || !text.contains('\n')), "{text:?}");
}

/// Checks one input. Returns true if all devices in it are valid.
///
/// # Panics
/// Panics if a property does not hold.
pub fn check(input: &[u8]) -> bool {
    let Some((&choices, text)) = input.split_first() else { return false };
    let Ok(text) = std::str::from_utf8(text) else { return false };
    if choices & 1 != 0 {
        return match config_file(text) {
            Ok(devices) => devices.iter().all(|(_, verdict)| is_accepted(verdict, text)),
            Err(sentence) => {
                assert_sentence(&sentence, text);
                false
            }
        };
    }
    let (parsed, verdict) = match device_words(text) {
        Ok(found) => found,
        Err(sentence) => {
            assert_sentence(&sentence, text);
            return false;
        }
    };
    let is_reserved = |(key, _): &(String, String)| key == "name" || key == "kind";
    if !parsed.2.iter().any(is_reserved) {
        let toml = toml(&parsed);
        let from_toml = config_file(&toml).unwrap_or_else(|error| panic!("{toml}: {error}"));
        assert_eq!(from_toml, [(parsed, verdict.clone())], "{toml}");
    }
    is_accepted(&verdict, text)
}

fn is_accepted(verdict: &Result<(), String>, text: &str) -> bool {
    if let Err(sentence) = verdict {
        assert_sentence(sentence, text);
    }
    verdict.is_ok()
}

fn toml((name, kind, pairs): &ParsedDevice) -> String {
    let mut text = format!("[[device]]\nname = {}\nkind = {}\n", quoted(name), quoted(kind));
    for (key, value) in pairs {
        let _ = writeln!(text, "{} = {}", quoted(key), quoted(value));
    }
    text
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for char in text.chars() {
        match char {
            '"' | '\\' => quoted.extend(['\\', char]),
            char if char.is_control() => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(char));
            }
            char => quoted.push(char),
        }
    }
    quoted + "\""
}
