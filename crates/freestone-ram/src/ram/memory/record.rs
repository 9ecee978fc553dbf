//! Records of layers beside their slot tables, for a process that adopts the family.
//!
//! The first word of a record has the layer's state and id. It is 0 until the other words are stored and the
//! layer belongs to a device, and each change of the state is one store. So a process that is killed at any
//! moment leaves each layer in one state.
//!
//! The tables of objects that several pages use have records with a [purpose](SharedTable) only.

use freestone_core::slot::Table;
use freestone_core::slot::adoption::RECORD_WORDS;
use freestone_core::sync::Ordering;

/// State of a recorded layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::ram) enum LayerState {
    /// The layer of a disk or fork.
    Live = 1,
    Snapshot = 2,
    /// A device's former layer that snapshots still read.
    Loose = 3,
    /// No device uses the layer.
    Retired = 4,
    /// The layer of a removed snapshot, from which pages are moved to other snapshots.
    Dying = 5,
}

/// Purpose of a table that no layer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::ram) enum SharedTable {
    /// Headers of groups, and the pieces of their objects in memory.
    GroupPieces = 6,
    /// Places of the objects of groups on the backing device.
    GroupPlaces = 7,
    /// Objects of pages with the same content.
    SharedObjects = 8,
}

/// Record of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ram) struct LayerRecord {
    pub state: LayerState,
    /// Id of the layer's table.
    pub id: u32,
    /// Id of the table of the chain's origin.
    pub chain: u32,
    /// Number of a snapshot in its chain.
    pub number: u64,
    /// Key that the user of the family has given to the device; 0 if none.
    pub key: u64,
    /// Size of the device in bytes.
    pub size: u64,
    /// Key of the device that empty slots read from; 0 if they read as zeroes.
    pub parent: u64,
    /// Number of rewinds of the device.
    pub rewinds: u64,
}

mod word {
    pub const STATE: usize = 0;
    pub const CHAIN: usize = 1;
    pub const NUMBER: usize = 2;
    pub const KEY: usize = 3;
    pub const SIZE: usize = 4;
    pub const PARENT: usize = 5;
    pub const REWINDS: usize = 6;
}

const ID_SHIFT: u32 = 8;

impl LayerRecord {
    /// Returns the record of a new disk or fork.
    pub const fn of_device(id: u32, size: u64) -> Self {
        Self { state: LayerState::Live, id, chain: id, number: 0, key: 0, size, parent: 0, rewinds: 0 }
    }

    /// Returns the record of a new snapshot of the device with the record `origin`.
    pub const fn of_snapshot(origin: &Self, id: u32, number: u64) -> Self {
        Self { state: LayerState::Snapshot, id, chain: origin.id, number, key: 0, ..*origin }
    }

    /// Decodes a record; `None` if it is damaged.
    pub fn decode(words: &[u64; RECORD_WORDS]) -> Option<Self> {
        let state = match words[word::STATE] & 0xFF {
            1 => LayerState::Live,
            2 => LayerState::Snapshot,
            3 => LayerState::Loose,
            4 => LayerState::Retired,
            5 => LayerState::Dying,
            _ => return None,
        };
        Some(Self {
            state,
            id: u32::try_from(words[word::STATE] >> ID_SHIFT).ok()?,
            chain: u32::try_from(words[word::CHAIN]).ok()?,
            number: words[word::NUMBER],
            key: words[word::KEY],
            size: words[word::SIZE],
            parent: words[word::PARENT],
            rewinds: words[word::REWINDS],
        })
    }
}

impl SharedTable {
    /// Returns the purpose in a record; `None` if the record is one of a layer.
    pub fn decode(words: &[u64; RECORD_WORDS]) -> Option<Self> {
        let all = [Self::GroupPieces, Self::GroupPlaces, Self::SharedObjects];
        all.into_iter().find(|purpose| *purpose as u64 == words[word::STATE] & 0xFF)
    }

    /// Records the purpose of a table.
    pub fn record(self, table: &Table) {
        if let Some(words) = table.record() {
            // Release: as for a layer.
            words[word::STATE].store(self as u64 | u64::from(table.id()) << ID_SHIFT, Ordering::Release);
        }
    }
}

/// Records that the layer with this table belongs to a device. Does nothing in a family that no process can
/// adopt, as the other functions.
pub(in crate::ram) fn write(table: &Table, of: &LayerRecord) {
    let Some(words) = table.record() else { return };
    let values = [0, u64::from(of.chain), of.number, of.key, of.size, of.parent, of.rewinds];
    for (word, value) in words.iter().zip(values).skip(1) {
        // Relaxed: the state, which is stored last, publishes them.
        word.store(value, Ordering::Relaxed);
    }
    // Release: the other words are stored before.
    words[word::STATE].store(of.state as u64 | u64::from(of.id) << ID_SHIFT, Ordering::Release);
}

/// Returns the record of a layer; `None` if the layer belongs to no device.
pub(in crate::ram) fn read(table: &Table) -> Option<LayerRecord> {
    // Relaxed: only the device's own thread changes the record, apart from the state.
    let words = table.record()?.each_ref().map(|word| word.load(Ordering::Relaxed));
    LayerRecord::decode(&words)
}

/// Records a change of the state of a layer that belongs to a device.
pub(in crate::ram) fn set_state(table: &Table, state: LayerState) {
    // Relaxed: see `read`.
    if let Some(word) = table.record().map(|words| &words[word::STATE])
        && word.load(Ordering::Relaxed) != 0
    {
        // Release: all changes of the layer in its former state are stored before.
        word.store(state as u64 | u64::from(table.id()) << ID_SHIFT, Ordering::Release);
    }
}

/// Records the keys of a layer's device and of the device that its empty slots read from.
pub(in crate::ram) fn set_keys(table: &Table, key: u64, parent: u64) {
    if let Some(words) = table.record() {
        // Relaxed: the next store publishes it.
        words[word::PARENT].store(parent, Ordering::Relaxed);
        // Release: the other words are stored before.
        words[word::KEY].store(key, Ordering::Release);
    }
}

/// Records the key of the device that the empty slots of a layer without a key read from.
pub(in crate::ram) fn set_parent_of_unnamed(table: &Table, parent: u64) {
    if let Some(words) = table.record()
        // Relaxed: a key that another thread stores comes with the same parent.
        && words[word::KEY].load(Ordering::Relaxed) == 0
    {
        // Release: stored before the key of the snapshot that reads the layer.
        words[word::PARENT].store(parent, Ordering::Release);
    }
}

/// Records the number of rewinds of a layer's device.
pub(in crate::ram) fn set_rewinds(table: &Table, rewinds: u64) {
    if let Some(words) = table.record() {
        // Relaxed: the key, which is stored later, publishes it.
        words[word::REWINDS].store(rewinds, Ordering::Relaxed);
    }
}

/// Records the size of a layer's device in bytes.
pub(in crate::ram) fn set_size(table: &Table, size: u64) {
    if let Some(words) = table.record() {
        // Relaxed: the word alone is consistent.
        words[word::SIZE].store(size, Ordering::Relaxed);
    }
}
