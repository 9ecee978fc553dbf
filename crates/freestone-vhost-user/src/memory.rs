//! The frontend's memory. Whoever else maps it may change it at any moment: nothing here hands out
//! a reference into it. Bytes are copied in and out, and numbers of rings are loaded and stored
//! atomically; what they say is for the caller to check, once it has its copy.
#![expect(unsafe_code)]
// UNSAFETY: maps a file of the frontend, and copies from and to the mapping.

use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use freestone_core::PAGE_BYTES;
use rustix::fs::{FileType, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use thiserror::Error;

use crate::sigbus::Guarded;
use crate::wire::MemRegion;

/// Regions of one frontend.
pub const MAX_REGIONS: usize = 128;
/// Largest page of memory that is known, in bytes.
const MAX_PAGE_BYTES: u64 = 1 << 30;

/// Why memory cannot be used.
#[derive(Debug, Error)]
pub enum MapError {
    /// It ends beyond all addresses, or is empty.
    #[error("a region of {size} bytes at {guest:#x} is no range of addresses")]
    Range {
        /// Its address.
        guest: u64,
        /// Its length.
        size: u64,
    },
    /// Two regions have the same addresses.
    #[error("a region at {0:#x} overlaps another one")]
    Overlap(u64),
    /// Not a file that can be measured.
    #[error("the memory is no regular file")]
    NotAFile,
    /// The file ends before the region.
    #[error("the region ends beyond its file of {0} bytes")]
    Short(u64),
    /// Too many regions.
    #[error("there are {MAX_REGIONS} regions already")]
    TooMany,
    /// No such region to remove.
    #[error("there is no region at {0:#x}")]
    Unknown(u64),
    /// The system refuses.
    #[error("the memory cannot be mapped: {0}")]
    Map(rustix::io::Errno),
}

/// An address that is not in the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unmapped;

/// A mapped part of the memory.
pub struct Region {
    what: MemRegion,
    map: NonNull<u8>,
    map_len: usize,
    /// Where the region begins in the mapping.
    lead: usize,
    /// Dropped before the mapping goes.
    guard: Option<Guarded>,
}

// SAFETY: a Region is a mapping and numbers; its bytes are only copied or accessed atomically.
unsafe impl Send for Region {}
// SAFETY: as above; that threads, and other processes, write the same bytes is expected.
unsafe impl Sync for Region {}

impl Region {
    fn new(what: MemRegion, file: &OwnedFd) -> Result<Self, MapError> {
        let range = MapError::Range { guest: what.guest, size: what.size };
        let ends = [what.guest, what.user, what.offset].map(|from| from.checked_add(what.size));
        let [Some(_), Some(_), Some(file_end)] = ends else { return Err(range) };
        if what.size == 0 || file_end > i64::MAX as u64 - MAX_PAGE_BYTES {
            return Err(range);
        }
        let stat = fstat(file).map_err(MapError::Map)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(MapError::NotAFile);
        }
        if file_end > stat.st_size as u64 {
            return Err(MapError::Short(stat.st_size as u64));
        }
        // Of a file in huge pages only whole ones can be mapped; its block size tells.
        let block = stat.st_blksize as u64;
        let page = if block.is_power_of_two() {
            block.clamp(PAGE_BYTES as u64, MAX_PAGE_BYTES)
        } else {
            PAGE_BYTES as u64
        };
        let offset = what.offset & !(page - 1);
        let lead = (what.offset - offset) as usize;
        let map_len = (file_end - offset).next_multiple_of(page) as usize;
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new mapping where the kernel likes, which nothing else in this process refers
        // to.
        let map = unsafe { mmap(std::ptr::null_mut(), map_len, protection, flags, file, offset) };
        let map = NonNull::new(map.map_err(MapError::Map)?.cast::<u8>()).ok_or(range)?;
        let mut region = Self { what, map, map_len, lead, guard: None };
        region.guard = Guarded::new(map.as_ptr().addr(), map_len);
        if region.guard.is_none() { Err(MapError::TooMany) } else { Ok(region) }
    }

    /// Whether its file has lost pages.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.guard.as_ref().is_some_and(Guarded::is_dead)
    }

    /// Where byte `at` of the region is, of `len` that are all in it.
    #[inline]
    fn place(&self, at: u64, len: usize) -> *mut u8 {
        debug_assert!(at + len as u64 <= self.what.size, "the caller has checked the range");
        // SAFETY: the mapping has `lead` and then `what.size` bytes.
        unsafe { self.map.as_ptr().add(self.lead + at as usize) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: mapped in `new` with this length, unmapped once. Where that fails it is leaked.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), self.map_len) };
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:#x} + {:#x})", self.what.guest, self.what.size)
    }
}

/// All regions at one time.
#[derive(Debug, Default, Clone)]
pub struct Memory {
    regions: Vec<Arc<Region>>,
}

impl Memory {
    /// This memory and another region.
    pub fn with(&self, what: MemRegion, file: &OwnedFd) -> Result<Self, MapError> {
        if self.regions.len() == MAX_REGIONS {
            return Err(MapError::TooMany);
        }
        let region = Region::new(what, file)?;
        let overlaps = |other: &Arc<Region>| {
            other.what.guest < what.guest + what.size && what.guest < other.what.guest + other.what.size
        };
        if self.regions.iter().any(overlaps) {
            return Err(MapError::Overlap(what.guest));
        }
        let mut regions = self.regions.clone();
        regions.push(Arc::new(region));
        Ok(Self { regions })
    }

    /// This memory without a region.
    pub fn without(&self, what: &MemRegion) -> Result<Self, MapError> {
        let is_it = |region: &Arc<Region>| {
            let has = region.what;
            (has.guest, has.user, has.size) == (what.guest, what.user, what.size)
        };
        let at = self.regions.iter().position(is_it).ok_or(MapError::Unknown(what.guest))?;
        let mut regions = self.regions.clone();
        regions.remove(at);
        Ok(Self { regions })
    }

    /// Whether a file of it has lost pages that somebody touched.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.regions.iter().any(|region| region.is_dead())
    }

    /// A part of a ring, by the frontend's own address.
    pub fn ring_part(&self, user: u64, len: usize, align: u64) -> Option<RingPart> {
        let region = self.regions.iter().find(|region| {
            let has = region.what;
            user.checked_sub(has.user).is_some_and(|at| at < has.size && len as u64 <= has.size - at)
        })?;
        let at = user - region.what.user;
        let aligned = region.place(at, len).addr().is_multiple_of(align as usize);
        aligned.then(|| RingPart { place: region.place(at, len), region: Arc::clone(region), len })
    }

    /// Copies out of the memory; zeroes where it [is gone](Self::is_dead).
    #[inline]
    pub fn read(&self, guest: u64, into: &mut [u8]) -> Result<(), Unmapped> {
        self.pieces(guest, into.len(), |place, at, len| {
            let to = into[at..at + len].as_mut_ptr();
            // SAFETY: `len` bytes are mapped at `place` as long as `self` has the region, and
            // `into` is memory of ours, which is never a part of a region. Others may write what is
            // read: then it is any bytes.
            unsafe { std::ptr::copy_nonoverlapping(place.cast_const(), to, len) };
        })
    }

    /// Copies so many bytes out of the memory.
    #[inline]
    pub fn array<const N: usize>(&self, guest: u64) -> Result<[u8; N], Unmapped> {
        let mut bytes = [0; N];
        let (place, len) = self.find(guest, N)?;
        if len == N {
            // SAFETY: as in `read`.
            unsafe { std::ptr::copy_nonoverlapping(place.cast_const(), bytes.as_mut_ptr(), N) };
        } else {
            self.read(guest, &mut bytes)?;
        }
        Ok(bytes)
    }

    /// Writes one byte.
    #[inline]
    pub fn set(&self, guest: u64, byte: u8) -> Result<(), Unmapped> {
        let (place, _) = self.find(guest, 1)?;
        // SAFETY: one byte is mapped there, see `read`.
        unsafe { place.write(byte) };
        Ok(())
    }

    /// Copies into the memory.
    #[inline]
    pub fn write(&self, guest: u64, from: &[u8]) -> Result<(), Unmapped> {
        self.pieces(guest, from.len(), |place, at, len| {
            // SAFETY: as in `read`, the other way round.
            unsafe { std::ptr::copy_nonoverlapping(from[at..at + len].as_ptr(), place, len) };
        })
    }

    /// Calls `copy` for each piece of memory that `len` bytes lie in, most often one.
    #[inline]
    fn pieces(
        &self,
        guest: u64,
        len: usize,
        mut copy: impl FnMut(*mut u8, usize, usize),
    ) -> Result<(), Unmapped> {
        if len == 0 {
            return Ok(());
        }
        let (place, mut done) = self.find(guest, len)?;
        copy(place, 0, done);
        while done < len {
            let at = guest.checked_add(done as u64).ok_or(Unmapped)?;
            let (place, more) = self.find(at, len - done)?;
            copy(place, done, more);
            done += more;
        }
        Ok(())
    }

    /// Where an address is, and how many of `len` bytes from there on.
    #[inline]
    fn find(&self, guest: u64, len: usize) -> Result<(*mut u8, usize), Unmapped> {
        for region in &self.regions {
            if let Some(at) = guest.checked_sub(region.what.guest)
                && at < region.what.size
            {
                let len = len.min((region.what.size - at) as usize);
                return Ok((region.place(at, len), len));
            }
        }
        Err(Unmapped)
    }
}

/// A part of a ring: bytes that lie in one region.
#[derive(Debug)]
pub struct RingPart {
    /// Keeps it mapped.
    region: Arc<Region>,
    place: *mut u8,
    len: usize,
}

// SAFETY: as for Region, of which it is a part.
unsafe impl Send for RingPart {}

impl RingPart {
    /// Whether its file has lost pages.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.region.is_dead()
    }

    #[expect(clippy::cast_ptr_alignment, reason = "a part is aligned, and so is its number")]
    fn number(&self, at: usize) -> &AtomicU16 {
        assert!(at.is_multiple_of(2) && at + 2 <= self.len, "an index of a ring is below its size");
        // SAFETY: mapped as long as the region is held, checked above, aligned as the part is; others
        // access it as a 16-bit number too.
        unsafe { AtomicU16::from_ptr(self.place.add(at).cast::<u16>()) }
    }

    /// A number that the driver publishes: what it wrote before is seen after.
    #[inline]
    pub fn load(&self, at: usize) -> u16 {
        // Acquire: pairs with the driver's release of the same number.
        u16::from_le(self.number(at).load(Ordering::Acquire))
    }

    /// A number that is published to the driver: it sees what was written before.
    #[inline]
    pub fn store(&self, at: usize, value: u16) {
        // Release: pairs with the driver's acquire of the same number.
        self.number(at).store(value.to_le(), Ordering::Release);
    }

    /// Copies the bytes from `at` on.
    #[inline]
    pub fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        assert!(at + N <= self.len, "an entry of a ring is below its size");
        let mut bytes = [0; N];
        // SAFETY: mapped as long as the region is held, checked above; see `Memory::read`.
        unsafe { std::ptr::copy_nonoverlapping(self.place.add(at).cast_const(), bytes.as_mut_ptr(), N) };
        bytes
    }

    /// Copies bytes to `at` and on.
    #[inline]
    pub fn set<const N: usize>(&self, at: usize, bytes: [u8; N]) {
        assert!(at + N <= self.len, "an entry of a ring is below its size");
        // SAFETY: as in `array`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.place.add(at), N) };
    }
}
