//! Tests of adopted families: every kind of device, interrupted changes, damaged files.
//!
//! The first family is in the same process and idle. It is dropped after the one that has adopted its memory,
//! and finds nothing to free then.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use super::*;
use crate::codec::{Algorithm, Dictionary, Params};
use crate::ram::content::import::RestoreInto as _;
use crate::ram::tests::{MIB, change, config, content, file_backing, word};
use crate::ram::{ForkConfig, MmStat, RecompressOptions, Secondary, Writeback};
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
    let FamilyFiles { family, roots, nodes, pool, backing } = files;
    let clone = |file: &dyn AsFd| file.as_fd().try_clone_to_owned().unwrap();
    FamilyFiles {
        family: clone(family),
        roots: clone(roots),
        nodes: clone(nodes),
        pool: clone(pool),
        backing: backing.as_ref().map(|file| clone(file)),
    }
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

#[test]
fn pages_on_backing_device_are_adopted() {
    for is_packed in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let backing = || file_backing(&directory.path().join("backing"), MIB, is_packed);
        let config = || Config { backing: Some(backing()), mem_limit: MIB, ..adoptable() };
        let first = Ram::new(config()).unwrap();
        first.set_keys(1, 0);
        (0..PAGES).for_each(|slot| write(&first, slot, slot));
        let snapshot = first.snapshot().unwrap();
        snapshot.set_keys(2, 0);
        first.writeback(&Writeback::Pages(vec![0..=PAGES / 2 - 1])).unwrap();
        // A word that is in two slots, a page that leaves a hole and a clean copy, and one that is being read.
        write(&first, 1, 11);
        let moved = word(&first, 0);
        snapshot.0.layer().table().leaf_or_new(0).unwrap().lock(0).publish(moved);
        first.discard(2 * PAGE, PAGE).unwrap();
        first.read_at(3 * PAGE, &mut [0; PAGE_BYTES]).unwrap();
        change(&first, 4, Word::in_flight);
        let present = |slot| match slot {
            1 => text(11),
            2 => vec![0; PAGE_BYTES],
            _ => text(slot),
        };
        let files = files(&first.family());
        let backing_file = files.backing.as_ref().unwrap();
        assert_eq!(rustix::fs::fstat(backing_file).unwrap().st_size, MIB as i64);
        let refused = adopt_with(adoptable(), clone(&files), &mut |_| None);
        assert!(matches!(refused, Err(AdoptError::Damaged(_))));
        let damage = |place| {
            let former = word(&first, 5);
            change(&first, 5, |_| Word::spilled(place, 0, 0));
            let refused = adopt_with(config(), clone(&files), &mut |_| None);
            assert!(matches!(refused, Err(AdoptError::Damaged(_))), "{place}");
            change(&first, 5, |_| former);
        };
        // Beyond the end, in the last block but too large, in a block that another page fills.
        [MIB / 16, MIB / 16 - 1, 0, 1 << 35].into_iter().for_each(damage);

        let (family, devices) = adopt_with(config(), files, &mut |_| None).unwrap();
        let devices: BTreeMap<_, _> = devices.into_iter().map(|device| (device.key, device.ram)).collect();
        let stat = family.backing().unwrap();
        let in_memory = if is_packed { 3 } else { 2 };
        // The snapshot has two of the pages.
        assert_eq!((stat.spilled_pages, stat.clean_pages), (PAGES / 2 - in_memory + 2, 0));
        assert_pages(&devices[&1], present);
        assert_pages(&devices[&2], text);
        // The space of all pages is known: new pages do not overwrite them.
        for _ in 0..3 {
            devices[&1].writeback(&Writeback::Pages(vec![PAGES / 2..=PAGES - 1])).unwrap();
            (PAGES / 2..PAGES).for_each(|slot| write(&devices[&1], slot, slot));
            assert_pages(&devices[&1], present);
            assert_pages(&devices[&2], text);
            devices[&2].writeback(&Writeback::Pages(vec![0..=PAGES - 1])).unwrap();
        }
        devices[&1].discard(0, PAGES * PAGE).unwrap();
        drop(devices);
        let end = Instant::now() + Duration::from_secs(20);
        while family.backing().unwrap().live_bytes > 0 {
            assert!(Instant::now() < end, "{:?}", family.backing());
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn groups_and_shared_objects_are_adopted() {
    let directory = tempfile::tempdir().unwrap();
    let backing = || file_backing(&directory.path().join("backing"), MIB, true);
    let config = || Config { backing: Some(backing()), mem_limit: MIB, ..adoptable() };
    let first = Ram::new(config()).unwrap();
    first.set_keys(1, 0);
    let content = |slot| text(if slot < PAGES / 2 { slot } else { 7000 + slot % 4 });
    (0..PAGES).for_each(|slot| first.write_at(slot * PAGE, &content(slot), Flags::empty()).unwrap());
    first.recompress(&RecompressOptions { dedup: true, ..Default::default() }).unwrap();
    first.recompress(&RecompressOptions { group: true, ..Default::default() }).unwrap();
    first.writeback(&Writeback::Pages(vec![0..=15])).unwrap();
    let snapshot = first.snapshot().unwrap();
    snapshot.set_keys(2, 0);
    // Words of each kind move to the snapshot.
    for slot in [1, 20, PAGES - 1] {
        write(&first, slot, 500 + slot);
    }
    // A page that is being read, and objects that no page refers to any more.
    change(&first, 2, Word::in_flight);
    first.discard(24 * PAGE, 8 * PAGE).unwrap();
    let present = |slot| match slot {
        1 | 20 => text(500 + slot),
        24..32 => vec![0; PAGE_BYTES],
        slot if slot == PAGES - 1 => text(500 + slot),
        _ => content(slot),
    };
    let sizes = |ram: &Ram| {
        let (groups, dedup) = (ram.group_stat().unwrap(), ram.dedup_stat().unwrap());
        let of_groups = [groups.groups, groups.pages, groups.spilled_pages, groups.bytes, groups.table_bytes];
        (of_groups, [dedup.objects, dedup.pages, dedup.bytes, dedup.saved_bytes, dedup.table_bytes])
    };
    let before = (stat(&first), stat(&snapshot), sizes(&first), first.family().stat().charged);
    assert!(before.2.0.iter().chain(&before.2.1).all(|size| *size > 0), "{before:?}");
    let files = files(&first.family());
    let damage = |slot, bad: Word| {
        let former = word(&first, slot);
        change(&first, slot, |_| bad);
        assert!(matches!(adopt_with(config(), clone(&files), &mut |_| None), Err(AdoptError::Damaged(_))));
        change(&first, slot, |_| former);
    };
    // Groups and objects that do not exist, beyond the tables and in them.
    let groups = [Word::grouped(1 << 20, 16), Word::grouped(400, 16), Word::spilled_in_group(400)];
    let objects = [Word::shared(1 << 20, 16, 0), Word::shared(200, 16, 0)];
    groups.into_iter().chain(objects).for_each(|bad| damage(16, bad));

    let (family, devices) = adopt_with(config(), files, &mut |_| None).unwrap();
    let mut devices: BTreeMap<_, _> = devices.into_iter().map(|device| (device.key, device.ram)).collect();
    let [disk, snapshot] = [1, 2].map(|key| devices.remove(&key).unwrap());
    assert_eq!((stat(&disk), stat(&snapshot), sizes(&disk), family.stat().charged), before);
    for _ in 0..2 {
        assert_pages(&disk, present);
        assert_pages(&snapshot, content);
        disk.recompress(&RecompressOptions { group: true, ..Default::default() }).unwrap();
        disk.writeback(&Writeback::Pages(vec![0..=PAGES - 1])).unwrap();
        disk.compact();
    }
    (0..PAGES).for_each(|slot| write(&disk, slot, 9000 + slot));
    assert_pages(&snapshot, content);
    drop(snapshot);
    disk.discard(0, PAGES * PAGE).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while family.stat().charged > 0 || family.backing().unwrap().live_bytes > 0 {
        assert!(Instant::now() < end, "{:?}, {:?}", family.stat(), family.backing());
        thread::sleep(Duration::from_millis(1));
    }
    let ([groups, ..], [objects, ..]) = sizes(&disk);
    assert_eq!((groups, objects), (0, 0));
}

/// The adopting process does not read the files of dictionaries again.
#[test]
fn dictionaries_are_adopted() {
    let samples: Vec<u8> = (0..PAGES * 8).flat_map(text).collect();
    let sizes = vec![PAGE_BYTES; samples.len() / PAGE_BYTES];
    let dictionary = Dictionary::train(&samples, &sizes, 20_000).unwrap();
    let with_dictionary =
        Params { level: Some(-100), dictionary: Some(dictionary.clone()), ..Params::default() };
    let second = Secondary {
        algorithm: Algorithm::Zstd,
        params: Params { level: Some(9), ..with_dictionary.clone() },
    };
    let settings = |params: Params, second: Secondary| Config {
        comp_algorithm: Algorithm::Zstd,
        algorithm_params: params,
        recomp_algorithms: [None, Some(second), None],
        auto_recompress: Some(Duration::from_secs(3600)),
        ..adoptable()
    };
    let family = Family::new(settings(with_dictionary, second.clone())).unwrap();
    let trained = || Ok::<_, SetupError>(Arc::new(auto::trained_streams(dictionary.bytes())?));
    family.adopt_trained(trained).unwrap();
    let first = family.ram(PAGES * PAGE).unwrap();
    first.set_keys(1, 0);
    (0..PAGES).for_each(|slot| write(&first, slot, slot));
    let half = RecompressOptions { priority: Some(2), max_pages: Some(PAGES / 2), ..Default::default() };
    assert!(first.recompress(&half).unwrap().shrunk > 0);
    let memory = FamilyMemory::open(files(&family)).unwrap();
    let stored = |priority| memory.dictionary(priority).and_then(Dictionary::trained);
    let bytes = |dictionary: Dictionary| dictionary.bytes().to_vec();
    let expected = Some(dictionary.bytes().to_vec());
    assert_eq!(
        [0, 1, 2, 3].map(|priority| stored(priority).map(bytes)),
        [expected.clone(), None, expected.clone(), expected]
    );
    let params = Params { dictionary: stored(0), ..Params::default() };
    let (_family, devices) = memory.adopt(settings(params, second), &mut |_| None).unwrap();
    assert_pages(&devices[0].ram, text);
    assert_eq!(devices[0].ram.auto_recompress_stat().dictionary_bytes, dictionary.bytes().len() as u64);
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
    let without_file = adoptable().backed_by(Arc::new(Ram::new(config(MIB)).unwrap()), true);
    assert!(matches!(Family::new(without_file), Err(SetupError::BackingWithoutFile)));
}
