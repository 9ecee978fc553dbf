//! Requests: how they start, and how their completions are judged.

use std::time::Duration;

use freestone::device::{Device, Error, Flags, Geometry, Op as DeviceOp, Request, Result as Answer};

use super::{Causes, Finding, Kind, Node, NodeId, OracleId, World, finding};
use crate::disk::DiskControl;
use crate::ops::{Io, IoKind};
use crate::oracle::{self, Fill, FlushToken, Outcome, ReadToken, SECTOR_BYTES, WriteToken};
use crate::rt::sync::Arc;
use crate::rt::thread;

const SECTOR: u64 = SECTOR_BYTES as u64;
const PAGE: u64 = 4096;

/// Bytes below its memory limit at which a pool may already report no space. The slack allows for a
/// span that a write must start, and for memory reserved by CPUs.
const LIMIT_SLACK_BYTES: u64 = 192 << 10;
/// Bytes below its own memory limit at which a device may already report no space. The limit is
/// charged in steps of 64 KiB per CPU.
const CAP_SLACK_BYTES: u64 = 256 << 10;

/// Time within which the memory of removed devices must be freed.
const RELEASE_WAIT: Duration = Duration::from_secs(5);

pub struct Task {
    pub node: NodeId,
    pub request: Request,
    /// Data to write; empty for other operations.
    pub data: Vec<u8>,
    oracle: OracleId,
    token: Token,
    before: StartState,
}

/// The state when a request started, against which an error is judged.
#[derive(Clone, Copy)]
pub(super) struct StartState {
    causes: Causes,
    /// A memory limit that the request may exceed was reached.
    full: bool,
    /// Value of [`World::freeing_verbs`] at the start.
    freeing_verbs: u64,
    /// Memory in use by the node's family, in bytes. For a node with several families, the largest
    /// family's use.
    used: u64,
    /// Number of layers with memory in the family of a RAM disk, and the bytes of the family that
    /// belong to nodes.
    layers: u64,
    live_bytes: u64,
    /// Value of [`Removals::settled`] at the start.
    removals: Option<u64>,
}

/// Number of removals that have started, and true while one is in progress.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Removals {
    begun: u64,
    in_progress: bool,
}

impl Removals {
    pub fn start(&mut self) {
        *self = Self { begun: self.begun + 1, in_progress: true };
    }

    pub fn finish(&mut self) {
        self.in_progress = false;
    }

    /// Returns the number of removals that have started, which is unchanged until the next one
    /// starts. `None` during a removal.
    fn settled(self) -> Option<u64> {
        (!self.in_progress).then_some(self.begun)
    }
}

enum Token {
    Read(ReadToken),
    Write(WriteToken),
    Flush(FlushToken),
}

impl World {
    /// Starts a request, which the caller then issues to the device. Returns `None` if no node
    /// suits the request.
    pub fn begin_io(&mut self, io: &Io) -> Option<(Task, Arc<dyn Device>)> {
        let all: Vec<NodeId> = match io.what {
            IoKind::Read | IoKind::Flush => self.targets(),
            _ => self.nodes_that(|node| !node.covered && !is_read_only(&node.kind)),
        };
        let id = self.choose(&all, io.node)?;
        let geometry = self.nodes[&id].device.geometry();
        let (offset, len) = range_of(io, &geometry);
        let fua = if io.fua { Flags::FUA } else { Flags::empty() };
        let request = match io.what {
            IoKind::Read => Request::read(offset, len),
            IoKind::Write => Request::write(offset, len).with(fua),
            IoKind::Zeroes => {
                let may_free = if io.fill.is_multiple_of(2) { Flags::MAY_FREE } else { Flags::empty() };
                Request::new(DeviceOp::WriteZeroes, offset, len).with(fua | may_free)
            }
            IoKind::Discard => Request::new(DeviceOp::Discard, offset, len).with(fua),
            IoKind::Flush => Request::flush(),
        };
        self.begin_request(id, request, io.fill)
    }

    /// Starts a read of at most `len` bytes of a node. Returns `None` if `offset` is not below the
    /// size.
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
                let write = Fill::drawn(fill).id(serial);
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

    /// Judges the completion of a request, with the bytes of a read.
    ///
    /// # Errors
    /// Fails if the bytes are not allowed, or if an error has no cause.
    pub fn end_io(&mut self, task: Task, answer: Answer<()>, bytes: &[u8]) -> Result<(), Finding> {
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

    /// Captures the state of a node against which an error will be judged.
    pub(super) fn before(&self, node: &Node) -> StartState {
        let (causes, used) = (self.causes(&node.disks), self.used(node));
        let (layers, live_bytes) = match &node.kind {
            Kind::Ram(ram) => (self.families[ram.family].family.stat().layers, self.live_bytes(ram.family)),
            _ => (0, 0),
        };
        let (full, removals) = (self.is_full(node, used), self.removals.settled());
        StartState { causes, full, freeing_verbs: self.freeing_verbs, used, layers, live_bytes, removals }
    }

    /// Checks that the simulation caused the error of a request, for example by a fault rule, a full disk or
    /// a power cut.
    pub(super) fn judge(
        &self,
        id: NodeId,
        request: Request,
        error: Error,
        before: StartState,
    ) -> Result<(), Finding> {
        // A request to a node that was removed meanwhile may fail with [`Error::Gone`].
        let Some(node) = self.nodes.get(&id) else { return Ok(()) };
        let now = self.causes(&node.disks);
        let caused = now.errors > before.causes.errors || now.hung > 0;
        let has_cause = match error {
            // A failure before this request may have invalidated a snapshot and show only now.
            Error::Media if self.can_be_damaged(node) => {
                caused || self.may_be_damaged(node) || self.may_overflow(node)
            }
            Error::Media => caused,
            Error::NoSpace => {
                let freed = self.freeing_verbs != before.freeing_verbs && self.is_limited(node);
                let full = before.full || self.is_full(node, before.used);
                caused || freed || full && !self.was_filled_by_removals(node, before)
            }
            Error::Gone => self.is_dead(node) || matches!(node.kind, Kind::Power(_)),
            _ => false,
        };
        if has_cause {
            return Ok(());
        }
        finding(format!("{}: {request:?} failed with \"{error}\" without a cause", node.name))
    }

    /// Returns true if a failure can damage the node, or a node below it, permanently.
    pub(super) fn can_be_damaged(&self, node: &Node) -> bool {
        matches!(node.kind, Kind::Cow(_) | Kind::Origin(_) | Kind::Power(_))
            || node.on.iter().filter_map(|id| self.nodes.get(id)).any(|on| self.can_be_damaged(on))
    }

    /// Returns true if the node, or a node below it, may run out of space, which can also
    /// invalidate a snapshot.
    pub(super) fn may_overflow(&self, node: &Node) -> bool {
        let short = match &node.kind {
            Kind::Cow(cow) => !cow.ample,
            _ => false,
        };
        short
            || self.is_limited(node)
            || node.on.iter().filter_map(|id| self.nodes.get(id)).any(|on| self.may_overflow(on))
    }

    /// Returns true if a memory limit that writes to the node may exceed is reached.
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
            Kind::Cow(_) | Kind::Origin(_) | Kind::Power(_) | Kind::Layer => self.may_overflow(node),
        }
    }

    /// Returns true if memory of removed devices filled the family of a RAM disk. The write should
    /// then have waited for this memory to be freed.
    ///
    /// In virtual time this function waits until such memory is freed. Memory freed with a layer
    /// since the start of the request belonged to removed devices, except for memory that nodes
    /// released meanwhile. Returns false if a removal ran beside the request, since the request may
    /// have come before the removal.
    fn was_filled_by_removals(&self, node: &Node, before: StartState) -> bool {
        let Kind::Ram(ram) = &node.kind else { return false };
        let stat = || self.families[ram.family].family.stat();
        let then = stat();
        let no_other_removal = before.removals.is_some() && before.removals == self.removals.settled();
        if !cfg!(freestone_sim) || !no_other_removal || then.mem_limit == 0 || ram.ram.own_limits().0 > 0 {
            return false;
        }
        let live_bytes = self.live_bytes(ram.family).max(before.live_bytes);
        thread::sleep(RELEASE_WAIT);
        let now = stat();
        let used = now.mem_used_total + live_bytes.saturating_sub(self.live_bytes(ram.family));
        now.layers < then.layers.max(before.layers)
            && used + now.guaranteed * 9 / 8 + LIMIT_SLACK_BYTES < now.mem_limit
    }

    /// Returns the bytes of memory charged to the nodes of a family.
    fn live_bytes(&self, family: usize) -> u64 {
        let charged = |node: &Node| match &node.kind {
            Kind::Ram(ram) if ram.family == family => ram.ram.over_stat().charged,
            _ => 0,
        };
        self.nodes.values().map(charged).sum()
    }

    /// Returns true if a disk below the node has died. Perhaps another disk died at the same
    /// moment, whose snapshot needed a copy for this request.
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

/// Returns the offset and the length in bytes of a request on a device of this geometry.
fn range_of(io: &Io, geometry: &Geometry) -> (u64, u64) {
    let block = u64::from(geometry.logical_block);
    let unit = if io.pages && geometry.size >= PAGE { PAGE } else { block };
    let units = geometry.size / unit;
    let at = u64::from(io.at) % units;
    let len = u64::from(io.len).min(units - at).max(1);
    (at * unit, len * unit)
}
