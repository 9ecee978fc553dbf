//! Tests of groups that are formed on request, and of groups together with writebacks and traffic.

use std::time::Duration;

use super::super::groups::tests::{
    PAGES, check_books, check_saved, config_with_groups, grouped, is_grouped, read, stat, steps, text,
    wait_until_free, write,
};
use super::*;
use crate::codec::Algorithm;
use crate::effort::effort;
use crate::ram::memory::ages::renumber_ages;
use crate::ram::tests::{MIB, config, word};
use crate::ram::{Config, IdleSelection, Ram, RecompressKind, Writeback};
use freestone_core::clock;
use freestone_core::device::Blocking;
use freestone_core::slot::Kind;

fn in_groups() -> RecompressOptions {
    RecompressOptions { group: true, ..RecompressOptions::default() }
}

#[test]
fn request_groups_selected_pages() {
    let ram = Ram::new(config(MIB)).unwrap();
    assert_eq!(ram.group_stat(), None);
    write(&ram, 0..PAGES, 0);
    let before = ram.mm_stat().compr_data_size;
    // Fewer than four selected neighbours stay alone.
    ram.mark_idle(IdleSelection::All);
    (0..8).for_each(|slot| assert!(slot < 3 || read(&ram, slot) == text(slot)));
    let idle = RecompressOptions { kind: Some(RecompressKind::Idle), ..in_groups() };
    let some = ram.recompress(&RecompressOptions { max_pages: Some(20), ..idle }).unwrap();
    assert_eq!((some.tried, some.shrunk, stat(&ram).pages), (16, 16, 16), "whole groups only");
    let rest = ram.recompress(&idle).unwrap();
    assert_eq!((rest.shrunk, stat(&ram).pages), (PAGES - 24, PAGES - 8));
    assert_eq!(before - ram.mm_stat().compr_data_size, some.saved_bytes + rest.saved_bytes);
    assert!((0..PAGES).all(|slot| is_grouped(&ram, slot) == (slot >= 8) && read(&ram, slot) == text(slot)));
    assert!(!word(&ram, 9).is_idle(), "an attempt clears the idle mark");
    let all = ram.recompress(&in_groups()).unwrap();
    assert_eq!((all.tried, all.shrunk), (8, 8));
    assert_eq!(ram.recompress(&in_groups()).unwrap(), RecompressReport::default());
    check_books(&ram);
    // Groups that were formed on request are dissolved in the background, too.
    write(&ram, 0..5, 90);
    steps(&ram);
    assert!((0..8).all(|slot| !is_grouped(&ram, slot)) && read(&ram, 7) == text(7));
}

#[test]
fn request_with_contradicting_options_is_refused() {
    let ram = Ram::new(config(MIB)).unwrap();
    for options in [
        RecompressOptions { threshold: 1, ..in_groups() },
        RecompressOptions { algo: Some(Algorithm::Zstd), ..in_groups() },
        RecompressOptions { priority: Some(1), ..in_groups() },
    ] {
        assert_eq!(ram.recompress(&options), Err((RecompressReport::default(), RecompressError::Group)));
    }
    write(&ram, 0..PAGES, 0);
    let cancelled = ram.recompress_with_progress(&in_groups(), &mut |done, _| done > 0);
    assert_eq!(cancelled, Err((RecompressReport::default(), RecompressError::Cancelled)));
    ram.compact();
    ram.set_mem_limit(ram.mm_stat().mem_used_total - PAGE);
    assert_eq!(ram.recompress(&in_groups()).unwrap_err().1, RecompressError::NoSpace);
    assert!((0..PAGES).all(|slot| read(&ram, slot) == text(slot) && !is_grouped(&ram, slot)));
    check_books(&ram);
}

#[test]
fn grouped_pages_are_written_back_and_read_again() {
    for packed in [true, false] {
        let backing = Arc::new(Ram::new(config(4 * MIB)).unwrap());
        let ram = grouped(config_with_groups().backed_by(backing, packed));
        let done = ram.writeback(&Writeback::Pages(vec![0..=PAGES - 1])).unwrap();
        assert_eq!(done.pages, PAGES);
        assert!((0..PAGES).all(|slot| word(&ram, slot).kind() == Kind::Spilled));
        // Only the packed layout has groups.
        let (groups, pages) = if packed { (PAGES / 8, PAGES) } else { (0, 0) };
        assert_eq!((stat(&ram).groups, stat(&ram).spilled_pages, stat(&ram).bytes), (groups, pages, 0));
        assert!((0..PAGES).all(|slot| word(&ram, slot).is_spilled_in_group() == packed));
        check_books(&ram);
        assert_eq!(ram.backing().unwrap().spilled_pages, PAGES);
        // Saved pages are pages of their own.
        check_saved(&ram);
        assert!((0..PAGES).all(|slot| read(&ram, slot) == text(slot)), "packed {packed}");
        if packed {
            // Pages that were read are in memory again, in their groups.
            assert_eq!((stat(&ram).pages, stat(&ram).grouped), (PAGES, PAGES));
            assert!((0..PAGES).all(|slot| read(&ram, slot) == text(slot)));
        }
        check_books(&ram);
    }
}

#[test]
fn writeback_by_idle_mark_takes_grouped_pages() {
    let backing = Arc::new(Ram::new(config(4 * MIB)).unwrap());
    let ram = grouped(config_with_groups().backed_by(backing, true));
    assert_eq!(ram.mark_idle(IdleSelection::All), PAGES);
    read(&ram, 17);
    write(&ram, 18..19, 700);
    assert_eq!(ram.writeback(&Writeback::Idle).unwrap().pages, PAGES - 2);
    assert!(is_grouped(&ram, 17) && read(&ram, 18) == text(718) && read(&ram, 19) == text(19));
    check_books(&ram);
}

/// Requests, snapshots and compaction, while all pages are grouped again and again.
#[test]
fn groups_under_traffic_keep_content() {
    let ram = Ram::new(Config { auto_group: Some(Duration::ZERO), ..config(MIB) }).unwrap();
    let pages = 256;
    write(&ram, 0..pages, 0);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2)
            .map(|thread| {
                let ram = &ram;
                scope.spawn(move || {
                    let mut state: u64 = thread + 1;
                    let mut seeds = vec![0; pages as usize];
                    for round in 0..effort(1500, 20_000_u64) {
                        state = state
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1_442_695_040_888_963_407);
                        // Each thread has every other page, so that groups have pages of both.
                        let slot = (state >> 33) % (pages / 2) * 2 + thread;
                        assert!(read(ram, slot) == text(slot + seeds[slot as usize]), "slot {slot}");
                        if (state >> 60).is_multiple_of(3) {
                            seeds[slot as usize] = round * 1000;
                            write(ram, slot..slot + 1, round * 1000);
                        }
                    }
                })
            })
            .collect();
        while writers.iter().any(|writer| !writer.is_finished()) {
            ram.0.pages.ages.advance(clock::now_ms());
            renumber_ages(&ram.0.pages);
            std::thread::sleep(Duration::from_millis(2));
            ram.0.family.groups.step();
            ram.compact();
            drop(ram.snapshot());
        }
    });
    assert!(stat(&ram).grouped > pages, "{:?}", stat(&ram));
    ram.discard(0, pages * PAGE).unwrap();
    wait_until_free(&ram);
}
