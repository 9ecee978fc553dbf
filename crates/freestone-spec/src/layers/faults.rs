//! Fault layer: parsing of its keys, and its attributes.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use freestone::faults::{Faults, Rules};
use serde_json::{Value, json};

/// Keys of the fault layer, which are also its attributes.
pub(super) const ATTRS: [&str; 2] = ["faults", "seed"];

/// Value of `faults` that adds the layer without rules. Rules can be set later.
const NO_RULES: &str = "none";

/// Checks the value of `faults`: fault rules, or `none`.
pub(super) fn parse_faults(text: &str) -> Result<String, String> {
    match text.trim() {
        "" | NO_RULES => Ok(NO_RULES.to_owned()),
        // The text is stored as it was typed, because specifications are compared by their texts.
        rules => rules.parse::<Rules>().map(|_| rules.to_owned()).map_err(|e| e.to_string()),
    }
}

/// Parses fault rules that [`parse_faults`] has checked.
pub(super) fn rules_of(text: &str) -> Rules {
    if text == NO_RULES { Rules::default() } else { text.parse().unwrap_or_default() }
}

pub(super) fn parse_seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("must be a whole number from 0 to {}", u64::MAX))
}

/// Returns a random seed of at most 32 bits, which is short enough to type.
pub(super) fn random_seed() -> u64 {
    u64::from(RandomState::new().build_hasher().finish() as u32)
}

/// Returns the value of one of the attributes [`ATTRS`].
pub(super) fn value(faults: &Faults, attr: &str) -> Value {
    if attr == "seed" { json!(faults.seed()) } else { json!(rules(faults)) }
}

/// Returns the present fault rules in the form of the key's value.
pub(super) fn rules(faults: &Faults) -> String {
    match faults.rules().to_string() {
        none if none.is_empty() => NO_RULES.to_owned(),
        rules => rules,
    }
}

/// Returns the seed, the number of hanging requests, and the counters of each fault rule.
pub fn fault_stat(faults: &Faults) -> Value {
    let rules = faults.counts();
    let rules = rules.iter().map(|c| json!({ "rule": c.rule, "matched": c.matched, "fired": c.fired }));
    json!({ "seed": faults.seed(), "hanging": faults.hung_requests(), "rules": rules.collect::<Vec<_>>() })
}
