//! The states of the models, against a reference that applies the definition of each model by brute force.

use std::collections::{BTreeMap, BTreeSet};

use freestone_drive::power::log::{Entry, Reader};
use freestone_explore::{Model, StateId, state_at};
use proptest::prelude::*;

use crate::harness::{Collect, DISK_BYTES, Op, Recorded, Seen, config, op, options};

/// Versions of a block: the writes to it, and the number of them that is durable.
type Blocks = BTreeMap<u64, (Vec<usize>, usize)>;

/// Returns all states of a log in which blocks of `unit` bytes are lost; without a unit, only prefixes.
fn reference(recorded: &Recorded, unit: Option<u64>) -> BTreeSet<Seen> {
    let mut reader = Reader::open(&recorded.path()).unwrap();
    let mut entries = Vec::new();
    while let Some(entry) = reader.next_entry().unwrap() {
        let mut data = vec![0; if entry.is_discard() { 0 } else { entry.len as usize }];
        if !data.is_empty() {
            reader.read_data(&entry, 0, &mut data).unwrap();
        }
        data.resize(entry.len as usize, 0);
        entries.push((entry, data));
    }
    let mut states = BTreeSet::new();
    for point in 0..=entries.len() {
        let before = &entries[..point];
        let mark = before.iter().rev().find_map(|(entry, _)| entry.mark.clone());
        let Some(unit) = unit else {
            states.insert((replay(before, &|_, _| true, 512), mark));
            continue;
        };
        let flushed = before.iter().rposition(|(entry, _)| entry.is_flush()).map_or(0, |at| at + 1);
        let mut blocks = Blocks::new();
        for (index, (entry, _)) in
            before.iter().enumerate().skip(flushed).filter(|(_, (entry, _))| entry.len > 0)
        {
            for block in entry.offset / unit..(entry.offset + entry.len).div_ceil(unit) {
                let (writes, durable) = blocks.entry(block).or_default();
                writes.push(index);
                if entry.is_fua() && index + 1 < point {
                    *durable = writes.len();
                }
            }
        }
        let choices: Vec<_> =
            blocks.iter().map(|(block, (writes, durable))| (*block, *durable..=writes.len())).collect();
        for chosen in product(&choices) {
            let keeps = |index: usize, block: u64| {
                let Some(kept) = chosen.get(&block).filter(|_| index >= flushed) else { return true };
                blocks[&block].0[..*kept].contains(&index)
            };
            states.insert((replay(before, &keeps, unit), mark.clone()));
        }
    }
    states
}

fn product(choices: &[(u64, std::ops::RangeInclusive<usize>)]) -> Vec<BTreeMap<u64, usize>> {
    let Some(((block, range), rest)) = choices.split_first() else { return vec![BTreeMap::new()] };
    let rest = product(rest);
    let with = |kept| {
        rest.iter().map(move |other| other.iter().map(|(b, k)| (*b, *k)).chain([(*block, kept)]).collect())
    };
    range.clone().flat_map(with).collect()
}

fn replay(entries: &[(Entry, Vec<u8>)], keeps: &dyn Fn(usize, u64) -> bool, unit: u64) -> Vec<u8> {
    let mut content = vec![0; DISK_BYTES as usize];
    for (index, (entry, data)) in entries.iter().enumerate() {
        for (at, byte) in data.iter().enumerate() {
            let place = entry.offset + at as u64;
            if keeps(index, place / unit) {
                content[place as usize] = *byte;
            }
        }
    }
    content
}

fn compare(ops: &[Op], model: Model, unit: Option<u64>) -> Result<(), TestCaseError> {
    let recorded = Recorded::new(ops);
    let collect = Collect::default();
    let report = recorded.explore(&options(&[model]), &collect);
    let states = collect.states.into_inner().unwrap();
    let expected = reference(&recorded, unit);
    let found: BTreeSet<Seen> = states.keys().cloned().collect();
    let ids: Vec<_> = states.values().collect();
    prop_assert!(found == expected, "{} states, expected {}: {ids:?}", found.len(), expected.len());
    prop_assert_eq!(report.states, states.len() as u64, "an equal state was checked twice: {:?}", ids);
    // Each identifier leads to the same content.
    for ((content, mark), ids) in &states {
        let id: StateId = ids[0].parse().unwrap();
        let again = state_at(&recorded.timeline(), &id).unwrap();
        prop_assert!(crate::harness::content(&again.disk().unwrap()) == *content, "{}: another content", id);
        prop_assert_eq!(again.mark(), mark.as_deref());
    }
    Ok(())
}

/// The first half of the choices makes states that are known: blocks of a discard that changed nothing are
/// lost.
#[test]
fn later_choices_are_tried_after_rounds_without_new_states() {
    compare(&[Op::Write(10, 1), Op::Discard(8, 2)], Model::Torn, Some(512)).unwrap();
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn prefix_model_equals_reference(ops in prop::collection::vec(op(), 0..12)) {
        compare(&ops, Model::Prefix, None)?;
    }

    #[test]
    fn subset_model_equals_reference(ops in prop::collection::vec(op(), 0..7)) {
        compare(&ops, Model::Subset, Some(4096))?;
    }

    // Few sectors, so that all choices of a window are tried.
    #[test]
    fn torn_model_equals_reference(
        ops in prop::collection::vec(op().prop_map(|op| match op {
            Op::Write(at, len) => Op::Write(at % 16, len.min(3)),
            Op::Fua(at, len) => Op::Fua(at % 16, len.min(2)),
            Op::Discard(at, len) => Op::Discard(at % 16, len.min(2)),
            op => op,
        }), 0..4)
    ) {
        compare(&ops, Model::Torn, Some(512))?;
    }
}
