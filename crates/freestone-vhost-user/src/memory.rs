//! The memory that a frontend shares. Other processes may change this memory at any moment, so this
//! module returns no references into it. Bytes are copied, and ring indices are accessed
//! atomically. The caller must validate the copies.
#![expect(unsafe_code)]
// UNSAFETY: maps files of the frontend, and copies from and to the mappings.

use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use freestone_core::PAGE_BYTES;
use rustix::fs::{FileType, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use thiserror::Error;

use crate::sigbus::MappingGuard;
use crate::wire::MemRegion;

/// Maximum number of memory regions of a frontend.
pub const MAX_REGIONS: usize = 128;
/// Largest supported page size of memory files, in bytes.
const MAX_PAGE_BYTES: u64 = 1 << 30;

/// An error from mapping memory.
#[derive(Debug, Error)]
pub enum MapError {
    /// The region is empty or exceeds the address range.
    #[error("a region of {size} bytes at {guest:#x} is not a valid address range")]
    Range {
        /// Guest address.
        guest: u64,
        /// Length in bytes.
        size: u64,
    },
    /// The region overlaps another one.
    #[error("a region at {0:#x} overlaps another one")]
    Overlap(u64),
    /// The memory is not a regular file.
    #[error("the memory is not a regular file")]
    NotAFile,
    /// The file ends before the region.
    #[error("the region ends beyond its file of {0} bytes")]
    Short(u64),
    /// The frontend has too many regions.
    #[error("there are {MAX_REGIONS} regions already")]
    TooMany,
    /// The region to remove does not exist.
    #[error("there is no region at {0:#x}")]
    Unknown(u64),
    /// The system call failed.
    #[error("the memory cannot be mapped: {0}")]
    Map(rustix::io::Errno),
}

/// The address is not in the memory that the frontend shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnmappedAddress;

pub struct Region {
    layout: MemRegion,
    map: NonNull<u8>,
    map_len: usize,
    /// Offset of the region's first byte in the mapping, in bytes.
    lead: usize,
    /// SIGBUS protection, dropped before the mapping is unmapped.
    guard: Option<MappingGuard>,
}

// SAFETY: a Region is a mapping and plain numbers; its bytes are only copied or accessed
// atomically.
unsafe impl Send for Region {}
// SAFETY: as above; concurrent writes by threads and other processes are expected.
unsafe impl Sync for Region {}

impl Region {
    fn new(layout: MemRegion, file: &OwnedFd) -> Result<Self, MapError> {
        let range = MapError::Range { guest: layout.guest, size: layout.size };
        let ends = [layout.guest, layout.user, layout.offset].map(|from| from.checked_add(layout.size));
        let [Some(_), Some(_), Some(file_end)] = ends else { return Err(range) };
        if layout.size == 0 || file_end > i64::MAX as u64 - MAX_PAGE_BYTES {
            return Err(range);
        }
        let stat = fstat(file).map_err(MapError::Map)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(MapError::NotAFile);
        }
        if file_end > stat.st_size as u64 {
            return Err(MapError::Short(stat.st_size as u64));
        }
        // Files on huge pages can be mapped only in whole huge pages; the block size is the page
        // size.
        let block = stat.st_blksize as u64;
        let page = if block.is_power_of_two() {
            block.clamp(PAGE_BYTES as u64, MAX_PAGE_BYTES)
        } else {
            PAGE_BYTES as u64
        };
        let offset = layout.offset & !(page - 1);
        let lead = (layout.offset - offset) as usize;
        let map_len = (file_end - offset).next_multiple_of(page) as usize;
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: the kernel chooses the address of the new mapping, and nothing else refers to it.
        let map = unsafe { mmap(std::ptr::null_mut(), map_len, protection, flags, file, offset) };
        let map = NonNull::new(map.map_err(MapError::Map)?.cast::<u8>()).ok_or(range)?;
        let mut region = Self { layout, map, map_len, lead, guard: None };
        region.guard = MappingGuard::new(map.as_ptr().addr(), map_len);
        if region.guard.is_none() { Err(MapError::TooMany) } else { Ok(region) }
    }

    /// Returns true if the region's file was truncated and a lost page was accessed.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.guard.as_ref().is_some_and(MappingGuard::is_dead)
    }

    /// Returns the address of byte `at` of the region. The `len` bytes from there must be in the
    /// region.
    #[inline]
    fn pointer(&self, at: u64, len: usize) -> *mut u8 {
        debug_assert!(at + len as u64 <= self.layout.size, "the caller has checked the range");
        // SAFETY: the mapping contains `lead` and then `layout.size` bytes.
        unsafe { self.map.as_ptr().add(self.lead + at as usize) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: `new` mapped this range, and it is unmapped once. If that fails, the range is
        // leaked.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), self.map_len) };
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:#x} + {:#x})", self.layout.guest, self.layout.size)
    }
}

#[derive(Debug, Default, Clone)]
pub struct Memory {
    regions: Vec<Arc<Region>>,
}

impl Memory {
    pub fn with_region(&self, layout: MemRegion, file: &OwnedFd) -> Result<Self, MapError> {
        if self.regions.len() == MAX_REGIONS {
            return Err(MapError::TooMany);
        }
        let region = Region::new(layout, file)?;
        let overlaps = |other: &Arc<Region>| {
            other.layout.guest < layout.guest + layout.size
                && layout.guest < other.layout.guest + other.layout.size
        };
        if self.regions.iter().any(overlaps) {
            return Err(MapError::Overlap(layout.guest));
        }
        let mut regions = self.regions.clone();
        regions.push(Arc::new(region));
        Ok(Self { regions })
    }

    pub fn without_region(&self, layout: &MemRegion) -> Result<Self, MapError> {
        let is_same = |region: &Arc<Region>| {
            let has = region.layout;
            (has.guest, has.user, has.size) == (layout.guest, layout.user, layout.size)
        };
        let at = self.regions.iter().position(is_same).ok_or(MapError::Unknown(layout.guest))?;
        let mut regions = self.regions.clone();
        regions.remove(at);
        Ok(Self { regions })
    }

    /// Returns true if a memory file was truncated and a lost page was accessed.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.regions.iter().any(|region| region.is_dead())
    }

    /// Returns the `len` bytes of a ring at `user`, an address of the frontend's process. Returns
    /// None if they are not in one region, or not aligned to `align`.
    pub fn ring_part(&self, user: u64, len: usize, align: u64) -> Option<RingPart> {
        let region = self.regions.iter().find(|region| {
            let has = region.layout;
            user.checked_sub(has.user).is_some_and(|at| at < has.size && len as u64 <= has.size - at)
        })?;
        let at = user - region.layout.user;
        let aligned = region.pointer(at, len).addr().is_multiple_of(align as usize);
        aligned.then(|| RingPart { pointer: region.pointer(at, len), region: Arc::clone(region), len })
    }

    /// Copies the bytes at guest address `guest` into `into`. [Lost pages](Self::is_dead) read as
    /// zeroes.
    #[inline]
    pub fn read(&self, guest: u64, into: &mut [u8]) -> Result<(), UnmappedAddress> {
        self.pieces(guest, into.len(), |pointer, at, len| {
            let to = into[at..at + len].as_mut_ptr();
            // SAFETY: `len` bytes are mapped at `pointer` while `self` holds the region. `into` is
            // private memory, never part of a region. Concurrent writes may produce any bytes.
            unsafe { std::ptr::copy_nonoverlapping(pointer.cast_const(), to, len) };
        })
    }

    /// Checks that the `len` bytes at guest address `guest` are mapped, without an access.
    pub fn check(&self, guest: u64, len: usize) -> Result<(), UnmappedAddress> {
        self.pieces(guest, len, |_, _, _| {})
    }

    /// Returns a copy of the `N` bytes at guest address `guest`.
    #[inline]
    pub fn array<const N: usize>(&self, guest: u64) -> Result<[u8; N], UnmappedAddress> {
        let mut bytes = [0; N];
        let (pointer, len) = self.find(guest, N)?;
        if len == N {
            // SAFETY: as in `read`.
            unsafe { std::ptr::copy_nonoverlapping(pointer.cast_const(), bytes.as_mut_ptr(), N) };
        } else {
            self.read(guest, &mut bytes)?;
        }
        Ok(bytes)
    }

    #[inline]
    pub fn set(&self, guest: u64, byte: u8) -> Result<(), UnmappedAddress> {
        let (pointer, _) = self.find(guest, 1)?;
        // SAFETY: one byte is mapped there, as in `read`.
        unsafe { pointer.write(byte) };
        Ok(())
    }

    #[inline]
    pub fn write(&self, guest: u64, from: &[u8]) -> Result<(), UnmappedAddress> {
        self.pieces(guest, from.len(), |pointer, at, len| {
            // SAFETY: as in `read`, in the other direction.
            unsafe { std::ptr::copy_nonoverlapping(from[at..at + len].as_ptr(), pointer, len) };
        })
    }

    /// Calls `copy` with address, position and length of the bytes in each region that the range
    /// touches; usually one.
    #[inline]
    fn pieces(
        &self,
        guest: u64,
        len: usize,
        mut copy: impl FnMut(*mut u8, usize, usize),
    ) -> Result<(), UnmappedAddress> {
        if len == 0 {
            return Ok(());
        }
        let (pointer, mut done) = self.find(guest, len)?;
        copy(pointer, 0, done);
        while done < len {
            let at = guest.checked_add(done as u64).ok_or(UnmappedAddress)?;
            let (pointer, more) = self.find(at, len - done)?;
            copy(pointer, done, more);
            done += more;
        }
        Ok(())
    }

    /// Returns the mapped address of `guest`, and the number of the `len` bytes that its region
    /// contains.
    #[inline]
    fn find(&self, guest: u64, len: usize) -> Result<(*mut u8, usize), UnmappedAddress> {
        for region in &self.regions {
            if let Some(at) = guest.checked_sub(region.layout.guest)
                && at < region.layout.size
            {
                let len = len.min((region.layout.size - at) as usize);
                return Ok((region.pointer(at, len), len));
            }
        }
        Err(UnmappedAddress)
    }
}

/// A part of a ring, which lies in one region.
#[derive(Debug)]
pub struct RingPart {
    region: Arc<Region>,
    pointer: *mut u8,
    len: usize,
}

// SAFETY: as for Region.
unsafe impl Send for RingPart {}

impl RingPart {
    /// Returns true if the memory file was truncated and a lost page was accessed.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.region.is_dead()
    }

    #[expect(clippy::cast_ptr_alignment, reason = "the part and the offset are aligned")]
    fn number(&self, at: usize) -> &AtomicU16 {
        assert!(at.is_multiple_of(2) && at + 2 <= self.len, "ring index is out of range");
        // SAFETY: the held region keeps the bytes mapped, the range is checked above, and the
        // number is as aligned as the part. Other processes access it as a 16-bit number too.
        unsafe { AtomicU16::from_ptr(self.pointer.add(at).cast::<u16>()) }
    }

    /// Loads the 16-bit index at offset `at`, which the driver publishes. Data that the driver
    /// wrote before the index is visible afterwards.
    #[inline]
    pub fn load(&self, at: usize) -> u16 {
        // Acquire: pairs with the driver's release store of the same index.
        u16::from_le(self.number(at).load(Ordering::Acquire))
    }

    /// Stores a 16-bit index at offset `at`, which the driver reads. Data written before is visible
    /// to a driver that sees the index.
    #[inline]
    pub fn store(&self, at: usize, value: u16) {
        // Release: pairs with the driver's acquire load of the same index.
        self.number(at).store(value.to_le(), Ordering::Release);
    }

    /// Returns a copy of the `N` bytes at offset `at`.
    #[inline]
    pub fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        assert!(at + N <= self.len, "ring entry is out of range");
        let mut bytes = [0; N];
        // SAFETY: the held region keeps the bytes mapped, and the range is checked above; see
        // `Memory::read`.
        unsafe { std::ptr::copy_nonoverlapping(self.pointer.add(at).cast_const(), bytes.as_mut_ptr(), N) };
        bytes
    }

    #[inline]
    pub fn set<const N: usize>(&self, at: usize, bytes: [u8; N]) {
        assert!(at + N <= self.len, "ring entry is out of range");
        // SAFETY: as in `array`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.pointer.add(at), N) };
    }
}
