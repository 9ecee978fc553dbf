//! The versions that crashes, power cuts and flushes leave.

use super::*;

#[test]
fn crash_restores_unflushed_versions() {
    let mut bench = Bench::new(Durability::Flushed);
    for serial in 1..=3 {
        bench.write(serial, DONE);
    }
    bench.may_see_after_crash(&[0, 1, 2, 3]);
    bench.flush();
    bench.may_see_after_crash(&[3]);
    bench.write(4, DONE);
    let flying = bench.begin(5);
    bench.may_see_after_crash(&[3, 4, 5]);
    bench.0.end(flying, DONE);
    bench.may_see(&[5]);
}

#[test]
fn fua_makes_only_its_own_write_durable() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, DONE);
    let other = bench.0.begin_write(id(9), 20..21, Kind::Write);
    bench.0.end(other, DONE);
    bench.write(2, FUA);
    bench.may_see_after_crash(&[2]);
    bench.0.crash();
    let read = bench.0.begin_read();
    bench.0.check_read(read, 20, &[0; SECTOR_BYTES]).unwrap();
    bench.write(3, FUA);
    let old = bench.finds(2).unwrap_err();
    assert!(old.found.contains("version"), "{old}");
}

#[test]
fn flush_covers_writes_completed_before_its_start() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, DONE);
    let late = bench.begin(2);
    let flush = bench.0.begin_flush();
    bench.0.end(late, DONE);
    bench.0.end_flush(flush, true);
    bench.may_see_after_crash(&[1, 2]);
    let flush = bench.0.begin_flush();
    bench.0.end_flush(flush, false);
    bench.may_see_after_crash(&[1, 2]);
    bench.flush();
    bench.may_see_after_crash(&[2]);
}

#[test]
fn flush_does_not_cover_failed_write() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, FUA);
    bench.write(2, Outcome::Failed);
    bench.sees(2);
    bench.flush();
    bench.may_see(&[2]);
    bench.may_see_after_crash(&[1, 2]);
    bench.write(3, DONE);
    bench.may_see_after_crash(&[1, 2, 3]);
    bench.flush();
    bench.may_see_after_crash(&[3]);
}

#[test]
fn flush_covers_the_overlapping_write_that_was_read() {
    let mut bench = Bench::new(Durability::Flushed);
    let (one, two) = (bench.begin(1), bench.begin(2));
    bench.0.end(two, DONE);
    bench.0.end(one, DONE);
    bench.sees(2);
    bench.may_see_after_crash(&[0, 1, 2]);
    bench.flush();
    bench.may_see_after_crash(&[2]);
}

#[test]
fn read_after_crash_settles_version_for_good() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, DONE);
    bench.write(2, DONE);
    bench.0.crash();
    bench.may_see_after_crash(&[0, 1, 2]);
    bench.sees(1);
    bench.may_see(&[1]);
    bench.may_see_after_crash(&[1]);
    bench.write(3, DONE);
    bench.may_see(&[3]);
    bench.may_see_after_crash(&[1, 3]);
}

#[test]
fn write_in_flight_at_cut_may_take_effect_later() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, FUA);
    let write = bench.begin(2);
    bench.0.cut();
    bench.may_see(&[1, 2]);
    bench.0.end(write, DONE);
    bench.may_see(&[1, 2]);
    bench.sees(2);
    bench.may_see(&[2]);
    // The write took effect after the cut, so it is unflushed and the next cut may remove it.
    bench.may_see_after_crash(&[1, 2]);
    bench.flush();
    bench.may_see_after_crash(&[2]);
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, FUA);
    bench.write(2, DONE);
    let write = bench.begin(3);
    bench.0.cut();
    bench.0.end(write, DONE);
    bench.sees(1);
    bench.may_see(&[1]);
}

#[test]
fn completed_write_survives_process_but_not_power() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, DONE);
    bench.write(2, DONE);
    let flying = bench.begin(3);
    bench.0.die();
    bench.may_see(&[2, 3]);
    bench.may_see_after_crash(&[0, 1, 2, 3]);
    bench.0.end(flying, FUA);
    bench.sees(2);
    bench.may_see(&[2]);
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, DONE);
    bench.0.die();
    bench.may_see(&[0]);
}

#[test]
fn completion_of_request_from_before_crash_is_ignored() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, FUA);
    let (write, flush) = (bench.begin(2), bench.0.begin_flush());
    bench.0.crash();
    bench.0.end(write, FUA);
    bench.0.end_flush(flush, true);
    bench.may_see(&[1, 2]);
}

#[test]
fn durability_completed_keeps_all_and_nothing_none() {
    let mut bench = Bench::new(Durability::Completed);
    bench.write(1, DONE);
    bench.write(2, DONE);
    bench.may_see_after_crash(&[2]);
    let flying = bench.begin(3);
    bench.may_see_after_crash(&[2, 3]);
    bench.0.end(flying, Outcome::Failed);
    bench.may_see_after_crash(&[2, 3]);
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, FUA);
    bench.flush();
    bench.may_see_after_crash(&[0]);
}

#[test]
fn zeroes_after_crash_may_be_of_later_discard() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, DONE);
    bench.0.crash();
    bench.clear(Kind::Discard { zeroing: false });
    bench.sees(0);
    bench.may_see(&[0]);
    bench.may_see_after_crash(&[0, 1]);
}
