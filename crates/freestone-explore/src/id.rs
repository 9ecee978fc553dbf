//! The text form of a crash state, with which a user repeats one state.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::BLOCK_BYTES;

/// Identifier of a crash state: a point of the log, and the writes that the state has lost.
///
/// `120` is the state after the first 120 entries of the log. `120-45..47,50:2..3` has lost the
/// entries 45 to 47, and of entry 50 the blocks 2 and 3. Entries count from 1, as marks do in
/// `freestone power-cut --at`. Blocks count from 0, the block of the device in which the entry
/// starts. `@512` at the end sets the size of a block; without it, a block has 4096 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StateId {
    /// Number of entries of the log before the state.
    pub point: u64,
    /// Writes that the state has lost, in the order of their entries.
    pub lost: Vec<LostPart>,
    /// Size in bytes of a block, which is lost or kept whole.
    pub unit: u64,
}

/// A run of lost entries, or of lost blocks of one entry.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LostPart {
    /// Entries that are lost whole, by their numbers from 1.
    Entries(RangeInclusive<u64>),
    /// Blocks of one entry.
    Blocks {
        /// Number of the entry, from 1.
        entry: u64,
        /// Blocks, from 0 at the start of the entry.
        blocks: RangeInclusive<u64>,
    },
}

impl StateId {
    /// Returns the identifier of the state after the first `point` entries, with nothing lost.
    pub const fn prefix(point: u64) -> Self {
        Self { point, lost: Vec::new(), unit: BLOCK_BYTES }
    }
}

impl fmt::Display for StateId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.point)?;
        for (index, part) in self.lost.iter().enumerate() {
            f.write_str(if index == 0 { "-" } else { "," })?;
            match part {
                LostPart::Entries(entries) => write_range(f, entries)?,
                LostPart::Blocks { entry, blocks } => {
                    write!(f, "{entry}:")?;
                    write_range(f, blocks)?;
                }
            }
        }
        if self.unit != BLOCK_BYTES && !self.lost.is_empty() {
            write!(f, "@{}", self.unit)?;
        }
        Ok(())
    }
}

fn write_range(f: &mut fmt::Formatter<'_>, range: &RangeInclusive<u64>) -> fmt::Result {
    write!(f, "{}", range.start())?;
    if range.start() != range.end() {
        write!(f, "..{}", range.end())?;
    }
    Ok(())
}

/// Error of parsing a [`StateId`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a state; a state is POINT[-LOST][@UNIT], such as 120 or 120-45..47,50:2")]
pub struct ParseIdError {
    text: String,
}

impl FromStr for StateId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        parse(text).ok_or_else(|| ParseIdError { text: text.into() })
    }
}

fn parse(text: &str) -> Option<StateId> {
    let (rest, unit) = match text.split_once('@') {
        Some((rest, unit)) => (rest, number(unit)?),
        None => (text, BLOCK_BYTES),
    };
    let (point, lost) = match rest.split_once('-') {
        Some((point, lost)) => (point, lost.split(',').map(part).collect::<Option<_>>()?),
        None => (rest, Vec::new()),
    };
    unit.is_power_of_two().then_some(StateId { point: number(point)?, lost, unit })
}

fn part(text: &str) -> Option<LostPart> {
    Some(match text.split_once(':') {
        Some((entry, blocks)) => LostPart::Blocks { entry: number(entry)?, blocks: range(blocks)? },
        None => LostPart::Entries(range(text)?),
    })
}

fn range(text: &str) -> Option<RangeInclusive<u64>> {
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    let range = number(first)?..=number(last)?;
    (!range.is_empty()).then_some(range)
}

fn number(text: &str) -> Option<u64> {
    // `parse` accepts a sign.
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts() -> impl Strategy<Value = Vec<LostPart>> {
        let range = || (0..1000_u64, 0..5_u64).prop_map(|(first, len)| first..=first + len);
        let part = prop_oneof![
            range().prop_map(LostPart::Entries),
            (1..500_u64, range()).prop_map(|(entry, blocks)| LostPart::Blocks { entry, blocks }),
        ];
        prop::collection::vec(part, 0..6)
    }

    proptest! {
        #[test]
        fn display_is_parsed_back(point in 0..u64::MAX, lost in parts(), shift in 9..14_u32) {
            let unit = if lost.is_empty() { BLOCK_BYTES } else { 1 << shift };
            let id = StateId { point, lost, unit };
            prop_assert_eq!(id.to_string().parse::<StateId>(), Ok(id));
        }
    }

    #[test]
    fn malformed_ids_are_refused() {
        for text in ["", "x", "-1", "1-", "1-2..1", "1-2,", "1-2:", "1@", "1@3", "+1", "1-2@0", "1 "] {
            assert!(text.parse::<StateId>().is_err(), "{text}");
        }
        assert_eq!("120-45..47,50:2".parse::<StateId>().unwrap().to_string(), "120-45..47,50:2");
    }
}
