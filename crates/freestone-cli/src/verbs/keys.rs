//! `KEY=VALUE` words and JSON members that a verb passes on to the specification of a device or
//! store.
//!
//! The verbs do not check these keys: the specification does, as for `serve`.

use std::env;
use std::io;

use freestone_spec::entries::{Entries, SpecError};
use freestone_spec::path_text;
use serde_json::{Map, Value};

use crate::control::protocol::Fault;
use crate::error::Usage;

/// Parses `KEY=VALUE` words. Relative paths are resolved against the client's working directory.
pub fn parse_words(name: &str, kind: &str, words: &[String]) -> Result<Map<String, Value>, Usage> {
    let usage = |e: SpecError| Usage(e.to_string());
    // The name may still contain %n, so it is checked later, with the number in it.
    let mut entries = Entries::new("device", kind).map_err(usage)?;
    for word in words {
        let Some((key, value)) = word.split_once('=') else {
            return Err(Usage(format!("{name}: {kind}: {word}: a value is missing; write {word}=VALUE")));
        };
        if entries.add(key, value).is_err() {
            return Err(Usage(format!("{name}: {kind}: {key}: given twice")));
        }
    }
    let here = env::current_dir();
    let here = here.map_err(|e: io::Error| Usage(format!("the working directory cannot be found: {e}")))?;
    Ok(entries.with_base(&here).pairs.into_iter().map(|(key, value)| (key, value.into())).collect())
}

/// Returns the entries of a verb on `name`.
pub fn entries_of(name: &str, verb: &str, keys: &Map<String, Value>) -> Result<Entries, Fault> {
    let mut entries = Entries::new(name, verb).map_err(|e| Fault::invalid(e.to_string()))?;
    add(&mut entries, keys)?;
    Ok(entries)
}

/// Returns the entries of a fork or template of `base`.
pub fn entries_over(
    base: &str,
    name: &str,
    kind: &str,
    ttl: Option<u64>,
    keys: &Map<String, Value>,
) -> Result<Entries, Fault> {
    let invalid = |e: SpecError| Fault::invalid(e.to_string());
    let mut entries = Entries::new(name, kind).map_err(invalid)?;
    entries.add("base", base).map_err(invalid)?;
    if let Some(ttl) = ttl {
        entries.add("ttl", &ttl.to_string()).map_err(invalid)?;
    }
    add(&mut entries, keys)?;
    Ok(entries)
}

/// Adds keys from words or JSON to the entries of a device.
fn add(entries: &mut Entries, keys: &Map<String, Value>) -> Result<(), Fault> {
    for (key, value) in keys {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
            Value::Number(number) => number.to_string(),
            _ => {
                let name = &entries.name;
                return Err(Fault::invalid(format!("{name}: {key}: must be a text, a number or a boolean")));
            }
        };
        entries.add(key, &text).map_err(|e| Fault::invalid(e.to_string()))?;
    }
    Ok(())
}

/// Returns a parser for words of the command line, which may be any bytes. The words of a device
/// are text.
pub fn words_parser() -> impl clap::builder::TypedValueParser<Value = String> {
    use clap::builder::TypedValueParser as _;
    clap::builder::OsStringValueParser::new().map(|word| path_text::text(word.as_ref()))
}
