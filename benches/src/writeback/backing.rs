//! Backing file of the `writeback` benchmark, and RAM disks that use it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use freestone::PAGE_BYTES;
use freestone::codec::Algorithm;
use freestone::device::{Blocking, Device, Flags, IoBuf};
use freestone::file;
use freestone::ram::{Config, IdleSelection, Ram, Writeback};

use super::fio::{self, Job};
use crate::data::Data;
use crate::measure::process::{ResourceUsage, UsageMeter};

const COPY_PAGES: u64 = 256;
/// Time limit for the previous disk to close the file.
const CLOSED_WAIT_MAX: Duration = Duration::from_secs(10);

/// File that disks and fio use one after the other, removed on drop.
pub struct BackingFile {
    path: PathBuf,
    bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Compressed objects without padding (`compressed_writeback=1`).
    Packed,
    /// A page per block (`compressed_writeback=0`).
    Plain,
}

pub struct WritebackResult {
    pub pages: u64,
    /// Bytes that were written, by the disk's own count.
    pub bytes: u64,
    pub spent: ResourceUsage,
}

impl BackingFile {
    /// Creates a sparse file large enough for every page of `data_bytes`, in either layout.
    pub fn new(dir: &Path, data_bytes: u64) -> Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| format!("{}", dir.display()))?;
        let path = dir.join(format!("freestone-writeback-{}.img", std::process::id()));
        // Headers and unused ends of runs need less than 1/32 of the data.
        let bytes = (data_bytes + data_bytes / 32 + (16 << 20)).next_multiple_of(1 << 20);
        let this = Self { path, bytes };
        this.sparse()?;
        Ok(this)
    }

    /// Deallocates all blocks of the file.
    pub fn sparse(&self) -> Result<()> {
        let sparse = || -> std::io::Result<()> {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            let file: File = options.open(&self.path)?;
            file.set_len(self.bytes)?;
            file.sync_all()
        };
        sparse().with_context(|| format!("{}", self.path.display()))
    }

    /// Writes the whole file once, so that every block is allocated.
    pub fn fill(&self) -> Result<()> {
        fio::run(&Job::sequential_writes(&self.path, self.bytes)).map(drop)
    }

    /// Returns true if every block of the file is allocated.
    pub fn is_written(&self) -> Result<bool> {
        let metadata = std::fs::metadata(&self.path).with_context(|| format!("{}", self.path.display()))?;
        // `st_blocks` counts blocks of 512 bytes for every file system.
        Ok(metadata.blocks() * 512 >= self.bytes)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates an empty disk over the file; only one may exist at a time. Waits until the previous
    /// disk has closed the file. A dropped disk closes the file a little later, on the thread that
    /// drops the disk's last request.
    pub fn disk(&self, pages: u64, layout: Layout, mem_limit: u64) -> Result<Ram> {
        self.disk_over(pages, layout, mem_limit, |file| file)
    }

    /// Like [`disk`](Self::disk), over the device that `over` creates from the file.
    pub fn disk_over(
        &self,
        pages: u64,
        layout: Layout,
        mem_limit: u64,
        over: impl FnOnce(Arc<dyn Device>) -> Arc<dyn Device>,
    ) -> Result<Ram> {
        let started = Instant::now();
        let file = loop {
            match file::File::open_for_writeback(&self.path, None) {
                Err(file::SetupError::InUse { .. }) if started.elapsed() < CLOSED_WAIT_MAX => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                opened => break opened?,
            }
        };
        let config = Config {
            disksize: pages * PAGE_BYTES as u64,
            comp_algorithm: Algorithm::Lz4,
            mem_limit,
            ..Config::default()
        };
        Ok(Ram::new(config.backed_by(over(Arc::new(file)), layout == Layout::Packed))?)
    }
}

impl Drop for BackingFile {
    fn drop(&mut self) {
        // The file may be gone already; drop cannot report errors.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Writes every `step`-th page of the data to the disk, in order.
pub fn fill(ram: &Ram, data: &Data, step: u64) -> Result<()> {
    let run = if step == 1 { COPY_PAGES } else { 1 };
    let mut buffer = IoBuf::zeroed(run as usize * PAGE_BYTES)?;
    let count = data.pages / step;
    for first in (0..count).step_by(run as usize) {
        let part = &mut buffer[..(count - first).min(run) as usize * PAGE_BYTES];
        data.read(first * step, part)?;
        ram.write_at(first * PAGE_BYTES as u64, part, Flags::empty())?;
    }
    Ok(())
}

/// Marks all pages idle and writes them back. Returns the pages, the bytes and the resources used.
pub fn spill(ram: &Ram) -> Result<WritebackResult> {
    ram.mark_idle(IdleSelection::All);
    let watch = UsageMeter::start()?;
    let written = ram.writeback(&Writeback::Idle).map_err(|(_, error)| error)?;
    let spent = watch.stop()?;
    anyhow::ensure!(written.pages > 0, "no page was written back");
    Ok(WritebackResult { pages: written.pages, bytes: written.blocks * PAGE_BYTES as u64, spent })
}
