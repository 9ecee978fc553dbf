//! The buffers of a queue's tags. One is the kernel's while its tag is, the server's while it does
//! the request, and the device's while that has it; then the tag has none here.
#![expect(unsafe_code)]
// UNSAFETY: gives the pages of buffers back, which is by address.

use freestone_core::device::{Error, IoBuf};
use rustix::mm::{Advice, madvise};

/// Where a tag is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// With the kernel, which may write to its buffer.
    Kernel,
    /// Its request has arrived, and is not begun.
    Waiting,
    /// The data of its request is on the way.
    Fetching,
    /// The device has its request.
    Device,
    /// Its outcome cannot be told yet, for lack of a buffer.
    Starved,
    /// No request will come with it any more.
    Gone,
}

/// A tag.
#[derive(Debug)]
pub struct Slot {
    /// Where it is.
    pub place: Place,
    /// Requests that it had: an answer to one before is not for the one it has.
    pub serial: u64,
    buffer: IoBuf,
    /// Bytes from the buffer's begin that may have memory.
    touched: usize,
}

/// The tags of a queue.
#[derive(Debug)]
pub struct Slots {
    all: Vec<Slot>,
    bytes: usize,
    is_touched: bool,
}

impl Slots {
    /// So many tags, with buffers of so many bytes, a multiple of a page; they have no memory yet.
    pub fn new(depth: u16, bytes: usize) -> Result<Self, Error> {
        let slots = (0..depth).map(|_| {
            let buffer = fresh(bytes)?;
            Ok(Slot { place: Place::Kernel, serial: 0, buffer, touched: 0 })
        });
        Ok(Self { all: slots.collect::<Result<_, _>>()?, bytes, is_touched: false })
    }

    /// Bytes of a buffer.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A tag, of which there are as many as the queue is deep.
    pub fn get(&mut self, tag: u16) -> &mut Slot {
        &mut self.all[usize::from(tag)]
    }

    /// All tags.
    pub fn tags(&self) -> std::ops::Range<u16> {
        0..self.all.len() as u16
    }

    /// The memory of a tag's buffer that has no other use; makes another where the device has not
    /// given it back.
    pub fn address(&mut self, tag: u16) -> Result<u64, Error> {
        let bytes = self.bytes;
        let slot = self.get(tag);
        if slot.buffer.capacity() < bytes {
            slot.buffer = fresh(bytes)?;
            slot.touched = 0;
        }
        slot.buffer.show(bytes);
        Ok(slot.buffer.as_mut_ptr().expose_provenance() as u64)
    }

    /// Takes a tag's buffer out, of which `len` bytes are shown and get memory.
    pub fn take(&mut self, tag: u16, len: usize) -> IoBuf {
        self.is_touched |= len > 0;
        let slot = self.get(tag);
        slot.touched = slot.touched.max(len);
        let mut buffer = std::mem::replace(&mut slot.buffer, IoBuf::empty());
        buffer.show(len);
        buffer
    }

    /// Puts it back; one that is too small is dropped.
    pub fn put(&mut self, tag: u16, buffer: IoBuf) {
        let bytes = self.bytes;
        let slot = self.get(tag);
        if buffer.capacity() >= bytes {
            slot.buffer = buffer;
        }
    }

    /// Whether buffers have memory that [`give_back`](Self::give_back) would free.
    pub fn are_touched(&self) -> bool {
        self.is_touched
    }

    /// Gives the memory of all buffers back, whose content is lost. Nothing may be in them: each tag
    /// is with the kernel, without a request, and it does not write meanwhile.
    pub fn give_back(&mut self) {
        self.is_touched = false;
        for slot in &mut self.all {
            let touched = std::mem::take(&mut slot.touched);
            forget_pages(&mut slot.buffer, touched);
        }
    }

    /// Leaks the buffers: the kernel may still write to them.
    pub fn leak(self) {
        std::mem::forget(self.all);
    }
}

/// A buffer without memory: all but small ones have none before they are used.
fn fresh(bytes: usize) -> Result<IoBuf, Error> {
    let mut buffer = IoBuf::zeroed(bytes)?;
    // A small request would get memory for the buffers beside as well.
    advise(&mut buffer, bytes, Advice::LinuxNoHugepage);
    Ok(buffer)
}

fn forget_pages(buffer: &mut IoBuf, touched: usize) {
    advise(buffer, touched, Advice::LinuxDontNeed);
}

/// Tells the kernel what the first `bytes` are for, to whole pages.
fn advise(buffer: &mut IoBuf, bytes: usize, advice: Advice) {
    let page = rustix::param::page_size();
    // Other pages' bytes are not ours: a buffer is whole pages where a page has 4 KiB.
    let end = bytes.next_multiple_of(page).min(buffer.capacity() / page * page);
    let at = buffer.as_mut_ptr();
    if end == 0 || !at.addr().is_multiple_of(page) {
        return;
    }
    // SAFETY: whole pages of private memory, of a buffer that is borrowed exclusively: with the advices
    // above they read as they were, or as zeroes. Where it fails nothing changes.
    let _ = unsafe { madvise(at.cast(), end, advice) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 64 << 10;

    #[test]
    fn a_buffer_goes_and_comes_back() {
        let mut slots = Slots::new(2, BYTES).unwrap();
        let at = slots.address(0).unwrap();
        assert!(at.is_multiple_of(4096) && at != slots.address(1).unwrap());
        let mut buffer = slots.take(0, 512);
        assert_eq!((buffer.len(), buffer.capacity()), (512, BYTES));
        buffer.fill(7);
        slots.put(0, buffer);
        assert_eq!(slots.address(0).unwrap(), at);
        assert!(slots.are_touched());
        assert_eq!(slots.take(0, 513)[511..], [7, 0]);
    }

    #[test]
    fn a_small_one_is_not_taken_for_it() {
        let mut slots = Slots::new(1, BYTES).unwrap();
        let _device = slots.take(0, 4096);
        slots.put(0, IoBuf::zeroed(4096).unwrap());
        assert_ne!(slots.address(0).unwrap(), 0);
        assert_eq!(slots.take(0, BYTES).len(), BYTES);
    }

    #[test]
    fn memory_comes_back() {
        let mut slots = Slots::new(1, BYTES).unwrap();
        let mut buffer = slots.take(0, BYTES);
        buffer.fill(1);
        slots.put(0, buffer);
        slots.give_back();
        assert!(!slots.are_touched());
        assert!(slots.take(0, BYTES).iter().all(|byte| *byte == 0));
    }
}
