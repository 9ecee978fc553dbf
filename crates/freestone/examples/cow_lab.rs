//! Runs an origin and its snapshots for the kernel lab. The program executes the commands on its standard
//! input, and prints results in the format that `lab/snapshots.sh` uses for the kernel.
//!
//! ```text
//! cow_lab NOISE ORIGIN [COW KIND CHUNK]...      CHUNK in sectors of 512 bytes; 0 for the store's chunk
//!
//! write WHERE SECTOR COUNT SKIP    write COUNT sectors of NOISE from byte SKIP on; WHERE is `origin`, `snap1`, `snap2` ..
//! read WHERE FILE [SECTOR COUNT]   read into FILE; without SECTOR COUNT, the whole device
//! status WHERE                     print the status of a snapshot
//! merge WHERE                      merge a snapshot completely
//! merge-some WHERE                 merge at least one run of consecutive chunks, then stop
//! die N                            abort in the middle of the N-th write from now on, to any device
//! ```
//!
//! Exit status: 0, 1 if a command fails or is invalid, 134 (`SIGABRT`) after `die`.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{ExitCode, abort};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread::yield_now;

use freestone::cow::{Config, MergeStatus, Origin, Snapshot, Status};
use freestone::device::{
    Blocking, Buffer, Completion, Device, Flags, IoBuf, Op, Request, Result, TryResult, forward_device,
};
use freestone::file::{self, File};

const SECTOR_BYTES: u64 = 512;

type Outcome<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A device that can abort the process in the middle of a write, as a crash would.
struct CrashingDevice {
    file: File,
    /// Remaining writes to all devices until the abort. No abort happens if the number is 0 or negative.
    writes_left: Arc<AtomicI64>,
}

impl Device for CrashingDevice {
    forward_device!(|layer| layer.file => geometry, extents; prefetch: none, zoned: none, changes: none);

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        match request.op {
            Op::Read | Op::Flush => self.file.try_io(request, buffer),
            _ => Ok(TryResult::WouldBlock),
        }
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let last = !matches!(request.op, Op::Read | Op::Flush)
            && self.writes_left.fetch_sub(1, Ordering::SeqCst) == 1;
        if !last {
            return self.file.submit(request, buffer, done);
        }
        // A disk writes whole sectors, so the partial write ends at a sector boundary.
        let half = request.len / SECTOR_BYTES / 2 * SECTOR_BYTES;
        if half == 0 {
            abort();
        }
        let data = match request.op {
            Op::Write => IoBuf::copy_of(&buffer[..half as usize]).unwrap_or_else(|_| abort()),
            _ => IoBuf::empty(),
        };
        // Keeping the caller's completion until the abort stops the caller from continuing.
        let end = Completion::new(move |_, _| {
            let _held = &done;
            abort()
        });
        self.file.submit(Request { len: half, ..request }, data, end);
    }
}

/// The origin, its snapshots and the noise file that the commands use.
struct Lab {
    noise: Vec<u8>,
    origin: Origin,
    snapshots: Vec<Snapshot>,
    writes_left: Arc<AtomicI64>,
}

impl Lab {
    fn open(mut words: impl Iterator<Item = String>) -> Outcome<Self> {
        let mut next_word = |what: &str| words.next().ok_or_else(|| format!("{what} is missing"));
        let noise = fs::read(next_word("NOISE")?)?;
        let writes_left = Arc::new(AtomicI64::new(0));
        let device = |path: String| -> Outcome<Arc<dyn Device>> {
            let file = File::open(&file::Config::new(PathBuf::from(path)))?;
            Ok(Arc::new(CrashingDevice { file, writes_left: Arc::clone(&writes_left) }))
        };
        let origin = Origin::new(device(next_word("ORIGIN")?)?);
        let mut snapshots = Vec::new();
        while let Ok(cow) = next_word("COW") {
            let (kind, chunk) = (next_word("KIND")?.parse()?, next_word("CHUNK")?.parse::<u64>()?);
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

    /// Executes one command. Returns the text to print after the command.
    fn line(&self, line: &str) -> Outcome<String> {
        let words: Vec<_> = line.split_whitespace().collect();
        match *words.as_slice() {
            ["write", name, sector, count, skip] => {
                let (sector, count) = (sector.parse::<u64>()?, count.parse::<usize>()?);
                let skip = skip.parse::<usize>()?;
                let data = self.noise.get(skip..).and_then(|data| data.get(..count * SECTOR_BYTES as usize));
                let data = data.ok_or("there is less noise")?;
                Ok(outcome_word(self.device(name)?.write_at(sector * SECTOR_BYTES, data, Flags::empty()))
                    .into())
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
    Ok(outcome_word(outcome).into())
}

/// Returns the printed word for an outcome. The kernel side of the lab does not distinguish errors, so each
/// error is `failed`.
fn outcome_word(outcome: Result<()>) -> &'static str {
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
