//! What lies below a layer: nothing, another device, or a snapshot of the same family; and reads that fall through to it.

use std::sync::Arc;

use super::pages::Waits;
use super::{Inner, PAGE, Ram, piece};
use crate::PAGE_BYTES;
use crate::codec::Page;
use crate::device::{self, Buffer, Device, Request, Tried};
use crate::handoff::progress;
use crate::pin::{self, Pin};

use super::chain::View;

/// See the module. What lies below does not change.
#[derive(Clone)]
pub(super) enum Below {
    /// Zeroes.
    Nothing,
    Device(Base),
    Snapshot(Ram),
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

    /// Reads as much from `offset` on as can be had at once; returns how many bytes that were, 0 where it would have to
    /// wait.
    fn read(&self, offset: u64, into: &mut [u8]) -> device::Result<usize> {
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

impl Below {
    /// Whether anything lies at this page.
    pub fn reaches(&self, slot: u64) -> bool {
        slot * PAGE < self.size()
    }

    /// How many devices lie below one another.
    pub fn depth(&self) -> u32 {
        match self {
            Self::Nothing => 0,
            Self::Device(_) => 1,
            Self::Snapshot(ram) => 1 + pin::pinned(|pin| ram.0.view.load(pin).below.depth()),
        }
    }

    fn size(&self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Device(base) => base.size,
            Self::Snapshot(ram) => ram.0.size(),
        }
    }

    /// Reads as much from `offset` on as can be had at once; returns how many bytes that were, 0 where it would have to
    /// wait.
    pub fn read(&self, pin: &Pin<'_>, offset: u64, into: &mut [u8]) -> device::Result<usize> {
        match self {
            Self::Nothing => {
                into.fill(0);
                Ok(into.len())
            }
            Self::Device(base) => base.read(offset, into),
            Self::Snapshot(ram) => {
                let there = self.size().saturating_sub(offset).min(into.len() as u64) as usize;
                let (there, beyond) = into.split_at_mut(there);
                if !there.is_empty() {
                    let inner = &*ram.0;
                    match inner.read_through(inner.view.load(pin), pin, offset, there)? {
                        Tried::Done => {}
                        Tried::Partly(bytes) => return Ok(bytes as usize),
                        Tried::WouldBlock => return Ok(0),
                    }
                }
                beyond.fill(0);
                Ok(into.len())
            }
        }
    }

    /// Reads a page; false where it would have to wait. Nothing is `page` as it is.
    pub fn page(&self, slot: u64, page: &mut Page) -> device::Result<bool> {
        match self {
            Self::Nothing => Ok(true),
            _ => pin::pinned(|pin| self.read(pin, slot * PAGE, page)).map(|read| read == PAGE_BYTES),
        }
    }
}

impl Inner {
    /// Reads pages of a device that lies over something, or of a snapshot.
    pub(super) fn read_through(
        &self,
        view: &View,
        pin: &Pin<'_>,
        offset: u64,
        into: &mut [u8],
    ) -> device::Result<Tried> {
        let len = into.len() as u64;
        let target = len.min(super::io::TRY_READ_PAGES * PAGE);
        let mut done = 0;
        while done < target {
            let (slot, from, n) = piece(offset + done, target - done);
            // What the device holds itself is the common case.
            if let Some(own) = view.own_page(slot) {
                match self.family.read_slot(own, from, &mut into[done as usize..][..n]) {
                    Ok(result) => result?,
                    Err(Waits) => return Ok(progress(done, len)),
                }
                done += n as u64;
                continue;
            }
            let run = view.run_below(pin, slot, (offset + target).div_ceil(PAGE));
            let end = if run > 0 {
                ((slot + run) * PAGE - offset).min(target)
            } else {
                let part = &mut into[done as usize..][..n];
                let here = view.with_page(pin, slot, |found| {
                    found.map(|(_, guard)| self.family.read_slot(guard, from, part))
                });
                match here {
                    Some(Ok(result)) => {
                        result?;
                        done += n as u64;
                        continue;
                    }
                    Some(Err(Waits)) => return Ok(progress(done, len)),
                    None => done + n as u64,
                }
            };
            let read = view.below.read(pin, offset + done, &mut into[done as usize..end as usize])?;
            done += read as u64;
            if read == 0 {
                return Ok(progress(done, len));
            }
        }
        Ok(progress(done, len))
    }
}
