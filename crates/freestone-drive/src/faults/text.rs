//! Parses and formats fault rules, with error messages for users.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

use super::quantity::{self, QuantityError};
use super::rules::{
    Effects, LIE_OPS, Operation, Ops, ROT_OPS, RULES_MAX, Rule, Rules, STALE_OPS, Target, WriteFault,
};
use freestone_core::device::Error as DeviceError;

const EFFECTS: [&str; 9] =
    ["error=", "delay=", "hang", "torn=", "lost", "misdirected", "lie", "stale", "rot"];
const CONDITIONS: [&str; 5] = ["at=", "chance=", "nth=", "times=", "after="];
/// Units of a torn write: the text in a rule, and the size in bytes.
const UNITS: [(&str, u32); 3] = [("512", 512), ("4K", 4 << 10), ("16K", 16 << 10)];
/// Names of errors in rules. Several names may mean the same error; formatting uses the first one.
const ERRNOS: [(&str, DeviceError); 11] = [
    ("EIO", DeviceError::Media),
    ("ENOSPC", DeviceError::NoSpace),
    ("ENOMEM", DeviceError::NoMemory),
    ("EROFS", DeviceError::ReadOnly),
    ("EPERM", DeviceError::ReadOnly),
    ("EINVAL", DeviceError::Misaligned),
    ("EOPNOTSUPP", DeviceError::Unsupported),
    ("ENOTSUP", DeviceError::Unsupported),
    ("ESHUTDOWN", DeviceError::Gone),
    ("ETOOMANYREFS", DeviceError::ZoneTooManyOpen),
    ("EOVERFLOW", DeviceError::ZoneTooManyActive),
];
/// Maximum number of characters of a rule quoted in an error message.
const QUOTE_CHARS_MAX: usize = 80;

/// Error from parsing a list of rules: the invalid rule and its problem.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("fault rule {number} (\"{rule}\"): {problem}")]
pub struct RuleError {
    /// Position of the rule in the list, starting at 1.
    pub number: usize,
    /// Text of the rule, cut after 80 characters.
    pub rule: String,
    /// Problem found in the rule.
    pub problem: Problem,
}

/// Problems found in a rule. Messages are printed after the rule's text.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "each variant's message is its documentation")]
pub enum Problem {
    #[error("\"{word}\" is not an operation; there are {}{}", targets(), suggest(word, &target_words()))]
    Operation { word: String },
    #[error(
        "\"{word}\" is neither an effect ({}) nor a condition ({}){}",
        EFFECTS.join(" "), CONDITIONS.join(" "), suggest(word, &keys())
    )]
    Word { word: String },
    #[error("{key} needs a value, as in {key}={example}")]
    NoValue { key: String, example: &'static str },
    #[error("{key} takes no value")]
    Value { key: String },
    #[error("{0} is given twice")]
    Twice(String),
    #[error("it has no effect; there are {}", EFFECTS.join(" "))]
    NoEffect,
    #[error("error={name} is not a known error; use one of {}{}", errnos(), suggest(name, &errno_words()))]
    Errno { name: String },
    #[error("torn={0} is not a unit; there are 512, 4K and 16K")]
    Unit(String),
    #[error("{key}={value}: {problem}")]
    Quantity { key: &'static str, value: String, problem: QuantityError },
    #[error("{effect} is for {allowed}, not for {target}")]
    NotFor { effect: &'static str, allowed: String, target: &'static str },
    #[error("{0} and {1} exclude each other")]
    Both(&'static str, &'static str),
    #[error("{0} has no effect with error=; only torn= and misdirected can be combined with error=")]
    NothingLeft(&'static str),
    #[error("at= does not apply to flush, which has no offset")]
    FlushAt,
    #[error("there are more than {RULES_MAX} rules")]
    TooMany,
}

impl FromStr for Rules {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let mut rules = Vec::new();
        let texts = text.split(';').map(str::trim).filter(|text| !text.is_empty());
        for (number, text) in (1..).zip(texts) {
            let parsed = if number > RULES_MAX { Err(Problem::TooMany) } else { parse(text) };
            rules.push(parsed.map_err(|problem| {
                let mut rule: String = text.chars().take(QUOTE_CHARS_MAX).collect();
                if rule.len() < text.len() {
                    rule.push_str("...");
                }
                RuleError { number, rule, problem }
            })?);
        }
        Ok(Self(rules))
    }
}

// ---- parsing ------------------------------------------------------------------------------------

fn parse(text: &str) -> Result<Rule, Problem> {
    let mut words = text.split_whitespace();
    let first = words.next().unwrap_or_default();
    let target = Target::from_word(first).ok_or_else(|| Problem::Operation { word: first.into() })?;
    let mut rule = Rule {
        target,
        effects: Effects::default(),
        range: None,
        chance: None,
        nth: None,
        times: None,
        after: None,
    };
    for word in words {
        let (key, value) = match word.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (word, None),
        };
        if !add(&mut rule, key, value, word)? {
            return Err(Problem::Twice(key.into()));
        }
    }
    check(&rule)?;
    Ok(rule)
}

/// Adds an effect or condition (`word`, split into `key` and `value`) to the rule. Returns false if
/// the rule already contains one with this key.
fn add(rule: &mut Rule, key: &str, value: Option<&str>, word: &str) -> Result<bool, Problem> {
    let needed = |example| {
        let value = value.filter(|value| !value.is_empty());
        value.ok_or_else(|| Problem::NoValue { key: key.into(), example })
    };
    let no_value = || match value {
        None => Ok(()),
        Some(_) => Err(Problem::Value { key: key.into() }),
    };
    let stray = |write_fault: WriteFault, effects: &mut Effects| match effects.write_fault {
        Some(other) if write_fault.name() != other.name() => {
            Err(Problem::Both(other.name(), write_fault.name()))
        }
        _ => Ok(effects.write_fault.replace(write_fault).is_none()),
    };
    let effects = &mut rule.effects;
    Ok(match key {
        "error" => effects.error.replace(parse_error(needed("EIO")?)?).is_none(),
        "delay" => {
            let delay = quantity_of("delay", needed("20ms")?, quantity::delay)?;
            effects.delay.replace(delay).is_none()
        }
        "torn" => {
            let value = needed("4K")?;
            let unit = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(value));
            let (_, unit) = unit.ok_or_else(|| Problem::Unit(value.into()))?;
            stray(WriteFault::Torn(*unit), effects)?
        }
        "hang" => no_value().map(|()| !std::mem::replace(&mut effects.hang, true))?,
        "lie" => no_value().map(|()| !std::mem::replace(&mut effects.lie, true))?,
        "stale" => no_value().map(|()| !std::mem::replace(&mut effects.stale, true))?,
        "rot" => no_value().map(|()| !std::mem::replace(&mut effects.rot, true))?,
        "lost" => no_value().and_then(|()| stray(WriteFault::Lost, effects))?,
        "misdirected" => no_value().and_then(|()| stray(WriteFault::Misdirected, effects))?,
        "at" => rule.range.replace(quantity_of("at", needed("1M+64K")?, quantity::range)?).is_none(),
        "chance" => rule.chance.replace(quantity_of("chance", needed("1%")?, quantity::chance)?).is_none(),
        "nth" => rule.nth.replace(quantity_of("nth", needed("3")?, quantity::nth)?).is_none(),
        "times" => rule.times.replace(quantity_of("times", needed("1")?, quantity::count)?).is_none(),
        "after" => rule.after.replace(quantity_of("after", needed("100")?, quantity::count)?).is_none(),
        _ => return Err(Problem::Word { word: word.into() }),
    })
}

fn quantity_of<T>(
    key: &'static str,
    value: &str,
    parse: fn(&str) -> Result<T, QuantityError>,
) -> Result<T, Problem> {
    parse(value).map_err(|problem| Problem::Quantity { key, value: value.into(), problem })
}

fn parse_error(name: &str) -> Result<DeviceError, Problem> {
    let found = ERRNOS.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
    found.map(|(_, error)| *error).ok_or_else(|| Problem::Errno { name: name.into() })
}

/// Checks that the rule's effects, operations and conditions can be combined.
fn check(rule: &Rule) -> Result<(), Problem> {
    let Effects { error, delay, hang, write_fault, lie, stale, rot } = rule.effects;
    if rule.effects == Effects::default() {
        return Err(Problem::NoEffect);
    }
    let write_fault = write_fault.map(|write_fault| (write_fault.name(), write_fault.ops()));
    let of = |given: bool, name: &'static str, ops: Ops| given.then_some((name, ops));
    let limited =
        [write_fault, of(lie, "lie", LIE_OPS), of(stale, "stale", STALE_OPS), of(rot, "rot", ROT_OPS)];
    for (effect, ops) in limited.into_iter().flatten() {
        if !ops.intersects(rule.target.ops()) {
            let allowed = Operation::ALL.iter().filter(|operation| ops.contains(operation.set()));
            let allowed = allowed.map(|operation| operation.name()).collect::<Vec<_>>().join(", ");
            return Err(Problem::NotFor { effect, allowed, target: rule.target.name() });
        }
        if error.is_some()
            && !matches!(rule.effects.write_fault, Some(WriteFault::Torn(_) | WriteFault::Misdirected))
        {
            return Err(Problem::NothingLeft(effect));
        }
    }
    if delay.is_some() && hang {
        return Err(Problem::Both("delay", "hang"));
    }
    if rot && rule.effects.write_fault == Some(WriteFault::Lost) {
        return Err(Problem::Both("lost", "rot"));
    }
    if rule.range.is_some() && rule.target == Target::One(Operation::Flush) {
        return Err(Problem::FlushAt);
    }
    Ok(())
}

// ---- formatting ---------------------------------------------------------------------------------

/// Formats the rule so that parsing returns the same rule.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Effects { error, delay, hang, write_fault, lie, stale, rot } = self.effects;
        f.write_str(self.target.name())?;
        if let Some(error) = error {
            let name = ERRNOS.iter().find(|(_, known)| *known == error).map_or("EIO", |(name, _)| name);
            write!(f, " error={name}")?;
        }
        match write_fault {
            Some(WriteFault::Torn(unit)) => {
                let name = UNITS.iter().find(|(_, bytes)| *bytes == unit).map_or("512", |(name, _)| name);
                write!(f, " torn={name}")?;
            }
            Some(write_fault) => write!(f, " {}", write_fault.name())?,
            None => {}
        }
        for (given, name) in [(lie, "lie"), (stale, "stale"), (rot, "rot"), (hang, "hang")] {
            if given {
                write!(f, " {name}")?;
            }
        }
        if let Some(delay) = delay {
            write!(f, " delay={}", DisplayDelay(delay))?;
        }
        if let Some(range) = self.range {
            write!(f, " at={range}")?;
        }
        if let Some(chance) = self.chance {
            write!(f, " chance={chance}")?;
        }
        for (count, name) in [(self.nth, "nth"), (self.times, "times"), (self.after, "after")] {
            if let Some(count) = count {
                write!(f, " {name}={count}")?;
            }
        }
        Ok(())
    }
}

struct DisplayDelay(Duration);

impl fmt::Display for DisplayDelay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        quantity::write_delay(self.0, f)
    }
}

// ---- words --------------------------------------------------------------------------------------

impl Target {
    fn all() -> impl Iterator<Item = Self> {
        Operation::ALL.into_iter().map(Self::One).chain([Self::Writes, Self::All])
    }

    fn from_word(word: &str) -> Option<Self> {
        Self::all().find(|target| target.name() == word)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::One(operation) => operation.name(),
            Self::Writes => "writes",
            Self::All => "all",
        }
    }
}

impl WriteFault {
    const fn name(self) -> &'static str {
        match self {
            Self::Torn(_) => "torn",
            Self::Lost => "lost",
            Self::Misdirected => "misdirected",
        }
    }
}

fn target_words() -> Vec<&'static str> {
    Target::all().map(Target::name).collect()
}

fn targets() -> String {
    target_words().join(" ")
}

fn errno_words() -> Vec<&'static str> {
    ERRNOS.iter().map(|(name, _)| *name).collect()
}

fn errnos() -> String {
    errno_words().join(" ")
}

fn keys() -> Vec<&'static str> {
    EFFECTS.iter().chain(&CONDITIONS).map(|word| word.trim_end_matches('=')).collect()
}

/// Returns a suggestion such as `; write?` if one of `words` is similar to `typed`, else an empty
/// string.
fn suggest(typed: &str, words: &[&'static str]) -> String {
    let typed = typed.split('=').next().unwrap_or_default();
    // The length is limited because the comparison takes quadratic time, and longer words are not
    // typing errors.
    let lower = typed.chars().take(QUOTE_CHARS_MAX).collect::<String>().to_lowercase();
    let distance = |word: &str| strsim::damerau_levenshtein(&lower, &word.to_lowercase());
    let best = words.iter().map(|word| (distance(word), *word)).min_by_key(|(distance, _)| *distance);
    match best {
        Some((distance, word)) if distance <= word.len().div_ceil(3) && distance < word.len() => {
            format!("; {word}?")
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests;
