//! Helpers that run qemu's tools, and that read and compare whole devices.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use freestone::device::{Buffer, Completion, Device, IoBuf, Request, Result, TryResult};
use freestone::qcow2::{Config, Image};
use freestone_testkit::{Rng, first_difference};

const PATIENCE: Duration = Duration::from_secs(60);

/// A temporary directory for one test, in which qemu's tools run.
pub struct Dir(tempfile::TempDir);

impl Dir {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Returns a directory on a disk, and one on tmpfs, where no read completes inline.
    pub fn both() -> Vec<Self> {
        let mut both = vec![Self::new()];
        let shm = Path::new("/dev/shm");
        if shm.is_dir() {
            both.push(Self(tempfile::tempdir_in(shm).unwrap()));
        } else {
            assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "CI must have /dev/shm");
            println!("no /dev/shm: submitted reads are hardly tested here");
        }
        both
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn all(&self) -> &Path {
        self.0.path()
    }

    /// Runs a tool in the directory. Returns its standard output; panics if the tool is missing or
    /// fails.
    pub fn run(&self, tool: &str, args: &[&str]) -> String {
        let out = Command::new(tool).args(args).current_dir(self.0.path()).output();
        let out = out.unwrap_or_else(|error| panic!("{tool} (package qemu-utils): {error}"));
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let errors = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{tool} {args:?}: {}\n{text}{errors}", out.status);
        text
    }

    pub fn img(&self, args: &str) -> String {
        self.run("qemu-img", &args.split_whitespace().collect::<Vec<_>>())
    }

    /// Creates an image of 1 MiB that is encrypted with LUKS. qemu-img first measures the machine's
    /// speed, and fails if that takes less than a clock tick. On fast machines this is common, so
    /// the call is repeated.
    pub fn luks(&self, name: &str) {
        const TRIES: u32 = 100;
        const TOO_FAST: &str = "Unable to get accurate CPU usage";
        for _ in 0..TRIES {
            let mut create = Command::new(freestone_testkit::tools::find("qemu-img"));
            create.args(["create", "-f", "qcow2", "--object", "secret,id=s,data=key"]);
            create.args(["-o", "encrypt.format=luks,encrypt.key-secret=s", name, "1M"]);
            let out = create.current_dir(self.0.path()).output().expect("qemu-img (package qemu-utils)");
            if out.status.success() {
                return;
            }
            let errors = String::from_utf8_lossy(&out.stderr);
            assert!(errors.contains(TOO_FAST), "{create:?}: {}\n{errors}", out.status);
        }
        panic!("qemu-img was too fast for itself {TRIES} times");
    }

    /// Runs commands of qemu-io on a qcow2 image in the directory.
    pub fn io(&self, name: &str, commands: &[&str]) {
        let mut args = vec!["-f", "qcow2"];
        for command in commands {
            args.extend(["-c", *command]);
        }
        args.push(name);
        let out = self.run("qemu-io", &args);
        assert!(!out.contains("failed") && !out.contains("rror"), "{out}");
    }

    /// Drops the files of the directory from the page cache. Has no effect on tmpfs.
    pub fn drop_page_cache(&self) {
        for entry in fs::read_dir(self.0.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                let file = fs::File::open(path).unwrap();
                file.sync_all().unwrap();
                rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            }
        }
    }

    /// Returns the content of an image, as qemu reads it.
    pub fn raw(&self, name: &str) -> Vec<u8> {
        self.img(&format!("convert -O raw {name} {name}.check"));
        let content = fs::read(self.path(&format!("{name}.check"))).unwrap();
        fs::remove_file(self.path(&format!("{name}.check"))).unwrap();
        content
    }

    pub fn open(&self, name: &str) -> Image {
        Image::open(&Config::new(self.path(name))).unwrap()
    }
}

/// Returns `size` bytes of noise, text, repeated bytes and zeroes, in pieces that match no cluster
/// size.
pub fn content(size: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut content = vec![0; size];
    let mut at = 0;
    while at < size {
        let len = (512 * (1 + rng.below(300)) as usize).min(size - at);
        let part = &mut content[at..at + len];
        match rng.below(4) {
            0 => rng.fill(part),
            1 => part.iter_mut().enumerate().for_each(|(i, byte)| *byte = b"freestone "[i / 7 % 10]),
            2 => part.fill(rng.below(256) as u8),
            _ => {}
        }
        at += len;
    }
    content
}

/// Reads a range: inline as far as possible with the rest submitted, or all submitted if `inline`
/// is false.
pub fn read(device: &dyn Device, offset: u64, len: u64, inline: bool) -> Result<Vec<u8>> {
    let mut out = vec![0xee; len as usize];
    let mut done = 0;
    while inline && done < len {
        let request = Request::read(offset + done, len - done);
        match device.try_io(&request, Buffer::Read(&mut out[done as usize..]))? {
            TryResult::Done => return Ok(out),
            TryResult::Partly(n) => {
                assert!(n > 0 && n < len - done, "{n} of {}", len - done);
                done += n;
            }
            TryResult::WouldBlock => break,
        }
    }
    let rest = submit(device, offset + done, len - done).recv_timeout(PATIENCE).expect("no answer")?;
    out[done as usize..].copy_from_slice(&rest);
    Ok(out)
}

/// Submits a read. Returns the receiver of its data or error.
pub fn submit(device: &dyn Device, offset: u64, len: u64) -> mpsc::Receiver<Result<Vec<u8>>> {
    let (send, completion) = mpsc::channel();
    let buffer = IoBuf::zeroed(len as usize).unwrap();
    let done = Completion::new(move |outcome, buffer| drop(send.send(outcome.map(|()| buffer.to_vec()))));
    device.submit(Request::read(offset, len), buffer, done);
    completion
}

/// Checks that a device has the expected content: in one read, in pieces of many sizes, and with
/// many requests in flight.
pub fn same(device: &dyn Device, expected: &[u8], what: &str) {
    let size = device.geometry().size;
    assert_eq!(size, expected.len() as u64, "{what}");
    let check = |offset: u64, found: &[u8], how: &str| {
        let expected = &expected[offset as usize..offset as usize + found.len()];
        let wrong = first_difference(found, expected);
        assert_eq!(wrong.map(|at| at as u64 + offset), None, "{what}, {how} of {} at {offset}", found.len());
    };
    // The submitted read comes first, because nothing is cached yet.
    check(0, &read(device, 0, size, false).unwrap(), "submitted read");
    check(0, &read(device, 0, size, true).unwrap(), "tried read");
    let mut rng = Rng::new(size);
    let block = u64::from(device.geometry().logical_block);
    for _ in 0..8 {
        let mut reads = Vec::new();
        for i in 0..32 {
            let offset = rng.below(size / block) * block;
            let blocks = 1 + rng.below(((size - offset) / block).min(if i % 8 == 0 { 4096 } else { 16 }));
            reads.push((offset, submit(device, offset, blocks * block)));
        }
        for (offset, completion) in reads {
            check(
                offset,
                &completion.recv_timeout(PATIENCE).expect("no answer").unwrap(),
                "one of many reads",
            );
        }
        let offset = rng.below(size / block) * block;
        let len = (size - offset).min(8 * block);
        check(offset, &read(device, offset, len, true).unwrap(), "tried read");
    }
}
