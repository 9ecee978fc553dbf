//! Zone state file: the durable state of each zone.
//!
//! | bytes | content |
//! |---|---|
//! | 0 .. 4096 | [`Header`]: magic, version, geometry, checksum; written once |
//! | 4096 + 8192 g | [`Group`] g, first copy: sequence number, checksum, the marks of zones 510 g to 510 g + 509 |
//! | 8192 + 8192 g | the same, second copy |
//!
//! All numbers are little-endian. A change of a zone writes its group with the next sequence number
//! over the older copy, then syncs the file. So a torn write leaves the newer copy with all its
//! zones intact. Of two valid copies the one with the higher sequence number counts. For marks see
//! [`Mark`].
//!
//! A failed write may have happened. Its groups are suspect until they are rewritten at the same
//! place, so the older copy stays valid. The content found at opening may not be durable either, if
//! the last process ended between a write and its sync. So it is rewritten at opening.

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

use super::layout::Layout;
use super::mark::Mark;
use freestone_core::device::{self, Blocking, Device, Flags};
use freestone_core::file_locks::{self, Access, Held};
use freestone_core::mutants::{self, Mutant};
use freestone_core::replace::{MadeFile, MayGo, Place, STATE_PREFIX};

const MAGIC: [u8; 16] = *b"freestone zones\n";
const VERSION: u32 = 1;
const BLOCK_BYTES: u64 = 4096;
/// Upper limit of sequence numbers. No valid file reaches it; beyond it the numbers would soon wrap
/// around.
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
    /// Random number, part of every group's checksum: groups of another file are invalid here.
    id: U64,
    /// XXH3 of the fields before it.
    checksum: U64,
}

/// Block with the marks of a group of zones.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Group {
    sequence: U64,
    /// XXH3 of sequence number and marks, seeded with the file's id and the group's number.
    checksum: U64,
    marks: [U64; GROUP_ZONES],
}

const _: () = assert!(size_of::<Group>() == BLOCK_BYTES as usize);
const _: () = assert!(size_of::<Header>() <= BLOCK_BYTES as usize);

/// Errors from opening or writing the zone state file.
#[derive(Debug, Error)]
pub enum StateError {
    /// The file failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The device that holds the state failed.
    #[error("the device it is on: {0}")]
    Device(#[from] device::Error),
    /// The file is not a zone state file.
    #[error("it is no zone state file")]
    Foreign,
    /// A later version of Freestone created the file.
    #[error("it has version {0}; this Freestone knows version {VERSION}")]
    Newer(u32),
    /// Another process uses the file.
    #[error("another process uses it")]
    InUse,
    /// The file belongs to a device with other zones.
    #[error("it is for a device with {what} {found}; this one has {wanted}")]
    Geometry {
        /// Parameter that differs.
        what: &'static str,
        /// Value in the file.
        found: u64,
        /// Value of the device.
        wanted: u64,
    },
    /// The file is damaged; a crash cannot cause this.
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
    /// The mark of a zone is impossible; a crash cannot cause this.
    #[error("it is damaged: what it says of zone {0} is impossible")]
    BadMark(u32),
    /// The device for the state is too small or read-only.
    #[error("it needs a writable device of {needed} bytes; this one has {size}")]
    TooSmall {
        /// Required size in bytes.
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
/// A file at `path` cannot be read, or `path` is a symbolic link without a target, for example into
/// a file system that is not mounted.
pub fn is_state_file(path: &Path) -> io::Result<bool> {
    // Opening a pipe would block until its other end is open.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path) {
        Ok(file) => file,
        Err(error) => {
            return match Errno::from_io_error(&error) {
                // A name too long for its file system cannot exist. A socket cannot be opened.
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
    /// Sequence number of each group's newer copy.
    sequences: Vec<u64>,
    /// Groups with a failed write: the file may contain their next copy, or a part of it.
    suspect: BTreeSet<u64>,
    /// Registration of the file as open in this process; `None` on a device.
    held: Option<Held>,
}

/// Open zone state file and every zone's mark.
pub type Opened = (StateFile, Vec<Mark>);

impl Drop for StateFile {
    fn drop(&mut self) {
        if let Medium::File(file) = &self.medium {
            // Closing is not enough: a child process that was just forked holds the file until it
            // calls exec.
            file_locks::unlock(file.as_fd());
        }
    }
}

impl StateFile {
    /// Opens the state at `path`, or creates it with the marks `fresh` if nothing exists there.
    /// Returns every zone's mark, and the file if it is new.
    pub fn open(
        path: &Path,
        layout: &Layout,
        fresh: impl Fn(u32) -> Mark,
    ) -> Result<(Opened, Option<MadeFile>), StateError> {
        let made = if is_absent(path)? { Some(Self::make_file(path, layout, fresh)?) } else { None };
        let opened = Self::open_file(path, layout);
        if opened.is_err() {
            made.iter().for_each(MadeFile::remove);
        }
        Ok((opened?, made))
    }

    fn make_file(path: &Path, layout: &Layout, fresh: impl Fn(u32) -> Mark) -> Result<MadeFile, StateError> {
        let place = Place::new(path)?;
        let unfinished = place.begin(STATE_PREFIX)?;
        let file = unfinished.as_file().try_clone()?;
        file.set_len(bytes(layout.zones))?;
        Self::make(&Medium::File(file), layout, fresh)?;
        let made = unfinished.made(&place)?;
        place.put(unfinished, MayGo::Nothing)?.into_result().inspect_err(|_| made.remove())?;
        Ok(made)
    }

    fn open_file(path: &Path, layout: &Layout) -> Result<Opened, StateError> {
        let file = File::options().read(true).write(true).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(StateError::Foreign);
        }
        file_locks::lock(file.as_fd(), Access::Write).map_err(|error| match error {
            Errno::WOULDBLOCK => StateError::InUse,
            other => StateError::Io(other.into()),
        })?;
        let held = Held::new(&rustix::fs::fstat(&file).map_err(io::Error::from)?);
        let len = file.metadata()?.len();
        // The creator may have crashed before the file's name was durable.
        Place::new(path)?.keep_name()?;
        let (mut state, marks) = Self::load(Medium::File(file), len, layout)?;
        state.held = Some(held);
        Ok((state, marks))
    }

    /// Opens the state on `device`, or creates it if the device starts with zeroes.
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

    /// Writes a new state, the header last: an unfinished state has no header.
    fn make(medium: &Medium, layout: &Layout, fresh: impl Fn(u32) -> Mark) -> Result<(), StateError> {
        let id = freestone_core::unique::number();
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

    /// Returns the newer valid copy of a group.
    fn load_group(medium: &Medium, id: u64, group: u64) -> Result<Box<Group>, StateError> {
        let mut newest: Option<Box<Group>> = None;
        for copy in [0, 1] {
            let mut found =
                Group::new_box_zeroed().map_err(|_| StateError::Device(device::Error::NoMemory))?;
            medium.read(place(group, copy), found.as_mut_bytes())?;
            let sequence = found.sequence.get();
            // The parity of the sequence number must match the copy's place.
            let good = found.checksum.get() == found.sum(id, group)
                && sequence % 2 == copy
                && sequence < SEQUENCE_MAX;
            if good && newest.as_ref().is_none_or(|newest| sequence > newest.sequence.get()) {
                newest = Some(found);
            }
        }
        newest.ok_or(StateError::Damaged("both copies of a group of zones are bad"))
    }

    /// Returns true if the content of the file is known.
    pub fn is_certain(&self) -> bool {
        self.suspect.is_empty()
    }

    /// Makes the marks of these zones durable, and those of all suspect groups. `mark` returns the
    /// marks. After an error the file holds, for each of these groups, the old marks, the new ones,
    /// or those of an earlier failed write.
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
        // A later version may store its checksum elsewhere.
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

/// Returns a group as stored in the file.
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

/// Returns the size of the state of `zones` zones in bytes.
fn bytes(zones: u32) -> u64 {
    BLOCK_BYTES * (1 + 2 * groups(zones))
}

/// Returns the offset of a group's copy with this sequence number.
fn place(group: u64, sequence: u64) -> u64 {
    BLOCK_BYTES * (1 + 2 * group + sequence % 2)
}
