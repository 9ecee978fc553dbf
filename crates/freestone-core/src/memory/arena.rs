//! Memory in a memfd, allocated in equal units and addressed by offset.
//!
//! Tables and pools store offsets instead of pointers, so that another process can map the same file and
//! continue. The file is sparse and mapped in segments as the arena grows. A unit occupies memory from the
//! first access (or [`populate`](Arena::populate)) until [`release`](Arena::release).
#![expect(unsafe_code)]
// UNSAFETY: maps memory and computes addresses in it.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::device::{Error, Result};
use crate::sync::{AtomicPtr, Mutex, Ordering};

/// Size in bytes of a segment, the part of the file that is mapped at once.
const SEGMENT_BYTES: u64 = 1 << 30;
/// Maximum size of an arena in bytes. The location field of a slot addresses memory in steps of 16 bytes.
const ARENA_BYTES: u64 = 16 << crate::LOCATION_BITS;
/// Maximum bytes released to the kernel by one fallocate call, so that a call takes only a few milliseconds.
const RELEASE_STEP_BYTES: u64 = 32 << 20;
const SEGMENTS: usize = (ARENA_BYTES / SEGMENT_BYTES) as usize;

/// An allocator of equal units in a memfd.
///
/// Lock order: `state` is innermost, and is held while a segment is mapped.
pub struct Arena {
    file: OwnedFd,
    unit_bytes: u64,
    segments: Box<[AtomicPtr<u8>]>,
    state: Mutex<ArenaState>,
}

#[derive(Default)]
struct ArenaState {
    /// Number of the first unit that was never allocated.
    next_new: u32,
    free: Vec<u32>,
}

impl Arena {
    /// Creates an arena with units of `unit_bytes` bytes: a power of two from 4 KiB to 1 GiB, the segment
    /// size. `name` appears in `/proc/PID/maps`.
    ///
    /// # Errors
    /// Errors of `memfd_create(2)`, such as EMFILE.
    pub fn new(name: &str, unit_bytes: u64) -> rustix::io::Result<Self> {
        Ok(Self::on(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?, unit_bytes))
    }

    fn on(file: OwnedFd, unit_bytes: u64) -> Self {
        assert!(unit_bytes.is_power_of_two() && (4096..=SEGMENT_BYTES).contains(&unit_bytes));
        let segments = (0..SEGMENTS).map(|_| AtomicPtr::new(std::ptr::null_mut())).collect();
        Self { file, unit_bytes, segments, state: Mutex::default() }
    }

    /// Creates an arena on the file of another process's arena, which has ended. All units up to the last one
    /// with memory count as allocated, until [`keep_units`](Self::keep_units).
    ///
    /// # Errors
    /// EINVAL if no arena has made the file; errors of the file and of `mmap(2)`.
    pub fn adopt(file: OwnedFd, unit_bytes: u64) -> rustix::io::Result<Self> {
        let bytes = rustix::fs::fstat(&file)?.st_size as u64;
        if bytes > ARENA_BYTES || !bytes.is_multiple_of(SEGMENT_BYTES) {
            return Err(Errno::INVAL);
        }
        let arena = Self::on(file, unit_bytes);
        for index in 0..bytes / SEGMENT_BYTES {
            arena.map(index as usize)?;
        }
        let end = arena.data_in(0..bytes)?.last().map_or(0, |data| data.end);
        arena.state.lock().next_new = end.div_ceil(unit_bytes) as u32;
        Ok(arena)
    }

    /// Returns the file, for a process that [adopts](Self::adopt) the memory.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the parts of a byte range that have memory, in order. Other bytes read as zeroes, and an access
    /// to them allocates memory.
    ///
    /// # Errors
    /// Errors of `lseek(2)`.
    pub fn data_in(&self, range: Range<u64>) -> rustix::io::Result<Vec<Range<u64>>> {
        let (mut found, mut at) = (Vec::new(), range.start);
        while at < range.end {
            match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
                Ok(data) if data < range.end => {
                    at = rustix::fs::seek(&self.file, SeekFrom::Hole(data))?.min(range.end);
                    found.push(data..at);
                }
                // ENXIO: only a hole follows.
                Ok(_) | Err(Errno::NXIO) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Frees all units but the given ones, in ascending order, and releases their memory.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if the system has no memory for the list of free units.
    ///
    /// # Safety
    /// The caller owns the arena, and uses no other unit.
    pub unsafe fn keep_units(&self, used: &[u32]) -> Result<()> {
        let mut state = self.state.lock();
        let (end, mut next) = (state.next_new, 0);
        let mut free = Vec::new();
        free.try_reserve(end as usize - used.len().min(end as usize)).map_err(|_| Error::NoMemory)?;
        for &unit in used.iter().chain([&end]) {
            if next < unit {
                free.extend(next..unit);
                let (at, len) = (u64::from(next) * self.unit_bytes, u64::from(unit - next) * self.unit_bytes);
                // SAFETY: the caller uses none of these units.
                unsafe { self.release(at, len) };
            }
            next = unit + 1;
        }
        state.free = free;
        Ok(())
    }

    /// Allocates a unit and returns its number. The memory is zero unless the unit's last owner left data in
    /// it.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if the arena is full or the host is out of memory; [`Error::NoSpace`] at
    /// `RLIMIT_FSIZE`.
    pub fn alloc(&self) -> Result<u32> {
        let mut state = self.state.lock();
        if let Some(unit) = state.free.pop() {
            return Ok(unit);
        }
        let unit = state.next_new;
        let offset = u64::from(unit) * self.unit_bytes;
        if offset >= ARENA_BYTES {
            return Err(Error::NoMemory);
        }
        self.map_segment((offset / SEGMENT_BYTES) as usize)?;
        state.next_new += 1;
        Ok(unit)
    }

    /// Allocates a unit whose first `bytes` bytes (whole pages) are populated. Returns its number.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc) and [`populate`](Self::populate).
    pub fn alloc_populated(&self, bytes: u64) -> Result<u32> {
        let unit = self.alloc()?;
        let at = u64::from(unit) * self.unit_bytes;
        self.populate(at, bytes).inspect_err(|_| {
            // SAFETY: the unit was just allocated and is not used.
            unsafe { self.release(at, self.unit_bytes) };
            // SAFETY: as above.
            unsafe { self.free(unit) };
        })?;
        Ok(unit)
    }

    fn map_segment(&self, index: usize) -> Result<()> {
        // Relaxed: segment addresses are written only under the state lock, which the caller holds.
        if !self.segments[index].load(Ordering::Relaxed).is_null() {
            return Ok(());
        }
        let end = (index as u64 + 1) * SEGMENT_BYTES;
        rustix::fs::ftruncate(&self.file, end).map_err(|errno| match errno {
            // EFBIG: the file exceeds RLIMIT_FSIZE, which applies to memfds, too.
            Errno::FBIG => Error::NoSpace,
            _ => Error::NoMemory,
        })?;
        self.map(index).map_err(|_| Error::NoMemory)
    }

    /// Maps a segment of the file, which has its size.
    fn map(&self, index: usize) -> rustix::io::Result<()> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                SEGMENT_BYTES as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &self.file,
                index as u64 * SEGMENT_BYTES,
            )
        }?;
        // Release: pairs with the Acquire in `find`, for threads that learn of the unit without the state
        // lock.
        self.segments[index].store(address.cast(), Ordering::Release);
        Ok(())
    }

    /// Frees a unit. The caller has released the unit's memory, or guarantees which content the next owner
    /// finds in it.
    ///
    /// # Safety
    /// The caller owns the unit and does not use it any more.
    pub unsafe fn free(&self, unit: u32) {
        self.state.lock().free.push(unit);
    }

    /// Returns the address of the byte at `offset` in the arena, which must lie in an allocated unit.
    ///
    /// # Panics
    /// If no segment is mapped at `offset`.
    #[inline]
    pub fn at(&self, offset: u64) -> NonNull<u8> {
        let Some(address) = self.find(offset) else { panic_unallocated(offset) };
        address
    }

    /// Returns the address of a byte as [`at`](Self::at) does, or `None` if this thread sees no segment
    /// mapped at `offset`. A caller without a lock can get `None` for an allocated unit, because nothing
    /// orders this thread after the thread that mapped the segment.
    #[inline]
    pub fn find(&self, offset: u64) -> Option<NonNull<u8>> {
        let segment = self.segments.get((offset / SEGMENT_BYTES) as usize)?;
        // Acquire: pairs with the Release in map_segment.
        let base = NonNull::new(segment.load(Ordering::Acquire))?;
        // SAFETY: the segment is mapped whole, and the rest of the offset is below its size.
        Some(unsafe { base.add((offset % SEGMENT_BYTES) as usize) })
    }

    /// Allocates the pages of `len` bytes at `offset` (whole pages), so that later accesses do not fault.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if the host is out of memory.
    pub fn populate(&self, offset: u64, len: u64) -> Result<()> {
        assert!(len <= SEGMENT_BYTES - offset % SEGMENT_BYTES, "{len} bytes at {offset:#x} exceed a segment");
        let address = self.at(offset).as_ptr();
        // SAFETY: the range lies in a mapped segment; populating changes no content.
        match unsafe { rustix::mm::madvise(address.cast(), len as usize, Advice::LinuxPopulateWrite) } {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::INVAL) => {
                // Kernels before 5.14 lack `MADV_POPULATE_WRITE`: write to each page. Pages may be in use, so
                // the write is an atomic one that keeps the byte's value.
                for page in (0..len).step_by(4096) {
                    // SAFETY: inside the range; the byte keeps its value.
                    let byte = unsafe { std::sync::atomic::AtomicU8::from_ptr(address.add(page as usize)) };
                    // Relaxed: the write publishes no data.
                    byte.fetch_or(0, std::sync::atomic::Ordering::Relaxed);
                }
                Ok(())
            }
            Err(_) => Err(Error::NoMemory),
        }
    }

    /// Releases the pages of `len` bytes at `offset` (whole pages) to the kernel. The range then reads as
    /// zeroes.
    ///
    /// # Safety
    /// The range lies in units of the caller, and meanwhile no thread accesses it other than by atomics.
    pub unsafe fn release(&self, offset: u64, len: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // fallocate can fail for lack of kernel memory. The range must read as zeroes even then, so it is
        // overwritten.
        if rustix::fs::fallocate(&self.file, flags, offset, len).is_err() {
            // SAFETY: guaranteed by the caller.
            unsafe { self.overwrite(offset, len) };
        }
    }

    /// Overwrites a range with zeroes. Segments are not mapped side by side, so each one is written by itself.
    ///
    /// # Safety
    /// As for [`release`](Self::release).
    unsafe fn overwrite(&self, offset: u64, len: u64) {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let next = ((at / SEGMENT_BYTES + 1) * SEGMENT_BYTES).min(end);
            // SAFETY: the range lies in a mapped segment and belongs to the caller.
            unsafe { std::ptr::write_bytes(self.at(at).as_ptr(), 0, (next - at) as usize) };
            at = next;
        }
    }

    /// Releases all memory to the kernel in pieces of 32 MiB. Releasing many gigabytes takes seconds, so
    /// `progress` is called for each piece with the bytes released and the total.
    pub fn release_all(&mut self, progress: &mut dyn FnMut(u64, u64)) {
        let all = u64::from(self.units_ever_allocated()) * self.unit_bytes;
        for at in (0..all).step_by(RELEASE_STEP_BYTES as usize) {
            progress(at, all);
            // `&mut self`: no other thread uses the memory. If the call fails, dropping the arena releases
            // the memory.
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(&self.file, flags, at, RELEASE_STEP_BYTES.min(all - at));
        }
        progress(all, all);
    }

    /// Returns the number of units that were ever allocated.
    pub fn units_ever_allocated(&self) -> u32 {
        self.state.lock().next_new
    }

    /// Marks every unit that was ever allocated as in use. A rebuild of the pool starts with this state.
    pub fn clear_free_list(&mut self) {
        self.state.lock().free.clear();
    }
}

#[cold]
fn panic_unallocated(offset: u64) -> ! {
    unreachable!("arena offset {offset:#x} was never allocated")
}

impl Drop for Arena {
    fn drop(&mut self) {
        for segment in &self.segments {
            // Relaxed: `&mut self` excludes other threads.
            let address = segment.load(Ordering::Relaxed);
            if !address.is_null() {
                // SAFETY: mapped in map_segment with this size and unmapped once; references to the memory
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
    fn release_zeroes_memory_and_free_allows_reuse() {
        let arena = Arena::new("freestone-test", 8192).unwrap();
        let (a, b) = (arena.alloc().unwrap(), arena.alloc().unwrap());
        assert_ne!(a, b);
        let at = u64::from(b) * 8192;
        arena.populate(at, 8192).unwrap();
        // SAFETY: the test owns the unit.
        unsafe { arena.at(at + 5000).as_ptr().write(7) };
        // SAFETY: the test owns the unit.
        unsafe { arena.release(at, 8192) };
        // SAFETY: the test owns the unit.
        assert_eq!(unsafe { arena.at(at + 5000).as_ptr().read() }, 0);
        // SAFETY: the test owns the unit.
        unsafe { arena.free(b) };
        assert_eq!(arena.alloc().unwrap(), b);
    }

    #[test]
    fn release_all_frees_memory_and_reports_progress() {
        let mut arena = Arena::new("freestone-test", 1 << 20).unwrap();
        for _ in 0..70 {
            let at = u64::from(arena.alloc().unwrap()) << 20;
            arena.populate(at, 1 << 20).unwrap();
        }
        let blocks = |arena: &Arena| rustix::fs::fstat(&arena.file).unwrap().st_blocks;
        assert_eq!(blocks(&arena) * 512, 70 << 20);
        let mut reported = Vec::new();
        arena.release_all(&mut |done, all| reported.push((done >> 20, all >> 20)));
        assert_eq!(reported, [(0, 70), (32, 70), (64, 70), (70, 70)]);
        assert_eq!(blocks(&arena), 0);
    }

    #[test]
    fn adopted_arena_has_content_and_kept_units() {
        let arena = Arena::new("freestone-test", 4096).unwrap();
        for unit in 0..6 {
            assert_eq!(arena.alloc().unwrap(), unit);
            // SAFETY: the test owns the unit.
            unsafe { arena.at(u64::from(unit) * 4096).as_ptr().write(unit as u8 + 1) };
        }
        let file = arena.file().try_clone_to_owned().unwrap();
        drop(arena);
        let arena = Arena::adopt(file, 4096).unwrap();
        assert_eq!(arena.units_ever_allocated(), 6);
        // SAFETY: the test uses no other unit.
        unsafe { arena.keep_units(&[1, 4]) }.unwrap();
        // SAFETY: the file was mapped up to its end.
        let byte = |unit: u64| unsafe { arena.at(unit * 4096).as_ptr().read() };
        assert_eq!([0, 1, 2, 3, 4, 5].map(byte), [0, 2, 0, 0, 5, 0]);
        let mut units: Vec<_> = (0..5).map(|_| arena.alloc().unwrap()).collect();
        units.sort_unstable();
        assert_eq!(units, [0, 2, 3, 5, 6]);
        // Two segments.
        let large = Arena::new("freestone-test", SEGMENT_BYTES).unwrap();
        for unit in 0..2 {
            assert_eq!(large.alloc().unwrap(), unit);
            // SAFETY: the test owns the unit.
            unsafe { large.at(u64::from(unit) * SEGMENT_BYTES + 7).as_ptr().write(unit as u8 + 1) };
        }
        let adopted = Arena::adopt(large.file().try_clone_to_owned().unwrap(), SEGMENT_BYTES).unwrap();
        // SAFETY: the file was mapped up to its end.
        let byte = |unit: u64| unsafe { adopted.at(unit * SEGMENT_BYTES + 7).as_ptr().read() };
        assert_eq!(([0, 1].map(byte), adopted.units_ever_allocated()), ([1, 2], 2));
        let other = rustix::fs::memfd_create("freestone-test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&other, 4096).unwrap();
        assert!(Arena::adopt(other, 4096).is_err(), "not a file of an arena");
    }

    #[test]
    fn range_in_two_segments_is_overwritten() {
        let arena = Arena::new("freestone-test", SEGMENT_BYTES).unwrap();
        let units = [arena.alloc().unwrap(), arena.alloc().unwrap()];
        assert_eq!(units, [0, 1]);
        let place = |at: u64| arena.at(at).as_ptr();
        let places = [-4097, -4096, -1, 0, 4095, 4096].map(|at: i64| SEGMENT_BYTES.saturating_add_signed(at));
        // SAFETY: the test owns both units.
        places.iter().for_each(|at| unsafe { place(*at).write(7) });
        // SAFETY: as above.
        unsafe { arena.overwrite(SEGMENT_BYTES - 4096, 8192) };
        // SAFETY: as above.
        assert_eq!(places.map(|at| unsafe { place(at).read() }), [7, 0, 0, 0, 0, 7]);
    }

    #[test]
    fn find_of_unmapped_offset_is_none() {
        let arena = Arena::new("freestone-test", 4096).unwrap();
        assert_eq!(arena.find(0), None);
        arena.alloc().unwrap();
        assert_eq!(arena.find(4095), Some(arena.at(4095)));
        assert_eq!((arena.find(SEGMENT_BYTES), arena.find(u64::MAX)), (None, None));
    }

    #[test]
    fn alloc_maps_second_segment() {
        let arena = Arena::new("freestone-test", SEGMENT_BYTES).unwrap();
        for unit in 0..3 {
            assert_eq!(arena.alloc().unwrap(), unit);
            let at = u64::from(unit) * SEGMENT_BYTES + 12345;
            // SAFETY: the test owns the unit.
            unsafe { arena.at(at).as_ptr().write(unit as u8) };
            // SAFETY: the test owns the unit.
            assert_eq!(unsafe { arena.at(at).as_ptr().read() }, unit as u8);
        }
    }
}
