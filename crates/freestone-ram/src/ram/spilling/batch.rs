//! Batches: the pages of one write to the backing device.

use crate::ram::memory::groups::device::Hold;
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
    /// Number of pages of groups, which are not among `pages`.
    pub grouped: u64,
    /// Number of pages that were in memory before; the others only moved within the device.
    pub from_memory: u64,
}

/// An object in a batch.
pub(super) enum Entry {
    Page(PageEntry),
    Group(GroupEntry),
    MovedGroup(MovedGroup),
}

/// A group that leaves memory.
pub(super) struct GroupEntry {
    pub hold: Hold,
    /// Index into [`Eviction::layers`] of the layer of the members.
    pub layer: usize,
    pub unit: u64,
    /// Size in bytes of the object.
    pub bytes: usize,
    /// Slots of the pages that leave memory, with their ages.
    pub members: Vec<(u64, u8)>,
}

/// A group whose object moves to another place on the device.
pub(super) struct MovedGroup {
    /// The group is held on the device only.
    pub hold: Hold,
    pub unit: u64,
}

pub(super) struct PageEntry {
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
