//! The operations (ops) of a run: plain values. Ops name nodes, families and disks by numbers taken
//! modulo the number that exist, so any subset of a run is also a valid run.

mod draw;

use serde::{Deserialize, Serialize};

use crate::disk::Plan;
pub use draw::{draw, stack, warm_up};

/// A step of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// A request.
    Io(Io),
    /// Reads all of a node and checks the content.
    Check(u16),
    /// Waits for all requests in flight.
    Await,
    /// Sets the minimum number of threads that issue requests from now on.
    #[serde(rename = "Askers")]
    RequestThreads(u8),
    /// Sets the devices that the following ops choose from.
    Focus(Focus),
    /// Creates a family of RAM disks that share one pool.
    Family {
        /// Memory limit of the pool; 0 means no limit.
        limit_kib: u32,
        /// Compression algorithm, modulo their number.
        algorithm: u8,
        /// Backing device for spilled pages.
        backing: Option<Backing>,
        /// Recompresses automatically.
        auto: bool,
    },
    /// Creates a RAM disk in a family.
    Ram {
        /// Family of the disk.
        family: u16,
        /// Size.
        kib: u32,
    },
    /// Creates a simulated disk.
    Disk(DiskOp),
    /// Creates a null device with memory.
    Memory {
        /// Size.
        kib: u32,
    },
    /// Creates a file and opens it as a device.
    File {
        /// Size.
        kib: u32,
    },
    /// Creates a read-only file.
    Base {
        /// Size.
        kib: u32,
        /// Seed of the content.
        seed: u64,
        /// A layer above the file can make its reads fail.
        faults: bool,
    },
    /// Creates an image with content in a store.
    Image {
        /// Size.
        kib: u32,
        /// Seed of the content.
        seed: u64,
        /// Caches what is read of the image on a disk.
        cached: bool,
    },
    /// Sets the faults of the store from now on.
    StoreRules(u64),
    /// Pushes snapshots, files and images to one tag of the store at the same time.
    Push {
        /// Nodes to push.
        nodes: Vec<u16>,
        /// Tag, modulo their number.
        tag: u8,
        /// Seed of the options of the push, and of concurrent events.
        seed: u64,
    },
    /// Advances the clock of the store and prunes what no tag refers to.
    Prune {
        /// Time to advance, in eighths of the grace period.
        eighths: u8,
        /// Seed of the prune.
        seed: u64,
    },
    /// Saves the changes of a snapshot of a fork of a file as an image, which can be forked itself.
    Delta {
        /// Snapshot.
        node: u16,
        /// Also applies the image to a new fork.
        applies: bool,
    },
    /// Takes snapshots of RAM disks and forks at one moment.
    Snapshot(Vec<u16>),
    /// Takes snapshots of RAM disks and of origins at one moment.
    Moment {
        /// RAM disks and forks.
        rams: Vec<u16>,
        /// Origins, with the settings of each snapshot.
        cows: Vec<(u16, CowOp)>,
    },
    /// Forks a snapshot, a file or an image.
    Fork {
        /// Node to fork.
        snapshot: u16,
        /// Sectors by which the fork is larger than that node.
        more_sectors: u32,
        /// Memory cap of the fork; 0 means none.
        cap_kib: u32,
        /// Family of the fork; by default that of the snapshot, or the first family for a base.
        family: Option<u16>,
    },
    /// Gives clients of a template a fork each, which exists as long as the client is connected.
    Template {
        /// Snapshot, file or image to fork.
        of: u16,
        /// Number of clients: this modulo three, plus one.
        clients: u8,
        /// Seed of the requests of the clients.
        seed: u64,
        /// Family of the forks, as in [`Op::Fork`].
        family: Option<u16>,
    },
    /// Rewinds a disk or fork to its initial content.
    Rewind {
        /// Disk or fork.
        node: u16,
        /// Also resets its statistics.
        reset: bool,
    },
    /// Grows a RAM disk or fork.
    Grow {
        /// Disk or fork.
        node: u16,
        /// Growth.
        kib: u32,
    },
    /// Writes pages back to the backing device on request.
    Writeback {
        /// Disk or fork.
        node: u16,
        /// Selection of pages.
        which: u8,
    },
    /// Recompresses the pages of a device.
    Recompress(u16),
    /// Compacts the pool of a family.
    Compact(u16),
    /// Sets the limit of a family.
    Limit {
        /// Family.
        family: u16,
        /// New limit.
        kib: u32,
    },
    /// Sets the limits of one device.
    OwnLimits {
        /// Disk or fork.
        node: u16,
        /// Memory cap.
        cap_kib: u32,
        /// Guaranteed memory.
        least_kib: u32,
    },
    /// Puts an origin over a device.
    Origin(u16),
    /// Takes a snapshot of an origin.
    CowSnapshot {
        /// Origin.
        origin: u16,
        /// Kind of exception store, modulo their number.
        store: u8,
        /// Chunk size: 4 KiB shifted by this.
        chunk: u8,
        /// The COW device has room for all chunks.
        ample: bool,
        /// Node that serves as COW device; a new disk if `None`.
        on: Option<u16>,
    },
    /// Starts or resumes a merge.
    Merge(u16),
    /// Stops a merge.
    StopMerge(u16),
    /// Waits for the end of a merge.
    WaitMerge(u16),
    /// Puts a layer over a device that can lose power.
    Power(u16),
    /// Cuts the power of such a layer.
    PowerCut {
        /// Layer.
        node: u16,
        /// Seed of what survives.
        seed: u64,
    },
    /// Puts a layer over a device that passes everything through.
    Wrap {
        /// Device to cover.
        node: u16,
        /// Layer, modulo their number.
        layer: u8,
    },
    /// Puts a layer over a device that fails by rule.
    Faults {
        /// Device to cover.
        node: u16,
        /// Seed of the layer's decisions.
        seed: u64,
    },
    /// Replaces the rules of such a layer.
    Rules {
        /// Layer.
        layer: u16,
        /// Rules in the syntax of the library.
        rules: String,
    },
    /// Puts a layer with bad blocks over a device.
    BadBlocks {
        /// Device to cover.
        node: u16,
        /// Behaviour of the bad blocks.
        how: u8,
    },
    /// Makes blocks of such a layer bad.
    Bad {
        /// Layer.
        layer: u16,
        /// First sector.
        at: u32,
        /// Number of sectors, minus one.
        sectors: u16,
        /// Makes these blocks good instead.
        good: bool,
    },
    /// Truncates the file of a device.
    Cut {
        /// File.
        file: u16,
        /// New size, in 1/1024 of the old one.
        parts: u16,
    },
    /// Checks the changes of a device relative to its parent.
    Changes(u16),
    /// Checks the extents of a device.
    Extents(u16),
    /// Saves RAM disks, forks and snapshots to a file, and restores them from it.
    Save {
        /// Nodes to save.
        nodes: Vec<u16>,
        /// Family to restore into.
        family: u16,
        /// Identifies bases by a hash of their whole content.
        whole: bool,
    },
    /// Removes a node.
    Remove(u16),
    /// Kills everything that uses a disk, with or without a power loss, and opens it again.
    Crash {
        /// Disk, of those that can be opened again.
        tree: u16,
        /// The power fails, too: unflushed writes may be lost.
        power: bool,
        /// Seed of what survives.
        seed: u64,
    },
    /// Sets the faults of a disk from now on.
    Plan {
        /// Disk.
        disk: u16,
        /// Faults.
        plan: Plan,
    },
    /// Sets the free space of a disk.
    Room {
        /// Disk.
        disk: u16,
        /// Free space.
        kib: u32,
    },
    /// Shrinks a disk.
    Shrink {
        /// Disk.
        disk: u16,
        /// New size, in 1/1024 of the old one.
        parts: u16,
    },
    /// Ends the faults of one disk or failing layer, or of all.
    Heal(Option<u16>),
}

impl Op {
    /// Returns true if the op can run while a verb is running.
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

    /// Returns true if the op frees memory or changes a limit. The cause of an error of a
    /// concurrent request may be gone when the error is judged.
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

/// The devices that ops choose from, if the focus contains any that fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Focus {
    /// All devices.
    All,
    /// Devices that lie on one of the disks, and their COW devices.
    Disk(u16),
    /// Devices of a family.
    Family(u16),
}

/// A backing device for spilled pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backing {
    /// Size.
    pub kib: u32,
    /// Objects are packed; otherwise each has a block of its own.
    pub packed: bool,
    /// As in [`DiskOp::inline`].
    pub inline: u16,
}

/// Settings of a snapshot of an origin: as in [`Op::CowSnapshot`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "documented there")]
pub struct CowOp {
    pub store: u8,
    pub chunk: u8,
    pub ample: bool,
    pub on: Option<u16>,
}

/// A simulated disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskOp {
    /// Size.
    pub kib: u32,
    /// Logical block size: 512 bytes shifted by this modulo 4.
    pub block: u8,
    /// The disk has a volatile cache.
    pub volatile: bool,
    /// Tries per thousand that the disk completes at once.
    pub inline: u16,
}

/// Operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the operations of a device")]
pub enum IoKind {
    Read,
    Write,
    Zeroes,
    Discard,
    Flush,
}

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "independent choices")]
pub struct Io {
    /// Node.
    pub node: u16,
    /// Operation.
    pub what: IoKind,
    /// First block, modulo the size of the node.
    pub at: u32,
    /// Length in blocks, truncated at the end of the node.
    pub len: u16,
    /// Aligns begin and end to pages.
    pub pages: bool,
    /// Sets FUA.
    pub fua: bool,
    /// Fill pattern, modulo their number.
    pub fill: u8,
    /// Submits the request without a try.
    pub submit: bool,
    /// Waits for the completion.
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
