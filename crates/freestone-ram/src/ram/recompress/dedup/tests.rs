//! Tests of shared objects, step by step: each operation on pages that share an object.

use std::collections::BTreeMap;
use std::ops::Range;

use super::*;
use crate::pool::Pool;
use crate::ram::tests::{MIB, change, config, content, word};
use crate::ram::{Config, ForkConfig, Ram, Writeback};
use crate::transfer::{CollectedPages, ReadStored as _, StoredForm};
use freestone_core::device::{Blocking, Error, Flags};
use freestone_core::slot::LEAF_SLOTS;

/// Age at which pages are compared: longer than any test runs, so that only [`pass`] makes pages
/// old.
const AGE: Duration = Duration::from_secs(24 * 3600);
pub(super) const PAGES: u64 = 64;

pub(super) fn config_with_dedup() -> Config {
    Config { auto_dedup: Some(AGE), ..config(MIB) }
}

/// Returns a page that every algorithm but `store` compresses.
pub(super) fn text(seed: u64) -> Vec<u8> {
    content(3, seed, PAGE_BYTES / 2).repeat(2)
}

pub(super) fn write(ram: &Ram, slots: Range<u64>, seed: u64) {
    for slot in slots {
        ram.write_at(slot * PAGE, &text(slot + seed), Flags::empty()).unwrap();
    }
}

pub(super) fn read(ram: &Ram, slot: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE_BYTES];
    ram.read_at(slot * PAGE, &mut page).unwrap();
    page
}

/// Runs steps to the end of a pass, without a pause before it. Does nothing if pages are compared on
/// request only.
fn steps(ram: &Ram) {
    let dedup = &ram.0.family.dedup;
    if dedup.age.is_none() {
        return;
    }
    dedup.state.lock().next_pass_ms = 0;
    while !dedup.step() {
        // The keeper's own step may have ended the pass.
        dedup.state.lock().next_pass_ms = 0;
    }
}

/// Runs the steps of a whole pass that treats no page as known.
pub(super) fn pass(ram: &Ram) {
    // The keeper's own step may have begun a pass: the second pass is complete.
    for _ in 0..2 {
        ram.0.family.dedup.state.lock().complete_ms = None;
        steps(ram);
    }
}

/// Makes all pages of the family old, and runs a pass.
pub(super) fn dedup(ram: &Ram) {
    for layer in ram.0.pages.layers.all() {
        layer.for_each_leaf(|start, leaf| {
            for slot in start..start + LEAF_SLOTS {
                let guard = leaf.lock(slot);
                let word = guard.word();
                if word.memory_bytes() > 0 {
                    guard.publish(word.with_age(0));
                }
            }
        });
    }
    pass(ram);
}

/// Returns two disks of a family whose pages share objects: slot `n` of the second has the content
/// of slot `63 - n` of the first.
fn pair(config: Config) -> (Ram, Ram) {
    let first = Ram::new(config).unwrap();
    let second = first.family().ram(MIB).unwrap();
    write(&first, 0..PAGES, 0);
    (0..PAGES).for_each(|slot| second.write_at(slot * PAGE, &text(63 - slot), Flags::empty()).unwrap());
    dedup(&first);
    assert_eq!((stat(&first).objects, stat(&first).pages, stat(&first).shared), (PAGES, 2 * PAGES, PAGES));
    (first, second)
}

pub(super) fn stat(ram: &Ram) -> DedupStat {
    ram.dedup_stat().unwrap()
}

fn users(ram: &Ram, slot: u64) -> u32 {
    ram.0.pages.shared().unwrap().users_of(word(ram, slot))
}

/// Waits until the cleaner has freed all former layers of the family.
pub(super) fn wait_until_freed(ram: &Ram) {
    let end = Instant::now() + Duration::from_secs(20);
    while ram.0.pages.is_freeing() || ram.0.pages.removals.is_pending() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Checks the accounts of the family against its slots, while no request runs: the users of each
/// object, the charges of each layer, and the memory of all objects.
pub(super) fn check_books(ram: &Ram) {
    wait_until_freed(ram);
    let pages = &ram.0.pages;
    let _one = pages.background.lock();
    let (mut users, mut own, mut all) = (BTreeMap::new(), 0, 0);
    for layer in pages.layers.all() {
        let (mut memory, mut charged) = (0, 0);
        layer.for_each_leaf(|start, leaf| {
            for word in (start..start + LEAF_SLOTS).map(|slot| leaf.peek(slot)) {
                assert!(!word.is_picked());
                let bytes = match word.memory_bytes() {
                    0 => 0,
                    bytes => Pool::charged_bytes(bytes),
                };
                (memory, charged) = (memory + word.memory_bytes() as u64, charged + bytes);
                if word.is_shared() {
                    *users.entry(word.shared_number()).or_insert(0) += 1;
                } else {
                    own += bytes;
                }
            }
        });
        assert_eq!((layer.get(stored::COMPRESSED_BYTES), layer.charged()), (memory, charged));
        all += charged;
    }
    let stat = stat(ram);
    assert_eq!((stat.objects, stat.pages), (users.len() as u64, users.values().map(|&n| u64::from(n)).sum()));
    let shared = pages.shared().unwrap();
    assert!(users.iter().all(|(&number, &users)| shared.users(number) == users));
    assert_eq!(all, own + stat.bytes + stat.saved_bytes, "{stat:?}");
    assert!(pages.pool.pages() * PAGE >= own + stat.bytes);
}

/// Drops the devices, and checks that no memory is left.
pub(super) fn check_end(probe: &Ram, devices: Vec<Ram>) {
    drop(devices);
    probe.reset().unwrap();
    wait_until_freed(probe);
    check_books(probe);
    let (stat, family) = (stat(probe), probe.family().stat());
    assert_eq!((stat.objects, stat.pages, stat.bytes, stat.saved_bytes), (0, 0, 0, 0));
    probe.compact();
    probe.0.pages.pool.release_empties();
    assert_eq!((family.charged, probe.0.pages.pool.pages()), (0, 0));
}

#[test]
fn equal_pages_take_the_memory_of_one() {
    let first = Ram::new(config_with_dedup()).unwrap();
    let second = first.family().ram(MIB).unwrap();
    write(&first, 0..PAGES, 0);
    (0..PAGES).for_each(|slot| second.write_at(slot * PAGE, &text(63 - slot), Flags::empty()).unwrap());
    // A third user on the same disk, and pages that have no match.
    first.write_at(PAGES * PAGE, &text(5), Flags::empty()).unwrap();
    write(&second, PAGES..PAGES + 8, 1000);
    change(&first, 3, |word| word.with_idle(true));
    let (before, charged) = (first.family().stat(), [&first, &second].map(|ram| ram.over_stat().charged));
    dedup(&first);
    let stat = stat(&first);
    assert_eq!((stat.objects, stat.pages, stat.shared), (PAGES, 2 * PAGES + 1, PAGES + 1));
    assert_eq!([&first, &second].map(|ram| ram.over_stat().charged), charged, "charges do not change");
    assert!(stat.saved_bytes > stat.bytes && stat.table_bytes == 8192, "{stat:?}");
    assert_eq!(stat.fingerprint_bytes, first.0.family.dedup.state.lock().fingerprints.bytes());
    assert_eq!((users(&first, 5), users(&first, 6), word(&first, 5).age()), (3, 2, 0));
    assert!(word(&first, 3).is_idle() && !word(&first, 4).is_idle());
    check_books(&first);
    first.compact();
    let after = first.family().stat();
    assert!(after.mem_used_total * 5 < before.mem_used_total * 3, "{before:?} {after:?}");
    assert_eq!(after.charged, before.charged);
    let overhead = first.memory_overhead();
    assert!(overhead.pool_slack_bytes < after.mem_used_total / 4, "{overhead:?} {after:?}");
    for slot in 0..PAGES {
        assert!(read(&first, slot) == text(slot) && read(&second, slot) == text(63 - slot), "slot {slot}");
        let mut part = [0; 512];
        second.read_at(slot * PAGE + 1024, &mut part).unwrap();
        assert_eq!(part, text(63 - slot)[1024..1536]);
    }
    assert!(!word(&first, 3).is_idle() && word(&first, 3).is_shared(), "a read clears the idle mark");
    check_end(&first, vec![second]);
}

#[test]
fn changed_pages_leave_the_others() {
    let (first, second) = pair(config_with_dedup());
    second.write_at(8 * PAGE, &text(1000), Flags::empty()).unwrap();
    second.write_at(9 * PAGE + 512, &[7; 512], Flags::empty()).unwrap();
    second.discard(10 * PAGE, PAGE).unwrap();
    second.write_zeroes(11 * PAGE, PAGE, Flags::empty()).unwrap();
    let mut patched = text(54);
    patched[512..1024].fill(7);
    let zeroes = vec![0; PAGE_BYTES];
    for (slot, wanted) in [(8, text(1000)), (9, patched), (10, zeroes.clone()), (11, zeroes)] {
        assert!(!word(&second, slot).is_shared() && read(&second, slot) == wanted, "slot {slot}");
        assert_eq!(users(&first, 63 - slot), 1);
    }
    assert!((0..PAGES).all(|slot| read(&first, slot) == text(slot)));
    assert_eq!((stat(&first).objects, stat(&first).pages), (PAGES, 2 * PAGES - 4));
    check_books(&first);
    write(&first, 52..56, 2000);
    assert_eq!(stat(&first).objects, PAGES - 4, "the last user frees the object");
    check_books(&first);
    // Numbers of freed objects are reused.
    write(&second, 0..4, 2052);
    dedup(&first);
    assert!((0..4).all(|slot| word(&second, slot).shared_number() < PAGES && users(&first, 52 + slot) == 2));
    assert!((0..4).all(|slot| read(&second, slot) == text(2052 + slot)));
    check_end(&first, vec![second]);
}

#[test]
fn only_user_takes_its_object_back() {
    let (first, second) = pair(config_with_dedup());
    second.discard(0, MIB).unwrap();
    assert_eq!((stat(&first).objects, stat(&first).saved_bytes, users(&first, 7)), (PAGES, 0, 1));
    change(&first, 7, |word| word.with_idle(true));
    let charged = first.over_stat().charged;
    pass(&first);
    assert_eq!((stat(&first).objects, stat(&first).pages), (0, 0));
    assert!((0..PAGES).all(|slot| word(&first, slot).kind() == Kind::Compressed));
    assert!(word(&first, 7).is_idle() && first.over_stat().charged == charged);
    check_books(&first);
    // The back-references are those of the pages again.
    (0..PAGES / 2).for_each(|slot| first.discard(2 * slot * PAGE, PAGE).unwrap());
    assert!(first.compact() > 0);
    assert!((0..PAGES / 2).all(|slot| read(&first, 2 * slot + 1) == text(2 * slot + 1)));
    // A page that has its object back is found again.
    second.write_at(0, &text(1), Flags::empty()).unwrap();
    dedup(&first);
    assert_eq!((users(&first, 1), stat(&first).objects), (2, 1));
    check_end(&first, vec![second]);
}

#[test]
fn pages_that_must_stay_alone_do() {
    let first = Ram::new(config_with_dedup()).unwrap();
    let second = first.family().ram(MIB).unwrap();
    for ram in [&first, &second] {
        // Patterns of 32 and 64 bits, and a page that compresses to a few bytes.
        ram.write_at(0, &[9; PAGE_BYTES], Flags::empty()).unwrap();
        ram.write_at(PAGE, &b"eight by".repeat(PAGE_BYTES / 8), Flags::empty()).unwrap();
        let mut short = [9; PAGE_BYTES];
        short[0] = 8;
        ram.write_at(2 * PAGE, &short, Flags::empty()).unwrap();
        write(ram, 3..6, 0);
    }
    // Young pages.
    change(&first, 3, |word| word.with_age(0));
    pass(&first);
    assert_eq!(
        stat(&first),
        DedupStat { fingerprint_bytes: stat(&first).fingerprint_bytes, ..DedupStat::default() }
    );
    // Pages of a device with guaranteed memory.
    first.set_mem_limit(2 * MIB);
    second.set_own_limits(0, MIB).unwrap();
    dedup(&first);
    assert_eq!(stat(&first).objects, 0);
    second.set_own_limits(0, 0).unwrap();
    dedup(&first);
    assert_eq!((stat(&first).objects, stat(&first).pages), (3, 6));
    check_books(&first);
}

/// Fingerprints of pages that have changed, or moved, lead to no wrong page.
#[test]
fn outdated_fingerprint_shares_nothing() {
    let first = Ram::new(config_with_dedup()).unwrap();
    let second = first.family().ram(MIB).unwrap();
    write(&first, 0..3, 0);
    dedup(&first);
    // Changed, moved to a snapshot, and gone.
    first.write_at(0, &text(500), Flags::empty()).unwrap();
    let snapshot = first.snapshot().unwrap();
    first.write_at(PAGE, &text(501), Flags::empty()).unwrap();
    first.discard(2 * PAGE, PAGE).unwrap();
    write(&second, 0..3, 0);
    (0..3).for_each(|slot| change(&second, slot, |word| word.with_age(0)));
    // Only pages that have become cold since the last pass are visited.
    first.0.family.dedup.state.lock().complete_ms = Some(0);
    pass_of_new_pages(&first, &second, 0..3);
    assert!((0..3).all(|slot| read(&second, slot) == text(slot)));
    assert!(read(&first, 0) == text(500) && read(&first, 1) == text(501) && read(&snapshot, 1) == text(1));
    check_books(&first);
    dedup(&first);
    assert_eq!(stat(&first).objects, 2, "a complete pass finds the pages of the snapshot");
    assert!(
        (0..3)
            .all(|slot| read(&second, slot) == text(slot)
                && (slot == 0 || read(&snapshot, slot) == text(slot)))
    );
    check_books(&first);
    check_end(&first, vec![second, snapshot]);
}

/// Compares single pages, as a pass that visits only these.
fn pass_of_new_pages(family: &Ram, of: &Ram, slots: Range<u64>) {
    let dedup = &family.0.family.dedup;
    let _one = family.0.pages.background.lock();
    let (shared, layer) = (family.0.pages.shared().unwrap(), of.0.layer());
    for slot in slots {
        let page = Candidate { layer: &layer, leaf: layer.table().leaf(slot).unwrap(), slot };
        let State { fingerprints, .. } = &mut *dedup.state.lock();
        let attempt = dedup.compare(shared, fingerprints, &page, &can_share);
        assert_eq!(attempt, Attempt::Failed, "slot {slot}");
    }
}

#[test]
fn pages_of_every_algorithm_and_huge_pages_share() {
    for comp_algorithm in crate::codec::Algorithm::ALL {
        let first = Ram::new(Config { comp_algorithm, ..config_with_dedup() }).unwrap();
        let second = first.family().ram(MIB).unwrap();
        let page = |slot: u64| if slot.is_multiple_of(2) { content(5, slot, PAGE_BYTES) } else { text(slot) };
        for ram in [&first, &second] {
            (0..PAGES).for_each(|slot| ram.write_at(slot * PAGE, &page(slot), Flags::empty()).unwrap());
        }
        let charged = first.over_stat().charged;
        dedup(&first);
        assert_eq!((stat(&first).objects, first.over_stat().charged), (PAGES, charged), "{comp_algorithm}");
        assert!((0..PAGES).all(|slot| read(&first, slot) == page(slot) && read(&second, slot) == page(slot)));
        assert_eq!(first.mm_stat().huge_pages, 0, "a shared page is in no object of its own");
        check_books(&first);
        first.discard(0, MIB).unwrap();
        let since = second.mm_stat().huge_pages_since;
        pass(&first);
        assert!((0..PAGES).all(|slot| read(&second, slot) == page(slot) && !word(&second, slot).is_shared()));
        let stat = second.mm_stat();
        assert!(stat.huge_pages >= PAGES / 2 && stat.huge_pages_since == since, "{stat:?}");
        check_end(&first, vec![second]);
    }
}

#[test]
fn snapshots_forks_and_rewinds_keep_shared_pages() {
    let (first, second) = pair(config_with_dedup());
    let snapshot = first.snapshot().unwrap();
    let fork = snapshot.fork(&ForkConfig::default()).unwrap();
    let check = |fork: &Ram, changed: u64| {
        for slot in 0..PAGES {
            assert!(read(&snapshot, slot) == text(slot) && read(&second, slot) == text(63 - slot));
            assert!(slot == changed || read(fork, slot) == text(slot), "slot {slot} of the fork");
        }
    };
    check(&fork, PAGES);
    // The words of written pages move to the snapshot, and the pages still share their objects.
    write(&first, 0..20, 3000);
    fork.write_at(5 * PAGE + 512, &[1; 512], Flags::empty()).unwrap();
    check(&fork, 5);
    assert!((0..20).all(|slot| word(&snapshot, slot).is_shared() && users(&snapshot, slot) == 2));
    check_books(&first);
    first.rewind().unwrap();
    assert!(read(&first, 0) == [0; PAGE_BYTES]);
    check(&fork, 5);
    fork.rewind().unwrap();
    check(&fork, PAGES);
    second.grow(2 * MIB).unwrap();
    write(&second, 300..302, 0);
    dedup(&first);
    assert!((300..302).all(|slot| read(&second, slot) == text(slot)));
    check(&fork, PAGES);
    check_books(&first);
    drop(snapshot);
    let end = Instant::now() + Duration::from_secs(20);
    assert!((0..PAGES).all(|slot| read(&fork, slot) == text(slot)));
    drop((fork, second));
    while stat(&first).objects > 0 {
        assert!(Instant::now() < end, "{:?}", stat(&first));
        std::thread::sleep(Duration::from_millis(1));
    }
    check_end(&first, Vec::new());
}

#[test]
fn damaged_object_fails_reads_of_each_page() {
    let (first, second) = pair(config_with_dedup());
    {
        let owner = owner_of(word(&first, 8).shared_number());
        let mut guard = first.0.pages.shared().unwrap().object_slot(owner).unwrap();
        let bytes = first.0.pages.pool.object(&guard).len();
        first.0.pages.pool.overwrite(&mut guard, &vec![0xFF; bytes]);
    }
    let mut page = [0; PAGE_BYTES];
    for (ram, slot) in [(&first, 8), (&second, 55)] {
        assert_eq!(ram.read_at(slot * PAGE, &mut page), Err(Error::Media));
        assert_eq!(ram.write_at(slot * PAGE + 512, &[1; 512], Flags::empty()), Err(Error::Media));
    }
    assert!(read(&first, 7) == text(7) && read(&second, 56) == text(7));
    // A page that is written as a whole is well again, the other is not.
    write(&first, 8..9, 0);
    assert!(read(&first, 8) == text(8) && second.read_at(55 * PAGE, &mut page) == Err(Error::Media));
    dedup(&first);
    assert!(read(&first, 8) == text(8) && second.read_at(55 * PAGE, &mut page) == Err(Error::Media));
    check_end(&first, vec![second]);
}

#[test]
fn compaction_moves_shared_objects() {
    let (first, second) = pair(config_with_dedup());
    for slot in (0..PAGES).filter(|slot| slot % 2 == 0) {
        first.discard(slot * PAGE, PAGE).unwrap();
        second.discard((63 - slot) * PAGE, PAGE).unwrap();
    }
    assert!(first.compact() > 0);
    for slot in (0..PAGES).filter(|slot| slot % 2 == 1) {
        assert!(read(&first, slot) == text(slot) && read(&second, 63 - slot) == text(slot), "slot {slot}");
    }
    check_end(&first, vec![second]);
}

#[test]
fn saved_pages_have_the_form_of_the_object() {
    let (first, second) = pair(config_with_dedup());
    for ram in [&first, &second] {
        ram.write_at(PAGES * PAGE, &content(5, 9, PAGE_BYTES), Flags::empty()).unwrap();
    }
    dedup(&first);
    let snapshot = second.snapshot().unwrap();
    let mut collected = CollectedPages::default();
    snapshot.copy_pages(0..PAGES + 1, None, &mut collected).unwrap();
    let mut slots = 0..PAGES;
    for (slot, form, bytes) in collected.iter() {
        let mut page = [0; PAGE_BYTES];
        if slots.next() == Some(slot) {
            assert_eq!(form, StoredForm::Compressed(0));
            first.0.pages.codecs.decompress(0, bytes, &mut page).unwrap();
            assert!(page == text(63 - slot)[..], "slot {slot}");
        } else {
            assert!(form == StoredForm::Huge && bytes == content(5, 9, PAGE_BYTES), "slot {slot}");
        }
    }
    assert_eq!((slots.next(), collected.iter().count() as u64), (None, PAGES + 1));
    assert!((0..PAGES).all(|slot| word(&second, slot).age() == 0), "ages do not change");
    check_end(&first, vec![second, snapshot]);
}

#[test]
fn written_back_pages_have_objects_of_their_own() {
    for packed in [true, false] {
        let backing = Arc::new(Ram::new(config(4 * MIB)).unwrap());
        let (first, second) = pair(config_with_dedup().backed_by(backing, packed));
        let used = first.family().stat().mem_used_total;
        assert_eq!(first.writeback(&Writeback::Pages(vec![0..=PAGES - 1])).unwrap().pages, PAGES);
        assert!((0..PAGES).all(|slot| word(&first, slot).kind() == Kind::Spilled));
        assert_eq!((stat(&first).objects, stat(&first).pages, stat(&first).saved_bytes), (PAGES, PAGES, 0));
        assert!(first.over_stat().charged == 0 && second.over_stat().charged > 0);
        check_books(&first);
        second.writeback(&Writeback::Pages(vec![0..=PAGES - 1])).unwrap();
        assert_eq!((stat(&first).objects, first.backing().unwrap().spilled_pages), (0, 2 * PAGES));
        first.compact();
        assert!(first.family().stat().mem_used_total < used / 4);
        assert!(
            (0..PAGES).all(|slot| read(&first, slot) == text(slot) && read(&second, slot) == text(63 - slot))
        );
        // In the packed layout pages that were read are in memory again, and share again.
        dedup(&first);
        assert_eq!(stat(&first).objects, if packed { PAGES } else { 0 });
        assert!(
            (0..PAGES).all(|slot| read(&first, slot) == text(slot) && read(&second, slot) == text(63 - slot))
        );
        check_books(&first);
    }
}
