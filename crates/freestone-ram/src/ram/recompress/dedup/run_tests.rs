//! Tests of shared objects in families: on request, with groups, at memory limits, with related
//! images, under random changes and under traffic.

use std::sync::Arc;
use std::time::Duration;

use super::super::tests::{
    PAGES, check_books, check_end, config_with_dedup, dedup, pass, read, stat, text, wait_until_freed, write,
};
use super::*;
use crate::codec::Page;
use crate::effort::effort;
use crate::ram::tests::{MIB, config, content, word};
use crate::ram::{Config, ForkConfig, IdleSelection, Ram, RecompressKind, Writeback};
use freestone_core::PAGE_BYTES;
use freestone_core::clock;
use freestone_core::device::{Blocking, Flags};
use freestone_core::slot::Kind;
use freestone_core::sync::Instant;

fn once() -> RecompressOptions {
    RecompressOptions { dedup: true, ..RecompressOptions::default() }
}

/// Returns the next number of a generator.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

#[test]
fn request_shares_selected_pages_of_the_family() {
    let first = Ram::new(config(MIB)).unwrap();
    let second = first.family().ram(MIB).unwrap();
    assert_eq!(first.dedup_stat(), None);
    write(&first, 0..PAGES, 0);
    write(&second, 0..PAGES, 0);
    // Idle pages only.
    first.mark_idle(IdleSelection::All);
    let idle = RecompressOptions { kind: Some(RecompressKind::Idle), ..once() };
    assert_eq!(first.recompress(&idle).unwrap().shrunk, 0);
    second.mark_idle(IdleSelection::All);
    read(&second, 9);
    let some = second.recompress(&RecompressOptions { max_pages: Some(PAGES + 10), ..idle }).unwrap();
    assert_eq!((some.tried, some.shrunk, stat(&first).objects), (PAGES + 10, 10, 10));
    assert!(word(&second, 8).is_idle() && !word(&second, 9).is_shared());
    let rest = first.recompress(&once()).unwrap();
    assert_eq!((rest.shrunk, stat(&first).objects, stat(&first).pages), (PAGES - 10, PAGES, 2 * PAGES));
    let saved = stat(&first).saved_bytes;
    assert!(
        (saved - 16 * PAGES..=saved).contains(&(some.saved_bytes + rest.saved_bytes)),
        "rounded to classes"
    );
    assert_eq!(first.recompress(&once()).unwrap(), RecompressReport::default());
    check_books(&first);
    // A later run gives objects back to their only users.
    second.discard(0, MIB).unwrap();
    first.recompress(&once()).unwrap();
    assert_eq!(stat(&first).objects, 0);
    check_end(&first, vec![second]);
}

#[test]
fn request_with_contradicting_options_is_refused() {
    let ram = Ram::new(config(MIB)).unwrap();
    for options in [
        RecompressOptions { threshold: 1, ..once() },
        RecompressOptions { priority: Some(1), ..once() },
        RecompressOptions { group: true, ..once() },
    ] {
        assert_eq!(ram.recompress(&options), Err((RecompressReport::default(), RecompressError::Dedup)));
    }
    write(&ram, 0..PAGES, 0);
    let cancelled = ram.recompress_with_progress(&once(), &mut |_, all| all == 0);
    assert_eq!(cancelled, Err((RecompressReport::default(), RecompressError::Cancelled)));
}

/// Pages are compared before they form groups, and pages that share an object stay out of groups.
#[test]
fn grouping_waits_until_pages_were_compared() {
    let first = Ram::new(Config { auto_group: Some(Duration::ZERO), ..config_with_dedup() }).unwrap();
    let second = first.family().ram(MIB).unwrap();
    write(&first, 0..PAGES, 0);
    write(&second, 0..8, 0);
    let step = || {
        first.0.pages.ages.advance(clock::now_ms());
        first.0.family.groups.step()
    };
    let group = || {
        // The keeper's own step may run meanwhile.
        let end = Instant::now() + Duration::from_secs(20);
        while !step() {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(1));
        }
        first.group_stat().unwrap().pages
    };
    assert!(!step());
    assert_eq!(first.group_stat().unwrap().pages, 0, "no page was compared");
    dedup(&first);
    assert_eq!(stat(&first).pages, 16);
    // All reads come after the time up to which pages were compared.
    while clock::now_ms() < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
    (0..PAGES).for_each(|slot| assert!(read(&first, slot) == text(slot)));
    first.0.pages.shared().unwrap().set_compared_ms(1);
    assert_eq!(group(), 0, "the pages are younger than the last pass");
    first.0.pages.ages.advance(clock::now_ms());
    first.0.pages.shared().unwrap().set_compared_ms(clock::now_ms());
    assert_eq!(group(), PAGES - 8);
    let is_grouped = |slot| word(&first, slot).is_grouped();
    assert!((0..PAGES).all(|slot| is_grouped(slot) == (slot >= 8)));
    // Pages in groups stay there.
    write(&second, 8..PAGES, 0);
    dedup(&first);
    assert_eq!(stat(&first).pages, 16);
    assert!((0..PAGES).all(|slot| is_grouped(slot) == (slot >= 8)));
    assert!((0..PAGES).all(|slot| read(&first, slot) == text(slot) && read(&second, slot) == text(slot)));
    check_end(&first, vec![second]);
}

/// A family whose pages all share objects accepts writes beyond its limit.
#[test]
fn family_of_shared_pages_evicts_at_its_limit() {
    for packed in [true, false] {
        let backing = Arc::new(Ram::new(config(64 * MIB)).unwrap());
        let (disks, pages) = (4, 128);
        let ram = Ram::new(config_with_dedup().backed_by(backing, packed)).unwrap();
        let mut all = vec![ram.clone()];
        all.resize_with(disks, || ram.family().ram(2 * MIB).unwrap());
        for disk in &all {
            write(disk, 0..pages, 0);
        }
        dedup(&ram);
        assert_eq!((stat(&ram).objects, stat(&ram).pages), (pages, disks as u64 * pages));
        ram.compact();
        let used = ram.family().stat().mem_used_total;
        ram.set_mem_limit(used + 8 * PAGE);
        for (disk, seed) in all.iter().zip(1..) {
            write(disk, 128..256, seed * 10_000);
        }
        assert!(ram.family().stat().mem_used_total <= used + 8 * PAGE);
        for (disk, seed) in all.iter().zip(1..) {
            assert!((0..pages).all(|slot| read(disk, slot) == text(slot)), "packed {packed}");
            assert!((128..256).all(|slot| read(disk, slot) == text(slot + seed * 10_000)));
        }
        assert!(stat(&ram).pages < disks as u64 * pages, "shared pages were evicted, too");
        check_books(&ram);
    }
}

/// A round for the family's limit evicts all pages of some objects, not a page of each object.
#[test]
fn eviction_takes_all_pages_of_an_object() {
    let backing = Arc::new(Ram::new(config(64 * MIB)).unwrap());
    let config = Config { disksize: 2 * MIB, ..config_with_dedup() };
    let ram = Ram::new(config.backed_by(backing, true)).unwrap();
    let (disks, pages) = (4, 256);
    let mut all = vec![ram.clone()];
    all.resize_with(disks as usize, || ram.family().ram(2 * MIB).unwrap());
    for disk in &all {
        write(disk, 0..pages, 0);
    }
    // Some pages are not shared, and leave first. The pages of 32 objects are hot on one disk.
    write(&ram, 300..310, 5000);
    dedup(&ram);
    assert_eq!((stat(&ram).objects, stat(&ram).pages), (pages, disks * pages));
    (0..32).for_each(|slot| assert!(read(&all[2], slot) == text(slot)));
    ram.compact();
    let used = ram.family().stat().mem_used_total;
    ram.set_mem_limit(used / 2);
    let end = Instant::now() + Duration::from_secs(60);
    while ram.family().stat().mem_used_total > used / 2 {
        assert!(Instant::now() < end, "{:?}", ram.family().stat());
        std::thread::sleep(Duration::from_millis(1));
    }
    let _one = ram.0.pages.background.lock();
    let stat = stat(&ram);
    assert_eq!(stat.pages, disks * stat.objects, "all pages of the objects that stayed");
    assert!((0..32).all(|slot| all.iter().all(|disk| word(disk, slot).is_shared())));
    assert!((300..310).all(|slot| word(&ram, slot).kind() == Kind::Spilled));
    assert_eq!(ram.backing().unwrap().spilled_pages, disks * (pages - stat.objects) + 10);
}

/// A device with a memory limit of its own is charged for whole objects, and evicts shared pages.
#[test]
fn own_limit_counts_whole_objects() {
    let backing = Arc::new(Ram::new(config(16 * MIB)).unwrap());
    let first = Ram::new(config_with_dedup().backed_by(backing, true)).unwrap();
    let second = first.family().ram(2 * MIB).unwrap();
    write(&first, 0..PAGES, 0);
    write(&second, 0..PAGES, 0);
    dedup(&first);
    let charged = second.over_stat().charged;
    second.set_own_limits(charged + 16 * PAGE, 0).unwrap();
    write(&second, PAGES..2 * PAGES, 5000);
    assert!(second.over_stat().charged <= charged + 16 * PAGE);
    assert!((0..PAGES).any(|slot| word(&second, slot).kind() == Kind::Spilled));
    assert!((0..PAGES).all(|slot| word(&first, slot).is_shared()), "only the device's own pages leave");
    assert!((0..PAGES).all(|slot| read(&first, slot) == text(slot) && read(&second, slot) == text(slot)));
    check_books(&first);
}

/// 16 forks of 4 related images, all in one family: three quarters of an image are the same files at
/// other places, and the forks of all images get the same update.
#[test]
fn related_images_take_half_of_the_memory() {
    let (image, update) = (512, 128);
    let base = Ram::new(Config { disksize: 4 * MIB, ..config_with_dedup() }).unwrap();
    let mut devices = vec![];
    for number in 0..4_u64 {
        let disk = base.family().ram(4 * MIB).unwrap();
        for slot in 0..image {
            let seed = if slot < image / 4 { 100_000 * (number + 1) + slot } else { slot };
            disk.write_at((slot + number) * PAGE, &text(seed), Flags::empty()).unwrap();
        }
        let snapshot = disk.snapshot().unwrap();
        for fork in 0..4 {
            let disk = snapshot.fork(&ForkConfig::default()).unwrap();
            write(&disk, 600..600 + update, 1_000_000);
            write(&disk, 800..816, 2_000_000 + 1000 * (4 * number + fork));
            devices.push(disk);
        }
        devices.extend([disk, snapshot]);
    }
    base.compact();
    let before = base.family().stat().mem_used_total;
    dedup(&base);
    base.compact();
    let after = base.family().stat().mem_used_total + stat(&base).table_bytes + stat(&base).fingerprint_bytes;
    assert!(2 * after <= before, "{after} of {before} bytes, {:?}", stat(&base));
    assert_eq!(read(&devices[0], 600), text(1_000_600));
    check_books(&base);
    check_end(&base, devices);
}

// ---- random changes -------------------------------------------------------------------------------

type Content = Vec<Page>;

/// A device with the content that it should have, and the content of its base.
struct Modelled {
    ram: Ram,
    shows: Content,
    base: Content,
}

struct Model {
    probe: Ram,
    devices: Vec<Modelled>,
    state: u64,
}

const MODEL_PAGES: u64 = 40;

impl Model {
    fn new(probe: Ram, seed: u64) -> Self {
        let mut model = Self { probe, devices: Vec::new(), state: seed };
        (0..3).for_each(|_| model.add_disk());
        model
    }

    fn below(&mut self, end: u64) -> u64 {
        next(&mut self.state) % end
    }

    fn add_disk(&mut self) {
        let ram = self.probe.family().ram(MODEL_PAGES * PAGE).unwrap();
        let zeroes = vec![[0; PAGE_BYTES]; MODEL_PAGES as usize];
        self.devices.push(Modelled { ram, shows: zeroes.clone(), base: zeroes });
    }

    /// Returns one of few pages, of different sizes and forms.
    fn page(&mut self) -> Vec<u8> {
        match self.below(12) {
            seed @ 0..8 => text(seed),
            seed @ 8..10 => content(5, seed, PAGE_BYTES),
            seed => content(seed as u8 % 3, seed, PAGE_BYTES),
        }
    }

    fn change(&mut self, at: usize) {
        let (slot, kind, page) = (self.below(MODEL_PAGES), self.below(10), self.page());
        let Modelled { ram, shows, .. } = &mut self.devices[at];
        if ram.is_snapshot() {
            return;
        }
        let (offset, shown) = (slot * PAGE, &mut shows[slot as usize]);
        match kind {
            0 => {
                ram.write_at(offset + 1024, &page[..512], Flags::empty()).unwrap();
                shown[1024..1536].copy_from_slice(&page[..512]);
            }
            1 => {
                ram.write_zeroes(offset, PAGE, Flags::empty()).unwrap();
                shown.fill(0);
            }
            2 if !ram.is_fork() => {
                ram.discard(offset, PAGE).unwrap();
                shown.fill(0);
            }
            _ => {
                ram.write_at(offset, &page, Flags::empty()).unwrap();
                shown.copy_from_slice(&page);
            }
        }
    }

    fn change_devices(&mut self, at: usize) {
        let kind = self.below(5);
        let Modelled { ram, shows, base } = &mut self.devices[at];
        match (kind, ram.is_snapshot()) {
            (0, false) => {
                let (ram, shows) = (ram.snapshot().unwrap(), shows.clone());
                self.devices.push(Modelled { ram, base: shows.clone(), shows });
            }
            (0 | 1, true) => {
                let (ram, shows) = (ram.fork(&ForkConfig::default()).unwrap(), shows.clone());
                self.devices.push(Modelled { ram, base: shows.clone(), shows });
            }
            (1, false) => {
                ram.rewind().unwrap();
                shows.clone_from(base);
            }
            _ => {
                self.devices.swap_remove(at);
            }
        }
        if self.devices.len() < 3 {
            self.add_disk();
        }
        self.devices.truncate(12);
    }

    fn upkeep(&mut self) {
        let at = self.below(self.devices.len() as u64) as usize;
        match self.below(8) {
            0..3 => dedup(&self.probe),
            3 => pass(&self.probe),
            4 => drop(self.devices[at].ram.recompress(&once()).unwrap()),
            5 => drop(self.probe.compact()),
            6 => {
                let group = RecompressOptions { group: true, ..RecompressOptions::default() };
                self.devices[at].ram.recompress(&group).unwrap();
            }
            _ => {
                let from = self.below(MODEL_PAGES);
                if self.probe.backing().is_some() {
                    let selection = Writeback::Pages(vec![from..=(from + 9).min(MODEL_PAGES - 1)]);
                    self.devices[at].ram.writeback(&selection).unwrap();
                }
            }
        }
    }

    fn check(&self) {
        for (at, device) in self.devices.iter().enumerate() {
            for (slot, page) in (0..).zip(&device.shows) {
                assert!(read(&device.ram, slot) == page[..], "device {at}, slot {slot}");
            }
        }
        if self.probe.dedup_stat().is_some() {
            check_books(&self.probe);
        }
    }
}

#[test]
fn random_changes_keep_content_and_accounts() {
    for seed in 0..effort(6, 300_u64) {
        let dedup_config = if seed % 3 == 2 { config(MIB) } else { config_with_dedup() };
        let backing = || Arc::new(Ram::new(config(8 * MIB)).unwrap());
        let config = match seed % 3 {
            0 => dedup_config,
            packed => dedup_config.backed_by(backing(), packed == 1),
        };
        let mut model = Model::new(Ram::new(config).unwrap(), seed);
        for round in 0..60 {
            for _ in 0..12 {
                let at = model.below(model.devices.len() as u64) as usize;
                model.change(at);
            }
            let at = model.below(model.devices.len() as u64) as usize;
            match model.below(3) {
                0 => model.change_devices(at),
                _ => model.upkeep(),
            }
            if round % 6 == 0 {
                model.check();
            }
        }
        model.check();
        let devices = std::mem::take(&mut model.devices);
        dedup(&model.probe);
        check_end(&model.probe, devices.into_iter().map(|device| device.ram).collect());
    }
}

/// Requests, snapshots and compaction on two disks with the same content, while all pages are
/// compared again and again.
#[test]
fn shared_objects_under_traffic_keep_content() {
    let first = Ram::new(config_with_dedup()).unwrap();
    let second = first.family().ram(MIB).unwrap();
    let (pages, contents) = (64, 20);
    for disk in [&first, &second] {
        (0..pages).for_each(|slot| disk.write_at(slot * PAGE, &text(0), Flags::empty()).unwrap());
    }
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4_u64)
            .map(|thread| {
                let disk = if thread < 2 { &first } else { &second };
                scope.spawn(move || {
                    let mut state = thread + 1;
                    let mut seeds = vec![0; pages as usize];
                    for _ in 0..effort(1500, 20_000_u64) {
                        // Each thread has every other page of its disk.
                        let slot = next(&mut state) % (pages / 2) * 2 + thread % 2;
                        assert!(read(disk, slot) == text(seeds[slot as usize]), "slot {slot}");
                        if next(&mut state).is_multiple_of(3) {
                            let seed = next(&mut state) % contents;
                            seeds[slot as usize] = seed;
                            disk.write_at(slot * PAGE, &text(seed), Flags::empty()).unwrap();
                        }
                    }
                })
            })
            .collect();
        while writers.iter().any(|writer| !writer.is_finished()) {
            dedup(&first);
            first.compact();
            drop(second.snapshot());
        }
    });
    assert!(stat(&first).shared > pages, "{:?}", stat(&first));
    wait_until_freed(&first);
    check_books(&first);
    dedup(&first);
    assert!(stat(&first).objects <= contents);
    check_end(&first, vec![second]);
}
