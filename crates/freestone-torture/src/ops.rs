//! What a run consists of: plain values. They name nodes, families and disks by numbers that are
//! taken modulo what exists, so that any part of a run is a run, too.

use freestone_testkit::Rng;
use serde::{Deserialize, Serialize};

use crate::disk::{Chances, Plan};

/// One step of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// A request.
    Io(Io),
    /// All of a node is read.
    Check(u16),
    /// What is in flight is waited for.
    Await,
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
    /// Snapshots of RAM disks and forks at one moment.
    Snapshot(Vec<u16>),
    /// A fork of a snapshot.
    Fork {
        /// Of which.
        snapshot: u16,
        /// By so much it is larger than that.
        more_sectors: u32,
        /// Its own limit; 0 is none.
        cap_kib: u32,
        /// In another family.
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
    /// All is well with a disk, or with all of them.
    Heal(Option<u16>),
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

// ---- drawing ------------------------------------------------------------------------------------

/// How a run is drawn.
struct Draw {
    rng: Rng,
    /// Places that requests come back to.
    hot: [u32; 4],
    /// Where a sequential run is.
    next: u32,
    /// This run has faults, and crashes.
    faults: bool,
    crashes: bool,
}

/// The ops that make a stack. The same seed gives the same.
pub fn stack(seed: u64) -> Vec<Op> {
    let mut draw = Draw::new(seed);
    let mut ops = Vec::new();
    for _ in 0..=draw.below(2) {
        ops.push(draw.family());
        ops.push(draw.ram());
        if draw.chance(50) {
            ops.push(draw.ram());
        }
    }
    for _ in 0..draw.below(3) {
        let disk = draw.disk();
        ops.push(disk);
        ops.push(Op::Origin(u16::MAX));
        for _ in 0..draw.below(3) {
            ops.push(draw.cow_snapshot());
        }
    }
    for _ in 0..draw.below(4) {
        let op = match draw.below(5) {
            0 => Op::Memory { kib: draw.kib(64, 2048) },
            1 => Op::Power(draw.any()),
            2 => Op::Wrap { node: draw.any(), layer: draw.any() as u8 },
            3 => Op::Origin(draw.any()),
            _ => draw.cow_snapshot(),
        };
        ops.push(op);
    }
    ops
}

/// The ops of a run on a stack. The same seed gives the same.
pub fn draw(seed: u64, count: usize) -> Vec<Op> {
    let mut draw = Draw::new(seed);
    (0..count).map(|_| draw.op()).collect()
}

impl Draw {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let hot = [(); 4].map(|()| rng.word() as u32);
        let (faults, crashes) = (rng.chance(50), rng.chance(60));
        Self { rng, hot, next: 0, faults, crashes }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.rng.below(bound)
    }

    fn chance(&mut self, percent: u8) -> bool {
        self.rng.chance(percent)
    }

    fn any(&mut self) -> u16 {
        self.rng.word() as u16
    }

    /// From `least` to `most`, small ones as often as large ones.
    fn kib(&mut self, least: u32, most: u32) -> u32 {
        let doublings = u64::from((most / least).ilog2());
        let from = least << self.below(doublings + 1);
        let kib = (from + self.below(u64::from(from)) as u32).min(most);
        kib.next_multiple_of(4)
    }

    fn op(&mut self) -> Op {
        let (faults, crashes) = (self.faults, self.crashes);
        match self.below(1000) {
            0..760 => Op::Io(self.io()),
            790..800 => Op::Await,
            800..825 => {
                let count = 1 + usize::from(self.chance(30));
                Op::Snapshot((0..count).map(|_| self.any()).collect())
            }
            825..840 => Op::Fork {
                snapshot: self.any(),
                more_sectors: if self.chance(50) { 0 } else { self.below(3000) as u32 },
                cap_kib: if self.chance(80) { 0 } else { self.kib(64, 512) },
                family: self.chance(30).then(|| self.any()),
            },
            840..848 => Op::Rewind { node: self.any(), reset: self.chance(30) },
            848..854 => Op::Grow { node: self.any(), kib: self.kib(4, 1024) },
            854..868 => Op::Writeback { node: self.any(), which: self.any() as u8 },
            868..876 => Op::Recompress(self.any()),
            876..882 => Op::Compact(self.any()),
            882..888 => {
                let kib = if self.chance(30) { 0 } else { self.kib(128, 4096) };
                Op::Limit { family: self.any(), kib }
            }
            888..893 => Op::OwnLimits {
                node: self.any(),
                cap_kib: if self.chance(40) { 0 } else { self.kib(64, 1024) },
                least_kib: if self.chance(50) { 0 } else { self.kib(16, 256) },
            },
            893..899 => Op::Origin(self.any()),
            899..911 => self.cow_snapshot(),
            911..921 => Op::Merge(self.any()),
            921..924 => Op::StopMerge(self.any()),
            924..932 => Op::WaitMerge(self.any()),
            932..935 => Op::Power(self.any()),
            935..942 => Op::PowerCut { node: self.any(), seed: self.rng.word() },
            942..945 => Op::Wrap { node: self.any(), layer: self.any() as u8 },
            945..963 => Op::Remove(self.any()),
            963..967 => match self.below(4) {
                0 => self.family(),
                1 => self.disk(),
                2 => Op::Memory { kib: self.kib(64, 2048) },
                _ => self.ram(),
            },
            967..977 if crashes => {
                Op::Crash { tree: self.any(), power: self.chance(60), seed: self.rng.word() }
            }
            977..987 if faults => Op::Plan { disk: self.any(), plan: self.plan() },
            987..989 if faults => Op::Room { disk: self.any(), kib: self.kib(4, 1024) },
            989..991 if faults => Op::Shrink { disk: self.any(), parts: self.below(1024) as u16 },
            991..998 if faults => Op::Heal(self.chance(50).then(|| self.any())),
            // 760 to 789, and what this run does not have.
            _ => Op::Check(self.any()),
        }
    }

    fn io(&mut self) -> Io {
        let what = match self.below(100) {
            0..38 => What::Read,
            38..82 => What::Write,
            82..88 => What::Zeroes,
            88..94 => What::Discard,
            _ => What::Flush,
        };
        let len = match self.below(10) {
            0..5 => 1 + self.below(8) as u16,
            5..9 => 1 + self.below(64) as u16,
            _ => 1 + self.below(1024) as u16,
        };
        let at = match self.below(10) {
            0..4 => {
                let hot = self.below(self.hot.len() as u64) as usize;
                self.hot[hot].wrapping_add(self.below(32) as u32)
            }
            4..6 => self.next,
            _ => self.rng.word() as u32,
        };
        self.next = at.wrapping_add(u32::from(len));
        Io {
            node: self.any(),
            what,
            at,
            len,
            pages: self.chance(40),
            fua: self.chance(15),
            fill: self.any() as u8,
            submit: self.chance(30),
            wait: self.chance(70),
        }
    }

    fn family(&mut self) -> Op {
        let backing = self.chance(60).then(|| Backing {
            kib: self.kib(256, 8192),
            packed: self.chance(60),
            inline: [0, 300, 1000][self.below(3) as usize],
        });
        Op::Family {
            limit_kib: if self.chance(30) { 0 } else { self.kib(192, 2048) },
            algorithm: self.any() as u8,
            backing,
            auto: self.chance(10),
        }
    }

    fn ram(&mut self) -> Op {
        Op::Ram { family: self.any(), kib: self.kib(64, 8192) }
    }

    fn disk(&mut self) -> Op {
        let block = if self.chance(70) { 0 } else { self.any() as u8 };
        let inline = [0, 300, 1000][self.below(3) as usize];
        Op::Disk(DiskOp { kib: self.kib(64, 2048), block, volatile: self.chance(80), inline })
    }

    fn cow_snapshot(&mut self) -> Op {
        Op::CowSnapshot {
            origin: self.any(),
            store: self.any() as u8,
            chunk: [0, 0, 1, 2, 4][self.below(5) as usize],
            ample: self.chance(70),
            on: self.chance(20).then(|| self.any()),
        }
    }

    fn plan(&mut self) -> Plan {
        let (mut plan, most) = (Plan::default(), [20, 100, 500][self.below(3) as usize]);
        for chances in [&mut plan.read, &mut plan.write, &mut plan.clear, &mut plan.flush] {
            let mut draw =
                |percent| if self.rng.chance(percent) { self.rng.below(most) as u16 / 4 } else { 0 };
            *chances = Chances {
                fail: draw(40),
                fail_done: draw(50),
                fail_partly: draw(40),
                delay: draw(40) * 2,
                hang: draw(10) / 4,
            };
        }
        plan.delay_max_us = 1 << self.below(14);
        plan
    }
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
