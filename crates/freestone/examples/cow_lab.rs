//! An origin and its snapshots for the kernel lab: does what it reads from its standard input, a
//! line at a time, and answers as `lab/snapshots.sh` makes the kernel answer.
//!
//! ```text
//! cow_lab NOISE ORIGIN [COW KIND CHUNK]...      CHUNK in sectors of 512 bytes; 0 takes the store's
//!
//! write WHERE SECTOR COUNT SKIP    COUNT sectors of NOISE from byte SKIP on; WHERE is `origin`, `snap1`, `snap2` ..
//! read WHERE FILE [SECTOR COUNT]   into FILE; without a place all of it
//! status WHERE
//! merge WHERE                      to its end
//! merge-some WHERE                 until at least one run is merged, then it is stopped
//! die N                            the N-th write from now on to any of the devices is half done, and the last thing
//! ```
//!
//! Exit status: 0, 1 when something is refused or not understood, 134 (`SIGABRT`) after `die`.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{ExitCode, abort};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread::yield_now;

use freestone::cow::{Config, MergeStatus, Origin, Snapshot, Status};
use freestone::device::{
    Blocking, Buffer, Completion, Device, Extent, Flags, Geometry, IoBuf, Op, Request, Result, Tried,
};
use freestone::file::{self, File};

const SECTOR_BYTES: u64 = 512;

type Outcome<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A device that a crash interrupts.
struct Mortal {
    below: File,
    /// Writes until then, of all devices together; not positive: forever.
    writes_left: Arc<AtomicI64>,
}

impl Device for Mortal {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        match request.op {
            Op::Read | Op::Flush => self.below.try_io(request, buffer),
            _ => Ok(Tried::WouldBlock),
        }
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let last = !matches!(request.op, Op::Read | Op::Flush)
            && self.writes_left.fetch_sub(1, Ordering::SeqCst) == 1;
        if !last {
            return self.below.submit(request, buffer, done);
        }
        // Whole sectors, as a disk does it.
        let half = request.len / SECTOR_BYTES / 2 * SECTOR_BYTES;
        if half == 0 {
            abort();
        }
        let data = match request.op {
            Op::Write => IoBuf::copy_of(&buffer[..half as usize]).unwrap_or_else(|_| abort()),
            _ => IoBuf::empty(),
        };
        // What was to be answered is held until then, so that nothing goes on.
        let end = Completion::new(move |_, _| {
            let _held = &done;
            abort()
        });
        self.below.submit(Request { len: half, ..request }, data, end);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.below.extents(offset, len, row)
    }
}

/// What the lines are about.
struct Lab {
    noise: Vec<u8>,
    origin: Origin,
    snapshots: Vec<Snapshot>,
    writes_left: Arc<AtomicI64>,
}

impl Lab {
    fn open(mut words: impl Iterator<Item = String>) -> Outcome<Self> {
        let mut word = |what: &str| words.next().ok_or_else(|| format!("{what} is missing"));
        let noise = fs::read(word("NOISE")?)?;
        let writes_left = Arc::new(AtomicI64::new(0));
        let device = |path: String| -> Outcome<Arc<dyn Device>> {
            let below = File::open(&file::Config::new(PathBuf::from(path)))?;
            Ok(Arc::new(Mortal { below, writes_left: Arc::clone(&writes_left) }))
        };
        let origin = Origin::new(device(word("ORIGIN")?)?);
        let mut snapshots = Vec::new();
        while let Ok(cow) = word("COW") {
            let (kind, chunk) = (word("KIND")?.parse()?, word("CHUNK")?.parse::<u64>()?);
            let chunk_bytes = (chunk != 0).then(|| chunk.saturating_mul(SECTOR_BYTES));
            snapshots
                .push(origin.snapshot(device(cow)?, &Config { kind, chunk_bytes, ..Config::default() })?);
        }
        Ok(Self { noise, origin, snapshots, writes_left })
    }

    fn snapshot(&self, name: &str) -> Outcome<&Snapshot> {
        let number = name.strip_prefix("snap").and_then(|number| number.parse::<usize>().ok());
        let found = number.and_then(|number| self.snapshots.get(number.checked_sub(1)?));
        Ok(found.ok_or_else(|| format!("there is no snapshot `{name}`"))?)
    }

    fn device(&self, name: &str) -> Outcome<&dyn Device> {
        if name == "origin" { Ok(&self.origin) } else { Ok(self.snapshot(name)?) }
    }

    /// Does one line, and gives the answer.
    fn line(&self, line: &str) -> Outcome<String> {
        let words: Vec<_> = line.split_whitespace().collect();
        match *words.as_slice() {
            ["write", name, sector, count, skip] => {
                let (sector, count) = (sector.parse::<u64>()?, count.parse::<usize>()?);
                let skip = skip.parse::<usize>()?;
                let data = self.noise.get(skip..).and_then(|data| data.get(..count * SECTOR_BYTES as usize));
                let data = data.ok_or("there is less noise")?;
                Ok(word(self.device(name)?.write_at(sector * SECTOR_BYTES, data, Flags::empty())).into())
            }
            ["read", name, path] => {
                let device = self.device(name)?;
                read(device, path, 0, device.geometry().size)
            }
            ["read", name, path, sector, count] => {
                let (sector, count) = (sector.parse::<u64>()?, count.parse::<u64>()?);
                read(self.device(name)?, path, sector * SECTOR_BYTES, count * SECTOR_BYTES)
            }
            ["status", name] => Ok(self.snapshot(name)?.status().to_string()),
            ["merge", name] => {
                let snapshot = self.snapshot(name)?;
                snapshot.merge()?;
                Ok(format!("{:?}", snapshot.wait_merge()))
            }
            ["merge-some", name] => {
                let snapshot = self.snapshot(name)?;
                let before = snapshot.status();
                snapshot.merge()?;
                while snapshot.status() == before && snapshot.merge_status() == MergeStatus::Running {
                    yield_now();
                }
                snapshot.stop_merge();
                let merged = match (before, snapshot.status()) {
                    (Status::Usage(before), Status::Usage(now)) => now.allocated < before.allocated,
                    _ => false,
                };
                let what = if merged { "some is merged" } else { "nothing is merged" };
                Ok(format!("{:?}, {what}", snapshot.merge_status()))
            }
            ["die", writes] => {
                self.writes_left.store(writes.parse()?, Ordering::SeqCst);
                Ok("ok".into())
            }
            _ => Err(format!("`{line}` is not understood").into()),
        }
    }

    fn run(&self) -> Outcome<()> {
        for line in io::stdin().lines() {
            let line = line?;
            println!("{line}: {}", self.line(&line)?);
        }
        Ok(())
    }
}

fn read(device: &dyn Device, path: &str, offset: u64, len: u64) -> Outcome<String> {
    let mut data = vec![0; len as usize];
    let outcome = device.read_at(offset, &mut data);
    if outcome.is_ok() {
        fs::write(path, data)?;
    }
    Ok(word(outcome).into())
}

/// The kernel has only one word for what fails.
fn word(outcome: Result<()>) -> &'static str {
    if outcome.is_ok() { "ok" } else { "failed" }
}

fn main() -> ExitCode {
    match Lab::open(std::env::args().skip(1)).and_then(|lab| lab.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("refused: {error}");
            ExitCode::FAILURE
        }
    }
}
