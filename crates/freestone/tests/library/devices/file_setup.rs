//! Files that the file device refuses to open, and files that it creates.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use freestone::device::{Blocking, Device, Flags};
use freestone::file::{Config, Direct, Engine, File, SetupError};
use rustix::fs::{FlockOperation, flock};

const SIZE: u64 = 1 << 20;

fn refused(config: &Config) -> SetupError {
    let error = File::open(config).expect_err("must be refused");
    let path = config.path.display().to_string();
    assert!(error.to_string().starts_with(&path), "the error must name {path}: {error}");
    error
}

fn image(dir: &Path, name: &str, size: u64) -> Config {
    let path = dir.join(name);
    fs::File::create(&path).unwrap().set_len(size).unwrap();
    Config::new(path)
}

#[test]
fn unsuitable_file_is_refused_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| Config::new(dir.path().join(name));

    assert!(refused(&at("missing.img")).to_string().contains("No such file"));
    assert!(refused(&at("no/dir.img")).to_string().contains("No such file"));
    assert!(refused(&Config::new(dir.path())).to_string().contains("is a directory"));
    assert!(refused(&Config::new("/dev/null")).to_string().contains("is a character device"));
    let fifo = at("fifo");
    assert!(Command::new("mkfifo").arg(&fifo.path).status().unwrap().success());
    assert!(refused(&fifo).to_string().contains("is a pipe"));

    assert!(matches!(refused(&image(dir.path(), "empty.img", 0)), SetupError::Empty { .. }));
    let odd = refused(&image(dir.path(), "odd.img", 1000));
    assert!(matches!(odd, SetupError::Size { size: 1000, block: 512, .. }));
    assert!(odd.to_string().contains("truncate it to 1024 bytes"), "{odd}");

    let file = image(dir.path(), "file.img", SIZE);
    assert!(refused(&Config::new(file.path.join("below"))).to_string().contains("Not a directory"));
    let other = Config { size: Some(2 * SIZE), ..file.clone() };
    assert!(matches!(refused(&other), SetupError::SizeMismatch { found: SIZE, .. }));
    assert_eq!(fs::metadata(&file.path).unwrap().len(), SIZE);
    for size in [0, 511, u64::MAX] {
        assert!(matches!(
            refused(&Config { size: Some(size), ..at("new.img") }),
            SetupError::InvalidSize { .. }
        ));
    }
}

#[test]
fn missing_permission_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let config = image(dir.path(), "file.img", SIZE);
    fs::set_permissions(&config.path, fs::Permissions::from_mode(0o000)).unwrap();
    if fs::File::open(&config.path).is_ok() {
        // Root may write any regular file, so the test uses a file of procfs that even root cannot
        // write.
        let proc = Config::new("/proc/version");
        assert!(matches!(refused(&proc), SetupError::Call { .. } | SetupError::Empty { .. }));
        return;
    }
    assert!(refused(&config).to_string().contains("Permission denied"));
}

#[test]
fn new_file_is_sparse_and_created_only_if_usable() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new.img");
    let size = 1 << 40;
    let file = File::open(&Config { size: Some(size), ..Config::new(&path) }).unwrap();
    assert_eq!(file.geometry().size, size);
    let made = fs::metadata(&path).unwrap();
    assert_eq!((made.len(), made.mode() & 0o777), (size, 0o600));
    assert!(made.blocks() < 100, "{} blocks are allocated", made.blocks());

    // The size is not a multiple of the block size, so the file is not created.
    let odd = dir.path().join("odd.img");
    assert!(matches!(
        refused(&Config { size: Some(SIZE + 1), ..Config::new(&odd) }),
        SetupError::Size { .. }
    ));
    assert!(!odd.exists());
    // A new file is not created for a read-only device, because the file would be empty.
    refused(&Config { size: Some(SIZE), read_only: true, ..Config::new(&odd) });
    assert!(!odd.exists());
    // An existing file is kept, even if the device cannot be opened.
    let there = image(dir.path(), "there.img", 1000);
    refused(&Config { size: Some(SIZE), ..there.clone() });
    assert_eq!(fs::metadata(&there.path).unwrap().len(), 1000);
}

#[test]
fn file_is_locked_for_one_writer_or_many_readers() {
    let dir = tempfile::tempdir().unwrap();
    let write = image(dir.path(), "file.img", SIZE);
    let read = Config { read_only: true, ..write.clone() };

    let writer = File::open(&write).unwrap();
    assert!(matches!(refused(&write), SetupError::InUse { .. }));
    assert!(matches!(refused(&read), SetupError::InUse { .. }));
    // The lock on the file is released with the device, even after I/O. The test locks the file
    // itself, because an open would retry for a moment.
    let anybody = fs::File::open(&write.path).unwrap();
    for _ in 0..20 {
        writer.write_at(0, &[1; 4096], Flags::empty()).unwrap();
    }
    drop(writer);
    for _ in 0..20 {
        flock(&anybody, FlockOperation::NonBlockingLockExclusive).unwrap();
        flock(&anybody, FlockOperation::Unlock).unwrap();
        let writer = File::open(&write).unwrap();
        writer.write_at(0, &[1; 512], Flags::empty()).unwrap();
    }
    let readers = [File::open(&read).unwrap(), File::open(&read).unwrap()];
    assert!(matches!(refused(&write), SetupError::InUse { .. }));
    drop(readers);
    File::open(&write).unwrap();
}

#[test]
fn open_retries_while_previous_user_ends() {
    let dir = tempfile::tempdir().unwrap();
    let config = image(dir.path(), "file.img", SIZE);
    let ending = File::open(&config).unwrap();
    let ends = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        drop(ending);
    });
    File::open(&config).unwrap();
    ends.join().unwrap();
}

#[test]
fn direct_and_buffered_modes_apply() {
    let dir = tempfile::tempdir().unwrap();
    let config = image(dir.path(), "file.img", SIZE);
    for (direct, expected) in [(Direct::Auto, false), (Direct::Off, false), (Direct::On, true)] {
        let file = File::open(&Config { direct, ..config.clone() }).unwrap();
        assert_eq!(file.is_direct(), expected);
        assert!(expected || file.geometry().logical_block == 512);
    }
    for engine in [Engine::IoUring, Engine::Threads] {
        assert_eq!(File::open(&Config { engine, ..config.clone() }).unwrap().engine(), engine);
    }
    // procfs does not support O_DIRECT. The device must report that when it is opened, not at its
    // first request.
    if Path::new("/proc/config.gz").exists() {
        let odd = Config { direct: Direct::On, read_only: true, ..Config::new("/proc/config.gz") };
        refused(&odd);
    }
}
