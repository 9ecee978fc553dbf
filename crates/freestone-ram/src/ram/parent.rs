//! What lies below a layer: nothing, another device, or a snapshot of the same family; and reads
//! that fall through to it.

use std::sync::Arc;

use super::pages::Pages;
use super::read::Waits;
use super::source::{self, Source};
use super::{Inner, PAGE, Ram, piece};
use crate::codec::Page;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{self, Buffer, Device, Request, Tried};
use freestone_core::pin::{self, Pin, Swap};
use freestone_core::sync::{AtomicU32, Ordering};

/// What an empty slot is read from. It does not change.
#[derive(Clone)]
pub(super) enum Parent {
    /// Zeroes.
    Nothing,
    Device(Base),
    Snapshot(Ram),
    /// What is not loaded yet, and what lies below that.
    Staged(Arc<Staged>),
}

/// A read-only device that others are made from.
#[derive(Clone)]
pub(super) struct Base {
    pub device: Arc<dyn Device>,
    /// Bytes; a multiple of `block`. What lies beyond reads as zeroes.
    pub size: u64,
    /// Its logical block.
    block: u64,
}

impl Base {
    pub fn new(device: Arc<dyn Device>) -> Self {
        let geometry = device.geometry();
        Self { device, size: geometry.size, block: u64::from(geometry.logical_block) }
    }

    /// Reads as much from `offset` on as can be had at once; returns how many bytes that were, 0
    /// where it would have to wait. With nothing pinned: it calls the device.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> device::Result<usize> {
        let there = self.size.saturating_sub(offset).min(into.len() as u64) as usize;
        if there == 0 {
            into.fill(0);
            return Ok(into.len());
        }
        if !(offset | there as u64).is_multiple_of(self.block) {
            return self.read_part(offset, into);
        }
        let request = Request::read(offset, there as u64);
        let done = match self.device.try_io(&request, Buffer::Read(&mut into[..there]))? {
            Tried::Done => there,
            Tried::Partly(bytes) => bytes as usize,
            Tried::WouldBlock => return Ok(0),
        };
        if done < there {
            return Ok(done);
        }
        into[there..].fill(0);
        Ok(into.len())
    }

    /// As [`read`](Self::read), of less than a block: of the first page only.
    #[cold]
    fn read_part(&self, offset: u64, into: &mut [u8]) -> device::Result<usize> {
        let mut page = [0; PAGE_BYTES];
        let start = offset - offset % PAGE;
        if self.read(start, &mut page)? < PAGE_BYTES {
            return Ok(0);
        }
        let from = (offset - start) as usize;
        let len = into.len().min(PAGE_BYTES - from);
        into[..len].copy_from_slice(&page[from..from + len]);
        Ok(len)
    }
}

impl Parent {
    /// Whether anything lies at this page.
    pub fn reaches(&self, slot: u64) -> bool {
        match self {
            Self::Staged(staged) => staged.reaches(slot),
            _ => slot * PAGE < self.size(),
        }
    }

    /// Of two pages from `slot` on and before `end` the first: `other`, which is one, and the first
    /// that [lies here](Self::reaches); what does lies from `slot` on, or is not loaded yet.
    pub fn next_reached(&self, slot: u64, end: u64, other: impl FnOnce() -> Option<u64>) -> Option<u64> {
        match self {
            _ if self.reaches(slot) => Some(slot),
            Self::Staged(staged) => staged.next(slot, end).into_iter().chain(other()).min(),
            _ => other(),
        }
    }

    /// What lies below, when all is loaded.
    pub fn loaded(&self) -> &Self {
        match self {
            Self::Staged(staged) => staged.below.loaded(),
            _ => self,
        }
    }

    /// For a device that can be rewound while others read on.
    pub fn of_device(&self) -> Self {
        match self {
            Self::Staged(staged) => Self::Staged(Arc::new(staged.of_device())),
            _ => self.clone(),
        }
    }

    /// What is not loaded yet.
    pub fn here(&self) -> Option<Here> {
        match self {
            Self::Staged(staged) => pin::pinned(|pin| staged.left(pin).cloned()),
            _ => None,
        }
    }

    /// Whether a look at its extents may wait for a disk.
    pub fn may_wait(&self) -> bool {
        match self {
            Self::Nothing => false,
            Self::Device(_) => true,
            Self::Snapshot(ram) => ram.0.parent.may_wait(),
            Self::Staged(staged) => staged.below.may_wait(),
        }
    }

    /// How many devices lie below one another.
    pub fn depth(&self) -> u32 {
        match self {
            Self::Nothing => 0,
            Self::Device(_) => 1,
            Self::Snapshot(ram) => 1 + ram.0.parent.depth(),
            Self::Staged(staged) => staged.below.depth(),
        }
    }

    fn size(&self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Device(base) => base.size,
            Self::Snapshot(ram) => ram.0.size(),
            Self::Staged(staged) => staged.below.size(),
        }
    }

    /// How many pages of it there are, the last of which may be there in part.
    pub fn pages(&self) -> u64 {
        self.size().div_ceil(PAGE)
    }

    /// Reads a page that nobody above holds, from a base where it lies on one: as
    /// [`Base::read`], with nothing pinned.
    pub fn read_page(&self, slot: u64, page: &mut Page) -> device::Result<usize> {
        if let Self::Device(base) = self {
            return base.read(slot * PAGE, page);
        }
        // Where it lies is looked up at once for all levels: it may just be loaded.
        match self.page(slot, page)? {
            Look::All => Ok(PAGE_BYTES),
            Look::Waits => Ok(0),
            Look::Base(base, _) => base.read(slot * PAGE, page),
            Look::Staged(base, _) => base.read(slot * PAGE, page),
        }
    }

    /// Reads from `offset` on what is in memory; how many bytes that were, and why there was an
    /// end.
    pub fn look<'a>(
        &'a self,
        pin: &Pin<'_>,
        offset: u64,
        into: &mut [u8],
    ) -> device::Result<(usize, Look<'a>)> {
        if let Self::Staged(staged) = self {
            return staged.look(pin, offset, into);
        }
        let len = into.len();
        let there = self.size().saturating_sub(offset).min(len as u64) as usize;
        let looked = match self {
            _ if there == 0 => (0, Look::All),
            Self::Nothing | Self::Staged(_) => (0, Look::All),
            // What lies beyond its end comes with the rest.
            Self::Device(base) => return Ok((0, Look::Base(base, len))),
            Self::Snapshot(ram) => ram.0.look(pin, offset, &mut into[..there])?,
        };
        if !matches!(looked.1, Look::All) {
            return Ok(looked);
        }
        into[there..].fill(0);
        Ok((len, Look::All))
    }

    /// Reads a page, as far as it is in memory.
    pub fn page(&self, slot: u64, page: &mut Page) -> device::Result<Look<'_>> {
        pin::pinned(|pin| self.look(pin, slot * PAGE, page)).map(|(_, look)| look)
    }
}

/// Why a look at what is in memory ended.
pub(super) enum Look<'a> {
    /// It got all.
    All,
    /// The next page has to be waited for.
    Waits,
    /// The next so many bytes lie on this base: another device, which is not called under a pin.
    Base(&'a Base, usize),
    /// As [`Base`](Self::Base), of what is not loaded yet: the file is there as long as this is.
    Staged(Base, usize),
}

impl Inner {
    /// Reads from `offset` on what is in memory, of a device that lies over something, or of a
    /// snapshot; how many bytes that were, and why there was an end.
    pub(super) fn look<'a>(
        &'a self,
        pin: &Pin<'_>,
        offset: u64,
        into: &mut [u8],
    ) -> device::Result<(usize, Look<'a>)> {
        let view = self.view.load(pin);
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let left = (into.len() - done) as u64;
            let (slot, from, n) = piece(at, left);
            // What the device holds itself is the common case.
            if let Some(own) = view.own_page(slot) {
                match self.pages.read_slot(own, from, &mut into[done..][..n]) {
                    Ok(result) => result?,
                    Err(Waits) => return Ok((done, Look::Waits)),
                }
                done += n;
                continue;
            }
            let run = view.run_of_parent(pin, slot, (at + left).div_ceil(PAGE));
            let len = if run > 0 {
                ((slot + run) * PAGE - at).min(left) as usize
            } else {
                let part = &mut into[done..][..n];
                let here = view.with_page(pin, slot, |found| {
                    found.map(|(_, guard)| self.pages.read_slot(guard, from, part))
                });
                match here {
                    Some(Ok(result)) => {
                        result?;
                        done += n;
                        continue;
                    }
                    Some(Err(Waits)) => return Ok((done, Look::Waits)),
                    None => n,
                }
            };
            let (read, look) = self.parent.look(pin, at, &mut into[done..][..len])?;
            done += read;
            if !matches!(look, Look::All) {
                return Ok((done, look));
            }
        }
        Ok((done, Look::All))
    }
}

// ---- what is not loaded yet ----------------------------------------------------------------------

/// What is left in the file, for who looks.
#[derive(Clone)]
pub(super) struct Here {
    pub source: Arc<dyn Source>,
    pub base: Base,
}

impl Here {
    /// Whether this page is in the file.
    pub fn has(&self, slot: u64) -> bool {
        self.source.run(slot, slot + 1).1
    }
}

/// What lies below a device as long as not all is loaded.
pub(super) struct Staged {
    /// What is left in the file; `None`: all is loaded. [`left`](Self::left) is for those who read.
    pub here: Arc<Swap<Option<Here>>>,
    /// What lies below that.
    pub below: Parent,
    /// Not 0: the device has another content now, which has to do with the file no more.
    is_gone: AtomicU32,
}

impl Staged {
    pub fn new(source: Arc<dyn Source>, pages: &Arc<Pages>, size: u64, below: Parent) -> Self {
        let size = size.next_multiple_of(PAGE);
        let base = Base::new(source::device_of(Arc::clone(&source), pages, size));
        let here = Arc::new(Swap::new(Box::new(Some(Here { source, base }))));
        Self { here, below, is_gone: AtomicU32::new(0) }
    }

    /// For one device, which can be rewound while others read on.
    pub fn of_device(&self) -> Self {
        Self { here: Arc::clone(&self.here), below: self.below.clone(), is_gone: AtomicU32::new(0) }
    }

    /// The device is rewound.
    pub fn is_left(&self) {
        // Release: pairs with the Acquire in `left`.
        self.is_gone.store(1, Ordering::Release);
    }

    /// What is left in the file; `None` where nothing is.
    pub fn left<'a>(&'a self, pin: &'a Pin<'_>) -> Option<&'a Here> {
        // Acquire: pairs with the Release in `is_left`.
        if self.is_gone.load(Ordering::Acquire) != 0 { None } else { self.here.load(pin).as_ref() }
    }

    /// As [`Parent::reaches`].
    pub fn reaches(&self, slot: u64) -> bool {
        pin::pinned(|pin| self.left(pin).is_some_and(|here| here.has(slot))) || self.below.reaches(slot)
    }

    /// The first page from `slot` on and before `end` that is in the file.
    pub fn next(&self, slot: u64, end: u64) -> Option<u64> {
        pin::pinned(|pin| self.left(pin).and_then(|here| source::next_in(&*here.source, slot, end)))
    }

    /// As that of what lies below.
    pub fn look<'a>(
        &'a self,
        pin: &Pin<'_>,
        offset: u64,
        into: &mut [u8],
    ) -> device::Result<(usize, Look<'a>)> {
        let Some(here) = self.left(pin) else { return self.below.look(pin, offset, into) };
        let end = offset + into.len() as u64;
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let (run, has) = here.source.run(at / PAGE, end.div_ceil(PAGE));
            let bytes = ((at / PAGE + run) * PAGE - at).min(end - at) as usize;
            if has {
                return Ok((done, Look::Staged(here.base.clone(), bytes)));
            }
            let (read, look) = self.below.look(pin, at, &mut into[done..][..bytes])?;
            done += read;
            if !matches!(look, Look::All) {
                return Ok((done, look));
            }
        }
        Ok((done, Look::All))
    }
}
