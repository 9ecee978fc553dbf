//! Loading: all pages go from the files into memory, block by block in the order of the files, while
//! the devices are used.

use std::sync::Arc;
use std::time::Duration;

use super::index::Entry;
use super::source::{Index, Part};
use crate::ram::Loader;
use freestone_core::device::{Error, Result};
use freestone_core::sync::thread;

/// Before another try where there was no room.
const PAUSE_FIRST: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// A chain of devices whose pages are in files.
pub struct Stage {
    pub loader: Loader,
    pub index: Arc<Index>,
    /// A page of it could not be read.
    pub failed: bool,
}

/// What is left to be loaded of devices that were [restored](super::Keep::restore), which are used
/// meanwhile. As long as this is there, or a page could not be loaded, pages are read from the files;
/// dropping it leaves them there.
pub struct Loading {
    parts: Arc<[Part]>,
    stages: Vec<Stage>,
    /// By node, its place in `stages`.
    by_node: Vec<Option<usize>>,
    /// By file and block: where the first and the last of its entries are in their index, if there
    /// are any.
    wanted: Vec<Vec<Option<(u32, u32)>>>,
    /// The file and block that come next.
    next: (usize, u32),
    done: u64,
    all: u64,
    left: u64,
    block: Vec<u8>,
}

/// How loading ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loaded {
    /// All pages are in memory, and the files are let go.
    All,
    /// All but so many pages, which cannot be read: a block of a file is damaged. Reads of them
    /// fail until they are written.
    AllBut(u64),
    /// It was asked to stop, and can be carried on with.
    Cancelled,
}

impl Loading {
    pub(super) fn new(parts: Arc<[Part]>, stages: Vec<Stage>, by_node: Vec<Option<usize>>) -> Self {
        let none = |part: &Part| vec![None; part.blocks.len()];
        let mut wanted: Vec<Vec<Option<(u32, u32)>>> = parts.iter().map(none).collect();
        for stage in &stages {
            for (at, entry) in (0_u32..).zip(&stage.index.entries) {
                let place = &mut wanted[entry.file()][entry.block as usize];
                *place = Some(place.map_or((at, at), |(first, _)| (first, at)));
            }
        }
        let all = wanted.iter().flatten().filter(|place| place.is_some()).count() as u64;
        let block = Vec::new();
        let mut loading = Self { parts, stages, by_node, wanted, next: (0, 0), done: 0, all, left: 0, block };
        if all == 0 {
            loading.finish();
        }
        loading
    }

    /// Blocks of the files, of about a MiB: loaded and in all.
    pub fn progress(&self) -> (u64, u64) {
        (self.done, self.all)
    }

    /// Loads what is left, until `cancelled`, which is asked between blocks and while it waits, says
    /// so. Where there is no room it waits until there is: the pages are read from the files
    /// meanwhile. `progress` is given blocks as [`progress`](Self::progress) tells them.
    pub fn run(&mut self, cancelled: &dyn Fn() -> bool, progress: &mut dyn FnMut(u64, u64)) -> Loaded {
        while self.next.0 < self.parts.len() {
            let (file, block) = self.next;
            if block as usize >= self.parts[file].blocks.len() {
                self.next = (file + 1, 0);
                continue;
            }
            if let Some(place) = self.wanted[file][block as usize] {
                if cancelled() || !self.load((file, block), place, cancelled) {
                    return Loaded::Cancelled;
                }
                self.done += 1;
                progress(self.done, self.all);
            }
            self.next.1 += 1;
        }
        self.finish();
        if self.left == 0 { Loaded::All } else { Loaded::AllBut(self.left) }
    }

    /// All that can be loaded is.
    fn finish(&mut self) {
        self.stages.retain(|stage| {
            if !stage.failed {
                stage.loader.finish();
            }
            stage.failed
        });
        if self.stages.is_empty() {
            self.parts = Arc::default();
        }
    }

    /// Loads a block. False: it was cancelled; what was loaded of it is loaded once more then, which
    /// finds the slots full.
    fn load(
        &mut self,
        (file, block): (usize, u32),
        (first, last): (u32, u32),
        cancelled: &dyn Fn() -> bool,
    ) -> bool {
        let blocks = &self.parts[file].blocks;
        let Some(stage) = self.by_node[blocks.node(block) as usize] else { return true };
        let stage = &mut self.stages[stage];
        if !stage.loader.is_wanted() {
            return true;
        }
        blocks.will_load(block + 1);
        let loaded = blocks.load(block, &mut self.block);
        let index = Arc::clone(&stage.index);
        let entries = &index.entries[first as usize..=last as usize];
        for entry in entries.iter().filter(|entry| (entry.file(), entry.block) == (file, block)) {
            for page in entry.page()..entry.end() {
                let put = match loaded {
                    Err(error) => Err(error),
                    Ok(()) => put(stage, page, entry, &self.block, cancelled),
                };
                match put {
                    Ok(true) => {}
                    Ok(false) => return false,
                    Err(_) => {
                        (stage.failed, self.left) = (true, self.left + 1);
                    }
                }
            }
        }
        true
    }
}

/// Puts one page in, when there is room. False: it was cancelled.
fn put(stage: &Stage, page: u64, entry: &Entry, block: &[u8], cancelled: &dyn Fn() -> bool) -> Result<bool> {
    let data = stage.index.parts[entry.file()].blocks.data(entry, block)?;
    let mut pause = PAUSE_FIRST;
    loop {
        match stage.index.unpack(page, entry, data, |incoming| stage.loader.put(page, incoming)) {
            Err(Error::NoSpace | Error::NoMemory) => {}
            // Nobody needs it any more.
            Err(Error::Gone) => return Ok(true),
            put => return put.map(|()| true),
        }
        if cancelled() {
            return Ok(false);
        }
        if !stage.loader.is_wanted() {
            return Ok(true);
        }
        stage.loader.ask_for_room();
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSE_MAX);
    }
}
