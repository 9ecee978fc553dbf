//! The text of rules: read, with a sentence for what was not understood, and written.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

use super::quantity::{self, QuantityError};
use super::rules::{
    Astray, Effects, LIE_OPS, Operation, Ops, ROT_OPS, RULES_MAX, Rule, Rules, STALE_OPS, Target,
};
use freestone_core::device::Error as Answer;

const EFFECTS: [&str; 9] =
    ["error=", "delay=", "hang", "torn=", "lost", "misdirected", "lie", "stale", "rot"];
const CONDITIONS: [&str; 5] = ["at=", "chance=", "nth=", "times=", "after="];
/// Units of a torn write: what the user types, bytes.
const UNITS: [(&str, u32); 3] = [("512", 512), ("4K", 4 << 10), ("16K", 16 << 10)];
/// Names of answers. The first of each answer is the one that is written.
const ERRNOS: [(&str, Answer); 11] = [
    ("EIO", Answer::Media),
    ("ENOSPC", Answer::NoSpace),
    ("ENOMEM", Answer::NoMemory),
    ("EROFS", Answer::ReadOnly),
    ("EPERM", Answer::ReadOnly),
    ("EINVAL", Answer::Misaligned),
    ("EOPNOTSUPP", Answer::Unsupported),
    ("ENOTSUP", Answer::Unsupported),
    ("ESHUTDOWN", Answer::Gone),
    ("ETOOMANYREFS", Answer::ZoneTooManyOpen),
    ("EOVERFLOW", Answer::ZoneTooManyActive),
];
/// How much of a rule an error repeats, in characters.
const QUOTE_CHARS_MAX: usize = 80;

/// Why rules were not understood: which one, and what about it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("fault rule {number} (\"{rule}\"): {problem}")]
pub struct RuleError {
    /// Its number, from 1 on.
    pub number: usize,
    /// Its text; the beginning, where it is long.
    pub rule: String,
    /// What is wrong.
    pub problem: Problem,
}

/// What is wrong with a rule. Each is half a sentence that follows the rule.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "each variant's message is its documentation")]
pub enum Problem {
    #[error("\"{word}\" is not an operation; there are {}{}", targets(), meant(word, &target_words()))]
    Operation { word: String },
    #[error(
        "\"{word}\" is neither an effect ({}) nor a condition ({}){}",
        EFFECTS.join(" "), CONDITIONS.join(" "), meant(word, &keys())
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
    #[error("error={name} is nothing that a device answers; it answers {}{}", errnos(), meant(name, &errno_words()))]
    Errno { name: String },
    #[error("torn={0} is not a unit; there are 512, 4K and 16K")]
    Unit(String),
    #[error("{key}={value}: {problem}")]
    Quantity { key: &'static str, value: String, problem: QuantityError },
    #[error("{effect} is for {allowed}, not for {target}")]
    NotFor { effect: &'static str, allowed: String, target: &'static str },
    #[error("{0} and {1} exclude each other")]
    Both(&'static str, &'static str),
    #[error(
        "a request that is answered with an error leaves nothing to do for {0}; torn= and misdirected go with error="
    )]
    NothingLeft(&'static str),
    #[error("a flush has no place that at= could name")]
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

// ---- reading ------------------------------------------------------------------------------------

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

/// Adds a word to the rule; false where it is there already.
fn add(rule: &mut Rule, key: &str, value: Option<&str>, word: &str) -> Result<bool, Problem> {
    let needed = |example| {
        let value = value.filter(|value| !value.is_empty());
        value.ok_or_else(|| Problem::NoValue { key: key.into(), example })
    };
    let alone = || match value {
        None => Ok(()),
        Some(_) => Err(Problem::Value { key: key.into() }),
    };
    let stray = |astray: Astray, effects: &mut Effects| match effects.astray {
        Some(other) if astray.name() != other.name() => Err(Problem::Both(other.name(), astray.name())),
        _ => Ok(effects.astray.replace(astray).is_none()),
    };
    let effects = &mut rule.effects;
    Ok(match key {
        "error" => effects.error.replace(answer(needed("EIO")?)?).is_none(),
        "delay" => {
            let delay = quantity_of("delay", needed("20ms")?, quantity::delay)?;
            effects.delay.replace(delay).is_none()
        }
        "torn" => {
            let value = needed("4K")?;
            let unit = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(value));
            let (_, unit) = unit.ok_or_else(|| Problem::Unit(value.into()))?;
            stray(Astray::Torn(*unit), effects)?
        }
        "hang" => alone().map(|()| !std::mem::replace(&mut effects.hang, true))?,
        "lie" => alone().map(|()| !std::mem::replace(&mut effects.lie, true))?,
        "stale" => alone().map(|()| !std::mem::replace(&mut effects.stale, true))?,
        "rot" => alone().map(|()| !std::mem::replace(&mut effects.rot, true))?,
        "lost" => alone().and_then(|()| stray(Astray::Lost, effects))?,
        "misdirected" => alone().and_then(|()| stray(Astray::Misdirected, effects))?,
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

fn answer(name: &str) -> Result<Answer, Problem> {
    let found = ERRNOS.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
    found.map(|(_, error)| *error).ok_or_else(|| Problem::Errno { name: name.into() })
}

/// Whether effects, operations and conditions fit each other.
fn check(rule: &Rule) -> Result<(), Problem> {
    let Effects { error, delay, hang, astray, lie, stale, rot } = rule.effects;
    if rule.effects == Effects::default() {
        return Err(Problem::NoEffect);
    }
    let astray = astray.map(|astray| (astray.name(), astray.ops()));
    let of = |given: bool, name: &'static str, ops: Ops| given.then_some((name, ops));
    let limited = [astray, of(lie, "lie", LIE_OPS), of(stale, "stale", STALE_OPS), of(rot, "rot", ROT_OPS)];
    for (effect, ops) in limited.into_iter().flatten() {
        if !ops.intersects(rule.target.ops()) {
            let allowed = Operation::ALL.iter().filter(|operation| ops.contains(operation.set()));
            let allowed = allowed.map(|operation| operation.name()).collect::<Vec<_>>().join(", ");
            return Err(Problem::NotFor { effect, allowed, target: rule.target.name() });
        }
        if error.is_some() && !matches!(rule.effects.astray, Some(Astray::Torn(_) | Astray::Misdirected)) {
            return Err(Problem::NothingLeft(effect));
        }
    }
    if delay.is_some() && hang {
        return Err(Problem::Both("delay", "hang"));
    }
    if rot && rule.effects.astray == Some(Astray::Lost) {
        return Err(Problem::Both("lost", "rot"));
    }
    if rule.range.is_some() && rule.target == Target::One(Operation::Flush) {
        return Err(Problem::FlushAt);
    }
    Ok(())
}

// ---- writing ------------------------------------------------------------------------------------

/// The text from which the same rule is read.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Effects { error, delay, hang, astray, lie, stale, rot } = self.effects;
        f.write_str(self.target.name())?;
        if let Some(error) = error {
            let name = ERRNOS.iter().find(|(_, known)| *known == error).map_or("EIO", |(name, _)| name);
            write!(f, " error={name}")?;
        }
        match astray {
            Some(Astray::Torn(unit)) => {
                let name = UNITS.iter().find(|(_, bytes)| *bytes == unit).map_or("512", |(name, _)| name);
                write!(f, " torn={name}")?;
            }
            Some(astray) => write!(f, " {}", astray.name())?,
            None => {}
        }
        for (given, name) in [(lie, "lie"), (stale, "stale"), (rot, "rot"), (hang, "hang")] {
            if given {
                write!(f, " {name}")?;
            }
        }
        if let Some(delay) = delay {
            write!(f, " delay={}", Written(delay))?;
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

/// A time in the largest unit that divides it.
struct Written(Duration);

impl fmt::Display for Written {
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

impl Astray {
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

/// `; write?` where one of the words is near what was typed.
fn meant(typed: &str, words: &[&'static str]) -> String {
    let typed = typed.split('=').next().unwrap_or_default();
    // Longer ones are no slip of the finger, and comparing takes quadratic time.
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
