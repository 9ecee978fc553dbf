use super::*;

const DONE: Outcome = Outcome::Done { fua: false };
const FUA: Outcome = Outcome::Done { fua: true };

/// A device of one kind, and what is asked of it.
struct Bench(Oracle);

impl Bench {
    fn new(durability: Durability) -> Self {
        Self(Oracle::new("disk", 64, durability))
    }

    fn begin(&mut self, serial: u64) -> WriteToken {
        self.0.begin_write(id(serial), 8..16, Kind::Write)
    }

    fn write(&mut self, serial: u64, outcome: Outcome) {
        let write = self.begin(serial);
        self.0.end(write, outcome);
    }

    fn clear(&mut self, kind: Kind) {
        let write = self.0.begin_write(1, 8..16, kind);
        self.0.end(write, DONE);
    }

    fn flush(&mut self) {
        let flush = self.0.begin_flush();
        self.0.end_flush(flush, true);
    }

    /// What a read says that finds this version everywhere.
    fn finds(&mut self, version: u64) -> Result<(), Violation> {
        let read = self.0.begin_read();
        self.found(read, version)
    }

    fn found(&mut self, read: ReadToken, version: u64) -> Result<(), Violation> {
        self.0.check_read(read, 8, &bytes(version))
    }

    #[track_caller]
    fn sees(&mut self, version: u64) {
        if let Err(violation) = self.finds(version) {
            panic!("{violation}");
        }
    }

    /// Asked of a copy, so that nothing is settled.
    #[track_caller]
    fn may_see(&self, versions: &[u64]) {
        for version in 0..10 {
            let seen = Self(self.0.clone()).finds(version);
            assert_eq!(seen.is_ok(), versions.contains(&version), "{version} of {versions:?}: {seen:?}");
        }
    }

    /// The same after a crash.
    #[track_caller]
    fn may_see_after_crash(&self, versions: &[u64]) {
        let mut after = Self(self.0.clone());
        after.0.crash();
        after.may_see(versions);
    }
}

fn id(serial: u64) -> u64 {
    Fill::ALL[serial as usize % Fill::ALL.len()].id(serial)
}

/// Sectors 8 to 15 as the write `serial` leaves them; of 0, zeroes.
fn bytes(serial: u64) -> Vec<u8> {
    let mut out = vec![0; 8 * SECTOR_BYTES];
    if serial > 0 {
        fill(id(serial), 8, &mut out);
    }
    out
}

// ---- now ----------------------------------------------------------------------------------------

#[test]
fn a_write_that_was_answered_is_there_and_nothing_else() {
    let mut bench = Bench::new(Durability::Nothing);
    bench.may_see(&[0]);
    bench.write(1, DONE);
    bench.may_see(&[1]);
    bench.write(2, DONE);
    bench.may_see(&[2]);
    bench.clear(Kind::Zeroes);
    bench.may_see(&[0]);
}

#[test]
fn a_write_in_flight_may_be_seen_and_need_not() {
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, DONE);
    let two = bench.begin(2);
    bench.may_see(&[1, 2]);
    bench.sees(2);
    bench.0.end(two, DONE);
    bench.may_see(&[2]);
}

#[test]
fn of_writes_that_overlap_either_may_stay_until_a_read_shows_which() {
    let mut bench = Bench::new(Durability::Nothing);
    let (one, two) = (bench.begin(1), bench.begin(2));
    bench.0.end(two, DONE);
    bench.may_see(&[1, 2]);
    bench.0.end(one, DONE);
    bench.may_see(&[1, 2]);
    bench.sees(1);
    bench.may_see(&[1]);
}

#[test]
fn a_write_replaces_what_was_answered_before_it_began() {
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, DONE);
    let late = bench.begin(2);
    bench.write(3, DONE);
    bench.may_see(&[2, 3]);
    bench.write(4, DONE);
    bench.may_see(&[2, 4]);
    bench.0.end(late, Outcome::Failed);
    bench.may_see(&[2, 4]);
    bench.write(5, DONE);
    bench.may_see(&[5]);
}

#[test]
fn a_read_may_find_what_was_allowed_at_any_moment_since_it_began() {
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, DONE);
    let (early, other) = (bench.0.begin_read(), bench.0.begin_read());
    bench.write(2, DONE);
    let middle = bench.0.begin_read();
    bench.write(3, DONE);
    bench.found(early, 1).unwrap();
    bench.found(other, 3).unwrap();
    let seen = bench.found(middle, 1).unwrap_err();
    assert!(seen.to_string().contains("superseded by version"), "{seen}");
    let late = bench.0.begin_read();
    bench.found(late, 2).unwrap_err();
    assert!(bench.0.with_past.is_empty(), "it was kept for reads that are over");
}

#[test]
fn a_write_that_failed_leaves_old_or_new_and_a_read_settles_it() {
    for shown in [1, 2] {
        let mut bench = Bench::new(Durability::Flushed);
        bench.write(1, DONE);
        bench.write(2, Outcome::Failed);
        bench.may_see(&[1, 2]);
        bench.sees(shown);
        bench.may_see(&[shown]);
        let flips = bench.finds(3 - shown).unwrap_err();
        assert!(flips.to_string().contains("showed not to be there"), "{flips}");
        bench.may_see_after_crash(&[0, 1, 2]);
        bench.write(3, DONE);
        bench.may_see(&[3]);
        bench.flush();
        bench.may_see_after_crash(&[3]);
    }
}

#[test]
fn a_write_that_failed_may_be_torn_by_sectors_but_not_within_one() {
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, DONE);
    bench.write(2, Outcome::Failed);
    let mut torn = bytes(1);
    torn[SECTOR_BYTES..3 * SECTOR_BYTES].copy_from_slice(&bytes(2)[SECTOR_BYTES..3 * SECTOR_BYTES]);
    let read = bench.0.begin_read();
    bench.0.check_read(read, 8, &torn).unwrap();
    torn[5 * SECTOR_BYTES + 256..6 * SECTOR_BYTES].copy_from_slice(&bytes(2)[..256]);
    let read = bench.0.begin_read();
    let seen = bench.0.check_read(read, 8, &torn).unwrap_err();
    assert_eq!(seen.sector, 13);
    assert!(seen.found.contains("other bytes from byte 256 on"), "{seen}");
}

#[test]
fn a_read_settles_nothing_while_a_write_is_in_flight_or_was_when_it_began() {
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, DONE);
    bench.write(2, Outcome::Failed);
    let beside = bench.0.begin_read();
    let three = bench.begin(3);
    bench.sees(2);
    bench.may_see(&[1, 2, 3]);
    bench.0.end(three, Outcome::Failed);
    bench.found(beside, 1).unwrap();
    bench.may_see(&[1, 2, 3]);
    bench.sees(3);
    bench.may_see(&[3]);
}

#[test]
fn a_write_that_was_refused_did_nothing() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, FUA);
    bench.write(2, Outcome::Refused);
    bench.may_see(&[1]);
    bench.may_see_after_crash(&[1]);
}

#[test]
fn a_discard_leaves_zeroes_or_what_was_there_and_one_of_them_stays() {
    for shown in [0, 1] {
        let mut bench = Bench::new(Durability::Nothing);
        bench.write(1, DONE);
        bench.clear(Kind::Discard { zeroing: false });
        bench.may_see(&[0, 1]);
        bench.sees(shown);
        bench.may_see(&[shown]);
    }
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, DONE);
    bench.clear(Kind::Discard { zeroing: true });
    bench.may_see(&[0]);
}

// ---- after a crash ------------------------------------------------------------------------------

#[test]
fn a_crash_brings_back_what_was_not_flushed() {
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
fn fua_makes_one_write_durable_and_nothing_else() {
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
fn a_flush_covers_what_was_answered_before_it_began() {
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
fn a_flush_does_not_make_sure_of_a_write_that_failed() {
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
fn of_writes_that_overlapped_the_one_that_was_seen_is_flushed() {
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
fn what_a_read_finds_after_a_crash_is_there_for_good() {
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
fn what_is_in_flight_at_a_cut_may_come_after_it() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, FUA);
    let write = bench.begin(2);
    bench.0.cut();
    bench.may_see(&[1, 2]);
    bench.0.end(write, DONE);
    bench.may_see(&[1, 2]);
    bench.sees(2);
    bench.may_see(&[2]);
    // It came after the cut, so the next one may take it away.
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
fn what_was_answered_outlives_the_process_and_not_the_power() {
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
fn an_answer_from_before_a_crash_counts_for_nothing() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, FUA);
    let (write, flush) = (bench.begin(2), bench.0.begin_flush());
    bench.0.crash();
    bench.0.end(write, FUA);
    bench.0.end_flush(flush, true);
    bench.may_see(&[1, 2]);
}

#[test]
fn other_devices_keep_all_that_was_answered_or_nothing() {
    let mut bench = Bench::new(Durability::Answered);
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

// ---- snapshots, growing -------------------------------------------------------------------------

#[test]
fn a_snapshot_has_what_is_there_now_and_keeps_it() {
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
    assert!(seen.device == "taken" && seen.found.contains("not told lately"), "{seen}");
}

#[test]
fn a_snapshot_is_of_a_moment_since_the_verb_began() {
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, DONE);
    bench.write(2, DONE);
    let verb = bench.0.begin_read();
    bench.write(3, DONE);
    let taken = Bench(bench.0.snapshot_since(verb, "taken", Durability::Nothing));
    taken.may_see(&[2, 3]);
}

/// Seed 373 of the exact mode: the origin's cache lost the write that the snapshot had shown.
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
fn a_snapshot_loses_in_a_crash_what_its_origin_had_not_flushed() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, FUA);
    bench.write(2, DONE);
    let taken = Bench(bench.0.snapshot("taken", Durability::Flushed));
    taken.may_see(&[2]);
    taken.may_see_after_crash(&[1, 2]);
}

#[test]
fn a_device_that_is_turned_into_another_has_that_ones_content() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, FUA);
    let snapshot = bench.0.snapshot("taken", Durability::Flushed);
    bench.write(2, FUA);
    let (reads, verb) = (bench.0.begin_read(), bench.0.begin_read());
    let flying = bench.begin(3);
    let mut kept = Bench(bench.0.clone());
    let again = kept.0.begin_read();
    kept.0.turn_into(again, &snapshot, true);
    kept.may_see_after_crash(&[1, 2, 3]);
    bench.0.turn_into(verb, &snapshot, false);
    bench.may_see(&[1, 3]);
    bench.may_see_after_crash(&[1, 3]);
    bench.found(reads, 2).unwrap();
    bench.0.end(flying, DONE);
    bench.may_see(&[1, 3]);
    bench.write(4, DONE);
    bench.may_see(&[4]);
    let blank = Oracle::new("blank", 64, Durability::Flushed);
    let verb = bench.0.begin_read();
    bench.0.turn_into(verb, &blank, false);
    bench.may_see(&[0]);
}

#[test]
fn what_a_device_grew_by_is_zeroes() {
    let mut oracle = Oracle::new("disk", 3, Durability::Nothing);
    oracle.grow(19);
    oracle.grow(5);
    assert_eq!(oracle.size(), 19);
    let write = oracle.begin_write(id(1), 2..4, Kind::Write);
    oracle.end(write, DONE);
    let mut want = vec![0; 19 * SECTOR_BYTES];
    fill(id(1), 2, &mut want[2 * SECTOR_BYTES..4 * SECTOR_BYTES]);
    let read = oracle.begin_read();
    oracle.check_read(read, 0, &want).unwrap();
    want[18 * SECTOR_BYTES] = 1;
    let read = oracle.begin_read();
    assert_eq!(oracle.check_read(read, 0, &want).unwrap_err().sector, 18);
}

// ---- messages, bounds ---------------------------------------------------------------------------

#[test]
fn what_is_wrong_is_named() {
    let mut oracle = Oracle::new("disk", 64, Durability::Nothing);
    let (text, same) = (Fill::Text.id(1), Fill::Same.id(2));
    for (id, range) in [(text, 0..8), (same, 8..16), (Fill::Noise.id(3), 8..16)] {
        let write = oracle.begin_write(id, range, Kind::Write);
        oracle.end(write, DONE);
    }
    let mut says = |sector: u64, bytes: &[u8]| {
        let read = oracle.begin_read();
        oracle.check_read(read, sector, bytes).unwrap_err().to_string()
    };
    let misplaced = says(5, &content(text, 4));
    assert!(misplaced.contains("the bytes of sector 4, version 8 (written to sectors 0..8"), "{misplaced}");
    let old = says(8, &content(same, 8));
    assert!(old.contains("version 22 (written to sectors 8..16, began 3, done 4), superseded"), "{old}");
    assert!(old.contains("allowed: version 26 (written to sectors 8..16, began 5, done 6)"), "{old}");
    assert!(says(30, &[9; 2 * SECTOR_BYTES]).contains("and 1 more sectors"));
    assert!(says(0, &[0; SECTOR_BYTES]).contains("found in sector 0 zeroes"));
    let noise: Vec<u8> = (0..=255).cycle().take(SECTOR_BYTES).collect();
    assert!(says(0, &noise).contains("garbage that begins with 000102"));
}

#[test]
fn what_is_over_takes_no_memory() {
    let mut bench = Bench::new(Durability::Flushed);
    for round in 0..50_u64 {
        bench.write(round + 1, if round % 3 == 0 { Outcome::Failed } else { DONE });
        bench.clear(Kind::Discard { zeroing: false });
        bench.clear(Kind::Zeroes);
        if round % 10 == 0 {
            bench.write(round + 100, DONE);
            bench.flush();
            assert!(bench.0.sectors.values().all(|sector| sector.now.len() + sector.past.len() == 1));
        }
    }
    bench.clear(Kind::Zeroes);
    bench.flush();
    assert!(bench.0.sectors.is_empty() && bench.0.with_past.is_empty());
    let mut bench = Bench::new(Durability::Nothing);
    for _ in 0..100 {
        bench.clear(Kind::Discard { zeroing: false });
    }
    assert!(bench.0.sectors.values().all(|sector| sector.now.len() <= 2));
}

#[test]
fn what_lies_behind_a_head_that_is_turned_stays() {
    let mut bench = Bench::new(Durability::Nothing);
    let taken = bench.0.snapshot("taken", Durability::Nothing);
    bench.write(1, DONE);
    let verb = bench.0.begin_read();
    bench.0.turn_head_into(verb, 10, &taken, false);
    let mut want = bytes(1);
    want[..2 * SECTOR_BYTES].fill(0);
    let read = bench.0.begin_read();
    bench.0.check_read(read, 8, &want).unwrap();
}

#[test]
fn zeroes_after_a_crash_may_be_those_of_a_discard_since() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, DONE);
    bench.0.crash();
    bench.clear(Kind::Discard { zeroing: false });
    bench.sees(0);
    bench.may_see(&[0]);
    bench.may_see_after_crash(&[0, 1]);
}

#[test]
fn while_a_device_is_turned_into_another_either_may_be_seen() {
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, DONE);
    let before = bench.0.begin_read();
    let snapshot = Arc::new(bench.0.snapshot_since(before, "snapshot", Durability::Nothing));
    bench.write(2, DONE);
    let verb = bench.0.begin_turn(&snapshot);
    bench.may_see(&[1, 2]);
    bench.write(3, DONE);
    bench.may_see(&[1, 3]);
    bench.0.turn_into(verb, &snapshot, false);
    bench.may_see(&[1, 3]);
    bench.write(4, DONE);
    bench.may_see(&[4]);
}

#[test]
fn snapshots_of_one_moment_show_what_was_answered_before_what_one_of_them_shows() {
    let clock = Clock::default();
    let [mut first, mut second] =
        [(); 2].map(|()| Bench(Oracle::timed("disk", 64, Durability::Nothing, &clock)));
    let whole = |serial: Option<u64>| {
        let mut all = vec![0; 64 * SECTOR_BYTES];
        if let Some(serial) = serial {
            fill(id(serial), 8, &mut all[8 * SECTOR_BYTES..16 * SECTOR_BYTES]);
        }
        all
    };
    let verbs = [first.0.begin_read(), second.0.begin_read()];
    first.write(1, DONE);
    second.write(2, DONE);
    for (of_first, of_second, good) in
        [(None, None, true), (Some(1), None, true), (Some(1), Some(2), true), (None, Some(2), false)]
    {
        let shown = [(&first.0, &verbs[0], whole(of_first)), (&second.0, &verbs[1], whole(of_second))];
        let moment = shown.iter().map(|(oracle, verb, bytes)| oracle.latest(verb, bytes)).max().unwrap();
        let judged =
            shown.iter().all(|(oracle, verb, bytes)| oracle.check_moment(verb, moment, bytes).is_ok());
        assert_eq!(judged, good, "{of_first:?} {of_second:?}");
    }
}
