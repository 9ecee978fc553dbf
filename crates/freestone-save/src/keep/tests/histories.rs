//! Random histories of families compared with byte vectors. The directory is reopened at random
//! moments.

use super::*;
use freestone_ram::ram::ForkConfig;

const SIZE_MAX: u64 = 3 * MIB;
/// Value of [`ModelledDevice::base_size`] for a fork of a snapshot. The model does not cover the
/// rewind of such forks.
const OF_SNAPSHOT: u64 = 1;

/// A device and its expected content.
struct ModelledDevice {
    name: String,
    ram: Ram,
    bytes: Vec<u8>,
    /// Size of the fork's base in bytes; 0 for a disk, [`OF_SNAPSHOT`] for a fork of a snapshot.
    base_size: u64,
}

struct World {
    random: Random,
    family: Family,
    base: Ram,
    devices: Vec<ModelledDevice>,
    names: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let base = family().ram(MIB).unwrap();
        for page in 0..100 {
            base.write_at(page * PAGE, &random.page(), Flags::empty()).unwrap();
        }
        let base = base.snapshot().unwrap();
        let family = family();
        let ram = family.ram(2 * MIB).unwrap();
        let disk = ModelledDevice { name: "disk".into(), bytes: content(&ram), ram, base_size: 0 };
        let fork = family.fork(Arc::new(base.clone()), &ForkConfig::default()).unwrap();
        let fork = ModelledDevice { name: "fork".into(), bytes: content(&fork), ram: fork, base_size: MIB };
        Self { random, family, base, devices: vec![disk, fork], names: 0 }
    }

    fn step(&mut self) {
        let at = self.random.below(self.devices.len() as u64) as usize;
        let (random, few) = (&mut self.random, self.devices.len() < 7);
        let ModelledDevice { ram, bytes, base_size, .. } = &mut self.devices[at];
        if ram.is_snapshot() {
            return self.of_snapshot(at);
        }
        let size = bytes.len() as u64;
        let offset = random.below(size / 512) * 512;
        let range = offset as usize..(offset + (1 + random.below(24)) * 512).min(size) as usize;
        match random.below(30) {
            0..12 => {
                let first = offset / PAGE * PAGE;
                let page = random.page();
                let end = (first + PAGE).min(size) as usize;
                ram.write_at(first, &page[..end - first as usize], Flags::empty()).unwrap();
                bytes[first as usize..end].copy_from_slice(&page[..end - first as usize]);
            }
            12..18 => {
                let data: Vec<u8> = range.clone().map(|_| random.below(256) as u8).collect();
                ram.write_at(offset, &data, Flags::empty()).unwrap();
                bytes[range].copy_from_slice(&data);
            }
            18..23 => {
                let free = if random.below(2) == 0 { Flags::MAY_FREE } else { Flags::empty() };
                ram.write_zeroes(offset, range.len() as u64, free).unwrap();
                bytes[range].fill(0);
            }
            23..27 => {
                let first = offset / PAGE * PAGE;
                let end = (first + (1 + random.below(200)) * PAGE).min(size);
                ram.discard(first, end - first).unwrap();
                bytes[first as usize..end as usize].fill(0);
            }
            27 if size < SIZE_MAX => {
                let more = random.below(40) * if *base_size > 0 { 512 } else { PAGE };
                ram.grow(size + more).unwrap();
                bytes.resize((size + more) as usize, 0);
            }
            28 if few => {
                let (ram, bytes, base_size) = (ram.snapshot().unwrap(), bytes.clone(), *base_size);
                self.add("snapshot", ram, bytes, base_size);
            }
            29 if *base_size != OF_SNAPSHOT && random.below(20) == 0 => {
                ram.rewind().unwrap();
                bytes.fill(0);
                if *base_size > 0 {
                    let below = content(&self.base);
                    bytes[..below.len()].copy_from_slice(&below);
                }
            }
            _ => {}
        }
    }

    fn of_snapshot(&mut self, at: usize) {
        if self.devices.len() < 7 && self.random.below(4) == 0 {
            let ModelledDevice { ram, bytes, .. } = &self.devices[at];
            let (ram, bytes) = (ram.fork(&ForkConfig::default()).unwrap(), bytes.clone());
            self.add("twin", ram, bytes, OF_SNAPSHOT);
        } else if self.random.below(8) == 0 {
            self.devices.remove(at);
        }
    }

    fn add(&mut self, kind: &str, ram: Ram, bytes: Vec<u8>, base_size: u64) {
        self.names += 1;
        self.devices.push(ModelledDevice { name: format!("{kind}{}", self.names), ram, bytes, base_size });
    }

    fn save(&self, keep: &mut Keep) -> KeepReport {
        let devices: Vec<_> = self.devices.iter().map(|device| (&*device.name, &device.ram)).collect();
        save(keep, &devices)
    }

    fn check(&self, what: &str) {
        for ModelledDevice { name, ram, bytes, .. } in &self.devices {
            let shown = content(ram);
            assert_eq!(shown.len(), bytes.len(), "{what}: {name}");
            let differs = (0..bytes.len()).find(|&at| shown[at] != bytes[at]);
            assert_eq!(differs.map(|at| at / PAGE_BYTES), None, "{what}: {name}: a page");
        }
    }

    /// Replaces the devices by those restored in a new family.
    fn reopen(&mut self, path: &Path) -> (Keep, BackgroundLoad) {
        self.family = family();
        let (keep, devices, loading) = restored(path, &self.family, &[Base::Snapshot(self.base.clone())]);
        assert_eq!(devices.len(), self.devices.len());
        for device in &mut self.devices {
            device.ram = named(&devices, &device.name).clone();
        }
        (keep, loading)
    }
}

fn run(seed: u64, steps: u64) -> [u32; 3] {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::new(seed);
    let mut keep = Keep::open(dir.path()).unwrap();
    let mut loading: Option<BackgroundLoad> = None;
    let mut wrote = [0; 3];
    for step in 0..steps {
        world.step();
        match world.random.below(80) {
            0..4 => wrote[world.save(&mut keep).kind as usize] += 1,
            4 => drop(keep.merge_if_due(&never, &mut |_, _| {}).unwrap()),
            5 if keep.contents().is_some() => drop(keep.merge(&never, &mut |_, _| {}).unwrap()),
            6 => {
                world.save(&mut keep);
                // The restored devices must have exactly the saved content.
                drop((keep, loading.take()));
                let (again, left) = world.reopen(dir.path());
                (keep, loading) = (again, Some(left));
                if world.random.below(2) == 0 {
                    world.check(&format!("seed {seed}, step {step}, just restored"));
                }
            }
            // Load a few blocks or all.
            7..14 => {
                if let Some(loading) = &mut loading {
                    let left = Cell::new(world.random.below(4));
                    loading.run(&|| left.replace(left.get().wrapping_sub(1)) == 0, &mut |_, _| {});
                }
            }
            14 => world.check(&format!("seed {seed}, step {step}")),
            _ => {}
        }
    }
    world.check(&format!("seed {seed}, at the end"));
    world.save(&mut keep);
    drop((keep, loading));
    let (_keep, mut loading) = world.reopen(dir.path());
    load(&mut loading);
    world.check(&format!("seed {seed}, loaded"));
    wrote
}

#[test]
fn random_histories_restore_families() {
    let mut wrote = [0; 3];
    for seed in 1..=effort(1, 5) {
        for (all, one) in wrote.iter_mut().zip(run(seed, 400)) {
            *all += one;
        }
    }
    assert!(wrote[0] > effort(1, 6) && wrote[1] > effort(2, 12), "{wrote:?}: both kinds of files");
}

/// Saves a disk named "a" with 8 MiB of random pages. Returns the content of the disk.
fn saved_noise(dir: &Path, seed: u64) -> Vec<u8> {
    let ram = family().ram(8 * MIB).unwrap();
    let mut random = Random(seed);
    for page in 0..2048 {
        ram.write_at(page * PAGE, &random.page(), Flags::empty()).unwrap();
    }
    let mut keep = Keep::open(dir).unwrap();
    save(&mut keep, &[("a", &ram)]);
    content(&ram)
}

/// Snapshots are read and forked while pages of the origin are still in the files. Meanwhile the
/// origin is written, discarded and loaded.
#[test]
fn snapshots_during_loading_keep_content() {
    let dir = tempfile::tempdir().unwrap();
    let before = saved_noise(dir.path(), 77);
    for loaded_first in [false, true] {
        let (_keep, devices, mut loading) = restored(dir.path(), &family(), &[]);
        let live = named(&devices, "a");
        let first = live.snapshot().unwrap();
        live.write_at(PAGE, &[9; 3 * PAGE_BYTES], Flags::empty()).unwrap();
        live.write_at(5 * PAGE + 512, &[9; 512], Flags::empty()).unwrap();
        let second = live.snapshot().unwrap();
        live.discard(0, 700 * PAGE).unwrap();
        let fork = first.fork(&ForkConfig::default()).unwrap();
        fork.write_at(512, &[7; 512], Flags::empty()).unwrap();
        let mut forked = before.clone();
        forked[512..1024].fill(7);
        let mut then = before.clone();
        then[PAGE_BYTES..4 * PAGE_BYTES].fill(9);
        then[5 * PAGE_BYTES + 512..][..512].fill(9);
        let mut now = then.clone();
        now[..700 * PAGE_BYTES].fill(0);
        // When the younger snapshot is removed, the older one takes over its pages.
        let check = |second: Option<&Ram>| {
            assert!(content(&first) == before && content(&fork) == forked && content(live) == now);
            assert!(second.is_none_or(|second| content(second) == then));
        };
        check(Some(&second));
        if loaded_first {
            load(&mut loading);
            check(Some(&second));
            drop(second);
        } else {
            drop(second);
            check(None);
            load(&mut loading);
        }
        check(None);
    }
}

#[test]
fn rewind_or_removal_during_loading_keeps_snapshots() {
    let dir = tempfile::tempdir().unwrap();
    let before = saved_noise(dir.path(), 78);
    for remove in [false, true] {
        let family = family();
        let (keep, mut devices, mut loading) = restored(dir.path(), &family, &[]);
        let (_, live) = devices.remove(0);
        let snapshot = live.snapshot().unwrap();
        if remove {
            drop(live);
        } else {
            live.rewind().unwrap();
            assert!(content(&live).iter().all(|&byte| byte == 0), "it is empty at once");
            live.write_at(512, &[1; 512], Flags::empty()).unwrap();
            assert_eq!(content(&live)[..512], [0; 512], "also behind what was there");
            devices.push(("a".into(), live));
        }
        assert!(content(&snapshot) == before);
        load(&mut loading);
        assert!(content(&snapshot) == before);
        if let Some((_, live)) = devices.first() {
            assert_eq!(content(live)[1024..], vec![0; 8 * MIB as usize - 1024]);
        }
        // All memory must be freed.
        drop((keep, devices, snapshot, loading));
        let begun = std::time::Instant::now();
        while family.stat().charged + family.stat().retiring > 0 {
            assert!(begun.elapsed().as_secs() < 20, "{:?}", family.stat());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}
