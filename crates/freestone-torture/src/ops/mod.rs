//! The operations (ops) of a run, as plain values. Ops refer to nodes (devices of the stack),
//! families (RAM disks that share a pool) and disks by a number. The number is taken modulo the
//! count of those that exist, so any subset of a run is also a valid run.

mod draw;

use serde::{Deserialize, Serialize};

use crate::disk::Plan;
pub use draw::{draw, stack, warm_up};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Issues a request.
    Io(Io),
    /// Reads all of a node and checks the content read.
    Check(u16),
    /// Waits until no request is in flight.
    Await,
    /// Sets the minimum number of threads that issue requests from this op on.
    #[serde(rename = "Askers")]
    RequestThreads(u8),
    /// Sets the devices that the following ops choose from.
    Focus(Focus),
    /// Creates a family of RAM disks that share one pool.
    Family {
        /// Memory limit of the pool in KiB; 0 means no limit.
        limit_kib: u32,
        /// Compression algorithm: an index, modulo the number of algorithms. The quotient selects whether cold pages are
        /// compressed in groups, and whether cold pages with the same content are stored once.
        algorithm: u8,
        /// Backing device for spilled pages; `None` if the pool does not spill.
        backing: Option<Backing>,
        /// Recompresses pages automatically.
        auto: bool,
    },
    Ram {
        family: u16,
        kib: u32,
    },
    Disk(DiskOp),
    /// Creates a null device that stores its content in memory.
    Memory {
        kib: u32,
    },
    /// Creates a file and opens it as a device.
    File {
        kib: u32,
    },
    /// Creates a read-only file with content, the base of forks.
    Base {
        kib: u32,
        seed: u64,
        /// Adds a layer above the file that can make reads fail.
        faults: bool,
    },
    /// Creates an image with content in the image store.
    Image {
        kib: u32,
        seed: u64,
        /// Caches the parts of the image that were read on a disk.
        cached: bool,
    },
    /// Draws the fault rules of the image store from this seed. The rules apply from this op on.
    StoreRules(u64),
    /// Pushes snapshots, files and images to one tag of the image store at the same time.
    Push {
        nodes: Vec<u16>,
        /// Tag: an index, modulo the number of tags.
        tag: u8,
        /// Seed of the options of the pushes, and of concurrent events.
        seed: u64,
    },
    /// Advances the clock of the image store and deletes the objects to which no tag refers.
    Prune {
        /// Time by which the clock advances, in eighths of the grace period, modulo 20.
        eighths: u8,
        /// Seed of the choice of connection and of a dry run.
        seed: u64,
    },
    /// Saves the changes of a snapshot of a fork of a file as a qcow2 overlay, which can be forked
    /// itself.
    Delta {
        node: u16,
        /// Also applies the overlay to a new fork of the file.
        applies: bool,
    },
    /// Takes snapshots of RAM disks and forks at one moment.
    Snapshot(Vec<u16>),
    /// Takes snapshots of RAM disks and of origins at one moment.
    Moment {
        rams: Vec<u16>,
        /// Numbers of the origins, with the settings of each snapshot.
        cows: Vec<(u16, CowOp)>,
    },
    /// Forks a snapshot, a file or an image.
    Fork {
        snapshot: u16,
        /// Number of sectors by which the fork is larger than that node.
        more_sectors: u32,
        /// Memory limit of the fork in KiB; 0 means no limit.
        cap_kib: u32,
        /// Family of the fork. `None` selects the family of the snapshot, or the first family for a
        /// file or image.
        family: Option<u16>,
    },
    /// Connects clients to a template. Each client has a fork of its own, which exists until the
    /// client disconnects.
    Template {
        of: u16,
        /// Number of clients: this value modulo three, plus one.
        clients: u8,
        seed: u64,
        /// Family of the forks, as in [`Op::Fork`].
        family: Option<u16>,
    },
    /// Rewinds a RAM disk or fork to its initial content.
    Rewind {
        node: u16,
        reset: bool,
    },
    /// Grows a RAM disk or fork.
    Grow {
        node: u16,
        /// Growth in KiB.
        kib: u32,
    },
    /// Writes pages of a RAM disk, fork or snapshot back to the backing device.
    Writeback {
        node: u16,
        /// Selection of the pages, modulo the number of selections.
        which: u8,
    },
    /// Recompresses the pages of a RAM disk, fork or snapshot.
    Recompress(u16),
    /// Compacts the pool of the family of a RAM disk, fork or snapshot.
    Compact(u16),
    /// Sets the memory limit of a family.
    Limit {
        family: u16,
        /// New limit in KiB; 0 means no limit.
        kib: u32,
    },
    /// Sets the memory limits of one RAM disk or fork.
    OwnLimits {
        node: u16,
        /// Memory limit in KiB; 0 means no limit.
        cap_kib: u32,
        /// Guaranteed memory in KiB.
        least_kib: u32,
    },
    /// Puts an origin over a device.
    Origin(u16),
    CowSnapshot {
        origin: u16,
        /// Kind of exception store: an index, modulo the number of kinds.
        store: u8,
        /// Chunk size: 4 KiB shifted left by this.
        chunk: u8,
        /// The COW device has room for copies of all chunks.
        ample: bool,
        /// Node that serves as COW device; `None` creates a new disk.
        on: Option<u16>,
    },
    /// Starts or resumes the merge of a snapshot into its origin.
    Merge(u16),
    StopMerge(u16),
    WaitMerge(u16),
    /// Puts a power layer over a device: a layer that loses unflushed writes when its power is cut.
    Power(u16),
    PowerCut {
        node: u16,
        /// Seed that selects the unflushed writes that survive.
        seed: u64,
    },
    /// Puts a layer over a device that passes all requests through unchanged.
    Wrap {
        node: u16,
        /// Kind of layer: an index, modulo the number of kinds.
        layer: u8,
    },
    /// Puts a fault layer over a device: a layer that fails requests by rule.
    Faults {
        node: u16,
        seed: u64,
    },
    Rules {
        layer: u16,
        /// Rules in the syntax of the library's fault layer.
        rules: String,
    },
    BadBlocks {
        node: u16,
        /// Behaviour of the bad blocks: selects the options of the layer.
        how: u8,
    },
    /// Makes blocks of a layer with bad blocks bad, or good again.
    Bad {
        layer: u16,
        /// First bad sector, modulo the size.
        at: u32,
        /// Number of sectors, minus one.
        sectors: u16,
        /// Makes these blocks good instead of bad.
        good: bool,
    },
    /// Truncates the file under a file device.
    Cut {
        file: u16,
        /// New size of the file, in 1/1024 of its full size.
        parts: u16,
    },
    /// Checks the list of changes of a device relative to its parent against the content of both.
    Changes(u16),
    /// Checks the extents that a device reports against its content.
    Extents(u16),
    /// Saves RAM disks, forks and snapshots to a file, and restores them from it.
    Save {
        nodes: Vec<u16>,
        /// Number of the family to restore into.
        family: u16,
        /// Identifies the base of a fork by a hash of its whole content.
        whole: bool,
    },
    Remove(u16),
    /// Kills everything that uses a disk, with or without a power loss, and opens the disk again.
    Crash {
        /// Number of the disk, among those that can be opened again.
        tree: u16,
        /// Also cuts the power: unflushed writes may be lost.
        power: bool,
        /// Seed that selects the unflushed writes that survive.
        seed: u64,
    },
    /// Sets the fault probabilities of a simulated disk from this op on.
    Plan {
        disk: u16,
        plan: Plan,
    },
    /// Sets the free space of a simulated disk.
    Room {
        disk: u16,
        /// Free space in KiB.
        kib: u32,
    },
    Shrink {
        disk: u16,
        /// New size, in 1/1024 of the size in its geometry.
        parts: u16,
    },
    /// Ends the faults of the disk or injector with this number, or of all for `None`.
    Heal(Option<u16>),
}

impl Op {
    /// Returns true if the op can run while a verb (an op on devices other than a request) is
    /// running.
    pub fn is_concurrent(&self) -> bool {
        matches!(
            self,
            Self::Io(_)
                | Self::Check(_)
                | Self::Await
                | Self::RequestThreads(_)
                | Self::Focus(_)
                | Self::Limit { .. }
                | Self::Plan { .. }
                | Self::Room { .. }
                | Self::Shrink { .. }
                | Self::Heal(_)
                | Self::Rules { .. }
                | Self::Bad { .. }
                | Self::Cut { .. }
                | Self::StoreRules(_)
        )
    }

    /// Returns true if the op frees memory or changes a memory limit. A full pool, as the cause of
    /// an error of a concurrent request, may then be gone when the error is judged.
    pub fn frees(&self) -> bool {
        matches!(
            self,
            Self::Rewind { .. }
                | Self::Writeback { .. }
                | Self::Recompress(_)
                | Self::Compact(_)
                | Self::Limit { .. }
                | Self::OwnLimits { .. }
        )
    }
}

/// The devices that ops choose from. If none of these suits an op, it chooses from all devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Focus {
    All,
    /// Devices that lie on the disk with this number, and the COW devices of their snapshots.
    Disk(u16),
    Family(u16),
}

/// A backing device for spilled pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backing {
    pub kib: u32,
    /// Packs several compressed pages into a block; otherwise each has a block of its own.
    pub packed: bool,
    /// Tries per thousand that the backing device completes at once, as in [`DiskOp::inline`].
    pub inline: u16,
}

/// Settings of a snapshot of an origin. The fields are those of [`Op::CowSnapshot`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CowOp {
    pub store: u8,
    pub chunk: u8,
    pub ample: bool,
    pub on: Option<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskOp {
    pub kib: u32,
    /// Logical block size: 512 bytes shifted left by this value modulo 4.
    pub block: u8,
    /// The disk has a volatile write cache.
    pub volatile: bool,
    /// Tries (calls that may complete without waiting) per thousand that the disk completes at
    /// once.
    pub inline: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum IoKind {
    Read,
    Write,
    Zeroes,
    Discard,
    Flush,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "independent choices")]
pub struct Io {
    pub node: u16,
    pub what: IoKind,
    /// First block, modulo the number of blocks of the node.
    pub at: u32,
    /// Length in blocks, truncated to the end of the node.
    pub len: u16,
    /// Aligns the start and the end of the request to pages.
    pub pages: bool,
    pub fua: bool,
    /// Fill pattern of a write: a number for [`Fill::drawn`](crate::oracle::Fill::drawn).
    pub fill: u8,
    /// Submits the request without a preceding try.
    pub submit: bool,
    /// Waits for the completion before the next op.
    pub wait: bool,
}

#[cfg(test)]
mod tests {
    use super::{Op, draw, stack};

    #[test]
    fn ops_same_seed_same_run_and_json_roundtrip() {
        for seed in 0..20 {
            let ops: Vec<Op> = stack(seed).into_iter().chain(draw(seed, 300)).collect();
            let again: Vec<Op> = stack(seed).into_iter().chain(draw(seed, 300)).collect();
            assert!(ops == again);
            let text = serde_json::to_string(&ops).unwrap();
            assert!(serde_json::from_str::<Vec<Op>>(&text).unwrap() == ops);
        }
        assert!(draw(1, 100) != draw(2, 100));
    }
}
