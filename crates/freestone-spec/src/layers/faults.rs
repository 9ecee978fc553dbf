//! Fault layer: keys and attributes.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use freestone::faults::{Faults, Rules};
use serde_json::{Value, json};

/// Keys of the layer, which are also its attributes.
pub(super) const ATTRS: [&str; 2] = ["faults", "seed"];

/// The layer exists without rules. Rules can be set later.
const NO_RULES: &str = "none";

/// Checks fault rules, or `none`.
pub(super) fn parse_faults(text: &str) -> Result<String, String> {
    match text.trim() {
        "" | NO_RULES => Ok(NO_RULES.to_owned()),
        // Kept as typed, because specifications are compared by their words.
        rules => rules.parse::<Rules>().map(|_| rules.to_owned()).map_err(|e| e.to_string()),
    }
}

/// Parses rules that [`parse_faults`] has checked.
pub(super) fn rules_of(text: &str) -> Rules {
    if text == NO_RULES { Rules::default() } else { text.parse().unwrap_or_default() }
}

/// Parses a seed.
pub(super) fn parse_seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("must be a whole number from 0 to {}", u64::MAX))
}

/// Returns a random seed that is short enough to type.
pub(super) fn random_seed() -> u64 {
    u64::from(RandomState::new().build_hasher().finish() as u32)
}

/// Returns the value of an attribute.
pub(super) fn value(faults: &Faults, attr: &str) -> Value {
    if attr == "seed" { json!(faults.seed()) } else { json!(rules(faults)) }
}

/// Formats the rules as they are typed.
pub(super) fn rules(faults: &Faults) -> String {
    match faults.rules().to_string() {
        none if none.is_empty() => NO_RULES.to_owned(),
        rules => rules,
    }
}

/// Returns the statistics of the rules.
pub fn fault_stat(faults: &Faults) -> Value {
    let rules = faults.counts();
    let rules = rules.iter().map(|c| json!({ "rule": c.rule, "matched": c.matched, "fired": c.fired }));
    json!({ "seed": faults.seed(), "hanging": faults.hanging(), "rules": rules.collect::<Vec<_>>() })
}
