//! Unflushed writes: the versions of blocks since the last flush, and the choice of lost ones.
//!
//! A block ends with its old content or its content after any of the writes since, independently of
//! its neighbours, as at a power cut of a device (`freestone power-cut`). So losing a write means
//! that each of its blocks has the content of an earlier version, unless a later write is kept.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use freestone_drive::power::log::Entry;

use crate::digest::Digest;
use crate::{ExploreError, LostPart, Result, StateId, VERSIONS_MAX};

/// Writes since the last flush, and the versions of the blocks to which they were made.
#[derive(Debug, Clone)]
pub struct Epoch {
    /// Size in bytes of a block, which is lost or kept whole.
    pub unit: u64,
    pub writes: Vec<Write>,
    pub blocks: BTreeMap<u64, Block>,
    versions: usize,
    /// True if the last write has FUA, and no entry follows: its completion may not be reported yet.
    has_open_fua: bool,
    /// True if a discard was applied whole, without versions.
    pub has_bulk: bool,
}

/// Write or discard since the last flush.
#[derive(Debug, Clone)]
pub struct Write {
    pub entry: Entry,
    /// Last mark before the write.
    pub mark: Option<Arc<str>>,
    /// True for a discard that is too large to be tracked by block. Durable at once.
    pub is_bulk: bool,
}

/// Block with unflushed versions.
#[derive(Debug, Clone)]
pub struct Block {
    /// Digest of the content before the first version.
    pub old: Digest,
    /// Number of versions that cannot be lost, because a write with FUA covers them.
    pub durable: usize,
    /// Versions, oldest first.
    pub versions: Vec<Version>,
}

/// Content of a block after a write.
#[derive(Debug, Clone, Copy)]
pub struct Version {
    /// Index of the write in [`Epoch::writes`].
    pub write: usize,
    pub digest: Digest,
}

/// Choice of lost versions: the number of versions that a block keeps. A block that is absent keeps
/// all its versions.
pub type Lost = BTreeMap<u64, usize>;

impl Block {
    /// Returns the number of versions that can be lost.
    pub fn losable(&self) -> usize {
        self.versions.len() - self.durable
    }

    fn digest(&self, kept: usize) -> Digest {
        kept.checked_sub(1).map_or(self.old, |last| self.versions[last].digest)
    }

    /// Returns the number of versions that remain if the versions are lost for which `is_lost`
    /// returns true: all up to the newest version that is not lost.
    fn kept(&self, is_lost: impl Fn(usize) -> bool) -> usize {
        let losable = &self.versions[self.durable..];
        losable
            .iter()
            .rposition(|version| !is_lost(version.write))
            .map_or(self.durable, |at| self.durable + at + 1)
    }
}

impl Write {
    /// Returns the blocks of `unit` bytes that the write touches.
    pub fn blocks(&self, unit: u64) -> Range<u64> {
        self.entry.offset / unit..(self.entry.offset + self.entry.len).div_ceil(unit)
    }
}

impl Epoch {
    pub const fn new(unit: u64) -> Self {
        Self {
            unit,
            writes: Vec::new(),
            blocks: BTreeMap::new(),
            versions: 0,
            has_open_fua: false,
            has_bulk: false,
        }
    }

    // ---- recording ------------------------------------------------------------------------------

    /// Adds a write, whose blocks follow.
    pub fn begin(&mut self, write: Write) {
        self.has_open_fua = write.entry.is_fua();
        self.has_bulk |= write.is_bulk;
        self.writes.push(write);
    }

    /// Adds the version of a block that the last write made, with the digests of the block's
    /// content before and after.
    pub fn push(&mut self, block: u64, old: Digest, new: Digest) -> Result<()> {
        let write = self.writes.len() - 1;
        let Write { entry, is_bulk, .. } = &self.writes[write];
        let (is_bulk, entry) = (*is_bulk, entry.number + 1);
        if is_bulk && !self.blocks.contains_key(&block) {
            return Ok(());
        }
        let block = self.blocks.entry(block).or_insert(Block { old, durable: 0, versions: Vec::new() });
        block.versions.push(Version { write, digest: new });
        if is_bulk {
            block.durable = block.versions.len();
        }
        self.versions += 1;
        if self.versions > VERSIONS_MAX {
            return Err(ExploreError::TooManyUnflushed { entry, unit: self.unit });
        }
        Ok(())
    }

    /// Makes a write with FUA durable, with everything as old in its blocks. Called when an entry
    /// follows the write.
    pub fn settle(&mut self) {
        if !std::mem::take(&mut self.has_open_fua) {
            return;
        }
        let Some(write) = self.writes.last() else { return };
        for (_, block) in self.blocks.range_mut(write.blocks(self.unit)) {
            block.durable = block.versions.len();
        }
    }

    // ---- choices --------------------------------------------------------------------------------

    /// Returns the indices of the writes of which at least one block can be lost, in order.
    pub fn losable_writes(&self) -> Vec<usize> {
        let mut is_losable = vec![false; self.writes.len()];
        for block in self.blocks.values() {
            block.versions[block.durable..].iter().for_each(|version| is_losable[version.write] = true);
        }
        (0..is_losable.len()).filter(|&write| is_losable[write]).collect()
    }

    /// Returns the number of choices of lost versions, at most `max`.
    pub fn choices(&self, max: u64) -> u64 {
        let counts = self.blocks.values().map(|block| block.losable() as u64 + 1);
        let mut choices: u64 = 1;
        for count in counts {
            choices = choices.saturating_mul(count);
            if choices >= max {
                return max;
            }
        }
        choices
    }

    /// Loses the versions of blocks for which `is_lost` returns true, given write and block.
    pub fn lose(&self, is_lost: impl Fn(usize, u64) -> bool) -> Lost {
        let mut lost = Lost::new();
        for (&number, block) in &self.blocks {
            let kept = block.kept(|write| is_lost(write, number));
            if kept < block.versions.len() {
                lost.insert(number, kept);
            }
        }
        lost
    }

    /// Returns the versions that are lost, each as write and block, ordered by write.
    pub fn lost_versions(&self, lost: &Lost) -> Vec<(usize, u64)> {
        let versions = lost.iter().flat_map(|(&number, &kept)| {
            self.blocks[&number].versions[kept..].iter().map(move |version| (version.write, number))
        });
        let mut versions: Vec<_> = versions.collect();
        versions.sort_unstable();
        versions
    }

    /// Returns true if the block keeps the version of a write.
    pub fn keeps(&self, lost: &Lost, write: usize, block: u64) -> bool {
        let Some(&kept) = lost.get(&block) else { return true };
        let versions = &self.blocks[&block].versions;
        kept.checked_sub(1).is_some_and(|last| versions[last].write >= write)
    }

    /// Returns the difference that the loss makes to the digest of the content.
    pub fn loss_digest(&self, lost: &Lost) -> Digest {
        lost.iter().fold(Digest::default(), |sum, (number, &kept)| {
            let block = &self.blocks[number];
            sum.plus(block.digest(kept)).minus(block.digest(block.versions.len()))
        })
    }

    // ---- identifiers ----------------------------------------------------------------------------

    /// Returns the identifier of the state after `point` entries that has lost these versions.
    pub fn id(&self, point: u64, lost: &Lost) -> StateId {
        let mut id = StateId { point, lost: Vec::new(), unit: self.unit };
        let versions = self.lost_versions(lost);
        for of_write in versions.chunk_by(|(write, _), (next, _)| write == next) {
            let write = &self.writes[of_write[0].0];
            let entry = write.entry.number + 1;
            // A block with a later version that is kept shows nothing of the write.
            let is_whole = write.blocks(self.unit).all(|number| {
                let index = self.blocks.get(&number).and_then(|block| {
                    block.versions.iter().position(|version| version.write == of_write[0].0)
                });
                index.is_none_or(|index| {
                    let block = &self.blocks[&number];
                    let kept = lost.get(&number).copied().unwrap_or(block.versions.len());
                    kept != index + 1
                })
            });
            if is_whole {
                match id.lost.last_mut() {
                    Some(LostPart::Entries(run)) if *run.end() + 1 == entry => *run = *run.start()..=entry,
                    _ => id.lost.push(LostPart::Entries(entry..=entry)),
                }
                continue;
            }
            let first = write.blocks(self.unit).start;
            for run in of_write.chunk_by(|(_, block), (_, next)| block + 1 == *next) {
                let blocks = run[0].1 - first..=run[run.len() - 1].1 - first;
                id.lost.push(LostPart::Blocks { entry, blocks });
            }
        }
        id
    }

    /// Returns the choice that an identifier describes, or the reason why these writes cannot be
    /// lost at the point.
    pub fn choice(&self, id: &StateId) -> std::result::Result<Lost, String> {
        let mut named: BTreeMap<usize, Vec<(u64, u64)>> = BTreeMap::new();
        let mut name = |entry: u64, blocks: Option<(u64, u64)>| {
            let found = self.writes.binary_search_by_key(&entry, |write| write.entry.number + 1);
            let Ok(index) = found else {
                return Err(format!("entry {entry} is not an unflushed write at entry {}", id.point));
            };
            let all = self.writes[index].blocks(self.unit);
            let (from, to) = blocks.map_or((all.start, all.end), |(from, to)| {
                (all.start.saturating_add(from), all.start.saturating_add(to).saturating_add(1))
            });
            if to > all.end {
                return Err(format!(
                    "entry {entry} has {} blocks of {} bytes",
                    all.end - all.start,
                    self.unit
                ));
            }
            named.entry(index).or_default().push((from, to));
            Ok(())
        };
        for part in &id.lost {
            match part {
                LostPart::Entries(entries) => {
                    // Only writes count: flushes and marks cannot be lost, and a long run must not take long.
                    let first =
                        self.writes.partition_point(|write| write.entry.number + 1 < *entries.start());
                    let run = self.writes[first..].iter().map(|write| write.entry.number + 1);
                    let run: Vec<_> = run.take_while(|entry| entry <= entries.end()).collect();
                    if run.len() as u64 != (entries.end() - entries.start()).saturating_add(1) {
                        let (first, last) = (entries.start(), entries.end());
                        let what = if first == last {
                            format!("entry {first} is not an unflushed write")
                        } else {
                            format!("the entries {first} to {last} are not all unflushed writes")
                        };
                        return Err(format!("{what} at entry {}", id.point));
                    }
                    run.into_iter().try_for_each(|entry| name(entry, None))?;
                }
                LostPart::Blocks { entry, blocks } => name(*entry, Some((*blocks.start(), *blocks.end())))?,
            }
        }
        let lost = self.lose(|write, block| {
            named.get(&write).is_some_and(|runs| runs.iter().any(|(from, to)| (*from..*to).contains(&block)))
        });
        if lost.is_empty() && !id.lost.is_empty() {
            return Err(format!("none of these writes can be lost at entry {}", id.point));
        }
        Ok(lost)
    }
}
