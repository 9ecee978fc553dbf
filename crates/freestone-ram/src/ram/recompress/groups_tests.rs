//! Tests of groups, step by step: each operation on pages that are in a group.

use super::*;
use crate::codec::Algorithm;
use crate::ram::tests::{MIB, change, config, content, word};
use crate::ram::{Config, Ram};
use crate::transfer::{CollectedPages, ReadStored as _, StoredForm};
use freestone_core::device::{Blocking, Error, Flags};

/// Age at which pages are grouped: longer than any test runs, so that only [`group`] makes pages
/// old.
const AGE: Duration = Duration::from_secs(24 * 3600);
pub(in crate::ram) const PAGES: u64 = 64;

pub(in crate::ram) fn config_with_groups() -> Config {
    Config { auto_group: Some(AGE), ..config(MIB) }
}

pub(in crate::ram) fn text(seed: u64) -> Vec<u8> {
    content(3, seed, PAGE_BYTES)
}

pub(in crate::ram) fn write(ram: &Ram, slots: std::ops::Range<u64>, seed: u64) {
    for slot in slots {
        ram.write_at(slot * PAGE, &text(slot + seed), Flags::empty()).unwrap();
    }
}

pub(in crate::ram) fn read(ram: &Ram, slot: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE_BYTES];
    ram.read_at(slot * PAGE, &mut page).unwrap();
    page
}

/// Runs steps to the end of a pass, without a pause before it.
pub(in crate::ram) fn steps(ram: &Ram) {
    let groups = &ram.0.family.groups;
    groups.state.lock().next_pass_ms = 0;
    while !groups.step() {
        // The keeper's own step may have ended the pass.
        groups.state.lock().next_pass_ms = 0;
    }
}

/// Runs the steps of a whole pass that treats no page as known.
fn pass(ram: &Ram) {
    let groups = &ram.0.family.groups;
    // The keeper's own step may have begun a pass: the second pass is complete.
    for _ in 0..2 {
        groups.state.lock().complete_ms = None;
        steps(ram);
    }
}

/// Makes pages old, and groups them.
pub(in crate::ram) fn group(ram: &Ram, slots: std::ops::Range<u64>) {
    for slot in slots {
        change(ram, slot, |word| word.with_age(0));
    }
    pass(ram);
}

/// Returns a disk with 64 pages in 8 groups.
pub(in crate::ram) fn grouped(config: Config) -> Ram {
    let ram = Ram::new(config).unwrap();
    write(&ram, 0..PAGES, 0);
    group(&ram, 0..PAGES);
    assert_eq!(stat(&ram).pages, PAGES);
    ram
}

pub(in crate::ram) fn stat(ram: &Ram) -> GroupStat {
    ram.group_stat().unwrap()
}

pub(in crate::ram) fn is_grouped(ram: &Ram, slot: u64) -> bool {
    word(ram, slot).is_grouped()
}

/// Checks the accounts against the slots, and that no slot is picked.
pub(in crate::ram) fn check_books(ram: &Ram) {
    let (mut memory, mut charged) = (0, 0);
    for slot in 0..PAGES {
        let word = word(ram, slot);
        assert!(!word.is_picked(), "slot {slot} was left picked");
        memory += word.memory_bytes() as u64;
        charged += if word.memory_bytes() > 0 { Pool::charged_bytes(word.memory_bytes()) } else { 0 };
    }
    assert_eq!(ram.mm_stat().compr_data_size, memory);
    assert_eq!(ram.0.layer().charged(), charged);
}

/// Waits until the cleaner has freed all groups.
pub(in crate::ram) fn wait_until_free(ram: &Ram) {
    let end = Instant::now() + Duration::from_secs(20);
    while stat(ram).groups > 0 {
        assert!(Instant::now() < end, "{:?}", stat(ram));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((stat(ram).pages, stat(ram).bytes), (0, 0));
}

#[test]
fn group_takes_less_memory_and_keeps_content() {
    let ram = Ram::new(config_with_groups()).unwrap();
    write(&ram, 0..PAGES, 0);
    change(&ram, 3, |word| word.with_idle(true));
    let before = ram.mm_stat();
    group(&ram, 0..PAGES);
    let (after, stat) = (ram.mm_stat(), stat(&ram));
    assert_eq!((stat.groups, stat.pages, stat.grouped, stat.ungrouped), (PAGES / 8, PAGES, PAGES, 0));
    assert!(after.compr_data_size < before.compr_data_size * 3 / 4, "{before:?} {after:?}");
    assert_eq!(after.compr_data_size, stat.bytes, "the pages are charged for the groups' bytes");
    assert_eq!(after.orig_data_size, before.orig_data_size);
    assert!((0..PAGES).all(|slot| is_grouped(&ram, slot) && word(&ram, slot).age() == 0));
    assert!(word(&ram, 3).is_idle() && !word(&ram, 4).is_idle());
    check_books(&ram);
    // In order, backwards, and parts of pages.
    for slot in (0..PAGES).chain((0..PAGES).rev()) {
        assert!(read(&ram, slot) == text(slot), "slot {slot}");
    }
    for slot in [5, 60, 1] {
        let mut part = [0; 512];
        ram.read_at(slot * PAGE + 1024, &mut part).unwrap();
        assert_eq!(part, text(slot)[1024..1536]);
    }
    let mut all = vec![0; (PAGES * PAGE) as usize];
    ram.read_at(0, &mut all).unwrap();
    assert!(all == (0..PAGES).flat_map(text).collect::<Vec<_>>());
    assert!(!word(&ram, 3).is_idle(), "a read clears the idle mark");
    assert_eq!((stat.table_bytes, ram.memory_overhead().leaves_bytes), (8192, 16384));
    assert!(ram.memory_overhead().streams_bytes > 0);
}

#[test]
fn changed_pages_leave_their_group() {
    let ram = grouped(config_with_groups());
    ram.write_at(8 * PAGE, &text(1000), Flags::empty()).unwrap();
    ram.write_at(9 * PAGE + 512, &[7; 512], Flags::empty()).unwrap();
    ram.discard(10 * PAGE, PAGE).unwrap();
    ram.write_zeroes(11 * PAGE, PAGE, Flags::empty()).unwrap();
    let mut patched = text(9);
    patched[512..1024].fill(7);
    let zeroes = vec![0; PAGE_BYTES];
    for (slot, wanted) in [(8, text(1000)), (9, patched), (10, zeroes.clone()), (11, zeroes)] {
        assert!(!is_grouped(&ram, slot) && read(&ram, slot) == wanted, "slot {slot}");
    }
    assert!((12..16).all(|slot| is_grouped(&ram, slot) && read(&ram, slot) == text(slot)));
    assert_eq!((stat(&ram).groups, stat(&ram).pages), (PAGES / 8, PAGES - 4));
    check_books(&ram);
    ram.discard(12 * PAGE, 4 * PAGE).unwrap();
    assert_eq!(stat(&ram).groups, PAGES / 8 - 1, "the last page frees the group");
    check_books(&ram);
    ram.discard(0, PAGES * PAGE).unwrap();
    wait_until_free(&ram);
    assert_eq!(ram.mm_stat().compr_data_size, 0);
    ram.compact();
    assert!(ram.mm_stat().mem_used_total < 64 << 10, "{:?}", ram.mm_stat());
}

#[test]
fn numbers_of_freed_groups_are_reused() {
    let ram = grouped(config_with_groups());
    for round in 1..4 {
        // Fill the readers of the CPUs with groups that are freed next.
        assert!((0..PAGES).all(|slot| read(&ram, slot) == text(slot + (round - 1) * 100)));
        write(&ram, 0..PAGES, round * 100);
        assert_eq!(stat(&ram).groups, 0);
        group(&ram, 0..PAGES);
        assert!((0..PAGES).all(|slot| word(&ram, slot).location() < PAGES));
        assert!(
            (0..PAGES).all(|slot| is_grouped(&ram, slot) && read(&ram, slot) == text(slot + round * 100))
        );
    }
}

#[test]
fn pages_that_do_not_gain_stay_alone() {
    let ram = Ram::new(config_with_groups()).unwrap();
    // Noise; fewer than four pages near each other; same-filled and young pages.
    (0..8).for_each(|slot| ram.write_at(slot * PAGE, &content(5, slot, PAGE_BYTES), Flags::empty()).unwrap());
    write(&ram, 8..11, 0);
    (16..24).for_each(|slot| ram.write_at(slot * PAGE, &[9; PAGE_BYTES], Flags::empty()).unwrap());
    write(&ram, 24..32, 0);
    let before = ram.mm_stat();
    group(&ram, 0..24);
    assert_eq!((stat(&ram).groups, stat(&ram).grouped, ram.mm_stat()), (0, 0, before));
    check_books(&ram);
    // Known pages are not compressed again, and a page that has become cold makes its neighbours
    // new.
    write(&ram, 11..12, 0);
    change(&ram, 11, |word| word.with_age(0));
    steps(&ram);
    assert_eq!(stat(&ram).groups, 0, "age 0 is known");
    ram.0.family.groups.state.lock().complete_ms = None;
    pass(&ram);
    assert_eq!(stat(&ram).pages, 4);
    assert!((8..12).all(|slot| is_grouped(&ram, slot) && read(&ram, slot) == text(slot)));
}

#[test]
fn pages_of_every_algorithm_are_grouped() {
    for comp_algorithm in Algorithm::ALL {
        let ram = Ram::new(Config { comp_algorithm, ..config_with_groups() }).unwrap();
        let page = |slot: u64| content(if slot.is_multiple_of(2) { 4 } else { 3 }, slot, PAGE_BYTES);
        (0..PAGES).for_each(|slot| ram.write_at(slot * PAGE, &page(slot), Flags::empty()).unwrap());
        group(&ram, 0..PAGES);
        assert!((0..PAGES).all(|slot| read(&ram, slot) == page(slot)), "{comp_algorithm}");
        assert!(comp_algorithm != Algorithm::Store || stat(&ram).pages == PAGES);
        check_books(&ram);
    }
}

/// A write between the copy of a page and the publication of its group stays.
#[test]
fn page_written_during_grouping_stays() {
    let ram = Ram::new(config_with_groups()).unwrap();
    write(&ram, 0..8, 0);
    (0..8).for_each(|slot| change(&ram, slot, |word| word.with_age(0)));
    let (groups, layer) = (ram.0.pages.groups().unwrap(), ram.0.layer());
    let _one = ram.0.pages.background.lock();
    let leaf = layer.table().leaf(0).unwrap();
    let selection = Selection { groups, is_wanted: &is_alone, clears_idle: false };
    let pick = |slot| ram.0.family.groups.pick(&selection, &layer, leaf, slot).unwrap();
    let picked = [2, 3].map(|slot| (slot, pick(slot)));
    write(&ram, 2..3, 500);
    // A read does not clear the mark, and a picked slot is not picked twice.
    assert!(read(&ram, 3) == text(3) && word(&ram, 3).is_picked());
    assert!(ram.0.family.groups.pick(&selection, &layer, leaf, 3).is_none());
    let kept =
        picked.map(|(slot, (old, _))| finish_picked(&ram.0.pages, &layer, leaf, slot, old, &|word| word));
    assert_eq!(kept, [false, true]);
    assert!(read(&ram, 2) == text(502) && !word(&ram, 2).is_picked() && !word(&ram, 3).is_picked());
    check_books(&ram);
}

#[test]
fn snapshots_and_forks_read_grouped_pages() {
    let ram = grouped(config_with_groups());
    let snapshot = ram.snapshot().unwrap();
    let fork = snapshot.fork(&crate::ram::ForkConfig::default()).unwrap();
    let check = |fork: &Ram, changed: u64| {
        for slot in 0..PAGES {
            let wanted = text(slot);
            assert!(read(&snapshot, slot) == wanted, "slot {slot} of the snapshot");
            assert!(slot == changed || read(fork, slot) == wanted, "slot {slot} of the fork");
        }
    };
    check(&fork, PAGES);
    // The words of written pages move to the snapshot, in the group.
    write(&ram, 0..20, 3000);
    fork.write_at(5 * PAGE + 512, &[1; 512], Flags::empty()).unwrap();
    check(&fork, 5);
    assert!((0..20).all(|slot| word(&snapshot, slot).is_grouped()));
    assert_eq!((stat(&ram).groups, stat(&ram).pages), (PAGES / 8, PAGES));
    check_books(&ram);
    let charged = snapshot.over_stat().charged + ram.over_stat().charged + fork.over_stat().charged;
    assert_eq!(charged, ram.family().stat().charged);
    // A rewind of the origin leaves the pages to the snapshot.
    ram.rewind().unwrap();
    assert!(read(&ram, 0) == [0; PAGE_BYTES]);
    check(&fork, 5);
    fork.rewind().unwrap();
    check(&fork, PAGES);
    drop(fork);
    drop(snapshot);
    wait_until_free(&ram);
}

/// Pages of a removed snapshot move to an older one, or are freed.
#[test]
fn removed_snapshot_passes_grouped_pages_on() {
    let ram = grouped(config_with_groups());
    let older = ram.snapshot().unwrap();
    let newer = ram.snapshot().unwrap();
    write(&ram, 0..PAGES, 1000);
    assert!(is_grouped(&newer, 9) && word(&older, 9) == Word::EMPTY);
    drop(newer);
    let end = Instant::now() + Duration::from_secs(20);
    while !word(&older, 9).is_grouped() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!((0..PAGES).all(|slot| read(&older, slot) == text(slot)));
    drop(older);
    wait_until_free(&ram);
    assert!((0..PAGES).all(|slot| read(&ram, slot) == text(slot + 1000)));
    // A reset frees the groups of the device itself.
    group(&ram, 0..PAGES);
    assert_eq!(stat(&ram).groups, PAGES / 8);
    ram.reset().unwrap();
    wait_until_free(&ram);
}

/// Checks the content of a saved snapshot of the disk.
pub fn check_saved(ram: &Ram) {
    let snapshot = ram.snapshot().unwrap();
    let mut collected = CollectedPages::default();
    snapshot.copy_pages(0..PAGES, None, &mut collected).unwrap();
    let mut slots = 0..PAGES;
    for (slot, form, bytes) in collected.iter() {
        assert_eq!(Some(slot), slots.next());
        let mut page = [0; PAGE_BYTES];
        match form {
            StoredForm::Compressed(0) => ram.0.pages.codecs.decompress(0, bytes, &mut page).unwrap(),
            form => {
                assert_eq!(form, StoredForm::Huge);
                page.copy_from_slice(bytes);
            }
        }
        assert!(page == text(slot)[..], "slot {slot}");
    }
    assert_eq!(slots.next(), None);
}

#[test]
fn saved_pages_leave_the_form_of_the_group() {
    let ram = grouped(config_with_groups());
    check_saved(&ram);
    assert!((0..PAGES).all(|slot| word(&ram, slot).age() == 0), "ages do not change");
}

#[test]
fn compaction_moves_pieces() {
    let ram = grouped(config_with_groups());
    // Holes among the pieces.
    for slot in (0..PAGES).filter(|slot| slot / 8 % 2 == 0) {
        ram.write_at(slot * PAGE, &[0; PAGE_BYTES], Flags::empty()).unwrap();
    }
    let before = ram.mm_stat().mem_used_total;
    ram.compact();
    assert!(ram.mm_stat().mem_used_total < before);
    for slot in (0..PAGES).filter(|slot| slot / 8 % 2 == 1) {
        assert!(is_grouped(&ram, slot) && read(&ram, slot) == text(slot), "slot {slot}");
    }
}

#[test]
fn damaged_group_fails_reads_of_its_pages_only() {
    let ram = grouped(config_with_groups());
    let groups = ram.0.pages.groups().unwrap();
    let slot = word(&ram, 8).location() / 8 * 8 + 1;
    {
        let mut guard =
            groups.piece_slot(crate::pool::BackRef::new(crate::pool::backrefs::MAX_TABLE_ID, slot)).unwrap();
        let bytes = ram.0.pages.pool.object(&guard).len();
        ram.0.pages.pool.overwrite(&mut guard, &vec![0xFF; bytes]);
    }
    let mut page = [0; PAGE_BYTES];
    assert_eq!(ram.read_at(8 * PAGE, &mut page), Err(Error::Media));
    assert_eq!(ram.read_at(8 * PAGE, &mut page), Err(Error::Media));
    assert_eq!(ram.write_at(9 * PAGE, &[1; 512], Flags::empty()), Err(Error::Media));
    assert!(read(&ram, 0) == text(0) && read(&ram, 16) == text(16));
    let snapshot = ram.snapshot().unwrap();
    let mut collected = CollectedPages::default();
    snapshot.copy_pages(7..9, None, &mut collected).unwrap();
    let forms: Vec<_> = collected.iter().map(|(_, form, _)| form).collect();
    assert!(matches!(forms[..], [StoredForm::Huge, StoredForm::Lost { permanent: true }]), "{forms:?}");
    drop(snapshot);
    // A page that is written as a whole is well again.
    write(&ram, 8..16, 0);
    assert!((0..PAGES).all(|slot| read(&ram, slot) == text(slot)));
}

#[test]
fn page_read_often_is_taken_out() {
    let ram = grouped(config_with_groups());
    for _ in 0..Word::READS_MAX {
        assert!(read(&ram, 8) == text(8));
        ram.0.pages.ages.advance(clock::now_ms());
    }
    read(&ram, 9);
    assert_eq!((word(&ram, 8).reads(), word(&ram, 9).reads()), (3, 1));
    pass(&ram);
    assert!(!is_grouped(&ram, 8) && is_grouped(&ram, 9) && read(&ram, 8) == text(8));
    assert_eq!((stat(&ram).ungrouped, stat(&ram).pages), (1, PAGES - 1));
    // A page that is cold again forgets its reads.
    change(&ram, 9, |word| word.with_age(0));
    pass(&ram);
    assert!(word(&ram, 9).reads() == 0 && is_grouped(&ram, 9));
    check_books(&ram);
}

#[test]
fn sparse_group_is_dissolved_and_formed_again() {
    let ram = grouped(config_with_groups());
    write(&ram, 8..11, 100);
    pass(&ram);
    assert!((11..16).all(|slot| is_grouped(&ram, slot)), "five of eight pages are enough");
    write(&ram, 11..12, 100);
    pass(&ram);
    assert!((8..16).all(|slot| !is_grouped(&ram, slot)));
    assert_eq!((stat(&ram).ungrouped, stat(&ram).groups), (4, PAGES / 8 - 1));
    check_books(&ram);
    group(&ram, 8..16);
    assert!((8..16).all(|slot| is_grouped(&ram, slot)));
    let wanted = |slot: u64| text(if slot < 12 { slot + 100 } else { slot });
    assert!((8..16).all(|slot| read(&ram, slot) == wanted(slot)));
}

/// Without space the pages stay as they are, and the next pass tries again.
#[test]
fn group_without_space_leaves_pages() {
    let ram = Ram::new(config_with_groups()).unwrap();
    write(&ram, 0..PAGES, 0);
    ram.compact();
    let before = ram.mm_stat();
    ram.set_mem_limit(before.mem_used_total - PAGE);
    (0..PAGES).for_each(|slot| change(&ram, slot, |word| word.with_age(0)));
    ram.0.family.groups.state.lock().complete_ms = None;
    steps(&ram);
    assert_eq!((stat(&ram).grouped, ram.mm_stat().compr_data_size), (0, before.compr_data_size));
    assert_eq!(ram.0.family.groups.state.lock().complete_ms, None, "the pages do not count as known");
    check_books(&ram);
    ram.set_mem_limit(before.mem_used_total + 16 * PAGE);
    pass(&ram);
    assert_eq!(stat(&ram).pages, PAGES);
    assert!((0..PAGES).all(|slot| read(&ram, slot) == text(slot)));
}

/// A device with a memory limit of its own is charged for its share of the groups.
#[test]
fn own_limit_counts_shares() {
    let ram = grouped(config_with_groups());
    let charged = ram.0.layer().charged();
    assert_eq!(charged, stat(&ram).bytes);
    ram.set_own_limits(charged.max(64 << 10) + 2 * PAGE, 0).unwrap();
    let is_refused = |slot: &u64| ram.write_at(slot * PAGE, &text(*slot), Flags::empty()).is_err();
    let refused = (PAGES..PAGES + 32).filter(is_refused).count();
    assert!(refused > 16, "{refused} of 32 writes are beyond the limit");
}
