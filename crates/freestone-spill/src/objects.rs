//! Grouping of page reads from the backing device, and verification of the pages read.

use super::blocks::BLOCK_UNITS;
use super::layout::{self, Place};
use super::space::BLOCK_BYTES;
use super::store::Store;
use freestone_core::slot::Word;

/// Maximum number of blocks in one read.
const READ_BLOCKS_MAX: u64 = 64;
/// Largest gap between pages, in blocks, that one read covers. A larger gap splits the read.
const GAP_BLOCKS: u64 = 4;

/// A page that is on the backing device.
#[derive(Clone, Copy)]
pub struct Spilled {
    pub slot: u64,
    pub word: Word,
    /// Object of the page, or of its group.
    pub place: Place,
    /// Owner (table and slot) in the header of the object.
    pub header_owner: u64,
}

/// Pages to read with one request, and the range of blocks to read.
pub struct ReadGroup<T> {
    pub first: u64,
    pub blocks: u32,
    /// The pages, in order of their place on the device.
    pub pages: Vec<T>,
}

impl Store {
    /// Groups pages that are close together on the device, so that one request reads them.
    pub fn group_reads<T: AsRef<Spilled>>(&self, mut all: Vec<T>) -> Vec<ReadGroup<T>> {
        all.sort_unstable_by_key(|one| one.as_ref().place.unit);
        let gap = if self.is_packed() { GAP_BLOCKS } else { 0 };
        let mut groups: Vec<ReadGroup<T>> = Vec::new();
        for one in all {
            let (start, blocks) = self.blocks_of(one.as_ref().place);
            if let Some(near) = groups.last_mut() {
                let end = near.first + u64::from(near.blocks);
                let to = end.max(start + u64::from(blocks));
                if start <= end + gap && to - near.first <= READ_BLOCKS_MAX {
                    near.blocks = (to - near.first) as u32;
                    near.pages.push(one);
                    continue;
                }
            }
            groups.push(ReadGroup { first: start, blocks, pages: vec![one] });
        }
        groups
    }

    /// Extracts the object of a page or of its group (in the plain layout the page) from `buffer`,
    /// which contains the blocks from `first` on. Returns `None` if the object is damaged, and counts a
    /// failed read.
    pub fn object<'b>(&self, spilled: &Spilled, first: u64, buffer: &'b [u8]) -> Option<&'b [u8]> {
        let Spilled { place: Place { unit, stored, algorithm }, header_owner, .. } = *spilled;
        let at = (unit - first * BLOCK_UNITS) as usize * layout::UNIT_BYTES;
        let object = if self.is_packed() {
            layout::object_at(buffer, at, header_owner, stored as usize, algorithm)
        } else {
            buffer.get(at..at + BLOCK_BYTES)
        };
        if object.is_some() {
            self.record_good_read();
        } else {
            self.record_failed_read();
        }
        object
    }
}
