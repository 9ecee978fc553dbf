//! States as changes over the base.

use std::sync::Arc;

use freestone_core::device::{Blocking as _, Device, Flags};
use freestone_explore::{Base, Model, StateId, Timeline, changes_at, explore, state_at};
use freestone_ram::ram::{Config, Ram};
use proptest::prelude::*;

use crate::harness::{Collect, DISK_BYTES, Recorded, Unwatched, config, content, op, options};

/// Returns a disk whose blocks have different contents, and one of which is zero.
fn base() -> Arc<dyn Device> {
    let ram = Ram::new(Config { disksize: DISK_BYTES, ..Config::default() }).unwrap();
    let blocks: Vec<u8> =
        (0..DISK_BYTES).map(|at| if at / 4096 == 2 { 0 } else { (at / 97) as u8 | 1 }).collect();
    ram.write_at(0, &blocks, Flags::empty()).unwrap();
    Arc::new(ram.snapshot().unwrap())
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn changes_of_each_state_are_over_the_base(ops in prop::collection::vec(op(), 0..6)) {
        let recorded = Recorded::new(&ops);
        let base = base();
        let timeline = Arc::new(Timeline::open(&recorded.path(), Base::Device(Arc::clone(&base)), 0).unwrap());
        let collect = Collect::default();
        explore(&timeline, &options(&[Model::Prefix, Model::Subset]), &collect, &Unwatched).unwrap();
        let original = content(&*base);
        for id in collect.states.into_inner().unwrap().into_values().flatten() {
            let id: StateId = id.parse().unwrap();
            let state = content(&state_at(&timeline, &id).unwrap().disk().unwrap());
            let changed = changes_at(&timeline, &id).unwrap();
            prop_assert!(content(&changed) == state, "{}: another content", id);
            let mut at = 0;
            while at < DISK_BYTES {
                at += changed.changes().unwrap().changes(at, DISK_BYTES - at, &mut |row| {
                    let range = row.offset as usize..(row.offset + row.len) as usize;
                    assert!(row.own || state[range.clone()] == original[range.clone()], "{id}: {range:?}");
                    true
                }).unwrap();
            }
            if id.point == 0 {
                let mut own = 0;
                changed.changes().unwrap().changes(0, DISK_BYTES, &mut |row| { own += u64::from(row.own) * row.len; true }).unwrap();
                prop_assert_eq!(own, 0, "the base itself has no changes");
            }
        }
    }
}
