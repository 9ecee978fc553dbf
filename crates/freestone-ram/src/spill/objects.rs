//! Pages that are read back from the backing device: near ones in one read, each checked before it
//! is used.

use super::blocks::BLOCK_UNITS;
use super::layout;
use super::space::BLOCK_BYTES;
use super::store::Store;
use freestone_core::slot::Word;

/// Blocks of one read.
const READ_BLOCKS_MAX: u64 = 64;
/// Blocks between two objects that are read along, rather than asked for by two requests.
const GAP_BLOCKS: u64 = 4;

/// A page on the backing device.
#[derive(Clone, Copy)]
pub struct Spilled {
    /// The page's slot.
    pub slot: u64,
    /// What the slot holds.
    pub word: Word,
    /// Whose it is by its header on the device.
    pub header_owner: u64,
}

/// What can be found in one read.
pub struct Near<T> {
    /// The first block to be read.
    pub first: u64,
    /// How many.
    pub blocks: u32,
    /// What lies there, by its place.
    pub of: Vec<T>,
}

impl Store {
    /// What is to be read, near ones together.
    pub fn near_ones_together<T: AsRef<Spilled>>(&self, mut all: Vec<T>) -> Vec<Near<T>> {
        all.sort_unstable_by_key(|one| one.as_ref().word.location());
        let gap = if self.is_packed() { GAP_BLOCKS } else { 0 };
        let mut groups: Vec<Near<T>> = Vec::new();
        for one in all {
            let (start, blocks) = self.blocks_of(one.as_ref().word);
            if let Some(near) = groups.last_mut() {
                let end = near.first + u64::from(near.blocks);
                let to = end.max(start + u64::from(blocks));
                if start <= end + gap && to - near.first <= READ_BLOCKS_MAX {
                    near.blocks = (to - near.first) as u32;
                    near.of.push(one);
                    continue;
                }
            }
            groups.push(Near { first: start, blocks, of: vec![one] });
        }
        groups
    }

    /// The object of a page, or its whole content where that lies there as it is, out of what was
    /// read from block `first` on. `None`: it is damaged, which is counted.
    pub fn object<'b>(&self, spilled: &Spilled, first: u64, buffer: &'b [u8]) -> Option<&'b [u8]> {
        let Spilled { slot: _, word, header_owner } = *spilled;
        let at = (word.location() - first * BLOCK_UNITS) as usize * layout::UNIT_BYTES;
        let object = if self.is_packed() {
            layout::object_at(buffer, at, header_owner, word.spilled_bytes(), word.algorithm() as u8)
        } else {
            buffer.get(at..at + BLOCK_BYTES)
        };
        if object.is_some() {
            self.good_read();
        } else {
            self.failed_read();
        }
        object
    }
}
