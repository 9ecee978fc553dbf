//! Description of a server for its successor, with descriptors.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

use freestone::ram::FAMILY_LAYOUT;
use freestone_nbd::{ConnectionState, PassedConnection};
use freestone_spec::path_text;
use freestone_state::STATE_VERSION;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::descriptor;

/// Version of the description. Fields that a successor may ignore do not change it.
const FORMAT: u32 = 1;
/// Largest description that is read, in bytes. The unread bytes of a thousand connections fit in.
const BYTES_MAX: u64 = 1 << 30;

/// Versions of the formats in which a server leaves data to its successor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// Version of this description.
    format: u32,
    /// Layout of the memory of families.
    layout: u64,
    /// Version of the state directory.
    state: u32,
}

/// Errors of a possible successor.
#[derive(Debug, Error)]
pub enum HandoverError {
    /// The description cannot be read.
    #[error("cannot read the description of the server: {0}")]
    Read(#[from] io::Error),
    /// The description is invalid.
    #[error("the description of the server is invalid: {0}")]
    Invalid(#[from] serde_json::Error),
    /// This program does not know the version of a format.
    #[error("the server has {what} of version {found}; this program knows version {known}")]
    Version {
        /// Data in this format.
        what: &'static str,
        /// Version that the predecessor uses.
        found: u64,
        /// Version that this program knows.
        known: u64,
    },
}

/// Descriptor with a name: the path of a control socket or program, the address of a listening socket, or the name of a
/// family's file.
#[derive(Debug, Serialize, Deserialize)]
pub struct NamedDescriptor {
    /// The name.
    pub name: String,
    /// The descriptor.
    #[serde(with = "descriptor")]
    pub descriptor: OwnedFd,
}

/// NBD connection.
#[derive(Debug, Serialize, Deserialize)]
pub struct Connection {
    #[serde(with = "descriptor")]
    socket: OwnedFd,
    state: ConnectionState,
    /// [Key](freestone_spec::kinds::Identity::key) of the content of the device.
    content: u64,
}

/// Server for a successor in the same process, after [`pass_on`](crate::running::Running::pass_on).
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Handover {
    /// Number of upgrades of this process, with this one.
    pub count: u64,
    /// Monotonic time at which requests began to wait.
    pub paused_at: Duration,
    /// Command line of the predecessor, also for its second execution if the successor cannot start.
    pub arguments: Vec<String>,
    /// The predecessor's program. `None` if the successor is the predecessor again.
    pub former: Option<NamedDescriptor>,
    /// Error of the upgrade, if the successor is the predecessor again.
    pub error: Option<String>,
    /// True if the end of the server was requested during the upgrade, so that the successor ends at once.
    pub ends: bool,
    /// The control socket, by its path.
    pub control: Option<NamedDescriptor>,
    /// The read-only control socket, by its path.
    pub control_read_only: Option<NamedDescriptor>,
    /// The server's own addresses in their order, each with true if the service manager has created the socket.
    pub addresses: Vec<(String, bool)>,
    /// Listening NBD sockets, by address. A name with several IP addresses has several.
    pub listeners: Vec<NamedDescriptor>,
    /// Files of families in the store of the service manager, by name.
    pub stored: Vec<NamedDescriptor>,
    /// NBD connections without TLS.
    pub connections: Vec<Connection>,
}

impl Connection {
    /// Returns the connection to a device whose content has this key.
    pub fn new(PassedConnection { socket, state }: PassedConnection, content: u64) -> Self {
        Self { socket, state, content }
    }

    /// Returns the connection and the key.
    pub fn into_parts(self) -> (PassedConnection, u64) {
        let Self { socket, state, content } = self;
        (PassedConnection { socket, state }, content)
    }
}

/// Memfd of a description, which the successor reads.
pub type Description = OwnedFd;

#[derive(Serialize, Deserialize)]
struct Document<T> {
    versions: Versions,
    #[serde(flatten)]
    rest: T,
}

/// Nothing but the versions.
#[derive(Serialize, Deserialize)]
struct Empty {}

impl Versions {
    /// Returns the versions of this program.
    pub const fn known() -> Self {
        Self { format: FORMAT, layout: FAMILY_LAYOUT, state: STATE_VERSION }
    }

    /// Writes a description that contains only the versions, for the check of a possible successor.
    ///
    /// # Errors
    /// No descriptor or memory is left.
    pub fn describe() -> io::Result<Description> {
        write(&Document { versions: Self::known(), rest: Empty {} })
    }

    /// Reads the versions in a description, and checks that this program knows them.
    ///
    /// # Errors
    /// See [`HandoverError`].
    pub fn check(number: RawFd) -> Result<(), HandoverError> {
        let document: Document<Empty> = serde_json::from_slice(&read(number)?)?;
        document.versions.check_known()
    }

    fn check_known(&self) -> Result<(), HandoverError> {
        let known = Self::known();
        let check = |what, found: u64, known: u64, is_known| {
            if is_known { Ok(()) } else { Err(HandoverError::Version { what, found, known }) }
        };
        check("a description", self.format.into(), known.format.into(), self.format == known.format)?;
        check("RAM disks in memory", self.layout, known.layout, self.layout == known.layout)?;
        check("a state directory", self.state.into(), known.state.into(), self.state <= known.state)
    }
}

impl Handover {
    /// Returns the monotonic time, which continues over an upgrade.
    pub fn now() -> Duration {
        let now = clock_gettime(ClockId::Monotonic);
        Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or_default())
    }

    /// Writes the description, and lets the successor inherit all its descriptors.
    ///
    /// # Errors
    /// No descriptor or memory is left.
    pub fn write(&self) -> io::Result<Description> {
        let file = write(&Document { versions: Versions::known(), rest: self })?;
        for descriptor in self.descriptors().chain([file.as_fd()]) {
            fcntl_setfd(descriptor, FdFlags::empty())?;
        }
        Ok(file)
    }

    /// Reads the description at a descriptor, and takes over all that are in it.
    ///
    /// # Errors
    /// See [`HandoverError`].
    pub fn read(number: RawFd) -> Result<Self, HandoverError> {
        let text = read(number)?;
        let document: Document<Empty> = serde_json::from_slice(&text)?;
        document.versions.check_known()?;
        let document: Document<Self> = serde_json::from_slice(&text)?;
        Ok(document.rest)
    }

    /// Returns a copy with duplicates of the descriptors.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        let copy = |passed: &NamedDescriptor| {
            Ok(NamedDescriptor { name: passed.name.clone(), descriptor: passed.descriptor.try_clone()? })
        };
        let copy_connection = |connection: &Connection| {
            let state = connection.state.clone();
            Ok(Connection { socket: connection.socket.try_clone()?, state, content: connection.content })
        };
        let all = |list: &[NamedDescriptor]| list.iter().map(copy).collect::<io::Result<Vec<_>>>();
        let one = |passed: &Option<NamedDescriptor>| passed.as_ref().map(copy).transpose();
        Ok(Self {
            count: self.count,
            paused_at: self.paused_at,
            arguments: self.arguments.clone(),
            former: one(&self.former)?,
            error: self.error.clone(),
            ends: self.ends,
            control: one(&self.control)?,
            control_read_only: one(&self.control_read_only)?,
            addresses: self.addresses.clone(),
            listeners: all(&self.listeners)?,
            stored: all(&self.stored)?,
            connections: self.connections.iter().map(copy_connection).collect::<io::Result<_>>()?,
        })
    }

    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let Self { former, control, control_read_only, listeners, stored, connections, .. } = self;
        let single = [former, control, control_read_only].into_iter().flatten();
        let named = single.chain(listeners).chain(stored).map(|passed| passed.descriptor.as_fd());
        named.chain(connections.iter().map(|connection| connection.socket.as_fd()))
    }
}

fn write(document: &impl Serialize) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create("freestone-handover", MemfdFlags::CLOEXEC)?);
    file.write_all(&serde_json::to_vec(document)?)?;
    Ok(file.into())
}

fn read(number: RawFd) -> Result<Vec<u8>, HandoverError> {
    let mut file = File::from(descriptor::take(number).map_err(io::Error::from)?);
    file.rewind()?;
    let mut text = Vec::new();
    file.take(BYTES_MAX).read_to_end(&mut text)?;
    Ok(text)
}

impl NamedDescriptor {
    /// Returns the name as the path of a socket.
    pub fn path(&self) -> PathBuf {
        path_text::path(&self.name)
    }
}
