//! System calls that fail while a directory of kept devices changes.

use freestone_core::fail_points::{Call, Fault, inject};
use rustix::io::Errno;

use super::damage::write_all;
use super::*;

/// Creates a fault with EIO: `after` calls succeed, and the next `times` calls fail.
fn fault(call: Call, after: u32, times: u32) -> Fault {
    Fault { call, after, times, errno: Errno::IO, is_done: false }
}

/// A disk that is saved repeatedly, and the contents of which one must survive a crash.
struct Life {
    dir: tempfile::TempDir,
    other: tempfile::TempDir,
    ram: Ram,
    keep: Keep,
    /// The contents of the disk, from the last content reported as saved on.
    contents: Vec<Vec<u8>>,
    /// File names created by failed steps, which a crash may undo.
    doubtful: Vec<String>,
    round: u8,
}

impl Life {
    fn new() -> Self {
        // Use a directory in memory if possible: an fsync of a disk takes milliseconds, and there
        // are thousands.
        let in_memory = || tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let (dir, other) = (in_memory(), in_memory());
        let keep = Keep::open(&dir.path().join("kept")).unwrap();
        let ram = family().ram(64 * PAGE).unwrap();
        for page in 0..64 {
            ram.write_at(page * PAGE, &[page as u8; PAGE_BYTES], Flags::empty()).unwrap();
        }
        let contents = vec![vec![0; 64 * PAGE_BYTES]];
        Self { dir, other, ram, keep, contents, doubtful: Vec::new(), round: 0 }
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("kept")
    }

    /// Runs a step. If the step `promises` durability and succeeds, only the current content may
    /// survive a crash. Then checks what a restart after a crash would restore.
    fn step(&mut self, promises: bool, step: impl FnOnce(&mut Keep, &Ram) -> bool, shown: &str) -> bool {
        let before = files(&self.path());
        let done = step(&mut self.keep, &self.ram);
        let left = inject(None);
        let mut after = files(&self.path());
        if !done {
            self.doubtful.extend(after.keys().filter(|name| !before.contains_key(*name)).cloned());
            assert!(before.keys().all(|name| after.contains_key(name)), "{shown}: a file went");
        }
        if done && promises {
            self.contents.drain(..self.contents.len() - 1);
        }
        self.check(&after, shown);
        let all = after.len();
        after.retain(|name, _| !self.doubtful.contains(name));
        if after.len() < all {
            self.check(&after, shown);
        }
        inject(left);
        done
    }

    fn check(&self, files: &BTreeMap<String, Vec<u8>>, shown: &str) {
        let path = self.other.path().join("crashed");
        write_all(&path, files);
        let mut keep = Keep::open(&path).unwrap_or_else(|why| panic!("{shown}: {why}"));
        let found = match keep.restore(&family(), &[], &never) {
            Ok((devices, _loading)) => content(named(&devices, "a")),
            Err(KeepError::Empty(_)) => vec![0; 64 * PAGE_BYTES],
            Err(why) => panic!("{shown}: {why}"),
        };
        assert!(self.contents.contains(&found), "{shown}: what was reported as saved is not there");
    }

    fn save(&mut self, shown: &str) -> bool {
        self.round += 1;
        let (round, ram) = (self.round, self.ram.clone());
        ram.write_at(u64::from(round) * PAGE, &[round ^ 0xff; PAGE_BYTES], Flags::empty()).unwrap();
        self.contents.push(content(&ram));
        let save = |keep: &mut Keep, ram: &Ram| keep.save(&[("a", ram)], &never, &mut |_, _| {}).is_ok();
        self.step(true, save, &format!("{shown}, save {round}"))
    }

    fn merge(&mut self, shown: &str) {
        let merge = |keep: &mut Keep, _: &Ram| keep.merge(&never, &mut |_, _| {}).is_ok();
        self.step(false, merge, &format!("{shown}, merge"));
    }
}

/// Every system call of a history fails, once or twice, before or after its effect. Content
/// reported as saved must survive a crash, even if the crash undoes names not known to be durable.
/// The second save after the fault must succeed, and no file of older generations may remain.
#[test]
fn save_or_merge_any_call_fails_loses_nothing() {
    let mut faults = 0;
    let calls = [
        (Call::OpenDir, false, 1),
        (Call::SyncDir, true, 1),
        (Call::SyncFile, true, 1),
        (Call::Place, true, 1),
        (Call::Open, false, 1),
        // Reads are numerous and differ little, so a quick run tests only some.
        (Call::Read, false, effort(11, 1)),
        (Call::ReadData, false, 1),
    ];
    for (call, changes, stride) in calls {
        for (times, is_done) in
            [(1, false), (2, false), (1, true)].into_iter().filter(|case| changes || !case.1)
        {
            for after in (0..).step_by(stride) {
                let mut life = Life::new();
                let shown = format!("{call:?} {times} times after {after}, done: {is_done}");
                inject(Some(Fault { is_done, ..fault(call, after, times) }));
                for step in 0..6 {
                    if step == 2 || step == 4 {
                        life.merge(&shown);
                    } else {
                        life.save(&shown);
                    }
                }
                let left = inject(None).unwrap();
                assert!(life.save(&shown) || life.save(&shown), "{shown}: saves fail after the fault");
                assert!(life.save(&shown), "{shown}: saves fail after the fault");
                life.keep.merge(&never, &mut |_, _| {}).unwrap();
                assert_eq!(files(&life.path()).len(), 1, "{shown}");
                if left.times > 0 {
                    break;
                }
                faults += 1;
            }
        }
    }
    assert!(faults > 30, "{faults}");
}

/// A merged file whose name may not be durable must not be continued by an increment. A crash that
/// undoes the name would lose the increment.
#[test]
fn merge_dir_sync_fails_next_save_is_whole() {
    let mut life = Life::new();
    assert!(life.save("before") && life.save("before"));
    inject(Some(fault(Call::SyncDir, 0, 1)));
    let failed = life.keep.merge(&never, &mut |_, _| {}).unwrap_err();
    inject(None);
    assert!(failed.to_string().contains("a crash may bring the old one back"), "{failed}");
    let names: Vec<_> = files(&life.path()).into_keys().collect();
    assert_eq!(names, ["0000000001-0001.part", "0000000001.whole", "0000000002.whole"]);
    assert!(!life.keep.is_merge_due());
    life.ram.write_at(0, &[9; 512], Flags::empty()).unwrap();
    let devices: [(&str, &Ram); 1] = [("a", &life.ram)];
    assert_eq!(life.keep.estimate(&devices).unwrap().kind, SaveKind::Whole);
    assert_eq!(save(&mut life.keep, &devices).kind, SaveKind::Whole);
    assert_eq!(files(&life.path()).into_keys().collect::<Vec<_>>(), ["0000000003.whole"]);
    assert_eq!(save(&mut life.keep, &devices).kind, SaveKind::Unchanged);
}

/// A transient error must not select an older file. The newer file would be readable again later
/// and supersede newer saves.
#[test]
fn open_passing_error_takes_no_older_generation() {
    let mut life = Life::new();
    assert!(life.save("old"));
    let old = files(&life.path());
    assert!(life.save("new") && life.keep.merge(&never, &mut |_, _| {}).is_ok() && life.save("new"));
    let path = life.path();
    let mut both = files(&path);
    both.extend(old);
    let (newest, dir) = (content(&life.ram), life.other.path().join("both"));
    drop((life.keep, life.ram));
    for damaged in [DamagePolicy::Refuse, DamagePolicy::UseOlder] {
        for (call, errno) in
            [(Call::Open, Errno::MFILE), (Call::Read, Errno::IO), (Call::Open, Errno::ACCESS)]
        {
            for after in 0.. {
                write_all(&dir, &both);
                inject(Some(Fault { errno, ..fault(call, after, 1) }));
                let opened = Keep::open_with(&dir, BaseCheck::default(), damaged);
                if inject(None).unwrap().times > 0 {
                    assert!(after > 1, "a call is found");
                    break;
                }
                assert!(
                    matches!(opened, Err(KeepError::Read(RestoreError::Read { .. }))),
                    "{call:?} {after}"
                );
                assert_eq!(files(&dir), both);
            }
        }
    }
    let (_keep, devices, _loading) = restored(&dir, &family(), &[]);
    assert!(content(named(&devices, "a")) == newest);
}

/// A directory that cannot be synced at the start is still used.
#[test]
fn open_dir_sync_fails_content_is_served() {
    let mut life = Life::new();
    assert!(life.save("first") && life.save("second"));
    let path = life.path();
    let ram = life.ram.clone();
    drop(life.keep);
    inject(Some(fault(Call::SyncDir, 0, 1)));
    let keep = Keep::open(&path);
    inject(None);
    let mut keep = keep.unwrap();
    let (devices, _loading) = keep.restore(&family(), &[], &never).unwrap();
    assert!(content(named(&devices, "a")) == content(&ram));
    named(&devices, "a").write_at(0, &[7; 512], Flags::empty()).unwrap();
    assert_eq!(save(&mut keep, &borrowed(&devices)).kind, SaveKind::Whole);
    assert_eq!(files(&path).len(), 1);
}

/// An existing file with the name of the next increment makes one save fail, but not the next.
#[test]
fn increment_name_taken_next_save_is_whole() {
    let mut life = Life::new();
    assert!(life.save("whole"));
    fs::write(life.path().join("0000000001-0001.part"), "foreign").unwrap();
    life.ram.write_at(0, &[5; 512], Flags::empty()).unwrap();
    let devices: [(&str, &Ram); 1] = [("a", &life.ram)];
    let failed = life.keep.save(&devices, &never, &mut |_, _| {}).unwrap_err();
    assert!(failed.to_string().contains("the file already exists"), "{failed}");
    assert_eq!(save(&mut life.keep, &devices).kind, SaveKind::Whole);
    assert_eq!(files(&life.path()).len(), 1);
}
