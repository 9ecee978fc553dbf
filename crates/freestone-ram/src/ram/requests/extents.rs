//! Extents (data, zeroes and holes) of a device, and the changes of a fork or snapshot against its
//! base.

use crate::ram::device::chain::View;
use crate::ram::device::parent::{Parent, StagedSource};
use crate::ram::device::{Inner, Ram};
use crate::ram::geometry::{LOGICAL_BLOCK_BYTES, PAGE, next_multiple};
use crate::ram::memory::config::SetupError;
use crate::ram::waiting::parent_zeroes::ParentZeroes;
use freestone_core::device::{
    self, Change, Changes, Device, Extent, ExtentKind, Flags, Op, Request, forward_device, range_end,
};
use freestone_core::mutants::{self, Mutant};
use freestone_core::pin::{self, Pin};
use freestone_core::slot::{Kind, LEAF_SLOTS, Word};
use freestone_core::zeroes::leading_zeroes;

/// Maximum bytes of the parent that one lookup of zeroes covers.
const LOOK_BYTES_MAX: u64 = 1 << 30;
/// Maximum slot table leaves that one call visits; each has 512 pages.
const TRY_LEAVES: u64 = 64;

struct Run<K> {
    from: u64,
    to: u64,
    kind: K,
}

struct Runs<K>(Vec<Run<K>>);

impl<K: PartialEq> Runs<K> {
    fn add(&mut self, from: u64, to: u64, kind: K) {
        match self.0.last_mut() {
            Some(last) if last.kind == kind => last.to = to,
            _ => self.0.push(Run { from, to, kind }),
        }
    }
}

#[derive(PartialEq)]
enum PageOwner {
    Own(ExtentKind),
    /// The device does not store the page: the parent's extents apply.
    Parent,
}

impl Inner {
    pub(in crate::ram) fn extents(
        &self,
        offset: u64,
        end: u64,
        row: &mut dyn FnMut(Extent) -> bool,
    ) -> device::Result<u64> {
        // Get the file before reading the slots: a page loaded meanwhile is then still found in the
        // file.
        let here = self.parent.staged_source();
        // Collect the runs under the pin and call the parent afterwards. The parent may read
        // extents from a disk, which must not happen under a pin.
        let runs = pin::pinned(|pin| {
            let view = self.view.load(pin);
            runs(offset / PAGE, end.div_ceil(PAGE), |slot, end| match view.run_of_parent(pin, slot, end) {
                0 => {
                    let kind = |word: Option<Word>| {
                        word.map_or(PageOwner::Parent, |word| PageOwner::Own(kind_of(word)))
                    };
                    (1, kind(view.with_page(pin, slot, |found| found.map(|(_, guard)| guard.word()))))
                }
                run => (run, PageOwner::Parent),
            })
        });
        let mut given = 0;
        for run in runs.0 {
            let (from, to) = ((run.from * PAGE).max(offset), (run.to * PAGE).min(end));
            let more = match run.kind {
                PageOwner::Own(kind) => {
                    given = to - offset;
                    row(Extent { offset: from, len: to - from, kind })
                }
                PageOwner::Parent => below_extents(&self.parent, here.as_ref(), from, to, &mut |extent| {
                    given = extent.offset + extent.len - offset;
                    row(extent)
                })?,
            };
            if !more {
                break;
            }
        }
        Ok(given)
    }
}

impl Inner {
    /// Returns true if a request that empties pages must look up zeroes of the parent before it
    /// continues.
    pub(super) fn needs_parent_check(&self, request: &Request, below: &ParentZeroes) -> bool {
        let empties = match request.op {
            Op::Discard => true,
            Op::WriteZeroes => request.flags.contains(Flags::MAY_FREE),
            Op::Read | Op::Write | Op::Flush => false,
        };
        let is_unknown =
            empties && !matches!(self.parent, Parent::Nothing) && below.known_until <= request.offset;
        // A request that is out of range fails without a lookup.
        is_unknown && request.check_range(self.size(), LOGICAL_BLOCK_BYTES).is_ok()
    }

    /// Looks up which bytes of a request read as zeroes from the parent, from the request's start
    /// on. May wait for a disk.
    pub(super) fn check_parent(&self, request: &Request) -> ParentZeroes {
        let (offset, end) = (request.offset, request.offset + request.len);
        let end = end.min((offset + LOOK_BYTES_MAX) / PAGE * PAGE);
        let here = self.parent.staged_source();
        let (zeroes_until, known_until) = leading_zeroes(offset, end, |from, len, row| {
            below_extents(&self.parent, here.as_ref(), from, from + len, row).map(drop)
        });
        // Round up to whole pages: a page with some data counts as data.
        let known_until = known_until.next_multiple_of(PAGE).min(offset + request.len);
        ParentZeroes { zeroes_from: offset, zeroes_until, known_until }
    }
}

/// Passes the parent's extents of the bytes `[from, to)` to `row`. Returns false if `row` returned
/// false or the parent described only a part.
fn below_extents(
    parent: &Parent,
    here: Option<&StagedSource>,
    from: u64,
    to: u64,
    row: &mut dyn FnMut(Extent) -> bool,
) -> device::Result<bool> {
    if let Parent::Staged(staged) = parent {
        let mut at = from;
        while at < to {
            let (run, has) =
                here.map_or((u64::MAX, false), |here| here.source.run(at / PAGE, to.div_ceil(PAGE)));
            let end = (at / PAGE).saturating_add(run).saturating_mul(PAGE).min(to);
            let more = if has {
                row(Extent { offset: at, len: end - at, kind: ExtentKind::Data })
            } else {
                below_extents(&staged.below, None, at, end, row)?
            };
            if !more {
                return Ok(false);
            }
            at = end;
        }
        return Ok(true);
    }
    let (device, size): (&dyn device::Device, u64) = match parent {
        Parent::Nothing | Parent::Staged(_) => {
            return Ok(row(Extent { offset: from, len: to - from, kind: ExtentKind::Hole }));
        }
        Parent::Device(base) => (&*base.device, base.size),
        Parent::Snapshot(ram) => (ram, ram.0.size()),
    };
    let there = to.min(size);
    if from < there {
        let mut more = true;
        let described = device.extents(from, there - from, &mut |extent| {
            more = row(extent);
            more
        })?;
        if !more || described < there - from {
            return Ok(false);
        }
    }
    let beyond = from.max(there);
    Ok(beyond == to || row(Extent { offset: beyond, len: to - beyond, kind: ExtentKind::Hole }))
}

/// Collects runs of pages of one kind in `[slot, end)`, up to the work limit of one call. `next`
/// returns the length and kind of the run that begins at a page.
fn runs<K: PartialEq>(slot: u64, end: u64, mut next: impl FnMut(u64, u64) -> (u64, K)) -> Runs<K> {
    let mut runs = Runs(Vec::new());
    let mut at = slot;
    let mut looked = 0;
    while at < end && looked < TRY_LEAVES * LEAF_SLOTS {
        let (run, kind) = next(at, end);
        // A run longer than a leaf has no slots: finding it took one lookup.
        looked += if run > LEAF_SLOTS { 1 } else { run };
        runs.add(at, at + run, kind);
        at += run;
    }
    runs
}

/// Passes the changes of the bytes `[offset, offset + len)` to `row`, and returns the number of
/// bytes described. `next` returns the length of the run of pages that begins at a page, and true
/// if the run is changed.
fn changes(
    ram: &Inner,
    (offset, len): (u64, u64),
    next: impl Fn(&Pin<'_>, &View, u64, u64) -> (u64, bool),
    row: &mut dyn FnMut(Change) -> bool,
) -> device::Result<u64> {
    let end = range_end(offset, len, ram.size())?;
    let here = ram.parent.staged_source();
    let runs = pin::pinned(|pin| {
        let view = ram.view.load(pin);
        runs(offset / PAGE, end.div_ceil(PAGE), |slot, end| match (next(pin, view, slot, end), &here) {
            // Pages of the file that are not loaded yet are changes too.
            ((run, false), Some(here)) => here.source.run(slot, slot + run),
            (next, _) => next,
        })
    });
    let mut given = 0;
    for run in runs.0 {
        let (from, to) = ((run.from * PAGE).max(offset), (run.to * PAGE).min(end));
        given = to - offset;
        if !row(Change { offset: from, len: to - from, own: run.kind }) {
            break;
        }
    }
    Ok(given)
}

/// For a fork, the changes are the pages that differ from its base; for a snapshot, the pages that
/// the origin overwrote since.
impl Changes for Ram {
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> device::Result<u64> {
        let next = |_: &Pin<'_>, view: &View, slot, end| {
            let table = view.layer.table();
            let present = table.next_present(slot, end).unwrap_or(end);
            match table.leaf(slot) {
                Some(leaf) if present == slot => {
                    let stop = next_multiple(slot, LEAF_SLOTS).min(end);
                    let own = leaf.peek(slot) != Word::EMPTY;
                    let run = (slot..stop).take_while(|&slot| (leaf.peek(slot) != Word::EMPTY) == own);
                    (run.count().max(1) as u64, own)
                }
                _ => (present.max(slot + 1) - slot, false),
            }
        };
        changes(&self.0, (offset, len), next, row)
    }
}

/// A snapshot seen as a layer over its origin's base. The [`Changes`] of this view are the pages
/// that the origin stored itself when the snapshot was taken. Later changes of the origin and of
/// other snapshots do not affect them.
pub struct OverBaseView(Ram);

impl Ram {
    /// Returns a view of this snapshot whose changes are all pages not read from its origin's base;
    /// see [`OverBaseView`].
    ///
    /// # Errors
    /// Fails if this is a live device, as its content changes.
    pub fn over_base(&self) -> Result<OverBaseView, SetupError> {
        if self.is_snapshot() { Ok(OverBaseView(self.clone())) } else { Err(SetupError::WritableBase) }
    }
}

impl Device for OverBaseView {
    forward_device!(|view| (&view.0 as &dyn Device) => geometry, try_io, submit, extents;
        prefetch: below, zoned: below, changes: own);

    fn changes(&self) -> Option<&dyn Changes> {
        Some(self)
    }
}

impl Changes for OverBaseView {
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> device::Result<u64> {
        let next = |pin: &Pin<'_>, view: &View, slot, end| match view.run_of_parent(pin, slot, end) {
            // A page may move between layers of the chain meanwhile, but some layer always has the
            // page.
            0 if mutants::on(Mutant::DeltaEndsWithBase) && !view.parent.reaches(slot) => (1, false),
            0 => (1, view.with_page(pin, slot, |found| found.is_some())),
            run => (run, false),
        };
        changes(&self.0.0, (offset, len), next, row)
    }
}

fn kind_of(word: Word) -> ExtentKind {
    match word.kind() {
        Kind::Empty => ExtentKind::Hole,
        Kind::Same if word.location() == 0 => ExtentKind::Zero,
        _ => ExtentKind::Data,
    }
}
