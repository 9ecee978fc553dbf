//! Draws the ops of random runs, and of the stacks on which they operate, from a seed.

mod scenes;

use freestone_testkit::Rng;

use super::{Backing, CowOp, DiskOp, Io, IoKind, Op};
use crate::disk::{FaultRates, Plan};

/// Percentage of runs that have images, and percentage of ops in such a run before which an image op is
/// inserted.
const IMAGES_PERCENT: u8 = 40;
const IMAGE_OPS_PERCENT: u8 = 4;

struct Draw {
    rng: Rng,
    /// Addresses (block numbers) to which many requests go.
    hot: [u32; 4],
    /// End of the last request in blocks; a sequential request starts there.
    next: u32,
    faults: bool,
    crashes: bool,
    /// Number of threads that issue requests; with 0 the runner issues the requests itself.
    request_threads: u8,
}

/// Draws the ops that build a stack of devices. The same seed gives the same ops.
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
    if draw.chance(60) {
        ops.push(draw.base());
        for _ in 0..=draw.below(2) {
            ops.push(draw.fork());
        }
        ops.push(Op::Snapshot(vec![u16::MAX]));
    }
    for _ in 0..draw.below(7) {
        let op = match draw.below(11) {
            0 => Op::Memory { kib: draw.kib(64, 2048) },
            1 => Op::File { kib: draw.kib(64, 2048) },
            2 => Op::Power(draw.any()),
            3 => Op::Wrap { node: draw.any(), layer: draw.any() as u8 },
            4 | 5 => Op::Faults { node: draw.any(), seed: draw.rng.word() },
            6 | 7 => Op::BadBlocks { node: draw.any(), how: draw.any() as u8 },
            8 => Op::Origin(draw.any()),
            _ => draw.cow_snapshot(),
        };
        ops.push(op);
    }
    ops
}

/// Draws the ops of a run on a stack. The same seed gives the same ops.
pub fn draw(seed: u64, count: usize) -> Vec<Op> {
    let mut draw = Draw::new(seed);
    let request_threads =
        Some(draw.request_threads).filter(|&request_threads| request_threads > 0).map(Op::RequestThreads);
    let ops: Vec<Op> = request_threads.into_iter().chain(draw.ops(count)).collect();
    with_images(seed, draw.faults, ops)
}

/// Inserts image ops in some runs. The other runs keep their ops.
fn with_images(seed: u64, faults: bool, ops: Vec<Op>) -> Vec<Op> {
    let mut draw = Draw::new(!seed);
    if !draw.chance(IMAGES_PERCENT) {
        return ops;
    }
    let fork = |draw: &mut Draw| Op::Fork {
        snapshot: u16::MAX,
        more_sectors: if draw.chance(70) { 0 } else { draw.below(3000) as u32 },
        cap_kib: 0,
        family: None,
    };
    let mut all = vec![draw.image(), fork(&mut draw), Op::Snapshot(vec![u16::MAX])];
    for op in ops {
        if draw.chance(IMAGE_OPS_PERCENT) {
            match draw.below(20) {
                0..2 => all.extend([draw.image(), fork(&mut draw)]),
                2..6 if faults => all.push(Op::StoreRules(draw.rng.word())),
                6..8 if faults => all.push(Op::Heal(None)),
                8 => all.push(Op::Prune { eighths: draw.any() as u8, seed: draw.rng.word() }),
                _ => {
                    let nodes = (0..=u64::from(draw.chance(30))).map(|_| draw.any()).collect();
                    all.push(Op::Push { nodes, tag: draw.any() as u8, seed: draw.rng.word() });
                    if draw.chance(40) {
                        all.extend([fork(&mut draw), Op::Snapshot(vec![u16::MAX])]);
                    }
                }
            }
        }
        all.push(op);
    }
    all
}

/// Returns ops that start all threads that the process keeps after a run.
pub fn warm_up() -> Vec<Op> {
    let family = Op::Family { limit_kib: 0, algorithm: 0, backing: None, auto: false };
    let base = Op::Base { kib: 64, seed: 1, faults: true };
    let fork = Op::Fork { snapshot: 0, more_sectors: 0, cap_kib: 0, family: None };
    let wrap = Op::Wrap { node: 0, layer: 1 };
    let (snapshot, delta) = (Op::Snapshot(vec![0]), Op::Delta { node: 0, applies: true });
    let image = Op::Image { kib: 64, seed: 1, cached: true };
    vec![family, base, fork, snapshot, delta, wrap, Op::Faults { node: 0, seed: 1 }, image]
}

impl Draw {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let hot = [(); 4].map(|()| rng.word() as u32);
        let (faults, crashes) = (rng.chance(50), rng.chance(60));
        let request_threads = [0, 0, 2, 3][rng.below(4) as usize];
        Self { rng, hot, next: 0, faults, crashes, request_threads }
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

    /// Draws a size in KiB from `least` to `most`: first the power of two, uniformly, then the size within
    /// it.
    fn kib(&mut self, least: u32, most: u32) -> u32 {
        let doublings = u64::from((most / least).ilog2());
        let from = least << self.below(doublings + 1);
        let kib = (from + self.below(u64::from(from)) as u32).min(most);
        kib.next_multiple_of(4)
    }

    fn op(&mut self) -> Op {
        let (faults, crashes) = (self.faults, self.crashes);
        match self.below(1000) {
            0..742 => Op::Io(self.io()),
            742..750 => Op::Changes(self.any()),
            750..755 => Op::Extents(self.any()),
            755..760 => {
                let count = 1 + self.below(3);
                let nodes = (0..count).map(|_| self.any()).collect();
                Op::Save { nodes, family: self.any(), whole: self.chance(50) }
            }
            760..766 => Op::Delta { node: self.any(), applies: self.chance(50) },
            766..771 => self.template(),
            771..777 if faults => Op::Rules { layer: self.any(), rules: self.rules() },
            777..783 if faults => self.bad(),
            783..785 if faults => Op::Cut { file: self.any(), parts: self.below(1024) as u16 },
            790..800 => Op::Await,
            800..806 => {
                let rams = (0..self.below(3)).map(|_| self.any()).collect();
                let cows = (0..=self.below(2)).map(|_| (self.any(), self.cow_op())).collect();
                Op::Moment { rams, cows }
            }
            806..825 => {
                let count = 1 + usize::from(self.chance(30));
                Op::Snapshot((0..count).map(|_| self.any()).collect())
            }
            825..840 => self.fork(),
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
            942..945 => match self.below(3) {
                0 => Op::Faults { node: self.any(), seed: self.rng.word() },
                1 => Op::BadBlocks { node: self.any(), how: self.any() as u8 },
                _ => Op::Wrap { node: self.any(), layer: self.any() as u8 },
            },
            945..963 => Op::Remove(self.any()),
            963..967 => match self.below(6) {
                0 => self.family(),
                1 => self.disk(),
                2 => Op::Memory { kib: self.kib(64, 2048) },
                3 => Op::File { kib: self.kib(64, 2048) },
                4 => self.base(),
                _ => self.ram(),
            },
            967..977 if crashes => {
                Op::Crash { tree: self.any(), power: self.chance(60), seed: self.rng.word() }
            }
            977..987 if faults => Op::Plan { disk: self.any(), plan: self.plan() },
            987..989 if faults => Op::Room { disk: self.any(), kib: self.kib(4, 1024) },
            989..991 if faults => Op::Shrink { disk: self.any(), parts: self.below(1024) as u16 },
            991..998 if faults => Op::Heal(self.chance(50).then(|| self.any())),
            // Numbers 785 to 789, and faults or crashes in a run without them.
            _ => Op::Check(self.any()),
        }
    }

    fn io(&mut self) -> Io {
        let what = match self.below(100) {
            0..38 => IoKind::Read,
            38..82 => IoKind::Write,
            82..88 => IoKind::Zeroes,
            88..94 => IoKind::Discard,
            _ => IoKind::Flush,
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
            wait: self.chance(if self.request_threads > 0 { 25 } else { 70 }),
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

    fn image(&mut self) -> Op {
        Op::Image { kib: self.kib(64, 2048), seed: self.rng.word(), cached: self.chance(60) }
    }

    fn base(&mut self) -> Op {
        Op::Base { kib: self.kib(64, 2048), seed: self.rng.word(), faults: self.chance(40) }
    }

    fn fork(&mut self) -> Op {
        Op::Fork {
            snapshot: self.any(),
            more_sectors: if self.chance(50) { 0 } else { self.below(3000) as u32 },
            cap_kib: if self.chance(80) { 0 } else { self.kib(64, 512) },
            family: self.chance(30).then(|| self.any()),
        }
    }

    /// Draws bad blocks, half of them at the addresses to which many requests go.
    fn bad(&mut self) -> Op {
        let hot = self.below(2 * self.hot.len() as u64) as usize;
        let at = self.hot.get(hot).copied().unwrap_or_else(|| self.rng.word() as u32);
        Op::Bad { layer: self.any(), at, sectors: self.below(256) as u16, good: self.chance(20) }
    }

    fn template(&mut self) -> Op {
        Op::Template {
            of: self.any(),
            clients: self.any() as u8,
            seed: self.rng.word(),
            family: self.chance(40).then(|| self.any()),
        }
    }

    /// Draws fault rules whose effects the judge can account for: errors without effect, and late
    /// completions.
    fn rules(&mut self) -> String {
        let rules = (0..=self.below(2)).map(|_| self.rule());
        rules.collect::<Vec<_>>().join("; ")
    }

    fn rule(&mut self) -> String {
        let all = ["read", "write", "writes", "flush", "zeroes", "discard", "all"];
        let of = all[self.below(all.len() as u64) as usize];
        let (effect, most) = match self.below(6) {
            0..3 => ("error=EIO".to_owned(), 30),
            3 => ("error=ENOSPC".to_owned(), 30),
            4 => (format!("delay={}us", 1 + self.below(20_000)), 30),
            _ => ("hang".to_owned(), 3),
        };
        let when = match self.below(4) {
            0 => format!("chance={}%", 1 + self.below(most)),
            1 => format!("nth={}", 1 + self.below(3)),
            2 => format!("times={}", 1 + self.below(5)),
            _ => format!("after={} times={}", 1 + self.below(20), 1 + self.below(10)),
        };
        if of == "flush" || self.chance(60) {
            return format!("{of} {effect} {when}");
        }
        format!("{of} {effect} {when} at={}K+{}K", self.below(1024), 4 << self.below(8))
    }

    fn cow_snapshot(&mut self) -> Op {
        let (origin, CowOp { store, chunk, ample, on }) = (self.any(), self.cow_op());
        Op::CowSnapshot { origin, store, chunk, ample, on }
    }

    fn cow_op(&mut self) -> CowOp {
        CowOp {
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
            *chances = FaultRates {
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
