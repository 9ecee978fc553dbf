//! Holes in packed blocks: pages that were overwritten, discarded or came back leave places in
//! blocks that others still use. What is left in sparse blocks is read and written elsewhere,
//! tightly; then those blocks are free.
//!
//! Objects on the device say whose they are. One is moved only if its slot still points to where it
//! was read, and the block has not been used anew since before it was read: then the bytes are the
//! page's. The slot is picked meanwhile, as in every [eviction](super::eviction), and learns of the new
//! place when the copy is on the device.

use std::sync::Arc;
use std::time::Duration;

use super::PAGE;
use super::eviction::{Eviction, Found, Offered};
use super::outcome::WritebackError;
use super::pages::Pages;
use crate::pool::BackRef;
use crate::spill::blocks::BLOCK_UNITS;
use crate::spill::layout;
use crate::spill::reads::ReadError;
use crate::spill::store::Store;
use freestone_core::device::Error;
use freestone_core::sync::{Mutex, mpsc};

/// A block is sparse with at most so many units of 16 bytes in use.
const SPARSE_UNITS: u32 = 160;
/// Blocks that are read at once.
const WINDOW_BLOCKS: u64 = 64;
/// Blocks that are looked through before others have their turn: 4 MiB.
const PIECE_BLOCKS: usize = 1024;
/// How long that is for them to begin.
const GIVE_WAY: Duration = Duration::from_millis(1);
/// Blocks that one step of the background looks through.
const STEP_BLOCKS: u64 = 1 << 16;
/// Below so many holes nothing is done by itself.
const HOLES_MIN_BLOCKS: u64 = 256;

/// Moves what a family has on its backing device.
pub(super) struct Reclaim {
    pages: Arc<Pages>,
    /// The block at which the next step begins.
    cursor: Mutex<u64>,
}

impl Reclaim {
    /// It begins at the first block.
    pub fn new(pages: Arc<Pages>) -> Self {
        Self { pages, cursor: Mutex::default() }
    }

    /// Moves objects together, a part of the device at a time, where room gets short and holes are
    /// many.
    pub fn if_worth_it(&self) {
        let Some(store) = self.pages.store.as_ref().filter(|store| store.unanswered() == 0) else { return };
        let (free, holes) = (store.free_blocks(), store.hole_blocks());
        let blocks = store.blocks();
        if holes < HOLES_MIN_BLOCKS.min(blocks / 8) || free > blocks / 4 || holes < free / 4 {
            return;
        }
        let Some(_one) = self.pages.background.try_lock() else { return };
        let mut cursor = self.cursor.lock();
        if *cursor >= blocks {
            *cursor = 0;
        }
        let end = (*cursor + STEP_BLOCKS).min(blocks);
        if let Err(error) = self.range(store, *cursor, end) {
            tracing::debug!("holes are not reclaimed: {error}");
        }
        *cursor = end;
    }

    /// Moves objects together until `enough` blocks are free that were not, or on the whole device,
    /// while it may `go_on`. The caller holds `background`. Returns how many blocks that freed.
    pub fn until(&self, enough: u64, go_on: &mut dyn FnMut() -> bool) -> u64 {
        let Some(store) = self.store_with_holes() else { return 0 };
        let before = store.numbers().used;
        let freed = || before.saturating_sub(store.numbers().used);
        for from in (0..store.blocks()).step_by(PIECE_BLOCKS) {
            if !go_on() || !self.piece(store, from) || freed() >= enough {
                break;
            }
        }
        freed()
    }

    /// Bytes of the device that are looked through for holes.
    pub fn bytes(&self) -> u64 {
        self.store_with_holes().map_or(0, |store| store.blocks() * PAGE)
    }

    /// Moves objects together on the whole device, unless others are at work in the background. Between two
    /// pieces who waits for memory has its turn, and `go_on` is given the bytes that were looked
    /// through; false ends it.
    pub fn in_turns(&self, go_on: &mut dyn FnMut(u64) -> bool) {
        let Some(store) = self.store_with_holes() else { return };
        let Some(mut turn) = self.pages.background.try_lock() else { return };
        for from in (0..store.blocks()).step_by(PIECE_BLOCKS) {
            if !go_on(from * PAGE) {
                break;
            }
            if self.pages.keeper.is_wanted() {
                drop(turn);
                freestone_core::sync::thread::sleep(GIVE_WAY);
                turn = self.pages.background.lock();
            }
            if !self.piece(store, from) {
                break;
            }
        }
        drop(turn);
    }

    fn store_with_holes(&self) -> Option<&Arc<Store>> {
        self.pages.store.as_ref().filter(|store| store.is_packed() && store.hole_blocks() > 0)
    }

    /// Empties the sparse blocks of a piece. False: the device fails.
    fn piece(&self, store: &Arc<Store>, from: u64) -> bool {
        let end = (from + PIECE_BLOCKS as u64).min(store.blocks());
        let done = self.range(store, from, end);
        done.inspect_err(|error| tracing::debug!("holes are not reclaimed: {error}")).is_ok()
    }

    /// Empties the sparse ones of the blocks `[from, end)`.
    fn range(&self, store: &Arc<Store>, from: u64, end: u64) -> Result<(), WritebackError> {
        let is_sparse = |block: &u64| (1..=SPARSE_UNITS).contains(&store.map().live(*block));
        let mut from = from;
        while let Some(first) = (from..end).find(is_sparse) {
            // Objects begin in the block before, and end in the one behind.
            let start = first.saturating_sub(1);
            let stop = (start + WINDOW_BLOCKS).min(store.blocks());
            let last = if stop == store.blocks() { stop } else { stop - 1 };
            let sparse: Vec<u64> = (first..last.min(end)).filter(is_sparse).collect();
            // An eviction a window: nothing of its own is on its way while the next one is read.
            let mut eviction = Eviction::to_move(&self.pages, store);
            let moved = self.empty_window(store, start, stop, &sparse, &mut eviction);
            let (_, ended) = eviction.end();
            match moved.and(ended) {
                Ok(()) => {}
                // What cannot be read stays where it is.
                Err(WritebackError::Device(Error::Media)) if store.unanswered() == 0 => {}
                Err(error) => return Err(error),
            }
            from = last;
        }
        Ok(())
    }

    /// Moves what lies in the `sparse` blocks of the window `[start, stop)`.
    fn empty_window(
        &self,
        store: &Arc<Store>,
        start: u64,
        stop: u64,
        sparse: &[u64],
        eviction: &mut Eviction<'_>,
    ) -> Result<(), WritebackError> {
        let generations: Vec<u32> = (start..stop).map(|block| store.map().generation(block)).collect();
        let buffer = read(store, start, (stop - start) as u32).map_err(WritebackError::Device)?;
        let first_unit = start * BLOCK_UNITS;
        for &block in sparse {
            let (begin, end) = (block * BLOCK_UNITS, (block + 1) * BLOCK_UNITS);
            let mut done = begin - BLOCK_UNITS.min(begin);
            // One that reaches in from the block before is found by that one's headers.
            let before = block.checked_sub(1).filter(|&before| before >= start);
            for of in before.into_iter().chain([block]) {
                let Some(first) = store.map().first(of) else { continue };
                let at = (of * BLOCK_UNITS + u64::from(first) - first_unit) as usize * layout::UNIT_BYTES;
                for (at, header, bytes) in layout::walk(&buffer, at) {
                    let unit = first_unit + (at / layout::UNIT_BYTES) as u64;
                    let next = unit + u64::from(layout::units(bytes.len()));
                    if unit >= end {
                        break;
                    }
                    if next <= begin || unit < done {
                        continue;
                    }
                    done = next;
                    let generation = generations[(unit / BLOCK_UNITS - start) as usize];
                    self.move_object(&Found { owner: header.owner(), unit, generation, bytes }, eviction)?;
                }
            }
        }
        Ok(())
    }

    /// Moves an object that whichever layer of its chain holds.
    fn move_object(&self, object: &Found<'_>, eviction: &mut Eviction<'_>) -> Result<(), WritebackError> {
        let owner = BackRef::from_bits(object.owner);
        for layer in self.pages.layers.of_chain(owner.table()) {
            if eviction.relocate(&layer, object)? != Offered::Passed {
                break;
            }
        }
        Ok(())
    }
}

/// Reads blocks and waits for them.
fn read(store: &Arc<Store>, first: u64, blocks: u32) -> Result<Vec<u8>, Error> {
    let (tx, rx) = mpsc::channel();
    store.read(first, blocks, move |outcome| {
        // The reader waits for it.
        let _ = tx.send(outcome.map(<[u8]>::to_vec));
    });
    match rx.recv() {
        Ok(Ok(buffer)) => Ok(buffer),
        Ok(Err(ReadError::Failed(error))) => Err(error),
        // No answer is not the error of this window only.
        Ok(Err(ReadError::Late)) | Err(_) => Err(Error::Gone),
    }
}
