//! Describes reads whose bytes no allowed version explains.

use std::fmt;
use std::ops::Range;

use super::content::{Content, IdentifiedBytes};
use super::{Kind, Oracle, Tick};

#[derive(Debug, Clone)]
pub(super) struct WriteRecord {
    pub content: Content,
    pub kind: Kind,
    pub range: Range<u64>,
    pub began: Tick,
    /// Tick of the completion, and true if the write succeeded. `None` while in flight.
    pub ended: Option<(Tick, bool)>,
}

impl fmt::Display for WriteRecord {
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

/// A read that returned a version that was not allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub device: String,
    /// Number of the first wrong sector.
    pub sector: u64,
    pub found: String,
    pub allowed: Vec<String>,
    /// Ticks of the start and the judgement of the read.
    pub read: (Tick, Tick),
    /// Number of further wrong sectors in the read.
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
    pub(super) fn violation(
        &self,
        sector: u64,
        found: &IdentifiedBytes,
        began: Tick,
        more: u64,
    ) -> Violation {
        Violation {
            device: self.name.clone(),
            sector,
            found: self.describe(sector, found),
            allowed: self.allowed(sector),
            read: (began, self.tick),
            more,
        }
    }

    /// Describes the versions of this sector that a read may return now.
    pub fn allowed(&self, sector: u64) -> Vec<String> {
        let sector = self.sector(sector);
        sector.now.iter().map(|version| self.describe_version(version.content, version.began)).collect()
    }

    fn describe_version(&self, content: Content, began: Tick) -> String {
        let record =
            self.history.iter().rev().find(|record| record.content == content && record.began == began);
        record.map_or_else(|| content.to_string(), |record| format!("{content} ({record})"))
    }

    fn describe(&self, at: u64, found: &IdentifiedBytes) -> String {
        let sector = self.sector(at);
        if let Some(past) = sector.past.iter().rev().find(|past| found.matches(at, past.content)) {
            let story = self.history.iter().rev().find(|record| record.content == past.content);
            let story = story.map_or_else(String::new, |record| format!(" ({record})"));
            let why = match past.replaced_by {
                Some(by) => format!("superseded by {by} at {}", past.gone_since),
                None => format!("which an earlier read showed to be absent since {}", past.gone_since),
            };
            return format!("{}{story}, {why}", past.content);
        }
        match *found {
            IdentifiedBytes::Zero => "zeroes".to_owned(),
            IdentifiedBytes::Tagged { id, sector } if sector != at => {
                format!("the bytes of sector {sector}, {}", self.describe_write(id))
            }
            IdentifiedBytes::Tagged { id, .. } => self.describe_write(id),
            IdentifiedBytes::Torn { id, sector, from } => {
                let whose = if sector == at { String::new() } else { format!(" of sector {sector}") };
                format!("{}{whose} with other bytes from byte {from} on", self.describe_write(id))
            }
            IdentifiedBytes::Pattern(word) => {
                let record = self.history.iter().rev().find(|record| found.matches(at, record.content));
                match record {
                    Some(record) => {
                        format!("{} ({record}), superseded or never written here", record.content)
                    }
                    None => format!("the repeated word {word:#018x}"),
                }
            }
            IdentifiedBytes::Common { page, part } => format!("sector {part} of the common page {page}"),
            IdentifiedBytes::Garbage(bytes) => {
                format!("garbage that begins with {:032x}", u128::from_be_bytes(bytes))
            }
        }
    }

    fn describe_write(&self, id: u64) -> String {
        match self.history.iter().rev().find(|record| record.content == Content::Data(id)) {
            Some(record) => format!("version {id} ({record})"),
            None => format!("version {id}, which is not among the recent writes of this device"),
        }
    }
}
