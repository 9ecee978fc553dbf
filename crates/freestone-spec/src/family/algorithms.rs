//! The keys of compression algorithms: `recomp_algorithm` and `algorithm_params`.

use freestone::codec::{Algorithm, Params, ParamsError};

use super::{SECONDARIES, SecondarySpec};
use crate::entries::SpecError;
use crate::keys::{Keys, parse_algorithm};

/// Parses the value of `recomp_algorithm`: one or more groups `algo=NAME [priority=1..3]`,
/// separated by `;`. `NAME` without `algo=` is accepted, too.
pub(super) fn parse_secondaries(text: &str) -> Result<[Option<SecondarySpec>; SECONDARIES], String> {
    let mut all = <[Option<SecondarySpec>; SECONDARIES]>::default();
    for group in text.split(';') {
        let Group { priority, algo, rest } = Group::parse(group)?;
        let (algo, rest) = match (algo, rest.as_slice()) {
            (Some(algo), []) => (algo, &[][..]),
            (None, [bare, rest @ ..]) if !bare.contains('=') => (*bare, rest),
            (algo, rest) => (algo.unwrap_or_default(), rest),
        };
        if let Some(word) = rest.first() {
            return Err(format!(
                "{word:?} is not understood; write algo=NAME priority=1..{SECONDARIES}, and ; between several"
            ));
        }
        if algo.is_empty() {
            return Err("an algorithm is missing; for example algo=zstd priority=1".into());
        }
        let priority = priority.unwrap_or(1);
        let slot = (priority.checked_sub(1)).and_then(|index| all.get_mut(index));
        let slot = slot.ok_or_else(|| format!("priority={priority}: must be 1 to {SECONDARIES}"))?;
        let algorithm = parse_algorithm(algo)?;
        if let Some(other) = slot {
            let other = other.algorithm;
            return Err(format!("two algorithms at priority {priority}, {other} and {algorithm}"));
        }
        *slot = Some(SecondarySpec { algorithm, params: String::new() });
    }
    Ok(all)
}

/// Parses the value of `algorithm_params`: groups of words as in the kernel, separated by `;`.
/// `priority=` (0 is the primary algorithm) or `algo=` selects the algorithm of a group; without
/// both, it is the primary one. Returns the parameters of the primary algorithm, and sets those in
/// `secondaries`.
pub(super) fn parse_params(
    keys: &Keys,
    primary: Algorithm,
    secondaries: &mut [Option<SecondarySpec>; SECONDARIES],
) -> Result<String, SpecError> {
    let Some(text) = keys.typed("algorithm_params") else { return Ok(String::new()) };
    let mut found: [Option<String>; SECONDARIES + 1] = Default::default();
    for group in text.split(';') {
        let priority = group_priority(group, primary, secondaries)
            .map_err(|why| keys.refuse("algorithm_params", why))?;
        let algorithm = match priority.checked_sub(1).and_then(|index| secondaries[index].as_ref()) {
            Some(secondary) => secondary.algorithm,
            None => primary,
        };
        let words = group.split_whitespace().filter(|word| !word.starts_with("priority="));
        let words = words.collect::<Vec<_>>().join(" ");
        Params::check_words(&words, algorithm).map_err(|e| match e {
            // These two errors do not name the invalid word, so the message quotes the whole value
            // of the key.
            ParamsError::NotFor(..) | ParamsError::Twice(_) => keys.refuse("algorithm_params", e.to_string()),
            ParamsError::OtherAlgorithm(algo, is) if priority > 0 => keys.params_error(format!(
                "algo={algo} does not match recomp_algorithm, {is} at priority {priority}"
            )),
            e => keys.params_error(e.to_string()),
        })?;
        if found[priority].replace(words).is_some() {
            let why = format!("two groups of words for priority {priority}, {algorithm}");
            return Err(keys.refuse("algorithm_params", why));
        }
    }
    let [of_primary, rest @ ..] = found;
    for (secondary, words) in secondaries.iter_mut().zip(rest) {
        if let (Some(secondary), Some(words)) = (secondary, words) {
            secondary.params = words;
        }
    }
    Ok(of_primary.unwrap_or_default())
}

/// Returns the priority of the algorithm to which a group of parameters belongs; 0 is the primary
/// one.
fn group_priority(
    group: &str,
    primary: Algorithm,
    secondaries: &[Option<SecondarySpec>; SECONDARIES],
) -> Result<usize, String> {
    let has = |priority: usize| match priority.checked_sub(1) {
        None => Some(primary),
        Some(index) => secondaries.get(index)?.as_ref().map(|s| s.algorithm),
    };
    match Group::parse(group)? {
        Group { priority: Some(priority), .. } if priority > SECONDARIES => {
            Err(format!("priority={priority}: must be 0 (comp_algorithm) to {SECONDARIES}"))
        }
        Group { priority: Some(priority), .. } if has(priority).is_none() => {
            Err(format!("priority={priority}: recomp_algorithm has no algorithm there"))
        }
        Group { priority: Some(priority), .. } => Ok(priority),
        // Without secondary algorithms, an unknown name is refused later, when the words are
        // checked for the primary algorithm.
        Group { algo: Some(algo), .. } => {
            let named = |priority: &usize| has(*priority).is_some_and(|a| a.name() == algo);
            let found = (0..=SECONDARIES).find(named);
            let several = secondaries.iter().any(Option::is_some);
            match found {
                None if several => {
                    Err(format!("algo={algo} is neither comp_algorithm nor in recomp_algorithm"))
                }
                found => Ok(found.unwrap_or(0)),
            }
        }
        Group { .. } => Ok(0),
    }
}

/// Group of words between two `;` in the value of a key.
struct Group<'a> {
    priority: Option<usize>,
    algo: Option<&'a str>,
    /// Words of the group other than `priority=` and `algo=`.
    rest: Vec<&'a str>,
}

impl<'a> Group<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        let mut group = Self { priority: None, algo: None, rest: Vec::new() };
        for word in text.split_whitespace() {
            let twice = match word.split_once('=') {
                Some(("priority", number)) => {
                    let parsed = number.parse().map_err(|_| format!("{word}: not a priority"))?;
                    group.priority.replace(parsed).is_some()
                }
                Some(("algo", name)) => group.algo.replace(name).is_some(),
                _ => {
                    group.rest.push(word);
                    false
                }
            };
            if twice {
                let (key, _) = word.split_once('=').unwrap_or_default();
                return Err(format!("{key} is given twice"));
            }
        }
        Ok(group)
    }
}
