//! Loading of kept devices: moves all pages from the files into memory while the devices are in
//! use. Blocks are loaded in the order of the files.

use std::sync::Arc;
use std::time::Duration;

use super::index::Entry;
use super::source::{Index, Part};
use freestone_core::device::{Error, Result};
use freestone_core::sync::thread;
use freestone_ram::transfer::Loader;

/// First and longest pause between retries when memory is short.
const PAUSE_FIRST: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// A device with its snapshots whose pages are still in files.
pub struct Stage {
    loader: Loader,
    index: Arc<Index>,
    blocks: u32,
    failed: bool,
    /// True if memory was short for this stage: other stages continue first.
    waits: bool,
}

impl Stage {
    pub fn new(loader: Loader, index: Arc<Index>) -> Self {
        Self { loader, index, blocks: 0, failed: false, waits: false }
    }
}

type BlockId = (usize, u32);

/// Result of loading one block or page.
enum LoadResult {
    Done,
    NoSpace,
    Cancelled,
}

/// Remaining load of [restored](super::Keep::restore) devices, which are in use meanwhile. Reads of
/// pages that are not loaded yet use the files. Dropping the value ends the load and leaves these
/// pages in the files.
pub struct BackgroundLoad {
    parts: Arc<[Part]>,
    /// Stages of the load; `None` once all blocks of a stage are loaded.
    stages: Vec<Option<Stage>>,
    /// Index into `stages` by node (device or snapshot).
    by_node: Vec<Option<usize>>,
    /// By file and block: index positions of the block's first and last entry; `None` if no page is
    /// needed.
    wanted: Vec<Vec<Option<(u32, u32)>>>,
    /// Next block among those that were never tried.
    next: BlockId,
    /// Blocks to try before `next`, and blocks to retry after all others were tried.
    first: Vec<BlockId>,
    later: Vec<BlockId>,
    done: u64,
    all: u64,
    left: u64,
    block: Vec<u8>,
    /// File number, and end of the read-ahead already requested in that file.
    asked: (usize, u64),
}

/// Result of [`BackgroundLoad::run`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadOutcome {
    /// All pages are in memory, and the files are closed.
    Complete,
    /// All pages except this number are in memory. The others are unreadable, as a block of a file
    /// is damaged: reads of them fail until they are written.
    Incomplete(u64),
    /// The caller cancelled the load; another call of [`run`](BackgroundLoad::run) continues it.
    Cancelled,
}

impl BackgroundLoad {
    pub(super) fn new(parts: Arc<[Part]>, stages: Vec<Stage>, by_node: Vec<Option<usize>>) -> Self {
        let none = |part: &Part| vec![None; part.blocks.len()];
        let mut wanted: Vec<Vec<Option<(u32, u32)>>> = parts.iter().map(none).collect();
        let mut stages = stages;
        for stage in &mut stages {
            for (at, entry) in (0_u32..).zip(&stage.index.entries) {
                let place = &mut wanted[entry.file()][entry.block as usize];
                stage.blocks += u32::from(place.is_none());
                *place = Some(place.map_or((at, at), |(first, _)| (first, at)));
            }
        }
        let all = stages.iter().map(|stage| u64::from(stage.blocks)).sum();
        Self {
            parts,
            stages: stages.into_iter().map(Some).collect(),
            by_node,
            wanted,
            next: (0, 0),
            first: Vec::new(),
            later: Vec::new(),
            done: 0,
            all,
            left: 0,
            block: Vec::new(),
            asked: (0, 0),
        }
    }

    /// Returns the number of loaded blocks (about 1 MiB each) and of all blocks.
    pub fn progress(&self) -> (u64, u64) {
        (self.done, self.all)
    }

    /// Loads the remaining pages until `cancelled` returns true. `cancelled` is polled between
    /// blocks and during waits. If memory is short, the load continues with other devices and
    /// retries later; meanwhile the pages are read from the files. `progress` receives the values
    /// of [`progress`](Self::progress).
    pub fn run(&mut self, cancelled: &dyn Fn() -> bool, progress: &mut dyn FnMut(u64, u64)) -> LoadOutcome {
        loop {
            while let Some(at) = self.take_next() {
                let came = if cancelled() { LoadResult::Cancelled } else { self.load(at, cancelled) };
                match came {
                    LoadResult::Done => {
                        self.done += 1;
                        progress(self.done, self.all);
                    }
                    LoadResult::NoSpace => self.later.push(at),
                    LoadResult::Cancelled => {
                        self.first.push(at);
                        return LoadOutcome::Cancelled;
                    }
                }
            }
            if self.later.is_empty() {
                break;
            }
            // `take_next` pops blocks from the end.
            self.later.reverse();
            self.first = std::mem::take(&mut self.later);
            self.stages.iter_mut().flatten().for_each(|stage| stage.waits = false);
            thread::sleep(PAUSE_MAX);
        }
        if self.stages.iter().all(Option::is_none) {
            self.parts = Arc::default();
        }
        if self.left == 0 { LoadOutcome::Complete } else { LoadOutcome::Incomplete(self.left) }
    }

    /// Returns the next block with needed pages, or `None` after the last one.
    fn take_next(&mut self) -> Option<BlockId> {
        if let Some(at) = self.first.pop() {
            return Some(at);
        }
        loop {
            let (file, block) = self.next;
            let blocks = self.wanted.get(file)?;
            self.next = if (block as usize) < blocks.len() { (file, block + 1) } else { (file + 1, 0) };
            if blocks.get(block as usize).is_some_and(Option::is_some) {
                return Some((file, block));
            }
        }
    }

    /// Loads the pages of a block. If the load stops midway, a retry finds the loaded slots full
    /// and skips them.
    fn load(&mut self, (file, block): BlockId, cancelled: &dyn Fn() -> bool) -> LoadResult {
        let Some((first, last)) = self.wanted[file][block as usize] else { return LoadResult::Done };
        let blocks = &self.parts[file].blocks;
        let Some(place) = self.by_node[blocks.node(block) as usize] else { return LoadResult::Done };
        let Some(stage) = &mut self.stages[place] else { return LoadResult::Done };
        if stage.waits {
            return LoadResult::NoSpace;
        }
        let mut failed = 0;
        if stage.loader.is_wanted() {
            if self.asked.0 != file {
                self.asked = (file, 0);
            }
            blocks.read_ahead(block, &mut self.asked.1);
            let loaded = blocks.load(block, &mut self.block);
            let index = Arc::clone(&stage.index);
            let entries = &index.entries[first as usize..=last as usize];
            for entry in entries.iter().filter(|entry| (entry.file(), entry.block) == (file, block)) {
                for page in entry.page()..entry.end() {
                    let put = loaded.and_then(|()| put(stage, page, entry, &self.block, cancelled));
                    match put {
                        Ok(LoadResult::Done) => {}
                        Ok(came) => {
                            stage.waits = matches!(came, LoadResult::NoSpace);
                            return came;
                        }
                        Err(_) => failed += 1,
                    }
                }
            }
        }
        self.left += failed;
        stage.failed |= failed > 0;
        stage.blocks -= 1;
        if stage.blocks == 0 && !stage.failed {
            stage.loader.finish();
            self.stages[place] = None;
        }
        LoadResult::Done
    }
}

/// Stores one page in memory, with short retries if memory is short.
fn put(
    stage: &Stage,
    page: u64,
    entry: &Entry,
    block: &[u8],
    cancelled: &dyn Fn() -> bool,
) -> Result<LoadResult> {
    let data = stage.index.parts[entry.file()].blocks.data(entry, block)?;
    let mut pause = PAUSE_FIRST;
    loop {
        match stage.index.unpack(page, entry, data, |incoming| stage.loader.put(page, incoming)) {
            Err(Error::NoSpace | Error::NoMemory) => {}
            // Every device that shared the page was removed or has overwritten it.
            Err(Error::Gone) => return Ok(LoadResult::Done),
            put => return put.map(|()| LoadResult::Done),
        }
        if cancelled() {
            return Ok(LoadResult::Cancelled);
        }
        if !stage.loader.is_wanted() {
            return Ok(LoadResult::Done);
        }
        if pause > PAUSE_MAX {
            return Ok(LoadResult::NoSpace);
        }
        stage.loader.request_space();
        thread::sleep(pause);
        pause *= 2;
    }
}
