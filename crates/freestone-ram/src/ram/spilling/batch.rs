//! Batches: the pages of one write to the backing device.

use freestone_core::device::IoBuf;
use freestone_spill::budget::Charge;
use freestone_spill::layout::Packer;
use freestone_spill::space::Run;

/// A batch: the pages of one write to the backing device.
pub(super) struct Batch {
    pub tag: u8,
    pub run: Run,
    pub charge: Charge,
    pub content: Content,
    pub entries: Vec<Entry>,
}

pub(super) enum Content {
    Packed(Packer),
    Plain { buffer: IoBuf, blocks: u32 },
    Submitted,
}

/// An object that was read from the backing device.
pub(super) struct StoredObject<'b> {
    /// Owner of the object as in its header: table id and slot.
    pub owner: u64,
    /// Unit (of 16 bytes) of the device at which the header begins.
    pub unit: u64,
    /// Generation of the header's block before the read: how often the block was reused.
    pub generation: u32,
    pub bytes: &'b [u8],
}

/// Reason why a page was not picked.
pub(super) enum PickError {
    Unwanted,
    BatchFull,
}

/// Counts of the pages of a finished batch, added to the shared counters once per batch.
#[derive(Default)]
pub(super) struct EvictionCounts {
    pub pages: u64,
    /// Bytes of the pages' objects on the device.
    pub stored: u64,
    /// Number of pages that were in memory before; the others only moved within the device.
    pub from_memory: u64,
}

pub(super) struct Entry {
    /// Index into [`Eviction::layers`].
    pub layer: usize,
    pub slot: u64,
    pub unit: u64,
    /// Size in bytes of the object on the device.
    pub stored: u32,
    /// Number of the algorithm of the object on the device.
    pub algorithm: u8,
    pub age: u8,
}
