//! Reclaim of holes in packed blocks. Pages that were overwritten, discarded or read back leave
//! holes in blocks that other pages still use. Reclaim reads the objects of sparse blocks and
//! writes them to other blocks, tightly packed, which frees the sparse blocks.
//!
//! The header of an object on the device names its owner (table and slot). The object is moved only
//! if its slot still refers to the place that was read, and the block was not reused meanwhile.
//! Only then are the bytes those of the page. Meanwhile the slot is picked, as in every
//! [eviction](super::evict_rounds). When the copy is on the device, the slot refers to the new place.
//! A group of pages moves as a whole: it is held instead, and gets a new place.

use std::sync::Arc;
use std::time::Duration;

use super::batch::StoredObject;
use super::evict_batches::{Eviction, OfferOutcome};
use crate::pool::BackRef;
use crate::ram::geometry::PAGE;
use crate::ram::memory::groups;
use crate::ram::memory::outcome::WritebackError;
use crate::ram::memory::pages::Pages;
use freestone_core::device::Error;
use freestone_core::sync::{Mutex, mpsc};
use freestone_spill::blocks::{BLOCK_UNITS, OBJECT_BLOCKS_MAX};
use freestone_spill::layout;
use freestone_spill::reads::ReadError;
use freestone_spill::store::{FREE_SHARE, Store};

/// A block is sparse if at most this many of its 256 units of 16 bytes are in use.
const SPARSE_UNITS: u32 = 160;
/// Maximum blocks of 4 KiB per read.
const WINDOW_BLOCKS: u64 = 64;
/// Number of blocks before or after a block into which an object of the block can extend.
const REACH_BLOCKS: u64 = OBJECT_BLOCKS_MAX - 1;
const _: () = assert!(WINDOW_BLOCKS > 4 * REACH_BLOCKS);
/// Blocks (4 MiB) scanned before waiting evictions may run.
const PIECE_BLOCKS: usize = 1024;
/// Pause in which a waiting eviction can lock `background`.
const GIVE_WAY: Duration = Duration::from_millis(1);
/// Maximum blocks (256 MiB) scanned per background step.
const STEP_BLOCKS: u64 = 1 << 16;
/// Minimum holes, in blocks, for automatic reclaim; on small devices 1/8 of the device is enough.
const HOLES_MIN_BLOCKS: u64 = 256;

pub(in crate::ram) struct Reclaim {
    pages: Arc<Pages>,
    /// Block at which the next background step begins.
    cursor: Mutex<u64>,
}

impl Reclaim {
    pub fn new(pages: Arc<Pages>) -> Self {
        Self { pages, cursor: Mutex::default() }
    }

    /// Reclaims the next part of the backing device if space is short and holes are many. Called
    /// once a second.
    pub fn reclaim_if_needed(&self) {
        let Some(store) = self.pages.store.as_ref().filter(|store| store.abandoned() == 0) else { return };
        let (free, holes) = (store.free_blocks(), store.hole_blocks());
        let blocks = store.blocks();
        if holes < HOLES_MIN_BLOCKS.min(blocks / 8) || free > blocks / FREE_SHARE || holes < free / 4 {
            return;
        }
        let Some(_one) = self.pages.background.try_lock() else { return };
        let mut cursor = self.cursor.lock();
        if *cursor >= blocks {
            *cursor = 0;
        }
        let end = (*cursor + STEP_BLOCKS).min(blocks);
        if let Err(error) = self.reclaim_range(store, *cursor, end) {
            tracing::debug!("holes are not reclaimed: {error}");
        }
        *cursor = end;
    }

    /// Reclaims until `enough` blocks were freed, the device ends, or `go_on` returns false. The
    /// caller must hold [`Pages::background`]. Returns the number of blocks freed.
    pub fn reclaim_blocks(&self, enough: u64, go_on: &mut dyn FnMut() -> bool) -> u64 {
        let Some(store) = self.store_with_holes() else { return 0 };
        let before = store.stat().used;
        let freed = || before.saturating_sub(store.stat().used);
        for from in (0..store.blocks()).step_by(PIECE_BLOCKS) {
            if !go_on() || !self.reclaim_piece(store, from) || freed() >= enough {
                break;
            }
        }
        freed()
    }

    /// Returns the bytes of the backing device that [`reclaim_all`](Self::reclaim_all) would scan;
    /// 0 without holes.
    pub fn bytes(&self) -> u64 {
        self.store_with_holes().map_or(0, |store| store.blocks() * PAGE)
    }

    /// Reclaims the holes of the whole device, unless other background work is running. Lets
    /// evictions run between two pieces if requests wait for memory. `go_on` receives the bytes
    /// scanned; reclaim ends when `go_on` returns false.
    pub fn reclaim_all(&self, go_on: &mut dyn FnMut(u64) -> bool) {
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
            if !self.reclaim_piece(store, from) {
                break;
            }
        }
        drop(turn);
    }

    fn store_with_holes(&self) -> Option<&Arc<Store>> {
        self.pages.store.as_ref().filter(|store| store.is_packed() && store.hole_blocks() > 0)
    }

    /// Empties the sparse blocks of the piece of `PIECE_BLOCKS` blocks at block `from`. Returns
    /// false if reclaim cannot continue, for example because the device fails.
    fn reclaim_piece(&self, store: &Arc<Store>, from: u64) -> bool {
        let end = (from + PIECE_BLOCKS as u64).min(store.blocks());
        let done = self.reclaim_range(store, from, end);
        done.inspect_err(|error| tracing::debug!("holes are not reclaimed: {error}")).is_ok()
    }

    /// Empties the sparse blocks among the blocks `[from, end)`.
    fn reclaim_range(&self, store: &Arc<Store>, from: u64, end: u64) -> Result<(), WritebackError> {
        let is_sparse = |block: &u64| (1..=SPARSE_UNITS).contains(&store.map().live(*block));
        let mut from = from;
        while let Some(first) = (from..end).find(is_sparse) {
            // Objects of a sparse block may begin in a block before it, or end in a block after it:
            // read these blocks too.
            let start = first.saturating_sub(REACH_BLOCKS);
            let stop = (start + WINDOW_BLOCKS).min(store.blocks());
            let last = if stop == store.blocks() { stop } else { stop - REACH_BLOCKS };
            let sparse: Vec<u64> = (first..last.min(end)).filter(is_sparse).collect();
            // Use an eviction per window, so that no write of this window is in flight while the next
            // window is read.
            let mut eviction = Eviction::to_move(&self.pages, store);
            let moved = self.empty_window(store, start, stop, &sparse, &mut eviction);
            let (_, ended) = eviction.end();
            match moved.and(ended) {
                Ok(()) => {}
                // Objects in unreadable blocks stay in place.
                Err(WritebackError::Device(Error::Media)) if store.abandoned() == 0 => {}
                Err(error) => return Err(error),
            }
            from = last;
        }
        Ok(())
    }

    /// Moves the objects of the `sparse` blocks in the window of blocks `[start, stop)`.
    fn empty_window(
        &self,
        store: &Arc<Store>,
        start: u64,
        stop: u64,
        sparse: &[u64],
        eviction: &mut Eviction<'_>,
    ) -> Result<(), WritebackError> {
        let generations: Vec<u32> = (start..stop).map(|block| store.map().generation(block)).collect();
        let buffer = read_blocks(store, start, (stop - start) as u32).map_err(WritebackError::Device)?;
        let first_unit = start * BLOCK_UNITS;
        // End of the objects that were moved.
        let mut done = 0;
        for &block in sparse {
            let (begin, end) = (block * BLOCK_UNITS, (block + 1) * BLOCK_UNITS);
            // A walk from the first header of the last block before that has one finds an object that
            // extends into this block.
            let mut before = (start..block).rev().take(REACH_BLOCKS as usize);
            let before = before.find(|&before| store.map().first(before).is_some());
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
                    self.move_object(
                        &StoredObject { owner: header.owner(), unit, generation, bytes },
                        eviction,
                    )?;
                }
            }
        }
        Ok(())
    }

    /// Moves an object. The slot may be in any layer of the owner's chain: all layers are tried.
    fn move_object(
        &self,
        object: &StoredObject<'_>,
        eviction: &mut Eviction<'_>,
    ) -> Result<(), WritebackError> {
        let owner = BackRef::from_bits(object.owner);
        if owner.table() == groups::TABLE_ID {
            return eviction.relocate_group(object).map(drop);
        }
        for layer in self.pages.layers.layers_of_chain(owner.table()) {
            if eviction.relocate(&layer, object)? != OfferOutcome::Skipped {
                break;
            }
        }
        Ok(())
    }
}

/// Reads `blocks` blocks from block `first` on, and waits for the content.
fn read_blocks(store: &Arc<Store>, first: u64, blocks: u32) -> Result<Vec<u8>, Error> {
    let (tx, rx) = mpsc::channel();
    store.read(first, blocks, move |outcome| {
        // Cannot fail: the receiver exists until the result arrives.
        let _ = tx.send(outcome.map(<[u8]>::to_vec));
    });
    match rx.recv() {
        Ok(Ok(buffer)) => Ok(buffer),
        Ok(Err(ReadError::Failed(error))) => Err(error),
        // Not `Media`: a time-out concerns the whole device, so reclaim must end.
        Ok(Err(ReadError::TimedOut)) | Err(_) => Err(Error::Gone),
    }
}
