//! Tests of adopted families: every kind of device, interrupted changes, damaged files.
//!
//! The first family is in the same process and idle. It is dropped after the one that has adopted its memory,
//! and finds nothing to free then.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use super::*;
use crate::ram::tests::{MIB, config, content, word};
use crate::ram::{ForkConfig, MmStat};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Blocking as _, Flags};
use freestone_core::sync::thread;

const PAGE: u64 = PAGE_BYTES as u64;
const PAGES: u64 = 64;

fn adoptable() -> Config {
    Config { adoptable: true, ..config(PAGES * PAGE) }
}

fn text(seed: u64) -> Vec<u8> {
    content(3, seed, PAGE_BYTES / 2).repeat(2)
}

fn write(ram: &Ram, slot: u64, seed: u64) {
    ram.write_at(slot * PAGE, &text(seed), Flags::empty()).unwrap();
}

#[track_caller]
fn assert_pages(ram: &Ram, expected: impl Fn(u64) -> Vec<u8>) {
    let mut page = vec![0; PAGE_BYTES];
    for slot in 0..PAGES {
        ram.read_at(slot * PAGE, &mut page).unwrap();
        assert!(page == expected(slot), "slot {slot}");
    }
}

/// Returns other descriptors of the files.
fn clone(files: &FamilyFiles<impl AsFd>) -> FamilyFiles<OwnedFd> {
    let FamilyFiles { family, roots, nodes, pool } = files;
    let [family, roots, nodes, pool] =
        [family, roots, nodes, pool].map(|file| file.as_fd().try_clone_to_owned().unwrap());
    FamilyFiles { family, roots, nodes, pool }
}

fn files(family: &Family) -> FamilyFiles<OwnedFd> {
    clone(&family.files().unwrap())
}

fn adopt_with(
    config: Config,
    files: FamilyFiles<OwnedFd>,
    base: &mut dyn FnMut(u64) -> Option<Arc<dyn Device>>,
) -> Result<(Family, Vec<Adopted>), AdoptError> {
    FamilyMemory::open(files)?.adopt(config, base)
}

fn adopt(files: FamilyFiles<OwnedFd>) -> (Family, BTreeMap<u64, Ram>) {
    let (family, devices) = adopt_with(adoptable(), files, &mut |_| None).unwrap();
    (family, devices.into_iter().map(|device| (device.key, device.ram)).collect())
}

fn stat(ram: &Ram) -> MmStat {
    MmStat { mem_used_max: 0, mem_used_total: 0, pages_compacted: 0, huge_pages_since: 0, ..ram.mm_stat() }
}

#[test]
fn adopted_family_has_devices_content_and_statistics() {
    let first = Family::new(adoptable()).unwrap();
    let base: Arc<dyn Device> = {
        let ram = Ram::new(config(PAGES * PAGE)).unwrap();
        (0..PAGES).for_each(|slot| write(&ram, slot, 100 + slot));
        Arc::new(ram.snapshot().unwrap())
    };
    let disk = first.ram(PAGES * PAGE).unwrap();
    disk.set_keys(1, 0);
    (0..PAGES).for_each(|slot| write(&disk, slot, slot));
    let snapshot = disk.snapshot().unwrap();
    snapshot.set_keys(2, 0);
    write(&disk, 5, 505);
    disk.write_at(6 * PAGE, &[7; PAGE_BYTES], Flags::empty()).unwrap();
    let fork = snapshot.fork(&ForkConfig::default()).unwrap();
    fork.set_keys(3, 2);
    write(&fork, 9, 909);
    let over_base = first.fork(Arc::clone(&base), &ForkConfig::default()).unwrap();
    over_base.set_keys(4, 77);
    write(&over_base, 1, 1001);
    let rewound = first.ram(PAGES * PAGE).unwrap();
    rewound.set_keys(5, 0);
    write(&rewound, 0, 1);
    let of_rewound = rewound.snapshot().unwrap();
    of_rewound.set_keys(6, 0);
    rewound.rewind().unwrap();
    write(&rewound, 1, 2);
    // A removed origin, whose snapshot remains.
    let removed = first.ram(PAGES * PAGE).unwrap();
    write(&removed, 3, 33);
    let remains = removed.snapshot().unwrap();
    remains.set_keys(7, 0);
    drop(removed);
    let unnamed = first.ram(PAGES * PAGE).unwrap();
    write(&unnamed, 0, 1);
    disk.grow((PAGES + 1) * PAGE).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while record::read(remains.0.chain.get().origin().table()).unwrap().state != LayerState::Loose {
        assert!(Instant::now() < end);
        thread::sleep(Duration::from_millis(1));
    }
    let before: Vec<_> = [&disk, &snapshot, &fork, &over_base, &rewound].map(stat).into();
    let used = first.stat().charged;
    let files = files(&first);
    let _old = (first, disk, snapshot, fork, over_base, rewound, of_rewound, remains, unnamed);
    let refused = adopt_with(adoptable(), clone(&files), &mut |_| None);
    assert!(matches!(refused, Err(AdoptError::NoBase(77))));

    let bases = &mut |key| (key == 77).then(|| Arc::clone(&base));
    let (family, devices) = adopt_with(adoptable(), files, bases).unwrap();
    let mut devices: BTreeMap<_, _> = devices.into_iter().map(|device| (device.key, device.ram)).collect();
    assert_eq!(devices.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!([1, 2, 3, 4, 5].map(|key| stat(&devices[&key])).to_vec(), before);
    assert_eq!(family.stat().charged, used);
    assert_eq!(devices[&1].geometry().size, (PAGES + 1) * PAGE);
    assert_pages(&devices[&1], |slot| match slot {
        5 => text(505),
        6 => vec![7; PAGE_BYTES],
        _ => text(slot),
    });
    assert_pages(&devices[&2], text);
    assert_pages(&devices[&3], |slot| text(if slot == 9 { 909 } else { slot }));
    assert_pages(&devices[&4], |slot| text(if slot == 1 { 1001 } else { 100 + slot }));
    let only = |slot: u64, seed| move |at| if at == slot { text(seed) } else { vec![0; PAGE_BYTES] };
    assert_pages(&devices[&5], only(1, 2));
    assert_pages(&devices[&6], only(0, 1));
    assert_pages(&devices[&7], only(3, 33));
    // The family works on: changes do not reach snapshots, and all memory is freed in the end.
    (0..PAGES).for_each(|slot| write(&devices[&1], slot, 2000 + slot));
    assert_pages(&devices[&2], text);
    devices[&1].compact();
    assert_pages(&devices[&1], |slot| text(2000 + slot));
    let last = devices.remove(&1).unwrap();
    drop(devices);
    last.reset().unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while family.stat().layers > 1 || family.stat().charged > 0 {
        assert!(Instant::now() < end, "{:?}", family.stat());
        thread::sleep(Duration::from_millis(1));
    }
    last.compact();
    assert_eq!(family.stat().mem_used_total, 0);
}

/// The first process is killed while it moves words: both slots have the object.
#[test]
fn object_in_two_slots_of_a_chain_is_kept_once() {
    let first = Ram::new(adoptable()).unwrap();
    first.set_keys(1, 0);
    (0..4).for_each(|slot| write(&first, slot, slot));
    let (older, younger) = (first.snapshot().unwrap(), first.snapshot().unwrap());
    older.set_keys(2, 0);
    younger.set_keys(3, 0);
    write(&first, 1, 11);
    let put = |ram: &Ram, slot: u64, word: Word| {
        ram.0.layer().table().leaf_or_new(slot).unwrap().lock(slot).publish(word);
    };
    // Of the origin, and of the younger snapshot.
    put(&younger, 0, word(&first, 0));
    put(&older, 1, word(&younger, 1));
    let files = files(&first.family());
    let (_family, devices) = adopt(files);
    for key in [2, 3] {
        assert_pages(&devices[&key], |slot| if slot < 4 { text(slot) } else { vec![0; PAGE_BYTES] });
    }
    write(&devices[&1], 0, 100);
    assert_pages(&devices[&2], |slot| if slot < 4 { text(slot) } else { vec![0; PAGE_BYTES] });
}

#[track_caller]
fn refused(files: FamilyFiles<OwnedFd>) -> AdoptError {
    match adopt_with(adoptable(), files, &mut |_| None) {
        Ok(_) => panic!("adopted"),
        Err(error) => error,
    }
}

#[test]
fn unusable_files_are_refused() {
    let first = Ram::new(adoptable()).unwrap();
    first.set_keys(1, 0);
    (0..PAGES).for_each(|slot| write(&first, slot, slot));
    let of_first = files(&first.family());
    let mixed = FamilyFiles { family: of_first.nodes.try_clone().unwrap(), ..clone(&of_first) };
    assert!(matches!(refused(mixed), AdoptError::Foreign));
    let empty = rustix::fs::memfd_create("freestone-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert!(matches!(refused(FamilyFiles { family: empty, ..clone(&of_first) }), AdoptError::Foreign));
    // Two slots have one object.
    let layer = first.0.layer();
    let leaf = layer.table().leaf(0).unwrap();
    let former = word(&first, 7);
    leaf.lock(7).publish(word(&first, 8));
    assert!(matches!(refused(clone(&of_first)), AdoptError::Damaged(_)));
    leaf.lock(7).publish(Word::spilled(1, 0, 0));
    assert!(matches!(refused(clone(&of_first)), AdoptError::Damaged(_)));
    leaf.lock(7).publish(former);
    // The version of another program.
    File::from(of_first.family.try_clone().unwrap()).write_at(&99_u64.to_le_bytes(), 8).unwrap();
    assert!(matches!(refused(clone(&of_first)), AdoptError::Layout { found: 99, known: 1 }));
    File::from(of_first.family.try_clone().unwrap()).write_at(&1_u64.to_le_bytes(), 8).unwrap();
    let (_family, devices) = adopt(of_first);
    assert_pages(&devices[&1], text);
    assert!(Family::new(config(PAGE)).unwrap().files().is_none());
    for config in [
        Config { auto_group: Some(Duration::ZERO), ..adoptable() },
        Config { auto_dedup: Some(Duration::ZERO), ..adoptable() },
        Config { auto_recompress: Some(Duration::ZERO), ..adoptable() },
        adoptable().backed_by(Arc::new(Ram::new(self::config(MIB)).unwrap()), true),
    ] {
        assert!(matches!(Family::new(config), Err(SetupError::AdoptableExcludes(_))));
    }
}
