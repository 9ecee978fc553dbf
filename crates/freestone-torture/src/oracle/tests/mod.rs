//! Reads without a crash, messages and bounds; the rooms below have crashes and whole-device verbs.

mod crashes;
mod snapshots;

use super::*;

const DONE: Outcome = Outcome::Done { fua: false };
const FUA: Outcome = Outcome::Done { fua: true };

/// A device with an oracle, and short names for its operations.
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

    /// Judges a read that finds the content of write `version` in all sectors; 0 means zeroes.
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

    /// Asserts that reads may return exactly these versions. Reads from clones, so the oracle does
    /// not change.
    #[track_caller]
    fn may_see(&self, versions: &[u64]) {
        for version in 0..10 {
            let seen = Self(self.0.clone()).finds(version);
            assert_eq!(seen.is_ok(), versions.contains(&version), "{version} of {versions:?}: {seen:?}");
        }
    }

    /// Asserts that reads after a crash may return exactly these versions. Reads from clones.
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

/// Returns the content of sectors 8 to 15 after write number `serial`; zeroes for 0.
fn bytes(serial: u64) -> Vec<u8> {
    let mut out = vec![0; 8 * SECTOR_BYTES];
    if serial > 0 {
        fill(id(serial), 8, &mut out);
    }
    out
}

#[test]
fn completed_write_is_the_only_allowed_version() {
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
fn write_in_flight_allows_old_and_new() {
    let mut bench = Bench::new(Durability::Nothing);
    bench.write(1, DONE);
    let two = bench.begin(2);
    bench.may_see(&[1, 2]);
    bench.sees(2);
    bench.0.end(two, DONE);
    bench.may_see(&[2]);
}

#[test]
fn overlapping_writes_leave_either_until_read() {
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
fn write_replaces_versions_completed_before_its_start() {
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
fn read_allows_versions_since_its_start() {
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
    assert!(bench.0.sectors_with_past.is_empty(), "it was kept for reads that are over");
}

#[test]
fn failed_write_leaves_old_or_new_until_read() {
    for shown in [1, 2] {
        let mut bench = Bench::new(Durability::Flushed);
        bench.write(1, DONE);
        bench.write(2, Outcome::Failed);
        bench.may_see(&[1, 2]);
        bench.sees(shown);
        bench.may_see(&[shown]);
        let flips = bench.finds(3 - shown).unwrap_err();
        assert!(flips.to_string().contains("showed to be absent"), "{flips}");
        bench.may_see_after_crash(&[0, 1, 2]);
        bench.write(3, DONE);
        bench.may_see(&[3]);
        bench.flush();
        bench.may_see_after_crash(&[3]);
    }
}

#[test]
fn failed_write_may_tear_between_sectors_only() {
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
fn read_overlapping_write_settles_nothing() {
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
fn refused_write_has_no_effect() {
    let mut bench = Bench::new(Durability::Flushed);
    bench.write(1, FUA);
    bench.write(2, Outcome::Refused);
    bench.may_see(&[1]);
    bench.may_see_after_crash(&[1]);
}

#[test]
fn discard_leaves_zeroes_or_old_until_read() {
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

#[test]
fn grown_range_reads_as_zeroes() {
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

#[test]
fn violation_describes_found_and_allowed() {
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
fn superseded_versions_are_dropped() {
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
    assert!(bench.0.sectors.is_empty() && bench.0.sectors_with_past.is_empty());
    let mut bench = Bench::new(Durability::Nothing);
    for _ in 0..100 {
        bench.clear(Kind::Discard { zeroing: false });
    }
    assert!(bench.0.sectors.values().all(|sector| sector.now.len() <= 2));
}

#[test]
fn check_moment_rejects_missing_earlier_write() {
    let clock = Clock::default();
    let [mut first, mut second] =
        [(); 2].map(|()| Bench(Oracle::with_clock("disk", 64, Durability::Nothing, &clock)));
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
