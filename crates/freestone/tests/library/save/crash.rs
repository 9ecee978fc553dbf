//! Saves that are killed, and that find no room: the old file stays as it was. And what a save
//! takes of memory.
//!
//! Each test runs itself as a child, which the environment tells what to do.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use freestone::device::{Blocking, Flags};
use freestone::ram::{Config, Family, Ram};
use freestone::save::{self, BaseCheck, SaveError};
use freestone_testkit::{Rng, effort};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::save::support::*;

const LIMIT: &str = "FREESTONE_SAVE_TEST_LIMIT";
const TARGET: &str = "FREESTONE_SAVE_TEST_TARGET";

/// Where this process is to save to, if it is a child.
fn target() -> Option<PathBuf> {
    std::env::var_os(TARGET).map(PathBuf::from)
}

/// A child that runs one test of this file.
fn child(test: &str, to: &Path, prefix: &str) -> Command {
    let (_, module) = module_path!().split_once("::").unwrap();
    let test = format!("{module}::{test}");
    let me = std::env::current_exe().unwrap();
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{prefix} exec \"$0\" \"$@\"")).arg(me);
    command.args([&test, "--exact", "--nocapture"]).env(TARGET, to).stdout(Stdio::null());
    command
}

fn large(seed: u64) -> Ram {
    let ram = disk(Config::default(), 32 * MIB);
    fill(&ram, 0..6000, seed);
    ram
}

fn is_of(ram: &Ram, seed: u64) -> bool {
    let mut page = vec![0; PAGE as usize];
    (0..6000).all(|slot| {
        ram.read_at(slot * PAGE, &mut page).unwrap();
        page == content(seed, slot)
    })
}

#[test]
fn a_killed_save_leaves_an_old_file() {
    if let Some(target) = target() {
        let disks = [large(1), large(2)];
        loop {
            for ram in &disks {
                save(&[("ram0", ram)], &target);
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk");
    save(&[("ram0", &large(1))], &file);
    let mut rng = Rng::new(3);
    let mut found = [0, 0];
    let rounds = effort(4, 12);
    for _ in 0..rounds {
        let mut process: Child = child("a_killed_save_leaves_an_old_file", &file, "").spawn().unwrap();
        // What is being written has no name; the one after the first is under way when that is
        // there.
        let inode = std::fs::metadata(&file).unwrap().ino();
        eventually("the child saves", || std::fs::metadata(&file).unwrap().ino() != inode);
        std::thread::sleep(Duration::from_millis(rng.below(60)));
        process.kill().unwrap();
        process.wait().unwrap();
        let restored = restore_one(&file, &family(), &[]);
        let seed = 1 + u64::from(!is_of(&restored, 1));
        assert!(is_of(&restored, seed));
        found[seed as usize - 1] += 1;
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if path != file {
                let name = path.file_name().unwrap().to_str().unwrap();
                assert!(name.starts_with(".freestone-save-"), "{name}");
                assert_eq!(freestone::replace::left_behind(&file), std::slice::from_ref(&path));
                // What is left of a crash is not taken for a saved disk, or is a complete one.
                if let Ok(left) = restore(&path, &family(), &[]) {
                    assert!(is_of(&left[0].1, 1) || is_of(&left[0].1, 2));
                }
                std::fs::remove_file(path).unwrap();
            }
        }
    }
    assert_eq!(found[0] + found[1], rounds);
}

#[test]
fn a_save_without_room_leaves_the_old_file() {
    if let Some(target) = target() {
        // Not before the disk is there: its memory counts as a file.
        let ram = large(1);
        let limit = std::env::var(LIMIT).unwrap().parse().unwrap();
        setrlimit(Resource::Fsize, Rlimit { current: Some(limit), maximum: None }).unwrap();
        let failed = save::save(&[("ram0", &ram)], &target, BaseCheck::Sampled, &mut |_, _| {}).unwrap_err();
        assert!(matches!(failed, SaveError::Write { .. }), "{failed}");
        assert!(failed.to_string().contains("File too large"), "{failed}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk");
    save(&[("ram0", &large(1))], &file);
    let before = std::fs::read(&file).unwrap();
    // In the header, in the contents, in the middle, at the end.
    let all = before.len() as u64;
    for limit in [0, 30, 70, all / 3, all - 1] {
        let mut process = child("a_save_without_room_leaves_the_old_file", &file, "trap '' XFSZ;");
        let status = process.env(LIMIT, limit.to_string()).status().unwrap();
        assert!(status.success(), "limit {limit}");
        assert!(std::fs::read(&file).unwrap() == before);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
    }
    let nowhere = dir.path().join("no/such/place");
    let ram = disk(Config::default(), MIB);
    let save_to = |to: &Path| save::save(&[("r", &ram)], to, BaseCheck::Sampled, &mut |_, _| {});
    assert!(matches!(save_to(&nowhere), Err(SaveError::Write { .. })));
    assert!(matches!(save_to(dir.path()), Err(SaveError::Write { .. })));
    assert!(matches!(save_to(Path::new("/dev/null")), Err(SaveError::Write { .. })));
    // Through a link the file behind it is replaced.
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    save(&[("r", &ram)], &link);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(save::inspect(&file).unwrap().devices[0].name, "r");
}

/// Private memory of this process in bytes; pools are shared memory and do not count.
fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn memory_is_bounded() {
    let Some(target) = target() else {
        let dir = tempfile::tempdir().unwrap();
        // Alone in its process, as other tests take memory, too.
        let status = child("memory_is_bounded", &dir.path().join("disk"), "").status().unwrap();
        assert!(status.success());
        return;
    };
    let ram = disk(Config::default(), 128 * MIB);
    let mut noise = vec![0; MIB as usize];
    for at in 0..96 {
        Rng::new(at).fill(&mut noise);
        ram.write_at(at * MIB, &noise, Flags::empty()).unwrap();
    }
    drop(noise);
    let bound = 24 * MIB;
    let before = private_bytes();
    let mut most = 0;
    let mut look = |_, _| most = most.max(private_bytes());
    let saved = save::save(&[("ram0", &ram)], &target, BaseCheck::Sampled, &mut look).unwrap();
    assert!(saved.file_bytes > 96 * MIB);
    assert!(most < before + bound, "{most} of {before}");
    drop(ram);
    let before = private_bytes();
    let mut most = 0;
    let mut look = |_, _| most = most.max(private_bytes());
    let family = Family::new(Config::default()).unwrap();
    assert_eq!(save::restore(&target, &family, &[], &mut look).unwrap().len(), 1);
    assert!(most < before + bound, "{most} of {before}");
}
