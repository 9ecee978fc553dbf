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
    loader: Loader,
    index: Arc<Index>,
    /// Blocks that are not loaded yet.
    blocks: u32,
    /// A page of it could not be read.
    failed: bool,
    /// There was no room for it: the others come first.
    waits: bool,
}

impl Stage {
    pub fn new(loader: Loader, index: Arc<Index>) -> Self {
        Self { loader, index, blocks: 0, failed: false, waits: false }
    }
}

/// A file and a block of it.
type At = (usize, u32);

/// What came of a block.
enum Came {
    Done,
    NoRoom,
    Cancelled,
}

/// What is left to be loaded of devices that were [restored](super::Keep::restore), which are used
/// meanwhile. As long as this is there, or a page could not be loaded, pages are read from the files;
/// dropping it leaves them there.
pub struct Loading {
    parts: Arc<[Part]>,
    /// Those that are not loaded yet.
    stages: Vec<Option<Stage>>,
    /// By node, its place in `stages`.
    by_node: Vec<Option<usize>>,
    /// By file and block: where the first and the last of its entries are in their index, if there
    /// are any.
    wanted: Vec<Vec<Option<(u32, u32)>>>,
    /// What comes next of those that were not tried yet.
    next: At,
    /// What comes before that, and what is tried again when all have been tried.
    first: Vec<At>,
    later: Vec<At>,
    done: u64,
    all: u64,
    left: u64,
    block: Vec<u8>,
    /// Up to where the system was asked to read a file.
    asked: (usize, u64),
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

    /// Blocks of the files, of about a MiB: loaded and in all.
    pub fn progress(&self) -> (u64, u64) {
        (self.done, self.all)
    }

    /// Loads what is left, until `cancelled`, which is asked between blocks and while it waits, says
    /// so. Where there is no room it waits until there is, and goes on with other devices: pages are
    /// read from the files meanwhile. `progress` is given blocks as [`progress`](Self::progress)
    /// tells them.
    pub fn run(&mut self, cancelled: &dyn Fn() -> bool, progress: &mut dyn FnMut(u64, u64)) -> Loaded {
        loop {
            while let Some(at) = self.take_next() {
                let came = if cancelled() { Came::Cancelled } else { self.load(at, cancelled) };
                match came {
                    Came::Done => {
                        self.done += 1;
                        progress(self.done, self.all);
                    }
                    Came::NoRoom => self.later.push(at),
                    Came::Cancelled => {
                        self.first.push(at);
                        return Loaded::Cancelled;
                    }
                }
            }
            if self.later.is_empty() {
                break;
            }
            // The next one is taken from the end.
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

    /// The next block that has pages which are wanted.
    fn take_next(&mut self) -> Option<At> {
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

    /// Loads a block. Where it stops what was loaded of it is loaded once more later, which finds the
    /// slots full.
    fn load(&mut self, (file, block): At, cancelled: &dyn Fn() -> bool) -> Came {
        let Some((first, last)) = self.wanted[file][block as usize] else { return Came::Done };
        let blocks = &self.parts[file].blocks;
        let Some(place) = self.by_node[blocks.node(block) as usize] else { return Came::Done };
        let Some(stage) = &mut self.stages[place] else { return Came::Done };
        if stage.waits {
            return Came::NoRoom;
        }
        let mut failed = 0;
        if stage.loader.is_wanted() {
            if self.asked.0 != file {
                self.asked = (file, 0);
            }
            blocks.will_load(block, &mut self.asked.1);
            let loaded = blocks.load(block, &mut self.block);
            let index = Arc::clone(&stage.index);
            let entries = &index.entries[first as usize..=last as usize];
            for entry in entries.iter().filter(|entry| (entry.file(), entry.block) == (file, block)) {
                for page in entry.page()..entry.end() {
                    let put = loaded.and_then(|()| put(stage, page, entry, &self.block, cancelled));
                    match put {
                        Ok(Came::Done) => {}
                        Ok(came) => {
                            stage.waits = matches!(came, Came::NoRoom);
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
        Came::Done
    }
}

/// Puts one page in, if there is room soon.
fn put(stage: &Stage, page: u64, entry: &Entry, block: &[u8], cancelled: &dyn Fn() -> bool) -> Result<Came> {
    let data = stage.index.parts[entry.file()].blocks.data(entry, block)?;
    let mut pause = PAUSE_FIRST;
    loop {
        match stage.index.unpack(page, entry, data, |incoming| stage.loader.put(page, incoming)) {
            Err(Error::NoSpace | Error::NoMemory) => {}
            // Nobody needs it any more.
            Err(Error::Gone) => return Ok(Came::Done),
            put => return put.map(|()| Came::Done),
        }
        if cancelled() {
            return Ok(Came::Cancelled);
        }
        if !stage.loader.is_wanted() {
            return Ok(Came::Done);
        }
        if pause > PAUSE_MAX {
            return Ok(Came::NoRoom);
        }
        stage.loader.ask_for_room();
        thread::sleep(pause);
        pause *= 2;
    }
}
