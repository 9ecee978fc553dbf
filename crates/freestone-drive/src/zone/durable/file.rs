//! Zone state file: stores the durable state of each zone of a device.
//!
//! | bytes | content |
//! |---|---|
//! | 0 .. 4096 | [`Header`]: magic, version, geometry, checksum; written once |
//! | 4096 + 8192 g | [`Group`] g, first copy: sequence number, checksum, the marks of zones 510 g to 510 g + 509 |
//! | 8192 + 8192 g | the same, second copy |
//!
//! All numbers are little-endian. A change of a zone writes the zone's group with the next sequence
//! number over the older copy, then syncs the file. So a torn write leaves the newer copy of the
//! group intact. Of two valid copies, the one with the higher sequence number is used. A [`Mark`]
//! is the durable state of one zone.
//!
//! A failed write may have changed the file. Its groups are suspect until they are rewritten at the
//! same place, which leaves the other copy valid. The content found when a file is opened may not
//! be durable, if the last process ended between a write and its sync. So opening rewrites it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::io::Errno;
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::mark::Mark;
use crate::zone::table::layout::Layout;
use freestone_core::device::{self, Blocking, Device, Flags};
use freestone_core::file_locks::{self, Access, FileRegistration};
use freestone_core::mutants::{self, Mutant};
use freestone_core::replace::{CreatedFile, ReplaceCheck, ReplaceTarget, STATE_PREFIX};

const MAGIC: [u8; 16] = *b"freestone zones\n";
const VERSION: u32 = 1;
const BLOCK_BYTES: u64 = 4096;
/// Upper limit of valid sequence numbers. No device writes often enough to reach it, so larger
/// numbers are damage, and increments cannot overflow.
const SEQUENCE_MAX: u64 = 1 << 62;
const GROUP_ZONES: usize = 510;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    magic: [u8; 16],
    version: U32,
    logical_block: U32,
    /// Size of the device in bytes.
    size: U64,
    /// Zone size in bytes.
    zone_size: U64,
    /// Zone capacity in bytes.
    zone_capacity: U64,
    zones: U32,
    conventional: U32,
    /// Random number of the file. It is part of the checksum of every group, so that groups of
    /// another file are invalid.
    id: U64,
    /// XXH3 hash of the fields before this one.
    checksum: U64,
}

/// Block of the file with the marks of 510 adjacent zones.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Group {
    sequence: U64,
    /// XXH3 hash of the marks, seeded with the sequence number, the file's id and the group's
    /// number.
    checksum: U64,
    marks: [U64; GROUP_ZONES],
}

const _: () = assert!(size_of::<Group>() == BLOCK_BYTES as usize);
const _: () = assert!(size_of::<Header>() <= BLOCK_BYTES as usize);

/// Errors from opening or writing a zone state file.
#[derive(Debug, Error)]
pub enum StateError {
    /// An operation on the file failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A request to the device that stores the state failed.
    #[error("the device it is on: {0}")]
    Device(#[from] device::Error),
    /// The file is not a zone state file.
    #[error("it is no zone state file")]
    Foreign,
    /// A later version of Freestone created the file.
    #[error("it has version {0}; this Freestone knows version {VERSION}")]
    Newer(u32),
    /// Another process or device uses the file.
    #[error("another process uses it")]
    InUse,
    /// The file belongs to a device with a different size, block size or zone layout.
    #[error("it is for a device with {what} {found}; this one has {wanted}")]
    Geometry {
        /// Name of the parameter that differs.
        what: &'static str,
        /// Value of the parameter in the file.
        found: u64,
        /// Value of the parameter of the device.
        wanted: u64,
    },
    /// The file is damaged in a way that a crash cannot cause.
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
    /// The mark of the zone with this number is impossible, which a crash cannot cause.
    #[error("it is damaged: what it says of zone {0} is impossible")]
    BadMark(u32),
    /// The device that should store the state is too small or read-only.
    #[error("it needs a writable device of {needed} bytes; this one has {size}")]
    TooSmall {
        /// Size in bytes that the state needs.
        needed: u64,
        /// Size of the device in bytes.
        size: u64,
    },
}

enum Medium {
    File(File),
    Device(Arc<dyn Device>),
}

impl Medium {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), StateError> {
        match self {
            Self::File(file) => Ok(file.read_exact_at(out, offset)?),
            Self::Device(device) => Ok(device.read_at(offset, out)?),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), StateError> {
        match self {
            Self::File(file) => Ok(file.write_all_at(data, offset)?),
            Self::Device(device) => Ok(device.write_at(offset, data, Flags::empty())?),
        }
    }

    fn sync(&self) -> Result<(), StateError> {
        match self {
            Self::File(file) => Ok(file.sync_data()?),
            Self::Device(device) => Ok(device.flush()?),
        }
    }
}

/// Returns true if a zone state file exists at `path`.
///
/// # Errors
/// The file at `path` cannot be read, or `path` is a symbolic link without a target. Its file
/// system may not be mounted.
pub fn is_state_file(path: &Path) -> io::Result<bool> {
    // Without `NONBLOCK`, opening a pipe would block until its other end is open.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path) {
        Ok(file) => file,
        Err(error) => {
            return match Errno::from_io_error(&error) {
                // No file with too long a name can exist, and a socket cannot be opened.
                Some(Errno::NAMETOOLONG | Errno::NXIO) => Ok(false),
                Some(Errno::NOENT) if is_absent(path)? => Ok(false),
                _ => Err(error),
            };
        }
    };
    if !file.metadata()?.is_file() {
        return Ok(false);
    }
    let mut magic = [0; MAGIC.len()];
    match file.read_exact_at(&mut magic, 0) {
        Ok(()) => Ok(magic == MAGIC),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns true if nothing exists at `path`, not even a symbolic link.
fn is_absent(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

pub struct StateFile {
    medium: Medium,
    id: u64,
    zones: u32,
    /// Sequence number of the newer copy of each group.
    sequences: Vec<u64>,
    /// Groups whose last write failed: the file may contain the new copy, or a part of it.
    suspect: BTreeSet<u64>,
    /// Registration of the file as open in this process; `None` if a device stores the state.
    held: Option<FileRegistration>,
}

/// Open zone state file, and the durable mark of every zone.
pub type OpenState = (StateFile, Vec<Mark>);

impl Drop for StateFile {
    fn drop(&mut self) {
        if let Medium::File(file) = &self.medium {
            // Closing the file may not unlock it: a child process that was just forked keeps the
            // file open until it calls `exec`.
            file_locks::unlock(file.as_fd());
        }
    }
}

impl StateFile {
    /// Opens the state file at `path`, or creates it with the marks that `fresh` returns if nothing
    /// exists there. Returns the open file, the mark of every zone, and the created file if it is
    /// new.
    pub fn open(
        path: &Path,
        layout: &Layout,
        fresh: impl Fn(u32) -> Mark,
    ) -> Result<(OpenState, Option<CreatedFile>), StateError> {
        let made = if is_absent(path)? { Some(Self::make_file(path, layout, fresh)?) } else { None };
        let opened = Self::open_file(path, layout);
        if opened.is_err() {
            made.iter().for_each(CreatedFile::remove);
        }
        Ok((opened?, made))
    }

    fn make_file(
        path: &Path,
        layout: &Layout,
        fresh: impl Fn(u32) -> Mark,
    ) -> Result<CreatedFile, StateError> {
        let place = ReplaceTarget::new(path)?;
        let unfinished = place.begin(STATE_PREFIX)?;
        let file = unfinished.as_file().try_clone()?;
        file.set_len(bytes(layout.zones))?;
        Self::make(&Medium::File(file), layout, fresh)?;
        let made = unfinished.created_file(&place)?;
        place.put(unfinished, ReplaceCheck::Nothing)?.into_result().inspect_err(|_| made.remove())?;
        Ok(made)
    }

    fn open_file(path: &Path, layout: &Layout) -> Result<OpenState, StateError> {
        let file = File::options().read(true).write(true).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(StateError::Foreign);
        }
        file_locks::lock(file.as_fd(), Access::Write).map_err(|error| match error {
            Errno::WOULDBLOCK => StateError::InUse,
            other => StateError::Io(other.into()),
        })?;
        let held = FileRegistration::new(&rustix::fs::fstat(&file).map_err(io::Error::from)?);
        let len = file.metadata()?.len();
        // The process that created the file may have crashed before the name of the file was
        // durable.
        ReplaceTarget::new(path)?.sync_name()?;
        let (mut state, marks) = Self::load(Medium::File(file), len, layout)?;
        state.held = Some(held);
        Ok((state, marks))
    }

    /// Opens the state stored on `device`, or creates it if the first block of the device is zero.
    pub fn open_on(
        device: Arc<dyn Device>,
        layout: &Layout,
        fresh: impl Fn(u32) -> Mark,
    ) -> Result<(Self, Vec<Mark>), StateError> {
        let geometry = device.geometry();
        let needed = bytes(layout.zones);
        if geometry.size < needed || geometry.read_only {
            return Err(StateError::TooSmall { needed, size: geometry.size });
        }
        let medium = Medium::Device(device);
        let mut first = vec![0; BLOCK_BYTES as usize];
        medium.read(0, &mut first)?;
        if first.iter().all(|&byte| byte == 0) {
            Self::make(&medium, layout, fresh)?;
        }
        Self::load(medium, needed, layout)
    }

    /// Writes a new state. The header is written last, so that an unfinished state has no header.
    fn make(medium: &Medium, layout: &Layout, fresh: impl Fn(u32) -> Mark) -> Result<(), StateError> {
        let id = freestone_core::unique::random_id();
        for group in 0..groups(layout.zones) {
            for sequence in [0, 1] {
                let block = block(id, group, sequence, layout.zones, &fresh);
                medium.write(place(group, sequence), block.as_bytes())?;
            }
        }
        medium.sync()?;
        let mut header = Header {
            magic: MAGIC,
            version: U32::new(VERSION),
            logical_block: U32::new(layout.block),
            size: U64::new(layout.size),
            zone_size: U64::new(layout.zone_size()),
            zone_capacity: U64::new(layout.capacity),
            zones: U32::new(layout.zones),
            conventional: U32::new(layout.conventional),
            id: U64::new(id),
            checksum: U64::ZERO,
        };
        header.checksum = U64::new(header.sum());
        let mut first = vec![0; BLOCK_BYTES as usize];
        first[..size_of::<Header>()].copy_from_slice(header.as_bytes());
        medium.write(0, &first)?;
        medium.sync()
    }

    fn load(medium: Medium, len: u64, layout: &Layout) -> Result<(Self, Vec<Mark>), StateError> {
        if len < BLOCK_BYTES {
            return Err(StateError::Foreign);
        }
        let mut first = vec![0; BLOCK_BYTES as usize];
        medium.read(0, &mut first)?;
        let (header, _) = Header::read_from_prefix(&first).map_err(|_| StateError::Foreign)?;
        header.check(layout)?;
        if len < bytes(layout.zones) {
            return Err(StateError::Damaged("it is too short"));
        }
        let id = header.id.get();
        let mut marks = Vec::with_capacity(layout.zones as usize);
        let mut sequences = Vec::new();
        for group in 0..groups(layout.zones) {
            let newer = Self::load_group(&medium, id, group)?;
            medium.write(place(group, newer.sequence.get()), newer.as_bytes())?;
            sequences.push(newer.sequence.get());
            let left = (layout.zones as usize - marks.len()).min(GROUP_ZONES);
            marks.extend(newer.marks[..left].iter().map(|mark| Mark(mark.get())));
        }
        medium.sync()?;
        let file = Self { medium, id, zones: layout.zones, sequences, suspect: BTreeSet::new(), held: None };
        Ok((file, marks))
    }

    /// Returns the newer one of the valid copies of a group. Fails if both copies are invalid.
    fn load_group(medium: &Medium, id: u64, group: u64) -> Result<Box<Group>, StateError> {
        let mut newest: Option<Box<Group>> = None;
        for copy in [0, 1] {
            let mut found =
                Group::new_box_zeroed().map_err(|_| StateError::Device(device::Error::NoMemory))?;
            medium.read(place(group, copy), found.as_mut_bytes())?;
            let sequence = found.sequence.get();
            // The first copy has even sequence numbers, the second copy odd ones.
            let good = found.checksum.get() == found.sum(id, group)
                && sequence % 2 == copy
                && sequence < SEQUENCE_MAX;
            if good && newest.as_ref().is_none_or(|newest| sequence > newest.sequence.get()) {
                newest = Some(found);
            }
        }
        newest.ok_or(StateError::Damaged("both copies of a group of zones are bad"))
    }

    /// Returns true if no group is suspect after a failed write.
    pub fn is_certain(&self) -> bool {
        self.suspect.is_empty()
    }

    /// Makes the marks of `zones` durable, and those of all suspect groups. `mark` returns the mark
    /// of a zone. After an error, the file contains for each of these groups the old marks, the new
    /// ones, or those of an earlier failed write.
    pub fn write(
        &mut self,
        zones: impl Iterator<Item = u32>,
        mark: impl Fn(u32) -> Mark,
    ) -> Result<(), StateError> {
        if mutants::on(Mutant::ZonesBelieveFailure) {
            self.suspect.clear();
        }
        self.suspect.extend(zones.map(|zone| u64::from(zone) / GROUP_ZONES as u64));
        if self.suspect.is_empty() {
            return Ok(());
        }
        for &group in &self.suspect {
            let sequence = self.sequences[group as usize] + 1;
            let block = block(self.id, group, sequence, self.zones, &mark);
            self.medium.write(place(group, sequence), block.as_bytes())?;
        }
        self.medium.sync()?;
        for group in std::mem::take(&mut self.suspect) {
            self.sequences[group as usize] += 1;
        }
        Ok(())
    }
}

impl Header {
    fn sum(&self) -> u64 {
        let bytes = self.as_bytes();
        xxh3_64_with_seed(&bytes[..bytes.len() - size_of::<U64>()], 0)
    }

    fn check(&self, layout: &Layout) -> Result<(), StateError> {
        if self.magic != MAGIC {
            return Err(StateError::Foreign);
        }
        // The version is checked before the checksum, which a later version may store elsewhere.
        if self.version.get() > VERSION {
            return Err(StateError::Newer(self.version.get()));
        }
        if self.version.get() != VERSION || self.checksum.get() != self.sum() {
            return Err(StateError::Damaged("the checksum of its header is wrong"));
        }
        let numbers = [
            ("size", self.size.get(), layout.size),
            ("logical_block", u64::from(self.logical_block.get()), u64::from(layout.block)),
            ("zone_size", self.zone_size.get(), layout.zone_size()),
            ("zone_capacity", self.zone_capacity.get(), layout.capacity),
            ("zone_nr_conv", u64::from(self.conventional.get()), u64::from(layout.conventional)),
        ];
        match numbers.into_iter().find(|(_, found, wanted)| found != wanted) {
            Some((what, found, wanted)) => Err(StateError::Geometry { what, found, wanted }),
            None if self.zones.get() != layout.zones => {
                Err(StateError::Damaged("its number of zones is wrong"))
            }
            None => Ok(()),
        }
    }
}

impl Group {
    fn sum(&self, id: u64, group: u64) -> u64 {
        let seed = id ^ group ^ self.sequence.get().rotate_left(32);
        xxh3_64_with_seed(self.marks.as_bytes(), seed)
    }
}

/// Returns a group with the given marks as it is stored in the file.
fn block(id: u64, group: u64, sequence: u64, zones: u32, mark: &impl Fn(u32) -> Mark) -> Group {
    let mut block =
        Group { sequence: U64::new(sequence), checksum: U64::ZERO, marks: [U64::ZERO; GROUP_ZONES] };
    let first = group * GROUP_ZONES as u64;
    for (zone, slot) in (first..u64::from(zones)).zip(&mut block.marks) {
        *slot = U64::new(mark(zone as u32).0);
    }
    block.checksum = U64::new(block.sum(id, group));
    block
}

fn groups(zones: u32) -> u64 {
    u64::from(zones).div_ceil(GROUP_ZONES as u64)
}

/// Returns the size in bytes of the state of a device with `zones` zones.
fn bytes(zones: u32) -> u64 {
    BLOCK_BYTES * (1 + 2 * groups(zones))
}

/// Returns the offset in bytes of the copy of a group with this sequence number.
fn place(group: u64, sequence: u64) -> u64 {
    BLOCK_BYTES * (1 + 2 * group + sequence % 2)
}
