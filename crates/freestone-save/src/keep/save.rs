//! Saving of whole files and increments.
//!
//! An increment needs a snapshot only while it is written; a permanent snapshot would keep old
//! pages in memory. If a save fails, its change bits are put back. Changes that an increment cannot
//! express (other devices or snapshots, a rewind) cause a whole file. As these changes are rare,
//! the format does not support them and stays small.

use std::sync::{Arc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use zerocopy::byteorder::little_endian::{U32, U64};

use crate::save::format::{KeptRecord, NodeParent};
use crate::save::plan::{self, Plan};
use crate::save::writer::{Contents, PageWriter, Writer};
use crate::save::{BaseIdentity, SaveError, SaveReport, write_pages};
use freestone_core::device::Device;
use freestone_core::slot::LEAF_SLOTS;
use freestone_core::slot::chain::Dirty;
use freestone_ram::ram::Ram;
use freestone_ram::transfer::{
    CollectedPages, ReadStored as _, TrackChanges as _, TrackSnapshot as _, WeakRam,
};

/// Numbers of unreadable pages, each after the number of its node.
pub type UnreadablePages = Vec<(u32, u64)>;

/// Maximum pages copied per step: those of a leaf of the slot table.
const TURN_PAGES: usize = LEAF_SLOTS as usize;

/// State of the newest save that the next save needs.
pub struct LastSave {
    nodes: Vec<SavedNode>,
    bases: Vec<(Weak<dyn Device>, BaseIdentity)>,
}

struct SavedNode {
    name: Option<String>,
    snapshot: bool,
    over: NodeParent,
    device: WeakRam,
    size: u64,
    /// Bitmap of the changes since the save; `None` for a snapshot.
    dirty: Option<Arc<Dirty>>,
    /// Pages of a live device that the save could not read; the next save reads them again.
    unread: Vec<u64>,
}

/// The devices at the moment of a save, with frozen content.
pub struct SavePoint {
    pub plan: Plan,
    /// The live devices among those to save, sorted by name.
    live_devices: Vec<LiveDevice>,
    pub saved_at: SystemTime,
}

struct LiveDevice {
    name: String,
    ram: Ram,
    /// Bitmaps of the changes before and after the moment of the save.
    before: Option<Arc<Dirty>>,
    after: Arc<Dirty>,
}

impl SavePoint {
    /// Takes snapshots of all live devices at one moment, and starts new bitmaps of changes.
    pub fn new(devices: &[(&str, &Ram)]) -> Result<Self, SaveError> {
        // Sort the devices, so that every save has them in the same order.
        let mut devices = devices.to_vec();
        devices.sort_unstable_by_key(|(name, _)| *name);
        let mut live_devices: Vec<LiveDevice> = Vec::new();
        let (mut frozen, saved_at) = plan::freeze(&devices, &mut |name, ram, snapshot| {
            let after = Arc::new(Dirty::new());
            snapshot.track_changes(Arc::clone(&after));
            live_devices.push(LiveDevice { name: name.to_owned(), ram: ram.clone(), before: None, after });
        })?;
        for (live, device) in live_devices.iter_mut().zip(frozen.iter_mut().filter(|device| device.live)) {
            live.before = device.changes.take();
        }
        let mut moment = Self { plan: Plan::default(), live_devices, saved_at };
        match Plan::new(frozen) {
            Ok(plan) => moment.plan = plan,
            Err(error) => {
                moment.put_back();
                return Err(error);
            }
        }
        Ok(moment)
    }

    /// Merges the old bitmaps into the new ones after a failed save.
    pub fn put_back(&self) {
        for live in &self.live_devices {
            match &live.before {
                Some(before) => live.after.merge(before),
                None => live.after.merge(&Dirty::everything()),
            }
        }
    }

    fn live(&self, name: Option<&String>) -> Option<&LiveDevice> {
        let at = self.live_devices.binary_search_by_key(&name?, |live| &live.name).ok()?;
        Some(&self.live_devices[at])
    }

    /// Returns the changes since `last` by node (`None` for snapshots). Returns `None` if an
    /// increment cannot express them.
    pub fn changes(&self, last: &LastSave) -> Option<Vec<Option<&Dirty>>> {
        let bases = self.plan.bases.iter().map(|base| &base.device);
        let same_bases = last.bases.len() == bases.len()
            && bases
                .zip(&last.bases)
                .all(|(base, (last, _))| std::ptr::addr_eq(Arc::as_ptr(base), last.as_ptr()));
        if last.nodes.len() != self.plan.nodes.len() || !same_bases {
            return None;
        }
        let nodes = self.plan.nodes.iter().zip(&last.nodes);
        nodes
            .map(|(node, last)| {
                let same = (&node.name, node.snapshot, node.over) == (&last.name, last.snapshot, last.over);
                if node.snapshot {
                    return (same && last.device.is(&node.ram)).then_some(None);
                }
                let live = self.live(node.name.as_ref()).filter(|live| same && last.device.is(&live.ram))?;
                let (before, expected) = (live.before.as_ref()?, last.dirty.as_ref()?);
                last.unread.iter().for_each(|&page| before.set(page));
                let can_say = Arc::ptr_eq(before, expected) && !before.is_everything();
                can_say.then_some(Some(&**before))
            })
            .collect()
    }

    pub fn is_unchanged(&self, last: &LastSave, changes: &[Option<&Dirty>]) -> bool {
        let sizes = self.plan.nodes.iter().zip(&last.nodes);
        changes.iter().flatten().all(|dirty| dirty.next(0).is_none())
            && sizes.into_iter().all(|(node, last)| node.ram.geometry().size == last.size)
    }

    /// Returns the state for the next save. `unread` are unreadable pages, each after the number of
    /// its node.
    pub fn into_last(self, bases: Vec<BaseIdentity>, unread: &[(u32, u64)]) -> LastSave {
        let nodes = (0_u32..).zip(&self.plan.nodes).map(|(number, node)| {
            let live = if node.snapshot { None } else { self.live(node.name.as_ref()) };
            SavedNode {
                name: node.name.clone(),
                snapshot: node.snapshot,
                over: node.over,
                device: live.map_or(&node.ram, |live| &live.ram).downgrade(),
                size: node.ram.geometry().size,
                dirty: live.map(|live| Arc::clone(&live.after)),
                unread: unread.iter().filter(|(of, _)| *of == number).map(|(_, page)| *page).collect(),
            }
        });
        let devices = self.plan.bases.iter().map(|base| Arc::downgrade(&base.device));
        LastSave { nodes: nodes.collect(), bases: devices.zip(bases).collect() }
    }

    pub fn write_whole(
        &self,
        mut writer: Writer<'_>,
        (kept, bases): (KeptRecord, &[BaseIdentity]),
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(SaveReport, UnreadablePages), SaveError> {
        writer.contents(&Contents::new(Some(kept), &self.plan, bases))?;
        let mut writer = PageWriter::new(writer, &self.plan).all_algorithms()?;
        write_pages(&self.plan, &mut writer, cancelled, progress)?;
        Ok((writer.to.finish()?, writer.unread))
    }

    /// Writes an increment. `progress` receives the bytes of pages written and their total.
    pub fn write_changes(
        &self,
        mut writer: Writer<'_>,
        (kept, bases): (KeptRecord, &[BaseIdentity]),
        changes: &[Option<&Dirty>],
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(SaveReport, UnreadablePages), SaveError> {
        writer.contents(&Contents::new(Some(kept), &self.plan, bases))?;
        // Write an algorithm on first use: its dictionary may be larger than the rest of the
        // increment.
        let mut writer = PageWriter::new(writer, &self.plan);
        let page_bytes = freestone_core::PAGE_BYTES as u64;
        let all = changes.iter().flatten().map(|dirty| dirty.pages()).sum::<u64>() * page_bytes;
        let (mut done, mut pages) = (0, CollectedPages::default());
        for (number, (node, dirty)) in self.plan.nodes.iter().zip(changes).enumerate() {
            let Some(dirty) = dirty else { continue };
            let mut next = dirty.next(0);
            while let Some(first) = next {
                if cancelled() {
                    return Err(SaveError::Cancelled);
                }
                let following = std::iter::successors(Some(first), |page| dirty.next(page + 1));
                let turn: Vec<u64> = following.take(TURN_PAGES).collect();
                next = turn.last().and_then(|last| dirty.next(last + 1));
                done += turn.len() as u64 * page_bytes;
                node.ram.copy_changed(turn, &mut pages).map_err(|(page, error)| SaveError::Page {
                    device: node.label.clone(),
                    page,
                    error,
                })?;
                for (page, stored, bytes) in pages.iter() {
                    writer.page(number as u32, page, stored, bytes)?;
                }
                progress(done.min(all), all);
            }
            writer.to.end_of_node()?;
        }
        Ok((writer.to.finish()?, writer.unread))
    }

    /// Returns the chain record for the header of a file with this content.
    pub fn record(&self, generation: u64, number: u32, continues: u64) -> KeptRecord {
        let since = self.saved_at.duration_since(UNIX_EPOCH).unwrap_or_default();
        KeptRecord {
            generation: U64::new(generation),
            number: U32::new(number),
            reserved: U32::ZERO,
            continues: U64::new(continues),
            seconds: U64::new(since.as_secs()),
            nanos: U32::new(since.subsec_nanos()),
            reserved2: [0; 12],
        }
    }
}

impl LastSave {
    /// Creates the state of devices that were just restored, and starts to record their changes.
    pub fn of_restored(
        nodes: &[crate::save::reader::Node],
        devices: &[Ram],
        identities: Vec<BaseIdentity>,
        bases: &[Arc<dyn Device>],
    ) -> Self {
        let of_node = |(node, ram): (&crate::save::reader::Node, &Ram)| {
            let dirty = (!node.snapshot).then(|| Arc::new(Dirty::new()));
            if let Some(dirty) = &dirty {
                ram.track_changes(Some(Arc::clone(dirty)));
            }
            SavedNode {
                name: node.name.clone(),
                snapshot: node.snapshot,
                over: node.over,
                device: ram.downgrade(),
                size: node.size,
                dirty,
                unread: Vec::new(),
            }
        };
        let bases = bases.iter().map(Arc::downgrade).zip(identities).collect();
        Self { nodes: nodes.iter().zip(devices).map(of_node).collect(), bases }
    }

    pub fn identities(&self) -> Vec<BaseIdentity> {
        self.bases.iter().map(|(_, identity)| *identity).collect()
    }

    /// Returns the approximate number of pages in an increment of these devices; `None` if the next
    /// save must write a whole file. Does not delay writers.
    pub fn estimate_pages(&self, devices: &[(&str, &Ram)]) -> Option<u64> {
        let named = self.nodes.iter().filter(|node| node.name.is_some());
        if named.clone().count() != devices.len() {
            return None;
        }
        named
            .map(|node| {
                let (_, ram) = devices.iter().find(|(name, _)| node.name.as_deref() == Some(*name))?;
                if !node.device.is(ram) || node.snapshot != ram.is_snapshot() {
                    return None;
                }
                let Some(expected) = &node.dirty else { return Some(0) };
                let dirty =
                    ram.dirty().filter(|dirty| Arc::ptr_eq(dirty, expected) && !dirty.is_everything())?;
                Some(dirty.pages() + node.unread.len() as u64)
            })
            .sum()
    }

    /// Continues with the new bitmaps after a failed save that merged the old ones into them.
    pub fn adopt_new_bitmaps(&mut self, failed: &SavePoint) {
        for node in &mut self.nodes {
            let live = failed.live(node.name.as_ref()).filter(|live| node.device.is(&live.ram));
            if let (Some(dirty), Some(LiveDevice { before: Some(before), after, .. })) =
                (&mut node.dirty, live)
                && Arc::ptr_eq(dirty, before)
            {
                *dirty = Arc::clone(after);
            }
        }
    }

    pub fn stop_tracking(&self) {
        for node in &self.nodes {
            if let (Some(dirty), Some(ram)) = (&node.dirty, node.device.get())
                && ram.dirty().is_some_and(|present| Arc::ptr_eq(&present, dirty) || present.is_everything())
            {
                ram.track_changes(None);
            }
        }
    }
}
