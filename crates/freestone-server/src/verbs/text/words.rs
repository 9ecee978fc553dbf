//! Parsing of `key=value` words on the command line.

use std::collections::HashMap;

use freestone_spec::aliases;
use freestone_spec::entries::nearest;

use crate::usage::Usage;

/// Parses the `key=value` words of a verb. Each key must be in `allowed` and occur only once. A former name
/// of a key is replaced by the present one, with a warning. `name` and `verb` are the prefix of error messages.
pub fn parse(
    name: &str,
    verb: &str,
    words: &[String],
    allowed: &[&str],
) -> Result<HashMap<String, String>, Usage> {
    let mut values = HashMap::new();
    for word in words {
        let refuse = |why: String| Usage(format!("{name}: {verb}: {why}"));
        let Some((key, value)) = word.split_once('=') else {
            return Err(refuse(format!("{word}: a value is missing; write {word}=VALUE")));
        };
        let key = aliases::canonical_user_key(key);
        if !allowed.contains(&key) {
            let hint = nearest(key, allowed).map(|h| format!("; {h}?")).unwrap_or_default();
            return Err(refuse(format!("unknown key {key:?}{hint}; the keys are {}", allowed.join(", "))));
        }
        if values.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(refuse(format!("{key}: given twice")));
        }
    }
    Ok(values)
}
