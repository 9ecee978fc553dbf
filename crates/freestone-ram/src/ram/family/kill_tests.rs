//! Processes that are killed in the middle of writes, writeback, snapshots, removals, rewinds, compactions, and
//! while pages enter groups or share objects, at any moment or at a [`KillPoint`]. Each one adopts the family of the
//! one before, and checks it. The test holds the descriptors.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Adopted, Family, FamilyFiles, FamilyMemory};
use crate::effort::effort;
use crate::ram::tests::{config, content, file_backing};
use crate::ram::{Config, Ram, RecompressOptions};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Blocking as _, Flags};
use freestone_core::kill_points::{self, KillPoint};
use freestone_core::sync::thread;

const PAGE: u64 = PAGE_BYTES as u64;
const PAGES: u64 = 256;
const WRITERS: u64 = 2;
/// Number of snapshots that exist at a time.
const SNAPSHOTS: usize = 3;
const DISK: u64 = 1;
/// A disk that is rewound again and again.
const SCRATCH: u64 = 2;
/// Pages that are written to it after each rewind.
const SCRATCH_PAGES: u64 = 8;
/// Test in which the processes run.
const TEST: &str = "killed_processes_lose_nothing";
/// Environment variable with the directory of a process to be killed, and its files.
const DIRECTORY: &str = "FREESTONE_TEST_KILLED_IN";
const FILES: &str = "FREESTONE_TEST_KILLED_FILES";

/// Name of the file for writeback. The families have a backing device if the test has created the file.
const BACKING: &str = "backing";
const BACKING_BYTES: u64 = 4 << 20;
/// Memory limit of families with a backing device, below the size of the content.
const MEM_LIMIT: u64 = 256 << 10;

fn settings(directory: &Path) -> Config {
    let path = directory.join(BACKING);
    let backing = path.exists().then(|| file_backing(&path, BACKING_BYTES, true));
    let mem_limit = if backing.is_some() { MEM_LIMIT } else { 0 };
    Config { adoptable: true, backing, mem_limit, ..config(PAGES * PAGE) }
}

/// Returns the slot whose page has the same content in the same version, so that both can share an object; for most
/// slots, `slot` itself. The same thread writes both.
fn twin(slot: u64) -> u64 {
    if slot < PAGES / 4 * 3 { slot } else { slot ^ WRITERS }
}

/// Returns version `version` of a page, whose compressed size differs from version to version.
fn page(slot: u64, version: u64) -> Vec<u8> {
    if version == 0 {
        return vec![0; PAGE_BYTES];
    }
    let slot = slot.min(twin(slot));
    // Some versions in a row have the same size, so that they overwrite one another in place.
    let random = (version / 4 * 7 + slot) % 10 * 400 + 16;
    let mut page = content(3, version * PAGES + slot, random as usize);
    page.resize(PAGE_BYTES - 8, 0);
    page.extend(version.to_le_bytes());
    page
}

/// Returns the version of a page, and checks its content.
#[track_caller]
fn version_of(ram: &Ram, slot: u64) -> u64 {
    let mut found = vec![0; PAGE_BYTES];
    ram.read_at(slot * PAGE, &mut found).unwrap();
    let version = u64::from_le_bytes(*found.last_chunk().unwrap());
    assert!(found == page(slot, version), "slot {slot} is torn: version {version}");
    version
}

/// For each slot the last version of which the write began, and the last one that was written.
struct Versions(File);

impl Versions {
    fn open(directory: &Path) -> Self {
        let path = directory.join("versions");
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        file.set_len(PAGES * 16).unwrap();
        Self(file)
    }

    /// Returns the versions of the scratch disk: one pair for all of its pages.
    fn scratch(directory: &Path) -> Self {
        let directory = directory.join("scratch");
        fs::create_dir_all(&directory).unwrap();
        Self::open(&directory)
    }

    fn column(&self, column: u64) -> Vec<u64> {
        let mut all = vec![0; PAGES as usize * 16];
        self.0.read_exact_at(&mut all, 0).unwrap();
        let (all, _) = all.as_chunks::<8>();
        all.iter().skip(column as usize).step_by(2).map(|version| u64::from_le_bytes(*version)).collect()
    }

    fn begun(&self) -> Vec<u64> {
        self.column(0)
    }

    fn written(&self) -> Vec<u64> {
        self.column(1)
    }

    fn set(&self, slot: u64, column: u64, version: u64) {
        self.0.write_all_at(&version.to_le_bytes(), slot * 16 + column * 8).unwrap();
    }
}

/// Checks a disk or snapshot: each page has a version between two.
#[track_caller]
fn check(ram: &Ram, what: &str, oldest: &[u64], newest: &[u64]) -> Vec<u64> {
    let versions: Vec<_> = (0..PAGES).map(|slot| version_of(ram, slot)).collect();
    for (slot, found) in versions.iter().enumerate() {
        let (oldest, newest) = (oldest[slot], newest[slot]);
        assert!((oldest..=newest).contains(found), "{what}, slot {slot}: {found} of {oldest}..={newest}");
    }
    versions
}

/// Checks the scratch disk: its pages are those before the last rewind, or some of those after it. Then writes the
/// others, so that the next process finds one version.
#[track_caller]
fn check_scratch(scratch: &Ram, versions: &Versions) {
    let (begun, written) = (versions.begun()[0], versions.written()[0]);
    let found: Vec<_> = (0..SCRATCH_PAGES).map(|slot| version_of(scratch, slot)).collect();
    let is_before = found.iter().all(|version| *version == written);
    let is_after = found.iter().all(|version| [0, begun].contains(version));
    assert!(is_before || begun > written && is_after, "scratch: {found:?}, {written} written, {begun} begun");
    if !is_before {
        write_scratch(scratch, versions, begun);
    }
}

fn write_scratch(scratch: &Ram, versions: &Versions, version: u64) {
    for slot in 0..SCRATCH_PAGES {
        scratch.write_at(slot * PAGE, &page(slot, version), Flags::empty()).unwrap();
    }
    versions.set(0, 1, version);
}

fn path_of_snapshot(directory: &Path, key: u64) -> PathBuf {
    directory.join(format!("snapshot-{key}"))
}

/// Checks the disks and all snapshots of an adopted family. Returns the disks, and the snapshots by key.
fn check_all(devices: Vec<Adopted>, directory: &Path) -> (Ram, Ram, BTreeMap<u64, Ram>) {
    // A device without a key was created a moment before the kill.
    let mut devices: BTreeMap<_, _> =
        devices.into_iter().filter(|device| device.key != 0).map(|device| (device.key, device.ram)).collect();
    let disk = devices.remove(&DISK).unwrap();
    let versions = Versions::open(directory);
    let found = check(&disk, "disk", &versions.written(), &versions.begun());
    for (slot, version) in (0..).zip(found) {
        versions.set(slot, 0, version);
        versions.set(slot, 1, version);
    }
    for entry in fs::read_dir(directory).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let Some(key) = name.strip_prefix("snapshot-").and_then(|key| key.parse().ok()) else { continue };
        let recorded = fs::read(path_of_snapshot(directory, key)).unwrap();
        let (recorded, _) = recorded.as_chunks::<8>();
        let bounds: Vec<_> = recorded.iter().map(|version| u64::from_le_bytes(*version)).collect();
        let (oldest, newest) = bounds.split_at(PAGES as usize);
        let Some(snapshot) = devices.get(&key) else { panic!("snapshot {key} is lost") };
        check(snapshot, &name, oldest, newest);
    }
    let scratch = devices.remove(&SCRATCH).unwrap();
    check_scratch(&scratch, &Versions::scratch(directory));
    // Other snapshots were being created or removed.
    devices.retain(|key, _| path_of_snapshot(directory, *key).exists());
    (disk, scratch, devices)
}

/// Writes, takes and removes snapshots, and compacts, until the process is killed.
fn run_until_killed(directory: &Path) {
    let (family, disk, scratch, mut snapshots) = if let Ok(paths) = std::env::var(FILES) {
        let files = open(paths.split_whitespace()).unwrap();
        let (family, devices) =
            FamilyMemory::open(files).unwrap().adopt(settings(directory), &mut |_| None).unwrap();
        let (disk, scratch, snapshots) = check_all(devices, directory);
        (family, disk, scratch, snapshots)
    } else {
        let family = Family::new(settings(directory)).unwrap();
        let disk = family.ram(PAGES * PAGE).unwrap();
        disk.set_keys(DISK, 0);
        let scratch = family.ram(PAGES * PAGE).unwrap();
        scratch.set_keys(SCRATCH, 0);
        (family, disk, scratch, BTreeMap::new())
    };
    let versions = Versions::open(directory);
    let FamilyFiles { family: header, roots, nodes, pool, backing: _ } = family.files().unwrap();
    let fds = [header, roots, nodes, pool].map(|file| file.as_raw_fd().to_string());
    println!("\nready {}", fds.join(" "));
    // The test opens the files meanwhile.
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let mut next_key = snapshots.keys().last().map_or(SCRATCH, |key| *key) + 1;
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (disk, versions) = (&disk, &versions);
            let mut written = versions.written();
            scope.spawn(move || {
                for round in 0_u64.. {
                    let slot = (round * 37 + round / 50) % (PAGES / WRITERS) * WRITERS + writer;
                    let twin = twin(slot);
                    let [version, of_twin] = [slot, twin].map(|slot| written[slot as usize]);
                    // Equal pages become different, and different ones equal.
                    let slots = if version == of_twin { &[slot][..] } else { &[slot, twin] };
                    let version = version.max(of_twin) + 1;
                    for &slot in slots {
                        versions.set(slot, 0, version);
                        disk.write_at(slot * PAGE, &page(slot, version), Flags::empty()).unwrap();
                        versions.set(slot, 1, version);
                        written[slot as usize] = version;
                    }
                }
            });
        }
        scope.spawn(|| {
            let versions = Versions::scratch(directory);
            for version in versions.begun()[0] + 1.. {
                versions.set(0, 0, version);
                scratch.rewind().unwrap();
                write_scratch(&scratch, &versions, version);
            }
        });
        scope.spawn(|| {
            loop {
                disk.compact();
                thread::sleep(Duration::from_millis(1));
            }
        });
        scope.spawn(|| {
            let group = RecompressOptions { group: true, ..RecompressOptions::default() };
            let dedup = RecompressOptions { dedup: true, ..RecompressOptions::default() };
            loop {
                for options in [&group, &dedup] {
                    // The limit may leave no space.
                    let _ = disk.recompress(options);
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        loop {
            let oldest = versions.written();
            let snapshot = disk.snapshot().unwrap();
            let newest = versions.begun();
            snapshot.set_keys(next_key, 0);
            let bounds: Vec<u8> = oldest.into_iter().chain(newest).flat_map(u64::to_le_bytes).collect();
            let new = directory.join("new");
            fs::write(&new, bounds).unwrap();
            fs::rename(new, path_of_snapshot(directory, next_key)).unwrap();
            snapshots.insert(next_key, snapshot);
            next_key += 1;
            if snapshots.len() > SNAPSHOTS {
                // Any of them, so that pages move to older ones.
                let key = *snapshots.keys().nth(next_key as usize % SNAPSHOTS).unwrap();
                fs::remove_file(path_of_snapshot(directory, key)).unwrap();
                snapshots.remove(&key);
            }
            thread::sleep(Duration::from_millis(1));
        }
    });
}

fn open<'a>(paths: impl Iterator<Item = &'a str>) -> io::Result<FamilyFiles<OwnedFd>> {
    let open = |path| File::options().read(true).write(true).open(path).map(OwnedFd::from);
    let files: Vec<_> = paths.map(open).collect::<io::Result<_>>()?;
    let [family, roots, nodes, pool] = files.try_into().unwrap();
    Ok(FamilyFiles { family, roots, nodes, pool, backing: None })
}

/// Starts a process that adopts `files` and checks its content. Returns its files when it begins to write;
/// `None` if it was killed before.
fn start(
    directory: &Path,
    files: Option<&FamilyFiles<OwnedFd>>,
    kill: Option<(KillPoint, u32)>,
) -> (Child, Option<FamilyFiles<OwnedFd>>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let (_, module) = module_path!().split_once("::").unwrap();
    let name = format!("{module}::{TEST}");
    command.args(["--exact", &name, "--nocapture"]).env(DIRECTORY, directory);
    if let Some(FamilyFiles { family, roots, nodes, pool, backing: _ }) = files {
        let own = std::process::id();
        let paths = [family, roots, nodes, pool].map(|file| format!("/proc/{own}/fd/{}", file.as_raw_fd()));
        command.env(FILES, paths.join(" "));
    }
    if let Some((point, times)) = kill {
        command.env(kill_points::VARIABLE, format!("{point:?}:{times}"));
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let ready = lines.find_map(|line| line.strip_prefix("ready ").map(ToOwned::to_owned));
    let Some(ready) = ready else { return (child, None) };
    let paths: Vec<_> = ready.split(' ').map(|fd| format!("/proc/{}/fd/{fd}", child.id())).collect();
    // Background work of the child can meet the kill point at any moment.
    let Ok(files) = open(paths.iter().map(String::as_str)) else { return (child, None) };
    let _ = child.stdin.take().unwrap().write_all(b"\n");
    (child, Some(files))
}

/// Adopts a family for the last time, checks it, and frees all of its memory.
fn finish(directory: &Path, files: FamilyFiles<OwnedFd>) {
    let (family, devices) =
        FamilyMemory::open(files).unwrap().adopt(settings(directory), &mut |_| None).unwrap();
    let (disk, scratch, snapshots) = check_all(devices, directory);
    drop((scratch, snapshots));
    disk.reset().unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    let blocks = || disk.backing().map_or(0, |backing| backing.used_bytes);
    while family.stat().layers > 1 || family.stat().mem_used_total > 0 || blocks() > 0 {
        let objects = (disk.group_stat(), disk.dedup_stat());
        assert!(Instant::now() < end, "{:?}, {:?}, {objects:?}", family.stat(), disk.backing());
        thread::sleep(Duration::from_millis(1));
        disk.compact();
    }
}

/// The processes to be killed run this test, too.
#[test]
fn killed_processes_lose_nothing() {
    match std::env::var_os(DIRECTORY) {
        Some(directory) => run_until_killed(Path::new(&directory)),
        None => kill_at_any_moment(tempfile::tempdir().unwrap().path()),
    }
}

#[test]
fn killed_processes_lose_nothing_on_backing_device() {
    let directory = tempfile::tempdir().unwrap();
    File::create(directory.path().join(BACKING)).unwrap();
    kill_at_any_moment(directory.path());
}

fn kill_at_any_moment(directory: &Path) {
    let mut files = None;
    for round in 0..effort(12, 1000_u64) {
        let (mut child, new) = start(directory, files.as_ref(), None);
        thread::sleep(Duration::from_micros(500 * (round * 7 % 60)));
        child.kill().unwrap();
        child.wait().unwrap();
        files = Some(new.unwrap());
    }
    finish(directory, files.unwrap());
}

/// Each process is killed at another point, so the processes pass all of them.
#[test]
fn kill_at_each_point_loses_nothing() {
    use KillPoint::*;
    let needs_device =
        |point: &KillPoint| matches!(point, PagesWritten | PageWrittenBack | PageInFlight | PageRead);
    let points: Vec<_> = KillPoint::ALL.into_iter().filter(|point| !needs_device(point)).collect();
    kill_at(&points, tempfile::tempdir().unwrap().path());
    // With a backing device, pages seldom stay in memory until they are overwritten, or shared.
    let is_frequent = |point: &KillPoint| {
        !matches!(point, OverwriteRecorded | HalfOverwritten | Overwritten | ObjectShared | ObjectTakenBack)
    };
    let points: Vec<_> = KillPoint::ALL.into_iter().filter(is_frequent).collect();
    let directory = tempfile::tempdir().unwrap();
    File::create(directory.path().join(BACKING)).unwrap();
    kill_at(&points, directory.path());
}

fn kill_at(points: &[KillPoint], directory: &Path) {
    let mut files = None;
    for times in 1..=effort(1, 30) {
        for point in points {
            let (mut child, new) = start(directory, files.as_ref(), Some((*point, times)));
            let end = Instant::now() + Duration::from_secs(60);
            let status = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break status;
                }
                if Instant::now() > end {
                    child.kill().unwrap();
                    panic!("{point:?} is not passed {times} times");
                }
                thread::sleep(Duration::from_millis(1));
            };
            assert_eq!(status.signal(), Some(libc::SIGKILL), "{point:?}: {status}");
            files = new.or(files);
        }
    }
    finish(directory, files.unwrap());
}
