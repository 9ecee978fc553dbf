//! A save that is killed or finds no space keeps the old file. Also, the memory that a save uses is
//! bounded.
//!
//! Each test runs itself as a child process, controlled by environment variables.

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

/// Returns the path of the file to save if this process is a child, else None.
fn target() -> Option<PathBuf> {
    std::env::var_os(TARGET).map(PathBuf::from)
}

/// Returns a command that runs one test of this file as a child process, which saves to `to`.
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

fn has_content(ram: &Ram, seed: u64) -> bool {
    let mut page = vec![0; PAGE as usize];
    (0..6000).all(|slot| {
        ram.read_at(slot * PAGE, &mut page).unwrap();
        page == content(seed, slot)
    })
}

#[test]
fn killed_save_keeps_the_old_file() {
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
        let mut process: Child = child("killed_save_keeps_the_old_file", &file, "").spawn().unwrap();
        // A new file has no name until it is complete. So a new inode means that the first save is
        // complete and the next one is running.
        let inode = std::fs::metadata(&file).unwrap().ino();
        eventually("the child saves", || std::fs::metadata(&file).unwrap().ino() != inode);
        std::thread::sleep(Duration::from_millis(rng.below(60)));
        process.kill().unwrap();
        process.wait().unwrap();
        let restored = restore_one(&file, &family(), &[]);
        let seed = 1 + u64::from(!has_content(&restored, 1));
        assert!(has_content(&restored, seed));
        found[seed as usize - 1] += 1;
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if path != file {
                let name = path.file_name().unwrap().to_str().unwrap();
                assert!(name.starts_with(".freestone-save-"), "{name}");
                assert_eq!(freestone::replace::find_stale_files(&file), std::slice::from_ref(&path));
                // A file that a killed save leaves behind is either complete or refused when it is
                // restored.
                if let Ok(left) = restore(&path, &family(), &[]) {
                    assert!(has_content(&left[0].1, 1) || has_content(&left[0].1, 2));
                }
                std::fs::remove_file(path).unwrap();
            }
        }
    }
    assert_eq!(found[0] + found[1], rounds);
}

#[test]
fn save_without_space_keeps_the_old_file() {
    if let Some(target) = target() {
        // The limit is set after the disk was created, because the disk's memory counts as a file.
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
    // The limits stop the save in the header, in the contents, in the middle, and near the end.
    let all = before.len() as u64;
    for limit in [0, 30, 70, all / 3, all - 1] {
        let mut process = child("save_without_space_keeps_the_old_file", &file, "trap '' XFSZ;");
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
    // Saving to a symbolic link replaces the file that the link points to.
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    save(&[("r", &ram)], &link);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(save::inspect(&file).unwrap().devices[0].name, "r");
}

/// Returns the private memory of this process in bytes. Pools of RAM disks are shared memory, so
/// they do not count.
fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn memory_is_bounded() {
    let Some(target) = target() else {
        let dir = tempfile::tempdir().unwrap();
        // The child process runs only this test, because other tests would use memory too.
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
