//! Scenes: groups of ops on the same few devices. Ops drawn one by one seldom choose the same
//! device.

use super::Draw;
use crate::disk::{FaultRates, Plan};
use crate::ops::{Focus, Io, IoKind, Op};

/// Number of scenes per thousand ops drawn.
const SCENES: u64 = 12;
/// Fill pattern that does not compress: the index of noise among the patterns.
const NOISE: u8 = 1;

impl Draw {
    /// Draws `count` ops, some of which form scenes.
    pub fn ops(&mut self, count: usize) -> Vec<Op> {
        let mut ops = Vec::with_capacity(count);
        while ops.len() < count {
            if self.below(1000) >= SCENES {
                ops.push(self.op());
                continue;
            }
            // A merge is most useful with faults, so that scene is drawn more often then.
            match self.below(if self.faults { 4 } else { 3 }) {
                0 => self.crowd(&mut ops),
                1 => self.spill(&mut ops),
                _ => self.merge(&mut ops),
            }
            ops.push(Op::Focus(Focus::All));
        }
        ops.truncate(count);
        ops
    }

    /// Draws a scene: a device fills its family (RAM disks that share a pool) up to the memory
    /// limit. The device is removed while other devices are written.
    fn crowd(&mut self, ops: &mut Vec<Op>) {
        ops.push(Op::Focus(Focus::Family(self.any())));
        ops.push(Op::Limit { family: 0, kib: self.kib(512, 4096) });
        for _ in 0..=self.below(2) {
            // A snapshot of no devices does nothing, but starting it waits for the verb before.
            ops.extend([Op::Ram { family: 0, kib: self.kib(1024, 8192) }, Op::Snapshot(Vec::new())]);
            for _ in 0..6 + self.below(16) {
                let node = if self.chance(85) { u16::MAX } else { self.any() };
                let len = 256 + self.below(768) as u16;
                let at = self.next_at(len);
                ops.push(Op::Io(Io { node, at, len, fill: NOISE, ..self.io_of(IoKind::Write) }));
            }
            if self.chance(30) {
                ops.push(Op::Snapshot(vec![self.any()]));
            }
            ops.push(Op::Await);
            ops.push(Op::Remove(u16::MAX));
            if self.chance(30) {
                ops.push(Op::Remove(self.any()));
            }
            if self.chance(70) {
                ops.push(Op::Snapshot(Vec::new()));
            }
            for _ in 0..4 + self.below(8) {
                // Small writes, so that some memory remains below the limit.
                let (io, len) = (self.io_of(IoKind::Write), 1 + self.below(16) as u16);
                ops.push(Op::Io(Io { len, fill: if self.chance(70) { NOISE } else { io.fill }, ..io }));
            }
        }
        ops.push(Op::Limit { family: 0, kib: 0 });
    }

    /// Draws a scene: pages are spilled to a slow backing device and overwritten meanwhile.
    fn spill(&mut self, ops: &mut Vec<Op>) {
        ops.push(Op::Focus(Focus::Family(self.any())));
        let delay = FaultRates { delay: 200 + self.below(800) as u16, ..FaultRates::default() };
        let slow = Plan { read: delay, write: delay, delay_max_us: 1 << self.below(14), ..Plan::default() };
        for _ in 0..=self.below(3) {
            for _ in 0..4 + self.below(8) {
                ops.push(self.hot_page(IoKind::Write));
            }
            if self.faults {
                let plan = if self.chance(80) { slow } else { self.plan() };
                ops.push(Op::Plan { disk: self.any(), plan });
            }
            ops.push(Op::Writeback { node: self.any(), which: [0, 3, 3, 4][self.below(4) as usize] });
            for _ in 0..4 + self.below(12) {
                let what = if self.chance(70) { IoKind::Write } else { IoKind::Read };
                ops.push(self.hot_page(what));
            }
            ops.push(Op::Check(self.any()));
        }
        ops.push(Op::Heal(None));
    }

    /// Draws a scene: a snapshot is written and merged while disks fail; then everything on the
    /// disk crashes.
    fn merge(&mut self, ops: &mut Vec<Op>) {
        let fresh = self.chance(60);
        if fresh {
            // `u16::MAX` selects the last device that can be covered: the new disk.
            ops.extend([self.disk(), Op::Origin(u16::MAX)]);
        }
        ops.push(Op::Focus(Focus::Disk(if fresh { u16::MAX } else { self.any() })));
        for _ in 0..=self.below(2) {
            // Choose kinds of exception store that support merging, with small chunks, so that a
            // merge has many steps.
            let (chunk, store) = (self.below(2) as u8, self.below(2) as u8);
            ops.push(Op::CowSnapshot { origin: self.any(), store, chunk, ample: true, on: None });
        }
        for _ in 0..8 + self.below(16) {
            ops.push(self.near());
        }
        let merged = self.any();
        for _ in 0..=self.below(2) {
            let begins_well = self.chance(50);
            if begins_well {
                // Starting a snapshot of no devices waits until the merge has started.
                ops.extend([Op::Merge(merged), Op::Snapshot(Vec::new())]);
            }
            for _ in 0..=self.below(3) {
                if self.faults {
                    let plan = if self.chance(20) { self.plan() } else { self.doubtful() };
                    ops.push(Op::Plan { disk: self.any(), plan });
                }
            }
            if !begins_well {
                ops.push(Op::Merge(merged));
            }
            for _ in 0..self.below(6) {
                ops.push(self.near());
            }
            ops.push(if self.chance(70) { Op::WaitMerge(merged) } else { Op::StopMerge(merged) });
            if self.chance(60) {
                ops.push(Op::Heal(None));
            }
        }
        // Writes to chunks whose exceptions a failed step may have removed on disk.
        for _ in 0..16 + self.below(32) {
            ops.push(self.near());
        }
        if self.crashes {
            if self.chance(80) {
                ops.push(Op::Io(Io { wait: true, ..self.io_of(IoKind::Flush) }));
            }
            ops.push(Op::Crash { tree: self.any(), power: self.chance(60), seed: self.rng.word() });
        }
        ops.push(Op::Heal(None));
        for _ in 0..2 {
            ops.push(Op::Check(self.any()));
        }
    }

    fn io_of(&mut self, what: IoKind) -> Io {
        Io { what, ..self.io() }
    }

    /// Returns the end of the last request, in blocks, and moves it forward by `len`.
    fn next_at(&mut self, len: u16) -> u32 {
        let at = self.next;
        self.next = at.wrapping_add(u32::from(len));
        at
    }

    /// Draws a request to one of a few pages at the first hot address, with data that does not
    /// compress.
    fn hot_page(&mut self, what: IoKind) -> Op {
        let at = self.hot[0].wrapping_add(self.below(8) as u32);
        let len = 1 + self.below(4) as u16;
        Op::Io(Io { at, len, pages: true, fill: NOISE, ..self.io_of(what) })
    }

    fn near(&mut self) -> Op {
        let io = self.io();
        let at = self.hot[0].wrapping_add(self.below(64) as u32);
        Op::Io(Io { at, len: 1 + io.len % 64, pages: false, ..io })
    }

    /// Draws fault probabilities under which writes fail, often although they took effect.
    fn doubtful(&mut self) -> Plan {
        let most = [100, 400, 700][self.below(3) as usize];
        let fail_done = 1 + self.below(most) as u16;
        let write = FaultRates {
            fail: fail_done / 4,
            fail_done,
            fail_partly: fail_done / 4,
            ..FaultRates::default()
        };
        Plan { write, ..Plan::default() }
    }
}
