//! Snapshots of a device, and replacements of its content.

use super::*;

#[test]
fn snapshot_keeps_current_content() {
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, DONE);
    let flying = bench.begin(2);
    let mut taken = Bench(bench.0.snapshot("taken", Durability::Nothing));
    bench.0.end(flying, DONE);
    bench.write(3, DONE);
    taken.may_see(&[1, 2]);
    taken.sees(1);
    taken.may_see(&[1]);
    let seen = taken.finds(3).unwrap_err();
    assert!(seen.device == "taken" && seen.found.contains("not among the recent writes"), "{seen}");
}

#[test]
fn snapshot_since_allows_versions_during_verb() {
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, DONE);
    bench.write(2, DONE);
    let verb = bench.0.begin_read();
    bench.write(3, DONE);
    let taken = Bench(bench.0.snapshot_since(verb, "taken", Durability::Nothing));
    taken.may_see(&[2, 3]);
}

/// Seed 373 of mode exact: a crash of the origin lost a cached write after a snapshot had shown it.
#[test]
fn snapshot_flush_keeps_no_write_of_its_origin() {
    let mut bench = Bench::new(Durability::Flushed);
    let verb = bench.0.begin_read();
    let (first, second) = (bench.begin(1), bench.begin(2));
    bench.0.end(second, FUA);
    bench.0.end(first, DONE);
    let mut taken = Bench(bench.0.snapshot_since(verb, "taken", Durability::Flushed));
    taken.sees(1);
    taken.flush();
    taken.may_see(&[1]);
    taken.may_see_after_crash(&[0, 1, 2]);
}

#[test]
fn snapshot_loses_unflushed_origin_data_in_crash() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, FUA);
    bench.write(2, DONE);
    let taken = Bench(bench.0.snapshot("taken", Durability::Flushed));
    taken.may_see(&[2]);
    taken.may_see_after_crash(&[1, 2]);
}

#[test]
fn replace_doubtfully_allows_both_contents() {
    let mut bench = Bench::new(Durability::Completed);
    bench.write(1, DONE);
    let snapshot = bench.0.snapshot("taken", Durability::Completed);
    bench.write(2, DONE);
    let flying = bench.begin(3);
    bench.write(4, DONE);
    bench.0.replace_doubtfully(&snapshot);
    bench.0.end(flying, DONE);
    bench.may_see(&[1, 3, 4]);
    bench.0.crash();
    bench.may_see(&[1, 3, 4]);
}

#[test]
fn replace_content_takes_other_content() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, FUA);
    let snapshot = bench.0.snapshot("taken", Durability::Flushed);
    bench.write(2, FUA);
    let (reads, verb) = (bench.0.begin_read(), bench.0.begin_read());
    let flying = bench.begin(3);
    let mut kept = Bench(bench.0.clone());
    let again = kept.0.begin_read();
    kept.0.replace_content(again, &snapshot, true);
    kept.may_see_after_crash(&[1, 2, 3]);
    bench.0.replace_content(verb, &snapshot, false);
    bench.may_see(&[1, 3]);
    bench.may_see_after_crash(&[1, 3]);
    bench.found(reads, 2).unwrap();
    bench.0.end(flying, DONE);
    bench.may_see(&[1, 3]);
    bench.write(4, DONE);
    bench.may_see(&[4]);
    let blank = Oracle::new("blank", 64, Durability::Flushed);
    let verb = bench.0.begin_read();
    bench.0.replace_content(verb, &blank, false);
    bench.may_see(&[0]);
}

#[test]
fn replace_head_keeps_the_rest() {
    let mut bench = Bench::new(Durability::Nothing);
    let taken = bench.0.snapshot("taken", Durability::Nothing);
    bench.write(1, DONE);
    let verb = bench.0.begin_read();
    bench.0.replace_head(verb, 10, &taken, false);
    let mut want = bytes(1);
    want[..2 * SECTOR_BYTES].fill(0);
    let read = bench.0.begin_read();
    bench.0.check_read(read, 8, &want).unwrap();
}

#[test]
fn begin_replacement_allows_old_and_new_content() {
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, DONE);
    let before = bench.0.begin_read();
    let snapshot = Arc::new(bench.0.snapshot_since(before, "snapshot", Durability::Nothing));
    bench.write(2, DONE);
    let verb = bench.0.begin_replacement(&snapshot);
    bench.may_see(&[1, 2]);
    bench.write(3, DONE);
    bench.may_see(&[1, 3]);
    bench.0.replace_content(verb, &snapshot, false);
    bench.may_see(&[1, 3]);
    bench.write(4, DONE);
    bench.may_see(&[4]);
}
