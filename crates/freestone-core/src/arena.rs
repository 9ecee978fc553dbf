//! Memory in a memfd, handed out in equal units and addressed by offset.
//!
//! Tables and pools keep offsets, never pointers, so that another process can map the same file and
//! go on. The file is sparse and mapped in segments as it grows; a unit's memory exists from its
//! first touch (or [`populate`](Arena::populate)) until [`release`](Arena::release).
#![expect(unsafe_code)]
// UNSAFETY: maps memory and computes addresses in it.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::device::{Error, Result};
use crate::sync::{AtomicPtr, Mutex, Ordering};

/// Size of one mapping.
const SEGMENT_BYTES: u64 = 1 << 30;
/// Where an arena ends: what a slot's location can address.
const ARENA_BYTES: u64 = 16 << crate::LOCATION_BITS;
/// Memory that is returned at once: a few milliseconds of work.
const GIVE_BACK_BYTES: u64 = 32 << 20;
const SEGMENTS: usize = (ARENA_BYTES / SEGMENT_BYTES) as usize;

/// Memory that is handed out in segments and addressed by 16-byte units.
///
/// Lock order: `state` is innermost: nothing is taken under it. It is held while a segment is
/// mapped.
pub struct Arena {
    file: OwnedFd,
    unit_bytes: u64,
    segments: Box<[AtomicPtr<u8>]>,
    state: Mutex<ArenaState>,
}

#[derive(Default)]
struct ArenaState {
    /// Units below this one have been handed out at some time.
    next: u32,
    free: Vec<u32>,
}

impl Arena {
    /// An arena of units of `unit_bytes`, a power of two from a page to a segment. `name` shows in
    /// `/proc/PID/maps`.
    ///
    /// # Errors
    /// Those of `memfd_create(2)`, such as EMFILE.
    pub fn new(name: &str, unit_bytes: u64) -> rustix::io::Result<Self> {
        assert!(unit_bytes.is_power_of_two() && (4096..=SEGMENT_BYTES).contains(&unit_bytes));
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
        let segments = (0..SEGMENTS).map(|_| AtomicPtr::new(std::ptr::null_mut())).collect();
        Ok(Self { file, unit_bytes, segments, state: Mutex::default() })
    }

    /// A unit that nobody else has. Its memory is zero unless its last owner left it otherwise.
    pub fn alloc(&self) -> Result<u32> {
        let mut state = self.state.lock();
        if let Some(unit) = state.free.pop() {
            return Ok(unit);
        }
        let unit = state.next;
        let offset = u64::from(unit) * self.unit_bytes;
        if offset >= ARENA_BYTES {
            return Err(Error::NoMemory);
        }
        self.map_segment((offset / SEGMENT_BYTES) as usize)?;
        state.next += 1;
        Ok(unit)
    }

    fn map_segment(&self, index: usize) -> Result<()> {
        // Relaxed: written only under the state lock, which the caller holds.
        if !self.segments[index].load(Ordering::Relaxed).is_null() {
            return Ok(());
        }
        let start = index as u64 * SEGMENT_BYTES;
        rustix::fs::ftruncate(&self.file, start + SEGMENT_BYTES).map_err(|errno| match errno {
            // RLIMIT_FSIZE holds for memory files, too.
            Errno::FBIG => Error::NoSpace,
            _ => Error::NoMemory,
        })?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                SEGMENT_BYTES as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &self.file,
                start,
            )
        };
        let address = address.map_err(|_| Error::NoMemory)?;
        // Release: pairs with the Acquire in `at`, for threads that learn of the unit other than
        // through this lock.
        self.segments[index].store(address.cast(), Ordering::Release);
        Ok(())
    }

    /// Gives a unit back. The caller has released its memory, or vouches for what the next owner
    /// finds there.
    ///
    /// # Safety
    /// The unit was handed out to the caller, who does not use it any more.
    pub unsafe fn free(&self, unit: u32) {
        self.state.lock().free.push(unit);
    }

    /// Address of a byte of a unit that was handed out.
    #[inline]
    pub fn at(&self, offset: u64) -> NonNull<u8> {
        let Some(address) = self.find(offset) else { never_handed_out(offset) };
        address
    }

    /// As [`at`](Self::at), of a byte that the caller learned of without a lock; `None` where it
    /// knows nothing of the memory there. It may be there all the same: nothing orders that caller
    /// after the thread that mapped it.
    #[inline]
    pub fn find(&self, offset: u64) -> Option<NonNull<u8>> {
        let segment = self.segments.get((offset / SEGMENT_BYTES) as usize)?;
        // Acquire: pairs with the Release in map_segment.
        let base = NonNull::new(segment.load(Ordering::Acquire))?;
        // SAFETY: the segment is mapped whole, and the rest of the offset is below its size.
        Some(unsafe { base.add((offset % SEGMENT_BYTES) as usize) })
    }

    /// Brings `len` bytes at `offset` (whole pages) into memory, so that touching them faults no
    /// more.
    pub fn populate(&self, offset: u64, len: u64) -> Result<()> {
        assert!(len <= SEGMENT_BYTES - offset % SEGMENT_BYTES, "{len} bytes at {offset:#x} are no unit's");
        let address = self.at(offset).as_ptr();
        // SAFETY: the range lies in a mapped segment; populating changes no content.
        match unsafe { rustix::mm::madvise(address.cast(), len as usize, Advice::LinuxPopulateWrite) } {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::INVAL) => {
                // A kernel before 5.14: write to each page, some of which may be in use. In one
                // step, so that what another thread writes there meanwhile stays.
                for page in (0..len).step_by(4096) {
                    // SAFETY: inside the range; the byte keeps its value.
                    let byte = unsafe { std::sync::atomic::AtomicU8::from_ptr(address.add(page as usize)) };
                    // Relaxed: nothing is published.
                    byte.fetch_or(0, std::sync::atomic::Ordering::Relaxed);
                }
                Ok(())
            }
            Err(_) => Err(Error::NoMemory),
        }
    }

    /// Returns the memory of `len` bytes at `offset` (whole pages) to the system. The range reads
    /// as zeroes again.
    ///
    /// # Safety
    /// It lies in units that were handed out to the caller, and nobody reads or writes it meanwhile
    /// (but as atomics).
    pub unsafe fn release(&self, offset: u64, len: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // The kernel may have no memory to do it.
        if rustix::fs::fallocate(&self.file, flags, offset, len).is_err() {
            // The promise of zeroes must hold even where the memory could not be returned.
            // SAFETY: the range lies in a mapped segment and belongs to the caller.
            unsafe { std::ptr::write_bytes(self.at(offset).as_ptr(), 0, len as usize) };
        }
    }

    /// Returns all memory to the system, piece by piece: for many gigabytes that takes seconds.
    /// `progress` is given bytes of the address range, done and in all.
    pub fn give_back(&mut self, progress: &mut dyn FnMut(u64, u64)) {
        let all = u64::from(self.handed_out()) * self.unit_bytes;
        for at in (0..all).step_by(GIVE_BACK_BYTES as usize) {
            progress(at, all);
            // With `&mut` nobody uses any of it. What fails is done when this is dropped.
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(&self.file, flags, at, GIVE_BACK_BYTES.min(all - at));
        }
        progress(all, all);
    }

    /// Units below this number have been handed out at some time.
    pub fn handed_out(&self) -> u32 {
        self.state.lock().next
    }

    /// Regards every unit that was ever handed out as in use: what a rebuild starts from.
    pub fn forget_free(&mut self) {
        self.state.lock().free.clear();
    }
}

#[cold]
fn never_handed_out(offset: u64) -> ! {
    unreachable!("offset {offset:#x} of an arena was never handed out")
}

impl Drop for Arena {
    fn drop(&mut self) {
        for segment in &self.segments {
            // Relaxed: `&mut self`, nobody else is here.
            let address = segment.load(Ordering::Relaxed);
            if !address.is_null() {
                // SAFETY: mapped in map_segment with this size, unmapped once; users of the memory
                // borrow the arena.
                let _ = unsafe { rustix::mm::munmap(address.cast(), SEGMENT_BYTES as usize) };
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn released_memory_is_zero_again_and_units_are_reused() {
        let arena = Arena::new("freestone-test", 8192).unwrap();
        let (a, b) = (arena.alloc().unwrap(), arena.alloc().unwrap());
        assert_ne!(a, b);
        let at = u64::from(b) * 8192;
        arena.populate(at, 8192).unwrap();
        // SAFETY: the unit is this test's.
        unsafe { arena.at(at + 5000).as_ptr().write(7) };
        // SAFETY: as above.
        unsafe { arena.release(at, 8192) };
        // SAFETY: as above.
        assert_eq!(unsafe { arena.at(at + 5000).as_ptr().read() }, 0);
        // SAFETY: as above.
        unsafe { arena.free(b) };
        assert_eq!(arena.alloc().unwrap(), b);
    }

    #[test]
    fn all_memory_is_given_back_and_that_is_told() {
        let mut arena = Arena::new("freestone-test", 1 << 20).unwrap();
        for _ in 0..70 {
            let at = u64::from(arena.alloc().unwrap()) << 20;
            arena.populate(at, 1 << 20).unwrap();
        }
        let blocks = |arena: &Arena| rustix::fs::fstat(&arena.file).unwrap().st_blocks;
        assert_eq!(blocks(&arena) * 512, 70 << 20);
        let mut told = Vec::new();
        arena.give_back(&mut |done, all| told.push((done >> 20, all >> 20)));
        assert_eq!(told, [(0, 70), (32, 70), (64, 70), (70, 70)]);
        assert_eq!(blocks(&arena), 0);
    }

    #[test]
    fn what_is_not_mapped_is_not_found() {
        let arena = Arena::new("freestone-test", 4096).unwrap();
        assert_eq!(arena.find(0), None);
        arena.alloc().unwrap();
        assert_eq!(arena.find(4095), Some(arena.at(4095)));
        assert_eq!((arena.find(SEGMENT_BYTES), arena.find(u64::MAX)), (None, None));
    }

    #[test]
    fn units_reach_into_a_second_segment() {
        let arena = Arena::new("freestone-test", SEGMENT_BYTES).unwrap();
        for unit in 0..3 {
            assert_eq!(arena.alloc().unwrap(), unit);
            let at = u64::from(unit) * SEGMENT_BYTES + 12345;
            // SAFETY: the unit is this test's.
            unsafe { arena.at(at).as_ptr().write(unit as u8) };
            // SAFETY: as above.
            assert_eq!(unsafe { arena.at(at).as_ptr().read() }, unit as u8);
        }
    }
}
