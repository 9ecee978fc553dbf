//! The tags of a queue and their buffers. The kernel owns a buffer while it owns the tag. The
//! device owns the buffer while it executes the request; the slot then has no buffer.
#![expect(unsafe_code)]
// UNSAFETY: madvise takes an address.

use freestone_core::device::{Error, IoBuf};
use rustix::mm::{Advice, madvise};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TagState {
    /// The kernel owns the tag, and may write to its buffer.
    Kernel,
    Waiting,
    /// The data of the tag's request is being fetched.
    Fetching,
    Device,
    /// The completion of the request waits for memory for a buffer.
    Starved,
    /// The tag will get no more requests.
    Gone,
}

#[derive(Debug)]
pub struct Slot {
    pub state: TagState,
    /// Number of requests that arrived for the tag. A late completion of an earlier request has a
    /// smaller number.
    pub serial: u64,
    buffer: IoBuf,
    /// Number of bytes from the start of the buffer for which memory may be allocated.
    touched: usize,
}

#[derive(Debug)]
pub struct Slots {
    all: Vec<Slot>,
    bytes: usize,
    is_touched: bool,
}

impl Slots {
    /// Creates `depth` tags with buffers of `bytes`, a multiple of the page size. No memory is
    /// allocated for the pages of the buffers yet.
    pub fn new(depth: u16, bytes: usize) -> Result<Self, Error> {
        let slots = (0..depth).map(|_| {
            let buffer = allocate_buffer(bytes)?;
            Ok(Slot { state: TagState::Kernel, serial: 0, buffer, touched: 0 })
        });
        Ok(Self { all: slots.collect::<Result<_, _>>()?, bytes, is_touched: false })
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the slot of a tag. Panics if the tag is not less than the queue depth.
    pub fn get(&mut self, tag: u16) -> &mut Slot {
        &mut self.all[usize::from(tag)]
    }

    pub fn tags(&self) -> std::ops::Range<u16> {
        0..self.all.len() as u16
    }

    /// Returns the address of a tag's unused buffer. Allocates a new buffer if the device did not
    /// return the last one.
    pub fn address(&mut self, tag: u16) -> Result<u64, Error> {
        let bytes = self.bytes;
        let slot = self.get(tag);
        if slot.buffer.capacity() < bytes {
            slot.buffer = allocate_buffer(bytes)?;
            slot.touched = 0;
        }
        slot.buffer.set_len(bytes);
        Ok(slot.buffer.as_mut_ptr().expose_provenance() as u64)
    }

    /// Takes a tag's buffer out of its slot, and sets its length to `len`.
    pub fn take(&mut self, tag: u16, len: usize) -> IoBuf {
        self.is_touched |= len > 0;
        let slot = self.get(tag);
        slot.touched = slot.touched.max(len);
        let mut buffer = std::mem::replace(&mut slot.buffer, IoBuf::empty());
        buffer.set_len(len);
        buffer
    }

    /// Stores the buffer of a tag in its slot. A buffer that is too small is dropped.
    pub fn put(&mut self, tag: u16, buffer: IoBuf) {
        let bytes = self.bytes;
        let slot = self.get(tag);
        if buffer.capacity() >= bytes {
            slot.buffer = buffer;
        }
    }

    /// Returns true if [`free_memory`](Self::free_memory) would free memory.
    pub fn are_touched(&self) -> bool {
        self.is_touched
    }

    /// Frees the memory of all buffers, whose content is lost. The kernel must own every tag, no
    /// tag may have a request, and the kernel must not write to the buffers meanwhile.
    pub fn free_memory(&mut self) {
        self.is_touched = false;
        for slot in &mut self.all {
            let touched = std::mem::take(&mut slot.touched);
            discard_pages(&mut slot.buffer, touched);
        }
    }

    /// Leaks the buffers, because the kernel may still write to them.
    pub fn leak(self) {
        std::mem::forget(self.all);
    }
}

/// Allocates a buffer of `bytes`. Pages of a large buffer have no memory before first use.
fn allocate_buffer(bytes: usize) -> Result<IoBuf, Error> {
    let mut buffer = IoBuf::zeroed(bytes)?;
    // With huge pages, a small request would allocate memory for neighboring buffers as well.
    advise(&mut buffer, bytes, Advice::LinuxNoHugepage);
    Ok(buffer)
}

fn discard_pages(buffer: &mut IoBuf, touched: usize) {
    advise(buffer, touched, Advice::LinuxDontNeed);
}

/// Applies `madvise` to the first `bytes` of the buffer, rounded up to whole pages.
fn advise(buffer: &mut IoBuf, bytes: usize, advice: Advice) {
    let page = rustix::param::page_size();
    // Stays inside the buffer, which consists of whole pages if pages have 4 KiB.
    let end = bytes.next_multiple_of(page).min(buffer.capacity() / page * page);
    let at = buffer.as_mut_ptr();
    if end == 0 || !at.addr().is_multiple_of(page) {
        return;
    }
    // SAFETY: the range is whole pages of private memory of an exclusively borrowed buffer. After
    // the advices above the pages keep their content or read as zeroes. A failure changes nothing.
    let _ = unsafe { madvise(at.cast(), end, advice) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 64 << 10;

    #[test]
    fn buffer_taken_and_put_keeps_address() {
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
    fn put_drops_buffer_that_is_too_small() {
        let mut slots = Slots::new(1, BYTES).unwrap();
        let _device = slots.take(0, 4096);
        slots.put(0, IoBuf::zeroed(4096).unwrap());
        assert_ne!(slots.address(0).unwrap(), 0);
        assert_eq!(slots.take(0, BYTES).len(), BYTES);
    }

    #[test]
    fn give_back_frees_memory() {
        let mut slots = Slots::new(1, BYTES).unwrap();
        let mut buffer = slots.take(0, BYTES);
        buffer.fill(1);
        slots.put(0, buffer);
        slots.free_memory();
        assert!(!slots.are_touched());
        assert!(slots.take(0, BYTES).iter().all(|byte| *byte == 0));
    }
}
