//! Reduction of failures, flaky checks, and refused logs.

use std::collections::HashMap;
use std::fs;
use std::sync::Mutex;

use freestone_explore::{Base, End, Model, Options, Timeline, state_at};

use crate::harness::{CheckBy, DISK_BYTES, Op, Recorded, content, options};

/// Returns true if block `number` has the content of the request with this index.
fn has(content: &[u8], number: usize, index: usize) -> bool {
    content[number * 4096] as usize == index + 1
}

/// A store without a flush between data and header: the header may point to data that was lost.
#[test]
fn failure_is_reduced_to_the_lost_write() {
    let mut ops = vec![Op::Write(0, 8), Op::Flush];
    ops.extend((1..7).map(|block| Op::Write(block * 8, 8)));
    ops.extend([Op::Write(0, 8), Op::Write(56, 8), Op::Flush]);
    let recorded = Recorded::new(&ops);
    // The header of request 8 needs the data of request 4, which is block 3.
    let check = CheckBy(|content: &[u8], _: &_| !has(content, 0, 8) || has(content, 3, 4));
    let report = recorded.explore(&options(&[Model::Prefix, Model::Subset]), &check);
    assert_eq!(report.end, End::Complete);
    let [failure] = &report.failures[..] else { panic!("{:#?}", report.failures) };
    assert_eq!(failure.lost.len(), 1, "{failure:#?}");
    assert_eq!((failure.lost[0].entry, failure.lost[0].offset, failure.lost[0].len), (5, 3 * 4096, 4096));
    assert!(failure.is_minimal && failure.lost[0].is_whole && failure.states > 1, "{failure:#?}");
    assert_eq!(failure.states, report.failing_states);
    let state = state_at(&recorded.timeline(), &failure.id).unwrap();
    assert!(!(check.0)(&content(&state.disk().unwrap()), &state));
    // Writes in order do not fail.
    let report = recorded.explore(&options(&[Model::Prefix]), &check);
    assert_eq!((report.failures.len(), report.end), (0, End::Complete));
}

/// The check needs either of two writes, so both must be lost.
#[test]
fn failure_with_two_lost_writes_keeps_both() {
    let recorded = Recorded::new(&[1, 2, 3, 4, 5].map(|block| Op::Write(block * 8, 8)));
    let check =
        CheckBy(|content: &[u8], _: &_| has(content, 2, 1) || has(content, 4, 3) || !has(content, 5, 4));
    let report = recorded.explore(&options(&[Model::Subset]), &check);
    let [failure] = &report.failures[..] else { panic!("{:#?}", report.failures) };
    assert_eq!(failure.lost.iter().map(|lost| lost.entry).collect::<Vec<_>>(), [2, 4]);
}

#[test]
fn torn_write_is_found_with_its_half() {
    let recorded = Recorded::new(&[Op::Write(0, 8), Op::Flush, Op::Write(0, 8)]);
    let check = CheckBy(|content: &[u8], _: &_| content[..4096].iter().all(|byte| *byte == content[0]));
    for model in [Model::Prefix, Model::Subset] {
        assert_eq!(recorded.explore(&options(&[model]), &check).failures, []);
    }
    let options = Options { stop_at_first: true, ..options(&[Model::Torn]) };
    let report = recorded.explore(&options, &check);
    let [failure] = &report.failures[..] else { panic!("{:#?}", report.failures) };
    assert!(report.end == End::FirstFailure && !failure.lost[0].is_whole, "{failure:#?}");
    assert!(failure.id.to_string().ends_with("@512"), "{}", failure.id);
}

/// The check finds an acknowledged write missing. The mark after the write is part of the state.
#[test]
fn acknowledged_write_without_flush_is_found() {
    let recorded = Recorded::new(&[Op::Flush, Op::Write(8, 8), Op::Mark, Op::Flush]);
    let check = CheckBy(|content: &[u8], state: &freestone_explore::State| {
        state.mark() != Some("mark 2") || has(content, 1, 1)
    });
    let report = recorded.explore(&options(&[Model::Prefix, Model::Subset]), &check);
    let [failure] = &report.failures[..] else { panic!("{:#?}", report.failures) };
    assert_eq!((failure.id.to_string().as_str(), failure.mark.as_deref()), ("3-2", Some("mark 2")));
}

#[test]
fn failing_prefixes_are_one_failure() {
    let mut ops: Vec<_> = (1..6).map(|block| Op::Write(block * 8, 8)).collect();
    ops.push(Op::Write(0, 8));
    let recorded = Recorded::new(&ops);
    // The first write is wrong until the last one completes it.
    let check = CheckBy(|content: &[u8], _: &_| !has(content, 1, 0) || has(content, 0, 5));
    let report = recorded.explore(&options(&[Model::Prefix, Model::Subset]), &check);
    assert_eq!(report.failures.len(), 1, "{:#?}", report.failures);
    assert_eq!(report.failures[0].id.to_string(), "6-6");
    // Without the model subset, nothing is reduced, and equal outputs are one failure.
    let report = recorded.explore(&options(&[Model::Prefix]), &check);
    assert_eq!((report.failures.len(), report.failing_states), (1, 5));
}

#[test]
fn failing_final_state_ends_the_exploration() {
    let recorded = Recorded::new(&[Op::Write(0, 8), Op::Flush]);
    let report = recorded.explore(&options(&[Model::Prefix]), &CheckBy(|_: &[u8], _: &_| false));
    assert_eq!((report.end, report.states, report.failures.len()), (End::FinalState, 1, 1));
}

#[test]
fn check_that_fails_once_is_flaky() {
    let recorded = Recorded::new(&[Op::Write(0, 8), Op::Write(8, 8)]);
    let counts = Mutex::new(HashMap::new());
    let check = CheckBy(|_: &[u8], state: &freestone_explore::State| {
        let mut counts = counts.lock().unwrap();
        let count = counts.entry(state.id().clone()).or_insert(0);
        *count += 1;
        state.point() == 2 || *count > 1
    });
    let report = recorded.explore(&options(&[Model::Prefix]), &check);
    assert_eq!((report.failures.len(), report.flaky.len(), report.states), (0, 2, 3));
}

#[test]
fn damaged_log_is_refused_with_its_entry() {
    let recorded = Recorded::new(&[Op::Write(0, 8), Op::Write(8, 8), Op::Flush]);
    let path = recorded.path();
    let open =
        |size| Timeline::open(&path, Base::Zeroes(size), 0).map(drop).map_err(|error| error.to_string());
    assert_eq!(open(DISK_BYTES), Ok(()));
    let error = open(4096).unwrap_err();
    assert!(error.starts_with("replaying entry 2 failed"), "{error}");
    let log = fs::read(&path).unwrap();
    fs::write(&path, &log[..512 * 12]).unwrap();
    let error = open(DISK_BYTES).unwrap_err();
    assert!(error.contains("entry 2 has data behind the end"), "{error}");
    fs::write(&path, [0; 4096]).unwrap();
    let error = open(DISK_BYTES).unwrap_err();
    assert!(error.contains("is not a dm-log-writes log"), "{error}");
}

#[test]
fn impossible_states_are_refused() {
    let recorded = Recorded::new(&[Op::Write(0, 8), Op::Fua(8, 8), Op::Flush, Op::Write(0, 8), Op::Mark]);
    let timeline = recorded.timeline();
    let refused = |id: &str| state_at(&timeline, &id.parse().unwrap()).map(drop).unwrap_err().to_string();
    for (id, why) in [
        // The end of the recording is a flush.
        ("9", "the log has 6 entries"),
        ("4-1", "entry 1 is not an unflushed write"),
        ("4-3..4", "are not all unflushed writes"),
        ("3-2", "not an unflushed write"),
        ("5-4:1", "entry 4 has 1 blocks"),
        ("5-4@8192", "is not a power of two from 512"),
        ("5-0..18446744073709551615", "are not all unflushed writes"),
        ("5-4:18446744073709551615", "entry 4 has 1 blocks"),
    ] {
        let error = refused(id);
        assert!(error.contains(why), "{id}: {error}");
    }
    // A write with FUA can be lost only before its completion is known.
    assert!(state_at(&timeline, &"2-2".parse().unwrap()).is_ok());
}
