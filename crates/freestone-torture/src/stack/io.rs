//! Requests: how they begin, and how their answers are judged.

use std::time::Duration;

use freestone::device::{Device, Error, Flags, Geometry, Op as DeviceOp, Request, Result as Answer};

use super::{Causes, Kind, Node, NodeId, OracleId, World, Wrong, wrong};
use crate::disk::DiskControl;
use crate::ops::{Io, What};
use crate::oracle::{self, Fill, FlushToken, Outcome, ReadToken, SECTOR_BYTES, WriteToken};
use crate::rt::sync::Arc;
use crate::rt::thread;

const SECTOR: u64 = SECTOR_BYTES as u64;
const PAGE: u64 = 4096;

/// Bytes by which a pool may miss its limit when it says that there is no room: the span that it
/// would have to begin, and what CPUs have in hand.
const LIMIT_SLACK_BYTES: u64 = 192 << 10;
/// As much for a device's own cap, by which it is charged in steps of 64 KiB for each CPU.
const CAP_SLACK_BYTES: u64 = 256 << 10;

/// Time in which what was removed is freed.
const SETTLES: Duration = Duration::from_secs(5);

/// A request that was begun.
pub struct Task {
    /// Where it goes.
    pub node: NodeId,
    /// What it is.
    pub request: Request,
    /// What is written.
    pub data: Vec<u8>,
    oracle: OracleId,
    token: Token,
    before: Before,
}

/// What was so when a request began.
#[derive(Clone, Copy)]
pub(super) struct Before {
    causes: Causes,
    /// A limit was reached that it can meet.
    full: bool,
    /// Verbs that make room, as [`World::frees`] counts them.
    frees: u64,
    /// Of the families below: bytes in use.
    used: u64,
    /// Of a RAM disk's family: what has memory, and the bytes of it that belong to nodes.
    layers: u64,
    live: u64,
    /// See [`Leaving::settled`].
    leaving: Option<u64>,
}

/// Which removals there were, and whether one is under way.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Leaving {
    begun: u64,
    under_way: bool,
}

impl Leaving {
    pub fn begins(&mut self) {
        *self = Self { begun: self.begun + 1, under_way: true };
    }

    pub fn ends(&mut self) {
        self.under_way = false;
    }

    /// A number that is the same as long as no removal begins; none while one is under way.
    fn settled(self) -> Option<u64> {
        (!self.under_way).then_some(self.begun)
    }
}

enum Token {
    Read(ReadToken),
    Write(WriteToken),
    Flush(FlushToken),
}

impl World {
    /// Begins a request; its device is to be asked next. `None` where there is no node for it.
    pub fn begin_io(&mut self, io: &Io) -> Option<(Task, Arc<dyn Device>)> {
        let all: Vec<NodeId> = match io.what {
            What::Read | What::Flush => self.targets(),
            _ => self.nodes_that(|node| !node.covered && !is_read_only(&node.kind)),
        };
        let id = self.choose(&all, io.node)?;
        let geometry = self.nodes[&id].device.geometry();
        let (offset, len) = place(io, &geometry);
        let fua = if io.fua { Flags::FUA } else { Flags::empty() };
        let request = match io.what {
            What::Read => Request::read(offset, len),
            What::Write => Request::write(offset, len).with(fua),
            What::Zeroes => {
                let may_free = if io.fill.is_multiple_of(2) { Flags::MAY_FREE } else { Flags::empty() };
                Request::new(DeviceOp::WriteZeroes, offset, len).with(fua | may_free)
            }
            What::Discard => Request::new(DeviceOp::Discard, offset, len).with(fua),
            What::Flush => Request::flush(),
        };
        self.begin_request(id, request, io.fill)
    }

    /// Begins a read of at most `len` bytes of a node; `None` behind its end.
    pub fn begin_check(&mut self, id: NodeId, offset: u64, len: u64) -> Option<(Task, Arc<dyn Device>)> {
        let left =
            self.nodes.get(&id)?.device.geometry().size.checked_sub(offset).filter(|&left| left > 0)?;
        self.begin_request(id, Request::read(offset, left.min(len)), 0)
    }

    fn begin_request(&mut self, id: NodeId, request: Request, fill: u8) -> Option<(Task, Arc<dyn Device>)> {
        let serial = self.next_write();
        let node = self.nodes.get_mut(&id)?;
        node.users += 1;
        let (device, oracle_id) = (Arc::clone(&node.device), node.oracle);
        let node = &self.nodes[&id];
        let before = self.before(node);
        let oracle = self.oracles.get_mut(&oracle_id)?;
        let sectors = request.offset / SECTOR..(request.offset + request.len) / SECTOR;
        let mut data = Vec::new();
        let token = match request.op {
            DeviceOp::Read => Token::Read(oracle.begin_read()),
            DeviceOp::Flush => Token::Flush(oracle.begin_flush()),
            DeviceOp::Write => {
                let write = Fill::ALL[usize::from(fill) % Fill::ALL.len()].id(serial);
                data.resize(request.len as usize, 0);
                oracle::fill(write, sectors.start, &mut data);
                Token::Write(oracle.begin_write(write, sectors, oracle::Kind::Write))
            }
            DeviceOp::WriteZeroes => Token::Write(oracle.begin_write(serial, sectors, oracle::Kind::Zeroes)),
            DeviceOp::Discard => {
                let kind = oracle::Kind::Discard { zeroing: false };
                Token::Write(oracle.begin_write(serial, sectors, kind))
            }
        };
        Some((Task { node: id, request, data, oracle: oracle_id, token, before }, device))
    }

    /// A request was answered; of a read, with these bytes.
    ///
    /// # Errors
    /// The bytes are not allowed, or the answer is an error that has no cause.
    pub fn end_io(&mut self, task: Task, answer: Answer<()>, bytes: &[u8]) -> Result<(), Wrong> {
        let Task { node: id, request, oracle, token, .. } = task;
        if let Some(node) = self.nodes.get_mut(&id) {
            node.users -= 1;
        }
        self.count(match (request.op, answer.is_ok()) {
            (DeviceOp::Read, true) => "reads",
            (DeviceOp::Read, false) => "reads that failed",
            (DeviceOp::Flush, true) => "flushes",
            (DeviceOp::Flush, false) => "flushes that failed",
            (_, true) => "writes",
            (_, false) => "writes that failed",
        });
        if let Some(oracle) = self.oracles.get_mut(&oracle) {
            let fua = request.flags.contains(Flags::FUA);
            match token {
                Token::Read(read) if answer.is_ok() => {
                    oracle.check_read(read, request.offset / SECTOR, bytes)?;
                }
                Token::Read(read) => oracle.abandon(read),
                Token::Flush(flush) => oracle.end_flush(flush, answer.is_ok()),
                Token::Write(write) => {
                    let outcome = if answer.is_ok() { Outcome::Done { fua } } else { Outcome::Failed };
                    oracle.end(write, outcome);
                }
            }
        }
        match answer {
            Ok(()) => Ok(()),
            Err(error) => self.judge(id, request, error, task.before),
        }
    }

    /// What an error will be judged by.
    pub(super) fn before(&self, node: &Node) -> Before {
        let (causes, used) = (self.causes(&node.disks), self.used(node));
        let (layers, live) = match &node.kind {
            Kind::Ram(ram) => (self.families[ram.family].family.stat().layers, self.live(ram.family)),
            _ => (0, 0),
        };
        let (full, leaving) = (self.is_full(node, used), self.leaving.settled());
        Before { causes, full, frees: self.frees, used, layers, live, leaving }
    }

    /// Whether an error has a cause.
    pub(super) fn judge(
        &self,
        id: NodeId,
        request: Request,
        error: Error,
        before: Before,
    ) -> Result<(), Wrong> {
        // What is removed may answer that it is gone.
        let Some(node) = self.nodes.get(&id) else { return Ok(()) };
        let now = self.causes(&node.disks);
        let caused = now.errors > before.causes.errors || now.hung > 0;
        let has_cause = match error {
            // What failed before can show now.
            Error::Media if self.remembers(node) => caused || self.had_trouble(node) || self.is_short(node),
            Error::Media => caused,
            Error::NoSpace => {
                let freed = self.frees != before.frees && self.is_limited(node);
                let full = before.full || self.is_full(node, before.used);
                caused || freed || full && !self.was_leaving(node, before)
            }
            Error::Gone => self.is_dead(node) || matches!(node.kind, Kind::Power(_)),
            _ => false,
        };
        if has_cause {
            return Ok(());
        }
        wrong(format!("{}: {request:?} was answered \"{error}\" without a cause", node.name))
    }

    /// Whether it, or what it lies on, can be worse off for good after a failure.
    pub(super) fn remembers(&self, node: &Node) -> bool {
        matches!(node.kind, Kind::Cow(_) | Kind::Origin(_) | Kind::Power(_))
            || node.on.iter().filter_map(|id| self.nodes.get(id)).any(|on| self.remembers(on))
    }

    /// Whether a snapshot of its own or below it can be lost for want of room.
    pub(super) fn is_short(&self, node: &Node) -> bool {
        let short = match &node.kind {
            Kind::Cow(cow) => !cow.ample,
            _ => false,
        };
        short
            || self.is_limited(node)
            || node.on.iter().filter_map(|id| self.nodes.get(id)).any(|on| self.is_short(on))
    }

    /// Whether a limit is reached that a node's writes can meet.
    fn is_full(&self, node: &Node, used: u64) -> bool {
        match &node.kind {
            Kind::Ram(ram) => {
                let stat = self.families[ram.family].family.stat();
                let used = stat.mem_used_total.max(used);
                let kept = stat.guaranteed * 9 / 8;
                let (cap, _) = ram.ram.own_limits();
                let charged = ram.ram.over_stat().charged;
                stat.mem_limit > 0 && used + kept + LIMIT_SLACK_BYTES >= stat.mem_limit
                    || cap > 0 && charged + CAP_SLACK_BYTES >= cap
            }
            Kind::Disk(_) | Kind::Memory | Kind::File(_) | Kind::Base(_) => false,
            Kind::Cow(_) | Kind::Origin(_) | Kind::Power(_) | Kind::Layer => self.is_short(node),
        }
    }

    /// Whether what filled a RAM disk's family was what removed devices had left: writes wait for
    /// that. Where time is virtual it is let pass, and what goes with a layer since the request
    /// began was theirs, but for what nodes gave up meanwhile. Nothing may have been removed beside
    /// the request: it may have come before.
    fn was_leaving(&self, node: &Node, before: Before) -> bool {
        let Kind::Ram(ram) = &node.kind else { return false };
        let stat = || self.families[ram.family].family.stat();
        let then = stat();
        let alone = before.leaving.is_some() && before.leaving == self.leaving.settled();
        if !cfg!(freestone_sim) || !alone || then.mem_limit == 0 || ram.ram.own_limits().0 > 0 {
            return false;
        }
        let live = self.live(ram.family).max(before.live);
        thread::sleep(SETTLES);
        let now = stat();
        let used = now.mem_used_total + live.saturating_sub(self.live(ram.family));
        now.layers < then.layers.max(before.layers)
            && used + now.guaranteed * 9 / 8 + LIMIT_SLACK_BYTES < now.mem_limit
    }

    /// Bytes that the nodes of a family have in memory.
    fn live(&self, family: usize) -> u64 {
        let charged = |node: &Node| match &node.kind {
            Kind::Ram(ram) if ram.family == family => ram.ram.over_stat().charged,
            _ => 0,
        };
        self.nodes.values().map(charged).sum()
    }

    /// Whether a disk below it has died. That may be told by another one that died with it: a
    /// request can wait for a copy to the store of a snapshot beside its own.
    fn is_dead(&self, node: &Node) -> bool {
        node.disks.iter().filter_map(|id| self.disks.get(id)).any(DiskControl::is_dead)
    }

    fn used(&self, node: &Node) -> u64 {
        let used = |family: &usize| self.families[*family].family.stat().mem_used_total;
        node.families.iter().map(used).max().unwrap_or(0)
    }
}

fn is_read_only(kind: &Kind) -> bool {
    matches!(kind, Kind::Base(_)) || matches!(kind, Kind::Ram(ram) if ram.ram.is_snapshot())
}

/// Where on a device of this geometry a request lies.
fn place(io: &Io, geometry: &Geometry) -> (u64, u64) {
    let block = u64::from(geometry.logical_block);
    let unit = if io.pages && geometry.size >= PAGE { PAGE } else { block };
    let units = geometry.size / unit;
    let at = u64::from(io.at) % units;
    let len = u64::from(io.len).min(units - at).max(1);
    (at * unit, len * unit)
}
