//! What a run consists of: plain values. They name nodes, families and disks by numbers that are
//! taken modulo what exists, so that any part of a run is a run, too.

mod draw;

use serde::{Deserialize, Serialize};

use crate::disk::Plan;
pub use draw::{draw, stack, warm_up};

/// One step of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// A request.
    Io(Io),
    /// All of a node is read.
    Check(u16),
    /// What is in flight is waited for.
    Await,
    /// From now on requests are asked for by so many threads, at least.
    Askers(u8),
    /// What the ops from now on are about.
    Focus(Focus),
    /// A family of RAM disks.
    Family {
        /// Of its pool; 0 is none.
        limit_kib: u32,
        /// Modulo the algorithms there are.
        algorithm: u8,
        /// Where pages are spilled to.
        backing: Option<Backing>,
        /// Recompresses by itself.
        auto: bool,
    },
    /// A RAM disk of a family.
    Ram {
        /// Whose.
        family: u16,
        /// Its size.
        kib: u32,
    },
    /// A simulated disk.
    Disk(DiskOp),
    /// The memory of a null device.
    Memory {
        /// Its size.
        kib: u32,
    },
    /// A file, as a device.
    File {
        /// Its size.
        kib: u32,
    },
    /// A file that is only read.
    Base {
        /// Its size.
        kib: u32,
        /// What is in it.
        seed: u64,
        /// Its reads can be made to fail.
        faults: bool,
    },
    /// An image in a store, with something in it.
    Image {
        /// Its size.
        kib: u32,
        /// What is in it.
        seed: u64,
        /// What is read of it is kept on a disk.
        cached: bool,
    },
    /// What goes wrong with the store from now on.
    StoreRules(u64),
    /// Snapshots, files and images go to one tag of the store at the same time.
    Push {
        /// Which.
        nodes: Vec<u16>,
        /// Modulo the tags there are.
        tag: u8,
        /// How, and what happens beside.
        seed: u64,
    },
    /// Time passes for the store, and what no tag refers to is deleted.
    Prune {
        /// How much, in eighths of the time for which such things are kept.
        eighths: u8,
        /// How.
        seed: u64,
    },
    /// What a snapshot holds over a file is saved as an image, which can be forked itself.
    Delta {
        /// Of which.
        node: u16,
        /// It is applied to a new fork, too.
        applies: bool,
    },
    /// Snapshots of RAM disks and forks at one moment.
    Snapshot(Vec<u16>),
    /// Snapshots of RAM disks, and of origins, at one moment.
    Moment {
        /// Of which RAM disks and forks.
        rams: Vec<u16>,
        /// Of which origins, and how.
        cows: Vec<(u16, CowOp)>,
    },
    /// A fork of a snapshot, a file or an image.
    Fork {
        /// Of which.
        snapshot: u16,
        /// By so much it is larger than that.
        more_sectors: u32,
        /// Its own limit; 0 is none.
        cap_kib: u32,
        /// In another family; of a file, in this one.
        family: Option<u16>,
    },
    /// Forks that clients of a template have for themselves, each for as long as he stays.
    Template {
        /// Of which snapshot, file or image.
        of: u16,
        /// Modulo three, and one more.
        clients: u8,
        /// What they do.
        seed: u64,
        /// As with a fork.
        family: Option<u16>,
    },
    /// Back to what it was made as.
    Rewind {
        /// Which disk or fork.
        node: u16,
        /// With its statistics.
        reset: bool,
    },
    /// A RAM disk or fork grows.
    Grow {
        /// Which.
        node: u16,
        /// By how much.
        kib: u32,
    },
    /// Pages are spilled by hand.
    Writeback {
        /// Of which device.
        node: u16,
        /// Which pages.
        which: u8,
    },
    /// Pages are compressed again.
    Recompress(u16),
    /// The pool is packed.
    Compact(u16),
    /// A family's limit is set.
    Limit {
        /// Whose.
        family: u16,
        /// To what.
        kib: u32,
    },
    /// A device's own limits are set.
    OwnLimits {
        /// Whose.
        node: u16,
        /// Its cap.
        cap_kib: u32,
        /// What is guaranteed to it.
        least_kib: u32,
    },
    /// An origin is put over a device.
    Origin(u16),
    /// A snapshot of an origin.
    CowSnapshot {
        /// Of which.
        origin: u16,
        /// Modulo the kinds of stores.
        store: u8,
        /// Chunks are 4 KiB shifted by this.
        chunk: u8,
        /// The COW device has room for everything.
        ample: bool,
        /// The COW device is this node; else a new disk.
        on: Option<u16>,
    },
    /// A merge begins, or goes on.
    Merge(u16),
    /// It stops.
    StopMerge(u16),
    /// Its end is waited for.
    WaitMerge(u16),
    /// A layer that loses power is put over a device.
    Power(u16),
    /// It does.
    PowerCut {
        /// Which.
        node: u16,
        /// What is left.
        seed: u64,
    },
    /// A layer that changes nothing is put over a device.
    Wrap {
        /// Which device.
        node: u16,
        /// Modulo the layers there are.
        layer: u8,
    },
    /// A layer that fails by rule is put over a device.
    Faults {
        /// Which.
        node: u16,
        /// Decides where it fails.
        seed: u64,
    },
    /// Such a layer has these rules from now on.
    Rules {
        /// Which.
        layer: u16,
        /// As the library reads them.
        rules: String,
    },
    /// A layer with bad blocks is put over a device.
    BadBlocks {
        /// Which.
        node: u16,
        /// How they behave.
        how: u8,
    },
    /// Blocks of such a layer become bad.
    Bad {
        /// Which layer.
        layer: u16,
        /// The first sector.
        at: u32,
        /// How many more.
        sectors: u16,
        /// They become good.
        good: bool,
    },
    /// A file loses its end below its device.
    Cut {
        /// Which.
        file: u16,
        /// What is left, in 1024 parts.
        parts: u16,
    },
    /// A device is asked what it holds over what it was made from.
    Changes(u16),
    /// A device is asked where it is zeroes.
    Extents(u16),
    /// RAM disks, forks and snapshots are saved to a file, and restored from it.
    Save {
        /// Which.
        nodes: Vec<u16>,
        /// Into which family.
        family: u16,
        /// Bases are known by every byte.
        whole: bool,
    },
    /// A node goes.
    Remove(u16),
    /// All that uses a disk dies, with the power or without, and is opened again.
    Crash {
        /// Which of the disks that can be opened again.
        tree: u16,
        /// What was not flushed goes as well.
        power: bool,
        /// What is left.
        seed: u64,
    },
    /// What goes wrong with a disk from now on.
    Plan {
        /// Which.
        disk: u16,
        /// What.
        plan: Plan,
    },
    /// A disk has so much room left.
    Room {
        /// Which.
        disk: u16,
        /// How much.
        kib: u32,
    },
    /// A disk shrinks to this many of 1024 parts.
    Shrink {
        /// Which.
        disk: u16,
        /// To how much.
        parts: u16,
    },
    /// All is well with a disk, or something else that fails; or with all of them.
    Heal(Option<u16>),
}

impl Op {
    /// Whether it can be done while a verb is under way.
    pub fn is_beside(&self) -> bool {
        matches!(
            self,
            Self::Io(_)
                | Self::Check(_)
                | Self::Await
                | Self::Askers(_)
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

    /// Whether it makes room, or changes a limit: what a request beside it met may be gone when
    /// that is judged.
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

/// What ops are about, where there is any of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Focus {
    /// All that there is.
    All,
    /// What lies on one of the disks, and its COW devices.
    Disk(u16),
    /// What lies in a family.
    Family(u16),
}

/// A backing device for spilled pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backing {
    /// Its size.
    pub kib: u32,
    /// Objects are packed, or lie in a block each.
    pub packed: bool,
    /// As [`DiskOp::inline`].
    pub inline: u16,
}

/// A snapshot of an origin: as in [`Op::CowSnapshot`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "said there")]
pub struct CowOp {
    pub store: u8,
    pub chunk: u8,
    pub ample: bool,
    pub on: Option<u16>,
}

/// A simulated disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskOp {
    /// Its size.
    pub kib: u32,
    /// The logical block is 512 bytes shifted by this, modulo 4.
    pub block: u8,
    /// It has a volatile cache.
    pub volatile: bool,
    /// Tries of a thousand that are answered at once.
    pub inline: u16,
}

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "as the device's operations")]
pub enum What {
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
    /// To which node.
    pub node: u16,
    /// What it does.
    pub what: What,
    /// Its first block, modulo what there is.
    pub at: u32,
    /// Blocks, cut off at the end.
    pub len: u16,
    /// It begins and ends with a page.
    pub pages: bool,
    /// With FUA.
    pub fua: bool,
    /// How it is filled: modulo the fills there are.
    pub fill: u8,
    /// It is only submitted, without a try.
    pub submit: bool,
    /// Its answer is waited for.
    pub wait: bool,
}

#[cfg(test)]
mod tests {
    use super::{Op, draw, stack};

    #[test]
    fn a_seed_gives_one_run_which_can_be_written_down() {
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
