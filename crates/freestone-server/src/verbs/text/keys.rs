//! `KEY=VALUE` words and JSON members that a verb passes to the specification of a device or an image store.
//!
//! Verbs do not check these keys. The specification checks them, as for `serve`.

use std::{env, io};

use freestone_control::protocol::RpcError;
use freestone_spec::entries::Entries;
use freestone_spec::path_text;
use serde_json::{Map, Value};

use crate::usage::Usage;

/// Parses `KEY=VALUE` words. Relative paths are resolved against the client's working directory.
pub fn parse_words(name: &str, kind: &str, words: &[String]) -> Result<Map<String, Value>, Usage> {
    // The name may still contain `%n`, so it is checked later, when `%n` has been replaced by the number.
    let mut entries = Entries::new("device", kind)?;
    for word in words {
        let Some((key, value)) = word.split_once('=') else {
            return Err(Usage(format!("{name}: {kind}: {word}: a value is missing; write {word}=VALUE")));
        };
        if entries.add_with_warning(key, value).is_err() {
            return Err(Usage(format!("{name}: {kind}: {key}: given twice")));
        }
    }
    let here = env::current_dir();
    let here = here.map_err(|e: io::Error| Usage(format!("the working directory cannot be found: {e}")))?;
    Ok(entries.with_base(&here).pairs.into_iter().map(|(key, value)| (key, value.into())).collect())
}

/// Returns the specification entries for the keys of a verb. `name` is the device or the subject of the verb.
pub fn entries_of(name: &str, verb: &str, keys: &Map<String, Value>) -> Result<Entries, RpcError> {
    let mut entries = Entries::new(name, verb)?;
    add(&mut entries, keys)?;
    Ok(entries)
}

/// Returns the specification entries of a fork or template (`kind`) of `base`.
pub fn entries_over(
    base: &str,
    name: &str,
    kind: &str,
    ttl: Option<u64>,
    keys: &Map<String, Value>,
) -> Result<Entries, RpcError> {
    freestone_core::trail::step!();
    let mut entries = Entries::new(name, kind)?;
    entries.add("base", base)?;
    if let Some(ttl) = ttl {
        entries.add("ttl", &ttl.to_string())?;
    }
    add(&mut entries, keys)?;
    Ok(entries)
}

/// Adds keys from words or JSON to specification entries.
fn add(entries: &mut Entries, keys: &Map<String, Value>) -> Result<(), RpcError> {
    for (key, value) in keys {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
            Value::Number(number) => number.to_string(),
            _ => {
                let name = &entries.name;
                refuse!(invalid, "{name}: {key}: must be a text, a number or a boolean");
            }
        };
        entries.add(key, &text)?;
    }
    Ok(())
}

/// Returns a parser for command-line words. A word may be any bytes, and is converted to text as paths are,
/// because the words of a device are text.
pub fn words_parser() -> impl clap::builder::TypedValueParser<Value = String> {
    use clap::builder::TypedValueParser as _;
    clap::builder::OsStringValueParser::new().map(|word| path_text::text(word.as_ref()))
}
