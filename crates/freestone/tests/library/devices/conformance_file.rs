//! The file device passes the conformance suite in every mode, on both engines, over a disk, tmpfs
//! and a loop device.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use freestone::device::Device;
use freestone::file::{Config, Direct, Engine, File};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{DeferPolicy, DeferringDevice, Rng};

const SIZE: u64 = 2 << 20;

/// Few rounds, because each FUA write and flush waits for the disk.
fn options(seed: u64) -> Options {
    Options { seed, rounds: 60, window: 1 << 20, max_io: 512 << 10, thread_rounds: 80, ..Options::default() }
}

/// New files in a temporary directory. Each file is used once.
struct Files {
    dir: tempfile::TempDir,
    made: Cell<u32>,
}

impl Files {
    fn new() -> Self {
        Self::below(&std::env::temp_dir())
    }

    fn below(dir: &Path) -> Self {
        Self { dir: tempfile::tempdir_in(dir).unwrap(), made: Cell::new(0) }
    }

    fn path(&self) -> PathBuf {
        self.made.set(self.made.get() + 1);
        self.dir.path().join(format!("{}.img", self.made.get()))
    }

    fn open(&self, direct: Direct, engine: Engine) -> Arc<dyn Device> {
        let config = Config { direct, engine, size: Some(SIZE), ..Config::new(self.path()) };
        Arc::new(File::open(&config).unwrap())
    }
}

#[test]
fn buffered() {
    let files = Files::new();
    conformance::check("buffered file", &|| files.open(Direct::Off, Engine::IoUring), options(1));
}

#[test]
fn direct() {
    let files = Files::new();
    conformance::check("direct file", &|| files.open(Direct::On, Engine::IoUring), options(2));
}

#[test]
fn on_threads() {
    let files = Files::new();
    conformance::check("buffered file on threads", &|| files.open(Direct::Off, Engine::Threads), options(3));
    conformance::check("direct file on threads", &|| files.open(Direct::On, Engine::Threads), options(4));
}

#[test]
fn deferred() {
    let files = Files::new();
    let make = || {
        let file = files.open(Direct::Off, Engine::Auto);
        Arc::new(DeferringDevice::new(file, DeferPolicy::Sometimes(30), 5)) as Arc<dyn Device>
    };
    conformance::check("deferred file", &make, options(5));
}

#[test]
fn read_only() {
    let files = Files::new();
    let path = files.path();
    let mut content = vec![0; SIZE as usize];
    Rng::new(6).fill(&mut content[SIZE as usize / 4..SIZE as usize / 2]);
    fs::write(&path, content).unwrap();
    for direct in [Direct::Off, Direct::On] {
        let config = Config { read_only: true, direct, ..Config::new(&path) };
        let make = || Arc::new(File::open(&config).unwrap()) as Arc<dyn Device>;
        conformance::check("read-only file", &make, options(6));
    }
}

/// tmpfs lacks `RWF_NOWAIT` and `FALLOC_FL_ZERO_RANGE`, so the device uses its fallbacks.
#[test]
fn on_tmpfs() {
    let shm = Path::new("/dev/shm");
    if !shm.is_dir() {
        assert!(!on_ci(), "CI must have /dev/shm");
        println!("no /dev/shm: the fallbacks for tmpfs are not tested here");
        return;
    }
    let files = Files::below(shm);
    for (seed, engine) in [(7, Engine::IoUring), (8, Engine::Threads)] {
        conformance::check("file on tmpfs", &|| files.open(Direct::Off, engine), options(seed));
    }
}

#[test]
fn grown_file() {
    let files = Files::new();
    for direct in [Direct::Off, Direct::On] {
        let path = files.path();
        let config = Config { direct, size: Some(SIZE), ..Config::new(&path) };
        let file = File::open(&config).unwrap();
        let grow = || {
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(2 * SIZE).unwrap();
            assert_eq!(file.refresh(), Ok(2 * SIZE));
        };
        conformance::check_grown(&file, &options(9), &grow).unwrap();
    }
}

#[test]
fn block_device() {
    let files = Files::new();
    let path = files.path();
    fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    let Some(disk) = LoopDevice::over(&path) else {
        // If the machine has no loop devices, the test uses a plain file instead.
        conformance::check("file", &|| files.open(Direct::Auto, Engine::Auto), options(10));
        return;
    };
    for direct in [Direct::Auto, Direct::Off] {
        let make = || {
            let config = Config { direct, ..Config::new(&disk.0) };
            Arc::new(File::open(&config).unwrap()) as Arc<dyn Device>
        };
        conformance::check("loop device", &make, options(11));
        let file = File::open(&Config { direct, ..Config::new(&disk.0) }).unwrap();
        assert_eq!(file.is_direct(), direct == Direct::Auto);
    }
    let file = File::open(&Config::new(&disk.0)).unwrap();
    let grow = || {
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(2 * SIZE).unwrap();
        let done = Command::new(freestone_testkit::tools::find("losetup"))
            .arg("--set-capacity")
            .arg(&disk.0)
            .status()
            .unwrap();
        assert!(done.success());
        assert_eq!(file.refresh(), Ok(2 * SIZE));
    };
    conformance::check_grown(&file, &options(12), &grow).unwrap();
}

/// A loop device over a file, detached when dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn over(path: &Path) -> Option<Self> {
        let out = Command::new(freestone_testkit::tools::find("losetup"))
            .args(["--find", "--show"])
            .arg(path)
            .output();
        match out {
            Ok(out) if out.status.success() => {
                Some(Self(PathBuf::from(String::from_utf8(out.stdout).unwrap().trim())))
            }
            failed => {
                assert!(!on_ci(), "CI must be able to set up loop devices: {failed:?}");
                println!("cannot set up a loop device, block devices are not tested here: {failed:?}");
                None
            }
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new(freestone_testkit::tools::find("losetup")).arg("--detach").arg(&self.0).status();
    }
}

fn on_ci() -> bool {
    std::env::var_os("CI").is_some_and(|ci| ci == "true")
}
