//! Checks what devices report about themselves against their content: extents, and changes relative
//! to a parent.

use freestone::device::{
    Blocking as _, Change, Device, Error, Extent, ExtentKind, Request, Result as Answer,
};
use freestone::qcow2::delta::{self, DeltaError};

use super::io::StartState;
use super::{Finding, Kind, Node, NodeId, VerbTask, World, act, finding, finish};
use crate::oracle::{Durability, Oracle, SECTOR_BYTES};
use crate::rt::sync::Arc;

/// Bytes per read of a whole device.
const READ_BYTES: usize = 256 << 10;

impl World {
    /// Returns the devices whose changes can be checked: forks and snapshots of RAM disks, and COW
    /// snapshots of origins without a merge.
    pub(super) fn with_changes(&self) -> Vec<NodeId> {
        let mut all = self.nodes_that(|node| match &node.kind {
            Kind::Ram(ram) => ram.ram.is_snapshot() || ram.ram.is_fork() && !node.covered,
            Kind::Cow(cow) => {
                let origin = self.nodes.get(&cow.origin);
                !node.covered
                    && !cow.merging
                    && origin.is_some_and(|origin| self.is_whole(cow.origin, origin))
            }
            _ => false,
        });
        all.retain(|id| !self.paused.contains(id));
        all
    }

    /// Returns true if an origin shows the content of which its snapshots are taken: no merge, no
    /// cover, not paused.
    fn is_whole(&self, id: NodeId, origin: &Node) -> bool {
        let is_half = matches!(&origin.kind, Kind::Origin(origin) if origin.is_half);
        !is_half && !origin.covered && !self.paused.contains(&id) && !self.has_merge(id)
    }

    /// Returns the nodes that must receive no writes while the changes of a device are listed.
    pub(super) fn nodes_to_pause(&self, id: NodeId) -> Vec<NodeId> {
        match self.nodes.get(&id).map(|node| &node.kind) {
            Some(Kind::Ram(ram)) if ram.ram.is_snapshot() => Vec::new(),
            Some(Kind::Cow(cow)) => vec![id, cow.origin],
            _ => vec![id],
        }
    }

    /// Checks the changes that a device lists. Each range not listed as changed must have the
    /// content of the parent or origin. A delta then reproduces the content of the device, even
    /// beyond the end of the parent.
    pub(super) fn changes(&mut self, id: NodeId) -> Option<VerbTask> {
        let node = &self.nodes[&id];
        let device = Arc::clone(&node.device);
        let (listed, base): (Arc<dyn Device>, _) = match &node.kind {
            Kind::Ram(ram) => {
                let base = ram.below.as_ref().map(|below| Arc::clone(&below.shows));
                let zeroes = || Arc::new(Oracle::new("zeroes", 0, Durability::Nothing));
                let over_base = ram.ram.over_base().ok().map(|over_base| Arc::new(over_base) as _);
                (over_base.unwrap_or(device), base.unwrap_or_else(zeroes))
            }
            Kind::Cow(cow) => {
                let origin = self.oracles.get(&self.nodes.get(&cow.origin)?.oracle)?;
                (device, Arc::new(origin.clone()))
            }
            _ => return None,
        };
        let ask = move |_: &dyn Device| {
            let shown = delta::for_each_change(&*listed, &mut |_| true);
            all_changes(&*listed).map(|rows| (shown, rows))
        };
        self.query_and_read(id, "changes", ask, move |world, (shown, rows), bytes, before| {
            let name = world.name(id);
            let mut own = 0;
            let mut base = (*base).clone();
            base.rename(&format!("the unchanged ranges of {name}"));
            for row in &rows {
                let range = row.offset as usize..(row.offset + row.len) as usize;
                if row.own {
                    own += row.len;
                    continue;
                }
                let read = base.begin_read();
                base.check_read(read, row.offset / SECTOR_BYTES as u64, &bytes[range])?;
            }
            match shown {
                Ok(summary) if summary.bytes == own => Ok(()),
                Ok(summary) => {
                    finding(format!("{name} has {own} changed bytes, but its summary is {summary:?}"))
                }
                Err(DeltaError::Read { error, .. }) => world.judge_query(id, error, before),
                Err(error) => finding(format!("the changes of {name} cannot be shown: {error}")),
            }
        })
    }

    /// Checks that ranges reported as holes or zeroes read as zeroes.
    pub(super) fn extents(&mut self, id: NodeId) -> Option<VerbTask> {
        self.query_and_read(id, "extents", all_extents, move |world, rows, bytes, _| {
            for row in rows.iter().filter(|row| row.kind != ExtentKind::Data) {
                let range = row.offset as usize..(row.offset + row.len) as usize;
                if bytes[range].iter().any(|&byte| byte != 0) {
                    return finding(format!(
                        "{} reports {row:?}, but the range is not zeroes",
                        world.name(id)
                    ));
                }
            }
            Ok(())
        })
    }

    /// Queries a device, reads all of its content, and judges the result against the content.
    fn query_and_read<T: Send + 'static>(
        &mut self,
        id: NodeId,
        what: &'static str,
        ask: impl FnOnce(&dyn Device) -> Answer<T> + Send + 'static,
        judge: impl FnOnce(&World, T, &[u8], StartState) -> Result<(), Finding> + Send + 'static,
    ) -> Option<VerbTask> {
        let node = &self.nodes[&id];
        let (before, oracle, device) = (self.before(node), node.oracle, Arc::clone(&node.device));
        let token = self.oracles.get_mut(&oracle)?.begin_read();
        act(move || {
            let looked = (ask(&*device), read_all(&*device));
            finish(move |world| {
                world.count(what);
                let (said, bytes) = match looked {
                    (Ok(said), Ok(bytes)) => (said, bytes),
                    (Err(error), _) | (_, Err(error)) => {
                        world.abandon(oracle, token);
                        return world.judge_query(id, error, before);
                    }
                };
                if let Some(oracle) = world.oracles.get_mut(&oracle) {
                    oracle.check_read(token, 0, &bytes)?;
                }
                judge(world, said, &bytes, before)
            })
        })
    }

    /// Checks that the error of a query or of a read has a cause.
    pub(super) fn judge_query(&self, id: NodeId, error: Error, before: StartState) -> Result<(), Finding> {
        let Some(node) = self.nodes.get(&id) else { return Ok(()) };
        if error == Error::Gone && (self.may_be_damaged(node) || self.may_overflow(node)) {
            return Ok(());
        }
        self.judge(id, Request::read(0, node.device.geometry().size), error, before)
    }
}

/// Reads all bytes of a device, in several requests.
pub(super) fn read_all(device: &dyn Device) -> Answer<Vec<u8>> {
    let mut bytes = vec![0; device.geometry().size as usize];
    let mut at = 0;
    for part in bytes.chunks_mut(READ_BYTES) {
        device.read_at(at, part)?;
        at += part.len() as u64;
    }
    Ok(bytes)
}

/// Collects the rows of a query over a whole device, and checks that the rows are contiguous.
fn all_rows<T: Copy>(
    device: &dyn Device,
    ask: impl Fn(u64, u64, &mut dyn FnMut(T) -> bool) -> Answer<u64>,
    place: impl Fn(&T) -> (u64, u64),
) -> Answer<Vec<T>> {
    let size = device.geometry().size;
    let (mut at, mut rows) = (0, Vec::new());
    while at < size {
        let mut next = at;
        let told = ask(at, size - at, &mut |row| {
            let (offset, len) = place(&row);
            assert!(offset == next && len > 0, "a row of {offset} to {} at {next}", offset + len);
            next += len;
            rows.push(row);
            true
        })?;
        assert!(
            told > 0 && at + told == next && next <= size,
            "{told} bytes from {at} on, and rows to {next}"
        );
        at = next;
    }
    Ok(rows)
}

fn all_changes(device: &dyn Device) -> Answer<Vec<Change>> {
    let Some(changes) = device.changes() else { return Ok(Vec::new()) };
    all_rows(
        device,
        |offset, len, row| changes.changes(offset, len, row),
        |row: &Change| (row.offset, row.len),
    )
}

fn all_extents(device: &dyn Device) -> Answer<Vec<Extent>> {
    all_rows(
        device,
        |offset, len, row| device.extents(offset, len, row),
        |row: &Extent| (row.offset, row.len),
    )
}
