//! What lies where: extents, and what a fork or snapshot holds itself.

use super::through::Below;
use super::{Inner, PAGE, Ram, next_multiple};
use crate::device::{self, Change, Changes, Extent, ExtentKind, range_end};
use crate::pin;
use crate::slot::{Kind, LEAF_SLOTS, Word};

/// Leaves that one call looks at.
const TRY_LEAVES: u64 = 64;

/// Neighbouring pages of one kind.
struct Run<K> {
    from: u64,
    to: u64,
    kind: K,
}

/// Gathers runs.
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
enum Holds {
    Itself(ExtentKind),
    /// What lies below says what is there.
    Below,
}

impl Inner {
    pub(super) fn extents(
        &self,
        offset: u64,
        end: u64,
        row: &mut dyn FnMut(Extent) -> bool,
    ) -> device::Result<u64> {
        // What lies below may be on a disk: it is asked with nothing pinned.
        let runs = pin::pinned(|pin| {
            let view = self.view.load(pin);
            runs(offset / PAGE, end.div_ceil(PAGE), |slot, end| match view.run_below(pin, slot, end) {
                0 => {
                    let kind =
                        |word: Option<Word>| word.map_or(Holds::Below, |word| Holds::Itself(kind_of(word)));
                    (1, kind(view.with_page(pin, slot, |found| found.map(|(_, guard)| guard.word()))))
                }
                run => (run, Holds::Below),
            })
        });
        let mut given = 0;
        for run in runs.0 {
            let (from, to) = ((run.from * PAGE).max(offset), (run.to * PAGE).min(end));
            let more = match run.kind {
                Holds::Itself(kind) => {
                    given = to - offset;
                    row(Extent { offset: from, len: to - from, kind })
                }
                Holds::Below => below_extents(&self.below, from, to, &mut |extent| {
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

/// Describes `[from, to)` as it is below. False: that is enough.
fn below_extents(
    below: &Below,
    from: u64,
    to: u64,
    row: &mut dyn FnMut(Extent) -> bool,
) -> device::Result<bool> {
    let (device, size): (&dyn device::Device, u64) = match below {
        Below::Nothing => return Ok(row(Extent { offset: from, len: to - from, kind: ExtentKind::Hole })),
        Below::Device(base) => (&*base.device, base.size),
        Below::Snapshot(ram) => (ram, ram.0.size()),
    };
    let there = to.min(size);
    if from < there {
        let mut more = true;
        let told = device.extents(from, there - from, &mut |extent| {
            more = row(extent);
            more
        })?;
        if !more || told < there - from {
            return Ok(false);
        }
    }
    let beyond = from.max(there);
    Ok(beyond == to || row(Extent { offset: beyond, len: to - beyond, kind: ExtentKind::Hole }))
}

/// The runs from `slot` on, of as many pages as one call looks at; `next` tells of the first of them, and how far that
/// goes.
fn runs<K: PartialEq>(slot: u64, end: u64, mut next: impl FnMut(u64, u64) -> (u64, K)) -> Runs<K> {
    let mut runs = Runs(Vec::new());
    let mut at = slot;
    let mut looked = 0;
    while at < end && looked < TRY_LEAVES * LEAF_SLOTS {
        let (run, kind) = next(at, end);
        // What is skipped as a whole costs nothing.
        looked += if run > LEAF_SLOTS { 1 } else { run };
        runs.add(at, at + run, kind);
        at += run;
    }
    runs
}

impl Changes for Ram {
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> device::Result<u64> {
        let end = range_end(offset, len, self.0.size())?;
        let runs = pin::pinned(|pin| {
            let view = self.0.view.load(pin);
            let table = view.layer.table();
            runs(offset / PAGE, end.div_ceil(PAGE), |slot, end| {
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
}

fn kind_of(word: Word) -> ExtentKind {
    match word.kind() {
        Kind::Empty => ExtentKind::Hole,
        Kind::Same if word.location() == 0 => ExtentKind::Zero,
        _ => ExtentKind::Data,
    }
}
