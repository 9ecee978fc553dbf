//! The parent of a layer, and reads of empty slots, which fall through to the parent. A parent is
//! nothing, another device, or a snapshot of the same family (devices that share a memory pool).

use std::sync::Arc;

use super::source::{self, Source};
use super::{Inner, Ram};
use crate::codec::Page;
use crate::ram::geometry::{PAGE, piece};
use crate::ram::memory::pages::Pages;
use crate::ram::memory::read::MustWait;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{self, Buffer, Device, Request, TryResult};
use freestone_core::pin::{self, Pin, Swap};
use freestone_core::sync::{AtomicU32, Ordering};

/// Maximum depth of a fork chain (fork of a snapshot of a fork ...). A read recurses once per
/// level.
pub(in crate::ram) const BELOW_DEPTH_MAX: u32 = 64;

/// The source of the content of a layer's empty slots. The parent of a layer never changes.
#[derive(Clone)]
pub(in crate::ram) enum Parent {
    /// No parent: empty slots read as zeroes.
    Nothing,
    Device(Base),
    Snapshot(Ram),
    /// A file from which pages are still being loaded, and the parent of pages that the file does
    /// not have.
    Staged(Arc<Staged>),
}

/// A read-only device that forks are based on.
#[derive(Clone)]
pub(in crate::ram) struct Base {
    pub device: Arc<dyn Device>,
    /// Size of the device in bytes, a multiple of `block`. Bytes beyond the size read as zeroes.
    pub size: u64,
    /// Logical block size in bytes.
    block: u64,
}

impl Base {
    pub fn new(device: Arc<dyn Device>) -> Self {
        let geometry = device.geometry();
        Self { device, size: geometry.size, block: u64::from(geometry.logical_block) }
    }

    /// Reads as much from `offset` on as is available without waiting. Returns the number of bytes
    /// read; 0 if the read must wait. Must not be called under a pin, as it calls another device.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> device::Result<usize> {
        freestone_core::trail::step!();
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
            TryResult::Done => there,
            TryResult::Partly(bytes) => bytes as usize,
            TryResult::WouldBlock => return Ok(0),
        };
        if done < there {
            return Ok(done);
        }
        into[there..].fill(0);
        Ok(into.len())
    }

    /// Reads a range that is not aligned to the base's blocks. Reads at most up to the end of the
    /// first page.
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

impl Ram {
    /// Returns true if pages that the device does not have are read from another one.
    pub fn has_base(&self) -> bool {
        !matches!(self.0.parent.loaded(), Parent::Nothing)
    }

    /// Returns true if pages that the device does not have are read from this snapshot of its family.
    pub fn is_based_on(&self, snapshot: &Self) -> bool {
        matches!(self.0.parent.loaded(), Parent::Snapshot(base) if base == snapshot)
    }

    /// Returns true if pages that the device does not have are read from this device outside its family.
    pub fn is_based_on_device(&self, device: &Arc<dyn Device>) -> bool {
        let is_same = |base: &Base| std::ptr::addr_eq(Arc::as_ptr(&base.device), Arc::as_ptr(device));
        matches!(self.0.parent.loaded(), Parent::Device(base) if is_same(base))
    }
}

impl Parent {
    /// Returns true if the parent can have content at this page; false if the page reads as zeroes.
    pub fn reaches(&self, slot: u64) -> bool {
        match self {
            Self::Staged(staged) => staged.reaches(slot),
            _ => slot * PAGE < self.size(),
        }
    }

    /// Returns the first page in `[slot, end)` that the parent [reaches](Self::reaches) or that
    /// `other` returns. If the parent does not reach `slot` itself, it reaches only pages of the
    /// file that are not loaded yet.
    pub fn next_reached(&self, slot: u64, end: u64, other: impl FnOnce() -> Option<u64>) -> Option<u64> {
        match self {
            _ if self.reaches(slot) => Some(slot),
            Self::Staged(staged) => staged.next(slot, end).into_iter().chain(other()).min(),
            _ => other(),
        }
    }

    /// Returns the parent that remains when all pages of the file are loaded.
    pub fn loaded(&self) -> &Self {
        match self {
            Self::Staged(staged) => staged.below.loaded(),
            _ => self,
        }
    }

    /// Returns a copy of the parent for a live device. A rewind detaches this copy from the file
    /// while snapshots of the device still read the file.
    pub fn of_device(&self) -> Self {
        match self {
            Self::Staged(staged) => Self::Staged(Arc::new(staged.of_device())),
            _ => self.clone(),
        }
    }

    /// Returns the file that the device is still being loaded from; `None` if there is none.
    pub fn staged_source(&self) -> Option<StagedSource> {
        match self {
            Self::Staged(staged) => pin::pinned(|pin| staged.active_source(pin).cloned()),
            _ => None,
        }
    }

    /// Returns true if listing the parent's extents may wait for a disk.
    pub fn may_wait(&self) -> bool {
        match self {
            Self::Nothing => false,
            Self::Device(_) => true,
            Self::Snapshot(ram) => ram.0.parent.may_wait(),
            Self::Staged(staged) => staged.below.may_wait(),
        }
    }

    /// Returns the number of devices in the chain of parents.
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

    /// Returns the number of pages of the parent; the last one may be partial.
    pub fn pages(&self) -> u64 {
        self.size().div_ceil(PAGE)
    }

    /// Reads a page from the parent, with [`Base::read`] if the page is on a base. Returns 4096, or
    /// less if the read must wait. Must not be called under a pin.
    pub fn read_page(&self, slot: u64, page: &mut Page) -> device::Result<usize> {
        if let Self::Device(base) = self {
            return base.read(slot * PAGE, page);
        }
        // Look up the page on all levels under one pin: it may be loaded from the file at the same
        // time.
        match self.page(slot, page)? {
            ReadEnd::Complete => Ok(PAGE_BYTES),
            ReadEnd::MustWait => Ok(0),
            ReadEnd::Base(base, _) => base.read(slot * PAGE, page),
            ReadEnd::Staged(base, _) => base.read(slot * PAGE, page),
        }
    }

    /// Reads bytes from `offset` on, as far as they are in memory. Returns the number of bytes read
    /// and the reason why the read ended.
    pub fn read_resident<'a>(
        &'a self,
        pin: &Pin<'_>,
        offset: u64,
        into: &mut [u8],
    ) -> device::Result<(usize, ReadEnd<'a>)> {
        if let Self::Staged(staged) = self {
            return staged.read_resident(pin, offset, into);
        }
        let len = into.len();
        let there = self.size().saturating_sub(offset).min(len as u64) as usize;
        let looked = match self {
            _ if there == 0 => (0, ReadEnd::Complete),
            Self::Nothing | Self::Staged(_) => (0, ReadEnd::Complete),
            // `Base::read` fills the part beyond the base's end with zeroes.
            Self::Device(base) => return Ok((0, ReadEnd::Base(base, len))),
            Self::Snapshot(ram) => ram.0.read_resident(pin, offset, &mut into[..there])?,
        };
        if !matches!(looked.1, ReadEnd::Complete) {
            return Ok(looked);
        }
        into[there..].fill(0);
        Ok((len, ReadEnd::Complete))
    }

    /// Reads a page if it is in memory. Returns [`ReadEnd::Complete`] then, or the reason why not.
    pub fn page(&self, slot: u64, page: &mut Page) -> device::Result<ReadEnd<'_>> {
        pin::pinned(|pin| self.read_resident(pin, slot * PAGE, page)).map(|(_, read_end)| read_end)
    }
}

/// Reason why a read of content in memory ended.
pub(in crate::ram) enum ReadEnd<'a> {
    Complete,
    MustWait,
    /// This number of next bytes is on this base. A base is another device, which must not be
    /// called under a pin.
    Base(&'a Base, usize),
    /// This number of next bytes is in a file of pages not loaded yet. The value keeps the file
    /// open.
    Staged(Base, usize),
}

impl Inner {
    /// Reads bytes of a snapshot, or of a device with a parent, from `offset` on, as far as they
    /// are in memory. Returns the number of bytes read and the reason why the read ended.
    pub(in crate::ram) fn read_resident<'a>(
        &'a self,
        pin: &Pin<'_>,
        offset: u64,
        into: &mut [u8],
    ) -> device::Result<(usize, ReadEnd<'a>)> {
        freestone_core::trail::step!();
        let view = self.view.load(pin);
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let left = (into.len() - done) as u64;
            let (slot, from, n) = piece(at, left);
            // Common case: the page is in the device's own layer.
            if let Some(own) = view.own_page(slot) {
                match self.pages.read_slot(own, from, &mut into[done..][..n]) {
                    Ok(result) => result?,
                    Err(MustWait) => return Ok((done, ReadEnd::MustWait)),
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
                    Some(Err(MustWait)) => return Ok((done, ReadEnd::MustWait)),
                    None => n,
                }
            };
            let (read, read_end) = self.parent.read_resident(pin, at, &mut into[done..][..len])?;
            done += read;
            if !matches!(read_end, ReadEnd::Complete) {
                return Ok((done, read_end));
            }
        }
        Ok((done, ReadEnd::Complete))
    }
}

// ---- pages not loaded yet ------------------------------------------------------------------------

/// A file with pages that are not loaded into memory yet.
#[derive(Clone)]
pub(in crate::ram) struct StagedSource {
    pub source: Arc<dyn Source>,
    pub base: Base,
}

impl StagedSource {
    /// Returns true if the file has this page.
    pub fn has(&self, slot: u64) -> bool {
        self.source.run(slot, slot + 1).1
    }
}

/// The parent of a device until all pages of its file are loaded.
pub(in crate::ram) struct Staged {
    /// The file; `None` when all its pages are loaded. Readers use
    /// [`active_source`](Self::active_source).
    pub source: Arc<Swap<Option<StagedSource>>>,
    /// Parent for pages that the file does not have.
    pub below: Parent,
    /// Not 0 after a rewind of the device: the content of the device no longer includes the file.
    is_detached: AtomicU32,
}

impl Staged {
    pub fn new(source: Arc<dyn Source>, pages: &Arc<Pages>, size: u64, below: Parent) -> Self {
        let size = size.next_multiple_of(PAGE);
        let base = Base::new(source::device_of(Arc::clone(&source), pages, size));
        let source = Arc::new(Swap::new(Box::new(Some(StagedSource { source, base }))));
        Self { source, below, is_detached: AtomicU32::new(0) }
    }

    /// Returns a copy with a detached flag of its own; see [`Parent::of_device`].
    pub fn of_device(&self) -> Self {
        Self { source: Arc::clone(&self.source), below: self.below.clone(), is_detached: AtomicU32::new(0) }
    }

    /// Detaches the device from the file, for a rewind.
    pub fn detach(&self) {
        // Release: pairs with the Acquire in `active_source`.
        self.is_detached.store(1, Ordering::Release);
    }

    /// Returns the file; `None` if all pages are loaded or the device is detached.
    pub fn active_source<'a>(&'a self, pin: &'a Pin<'_>) -> Option<&'a StagedSource> {
        // Acquire: pairs with the Release in `detach`.
        if self.is_detached.load(Ordering::Acquire) != 0 { None } else { self.source.load(pin).as_ref() }
    }

    /// As [`Parent::reaches`].
    pub fn reaches(&self, slot: u64) -> bool {
        pin::pinned(|pin| self.active_source(pin).is_some_and(|here| here.has(slot)))
            || self.below.reaches(slot)
    }

    /// Returns the first page in `[slot, end)` that is in the file; `None` if there is none.
    pub fn next(&self, slot: u64, end: u64) -> Option<u64> {
        pin::pinned(|pin| self.active_source(pin).and_then(|here| source::next_in(&*here.source, slot, end)))
    }

    /// As [`Parent::read_resident`].
    pub fn read_resident<'a>(
        &'a self,
        pin: &Pin<'_>,
        offset: u64,
        into: &mut [u8],
    ) -> device::Result<(usize, ReadEnd<'a>)> {
        let Some(here) = self.active_source(pin) else { return self.below.read_resident(pin, offset, into) };
        let end = offset + into.len() as u64;
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let (run, has) = here.source.run(at / PAGE, end.div_ceil(PAGE));
            let bytes = ((at / PAGE + run) * PAGE - at).min(end - at) as usize;
            if has {
                return Ok((done, ReadEnd::Staged(here.base.clone(), bytes)));
            }
            let (read, read_end) = self.below.read_resident(pin, at, &mut into[done..][..bytes])?;
            done += read;
            if !matches!(read_end, ReadEnd::Complete) {
                return Ok((done, read_end));
            }
        }
        Ok((done, ReadEnd::Complete))
    }
}
