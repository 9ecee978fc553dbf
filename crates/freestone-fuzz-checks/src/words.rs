//! What people write: a device of a command line, a file of `serve --config`.
//!
//! The first byte of an input says which of the two the rest is.
//! * An error is one sentence.
//! * A device says the same in both: written as TOML, its words give the same device with the same
//!   verdict.

use std::fmt::Write as _;

use freestone_spec::written::{Written, config_file, device_words};

/// A sentence has lines only where what was written has them, which it repeats; TOML can write them
/// in another way.
fn assert_sentence(text: &str, written: &str) {
    let lines = written.contains(['\n', '\\']);
    assert!(!text.is_empty() && (lines || !text.contains('\n')), "{text:?}");
}

/// Checks one input; true: everything in it is a device.
///
/// # Panics
/// Something does not hold.
pub fn check(input: &[u8]) -> bool {
    let Some((&choices, text)) = input.split_first() else { return false };
    let Ok(text) = std::str::from_utf8(text) else { return false };
    if choices & 1 != 0 {
        return match config_file(text) {
            Ok(devices) => devices.iter().all(|(_, verdict)| taken(verdict, text)),
            Err(sentence) => {
                assert_sentence(&sentence, text);
                false
            }
        };
    }
    let (written, verdict) = match device_words(text) {
        Ok(found) => found,
        Err(sentence) => {
            assert_sentence(&sentence, text);
            return false;
        }
    };
    let clash = |(key, _): &(String, String)| key == "name" || key == "kind";
    if !written.2.iter().any(clash) {
        let toml = toml(&written);
        let again = config_file(&toml).unwrap_or_else(|error| panic!("{toml}: {error}"));
        assert_eq!(again, [(written, verdict.clone())], "{toml}");
    }
    taken(&verdict, text)
}

fn taken(verdict: &Result<(), String>, text: &str) -> bool {
    if let Err(sentence) = verdict {
        assert_sentence(sentence, text);
    }
    verdict.is_ok()
}

fn toml((name, kind, pairs): &Written) -> String {
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
