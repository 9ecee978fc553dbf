//! What is said of a read that no allowed version explains.

use std::fmt;
use std::ops::Range;

use super::content::{Content, Found};
use super::{Kind, Oracle, Tick};

/// A write that an oracle was told of, for messages.
#[derive(Debug, Clone)]
pub(super) struct Told {
    pub content: Content,
    pub kind: Kind,
    pub range: Range<u64>,
    pub began: Tick,
    /// When and how it was answered.
    pub ended: Option<(Tick, bool)>,
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.kind {
            Kind::Write => "written to",
            Kind::Zeroes => "zeroed in",
            Kind::Discard { .. } => "discarded in",
        };
        write!(f, "{verb} sectors {}..{}, began {}", self.range.start, self.range.end, self.began)?;
        match self.ended {
            None => f.write_str(", in flight"),
            Some((tick, true)) => write!(f, ", done {tick}"),
            Some((tick, false)) => write!(f, ", failed {tick}"),
        }
    }
}

/// A read found what it must not find.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The device.
    pub device: String,
    /// The first sector that is wrong.
    pub sector: u64,
    /// What was found there, in words.
    pub found: String,
    /// What was allowed there, in words.
    pub allowed: Vec<String>,
    /// When the read began, and when it was judged.
    pub read: (Tick, Tick),
    /// How many more sectors of the read are wrong.
    pub more: u64,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, sector, found, allowed, read: (began, ended), more } = self;
        write!(f, "{device}: a read ({began} to {ended}) found in sector {sector} {found}; allowed: ")?;
        f.write_str(&allowed.join("; "))?;
        if *more > 0 {
            write!(f, " (and {more} more sectors of this read are wrong)")?;
        }
        Ok(())
    }
}

impl std::error::Error for Violation {}

impl Oracle {
    pub(super) fn violation(&self, sector: u64, found: &Found, began: Tick, more: u64) -> Violation {
        Violation {
            device: self.name.clone(),
            sector,
            found: self.describe(sector, found),
            allowed: self.allowed(sector),
            read: (began, self.tick),
            more,
        }
    }

    /// What a read of this sector may find now, in words.
    pub fn allowed(&self, sector: u64) -> Vec<String> {
        let sector = self.sector(sector);
        sector.now.iter().map(|version| self.with_story(version.content, version.began)).collect()
    }

    fn with_story(&self, content: Content, began: Tick) -> String {
        let told = self.history.iter().rev().find(|told| told.content == content && told.began == began);
        told.map_or_else(|| content.to_string(), |told| format!("{content} ({told})"))
    }

    fn describe(&self, at: u64, found: &Found) -> String {
        let sector = self.sector(at);
        if let Some(past) = sector.past.iter().rev().find(|past| found.matches(at, past.content)) {
            let story = self.history.iter().rev().find(|told| told.content == past.content);
            let story = story.map_or_else(String::new, |told| format!(" ({told})"));
            let why = match past.by {
                Some(by) => format!("superseded by {by} at {}", past.gone),
                None => format!("which an earlier read showed not to be there since {}", past.gone),
            };
            return format!("{}{story}, {why}", past.content);
        }
        match *found {
            Found::Zero => "zeroes".to_owned(),
            Found::Tagged { id, sector } if sector != at => {
                format!("the bytes of sector {sector}, {}", self.of_write(id))
            }
            Found::Tagged { id, .. } => self.of_write(id),
            Found::Torn { id, sector, from } => {
                let whose = if sector == at { String::new() } else { format!(" of sector {sector}") };
                format!("{}{whose} with other bytes from byte {from} on", self.of_write(id))
            }
            Found::Pattern(word) => {
                let told = self.history.iter().rev().find(|told| found.matches(at, told.content));
                match told {
                    Some(told) => format!("{} ({told}), superseded or never there", told.content),
                    None => format!("the word {word:#018x} over and over"),
                }
            }
            Found::Garbage(bytes) => {
                format!("garbage that begins with {:032x}", u128::from_be_bytes(bytes))
            }
        }
    }

    fn of_write(&self, id: u64) -> String {
        match self.history.iter().rev().find(|told| told.content == Content::Data(id)) {
            Some(told) => format!("version {id} ({told})"),
            None => format!("version {id}, of which this device was not told lately"),
        }
    }
}
