//! The way of a server to the process that holds its families.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use freestone::ram::FamilyFiles;
use uuid::Uuid;

/// A family that the holder has, with its files.
pub type HeldFiles = (Uuid, FamilyFiles<OwnedFd>);

/// The process that holds files of families, and the way to it. All methods answer within seconds.
pub(super) trait Holder: Send {
    /// Connects to the process, or starts it. Returns the families that it has.
    fn connect(&mut self) -> io::Result<Vec<HeldFiles>>;

    /// Returns true if there is no connection to the process.
    fn has_ended(&self) -> bool;

    /// Returns a descriptor that hangs up when the process ends, or `None` if there is none.
    fn watched(&self) -> Option<OwnedFd>;

    /// Has the files of a family held.
    fn hold(&mut self, id: Uuid, files: &[BorrowedFd<'_>]) -> io::Result<()>;

    /// Has the files of a family closed.
    fn release(&mut self, id: Uuid) -> io::Result<()>;

    /// Returns the names under which a family's files are stored, for a successor in the same process; `None` if it finds
    /// them by itself.
    fn stored_names(&self, id: Uuid) -> Option<Vec<String>>;

    /// Ends the connection.
    fn leave(&mut self);
}
