//! What devices say of themselves, held against their content: where they are zeroes, and what they
//! hold over what they were made from.

use freestone::device::{
    Blocking as _, Change, Device, Error, Extent, ExtentKind, Request, Result as Answer,
};
use freestone::qcow2::delta::{self, DeltaError};

use super::io::Before;
use super::{Act, Kind, Node, NodeId, World, Wrong, act, finish, wrong};
use crate::oracle::{Durability, Oracle, SECTOR_BYTES};
use crate::rt::sync::Arc;

/// Bytes that are read at once.
const READ_BYTES: usize = 256 << 10;

impl World {
    /// What can say what it holds over something that is known: forks and snapshots of RAM disks,
    /// and snapshots with a store of origins that are not being merged into.
    pub(super) fn changing(&self) -> Vec<NodeId> {
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
        all.retain(|id| !self.held.contains(id));
        all
    }

    /// Whether requests to an origin show what its snapshots are snapshots of.
    fn is_whole(&self, id: NodeId, origin: &Node) -> bool {
        let is_half = matches!(&origin.kind, Kind::Origin(origin) if origin.is_half);
        !is_half && !origin.covered && !self.held.contains(&id) && !self.has_merge(id)
    }

    /// What must not change while a device is asked what it changed.
    pub(super) fn compared(&self, id: NodeId) -> Vec<NodeId> {
        match self.nodes.get(&id).map(|node| &node.kind) {
            Some(Kind::Ram(ram)) if ram.ram.is_snapshot() => Vec::new(),
            Some(Kind::Cow(cow)) => vec![id, cow.origin],
            _ => vec![id],
        }
    }

    /// Whatever a device does not call its own is what lies below it, or its origin, has there; so
    /// a delta of it gives its content, also behind the end of that.
    pub(super) fn changes(&mut self, id: NodeId) -> Option<Act> {
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
            let shown = delta::show(&*listed, &mut |_| true);
            all_changes(&*listed).map(|rows| (shown, rows))
        };
        self.look(id, "changes", ask, move |world, (shown, rows), bytes, before| {
            let name = world.name(id);
            let mut own = 0;
            let mut base = (*base).clone();
            base.rename(&format!("what {name} does not call its own"));
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
                Ok(summary) => wrong(format!("{name} has {own} bytes of its own, and shows {summary:?}")),
                Err(DeltaError::Read { error, .. }) => world.judge_look(id, error, before),
                Err(error) => wrong(format!("the changes of {name} cannot be shown: {error}")),
            }
        })
    }

    /// What a device calls a hole, or zeroes, reads as zeroes.
    pub(super) fn extents(&mut self, id: NodeId) -> Option<Act> {
        self.look(id, "extents", all_extents, move |world, rows, bytes, _| {
            for row in rows.iter().filter(|row| row.kind != ExtentKind::Data) {
                let range = row.offset as usize..(row.offset + row.len) as usize;
                if bytes[range].iter().any(|&byte| byte != 0) {
                    return wrong(format!("{} says {row:?}, and it is not zeroes", world.name(id)));
                }
            }
            Ok(())
        })
    }

    /// Has a device say something of itself, reads all of it, and has both judged.
    fn look<T: Send + 'static>(
        &mut self,
        id: NodeId,
        what: &'static str,
        ask: impl FnOnce(&dyn Device) -> Answer<T> + Send + 'static,
        judge: impl FnOnce(&World, T, &[u8], Before) -> Result<(), Wrong> + Send + 'static,
    ) -> Option<Act> {
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
                        return world.judge_look(id, error, before);
                    }
                };
                if let Some(oracle) = world.oracles.get_mut(&oracle) {
                    oracle.check_read(token, 0, &bytes)?;
                }
                judge(world, said, &bytes, before)
            })
        })
    }

    /// Whether a device had a cause not to tell, or not to be read.
    pub(super) fn judge_look(&self, id: NodeId, error: Error, before: Before) -> Result<(), Wrong> {
        let Some(node) = self.nodes.get(&id) else { return Ok(()) };
        if error == Error::Gone && (self.had_trouble(node) || self.is_short(node)) {
            return Ok(());
        }
        self.judge(id, Request::read(0, node.device.geometry().size), error, before)
    }
}

/// All bytes of a device.
pub(super) fn read_all(device: &dyn Device) -> Answer<Vec<u8>> {
    let mut bytes = vec![0; device.geometry().size as usize];
    let mut at = 0;
    for part in bytes.chunks_mut(READ_BYTES) {
        device.read_at(at, part)?;
        at += part.len() as u64;
    }
    Ok(bytes)
}

/// What a device says of all of itself, and that the rows follow each other.
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
