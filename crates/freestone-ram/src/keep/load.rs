//! Loading of kept devices: moves all pages from the files into memory, block by block in the order
//! of the files, while the devices are in use.

use std::sync::Arc;
use std::time::Duration;

use super::index::Entry;
use super::source::{Index, Part};
use crate::ram::Loader;
use freestone_core::device::{Error, Result};
use freestone_core::sync::thread;

/// Pauses between retries when memory is short.
const PAUSE_FIRST: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// A chain of devices with pages in files.
pub struct Stage {
    loader: Loader,
    index: Arc<Index>,
    blocks: u32,
    failed: bool,
    /// Whether memory was short: other stages go first.
    waits: bool,
}

impl Stage {
    pub fn new(loader: Loader, index: Arc<Index>) -> Self {
        Self { loader, index, blocks: 0, failed: false, waits: false }
    }
}

type BlockId = (usize, u32);

/// Result of loading a block or page.
enum LoadResult {
    Done,
    NoRoom,
    Cancelled,
}

/// Remaining load of [restored](super::Keep::restore) devices, which are in use meanwhile. Pages
/// not loaded are read from the files. Dropping the value leaves them there.
pub struct Loading {
    parts: Arc<[Part]>,
    /// Stages; `None` once loaded.
    stages: Vec<Option<Stage>>,
    /// Index into `stages` by node.
    by_node: Vec<Option<usize>>,
    /// By file and block: first and last index position of the block's entries, if any.
    wanted: Vec<Vec<Option<(u32, u32)>>>,
    /// Next block among those never tried.
    next: BlockId,
    /// Blocks to try before `next`, and blocks to retry when all have been tried.
    first: Vec<BlockId>,
    later: Vec<BlockId>,
    done: u64,
    all: u64,
    left: u64,
    block: Vec<u8>,
    /// File and end of the read-ahead already requested.
    asked: (usize, u64),
}

/// Result of loading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loaded {
    /// All pages are in memory, and the files are closed.
    All,
    /// All pages but this many are in memory; the rest is unreadable, as a block of a file is
    /// damaged. Reads of them fail until they are written.
    AllBut(u64),
    /// The caller cancelled the load, which can be continued.
    Cancelled,
}

impl Loading {
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

    /// Returns the blocks (about 1 MiB each) loaded and the total.
    pub fn progress(&self) -> (u64, u64) {
        (self.done, self.all)
    }

    /// Loads the remaining pages until `cancelled` returns true; it is polled between blocks and
    /// while waiting. If memory is short, continues with other devices and retries later; pages are
    /// read from the files meanwhile. `progress` receives the values of
    /// [`progress`](Self::progress).
    pub fn run(&mut self, cancelled: &dyn Fn() -> bool, progress: &mut dyn FnMut(u64, u64)) -> Loaded {
        loop {
            while let Some(at) = self.take_next() {
                let came = if cancelled() { LoadResult::Cancelled } else { self.load(at, cancelled) };
                match came {
                    LoadResult::Done => {
                        self.done += 1;
                        progress(self.done, self.all);
                    }
                    LoadResult::NoRoom => self.later.push(at),
                    LoadResult::Cancelled => {
                        self.first.push(at);
                        return Loaded::Cancelled;
                    }
                }
            }
            if self.later.is_empty() {
                break;
            }
            // The next block is taken from the end.
            self.later.reverse();
            self.first = std::mem::take(&mut self.later);
            self.stages.iter_mut().flatten().for_each(|stage| stage.waits = false);
            thread::sleep(PAUSE_MAX);
        }
        if self.stages.iter().all(Option::is_none) {
            self.parts = Arc::default();
        }
        if self.left == 0 { Loaded::All } else { Loaded::AllBut(self.left) }
    }

    /// Returns the next block with needed pages.
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

    /// Loads a block. If it stops midway, a later retry finds the loaded slots full.
    fn load(&mut self, (file, block): BlockId, cancelled: &dyn Fn() -> bool) -> LoadResult {
        let Some((first, last)) = self.wanted[file][block as usize] else { return LoadResult::Done };
        let blocks = &self.parts[file].blocks;
        let Some(place) = self.by_node[blocks.node(block) as usize] else { return LoadResult::Done };
        let Some(stage) = &mut self.stages[place] else { return LoadResult::Done };
        if stage.waits {
            return LoadResult::NoRoom;
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
                            stage.waits = matches!(came, LoadResult::NoRoom);
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

/// Stores one page, with short retries if memory is short.
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
            // No device needs the page any more.
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
            return Ok(LoadResult::NoRoom);
        }
        stage.loader.request_space();
        thread::sleep(pause);
        pause *= 2;
    }
}
