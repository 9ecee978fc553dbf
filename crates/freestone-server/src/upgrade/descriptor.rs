//! Descriptors in the description of a server, as numbers.
#![expect(unsafe_code)]
// UNSAFETY: takes over descriptors of the predecessor in this process, which are passed as numbers.

use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use rustix::io::{FdFlags, fcntl_setfd};
use serde::de::Error as _;
use serde::{Deserialize as _, Deserializer, Serializer};

/// Takes over a descriptor. Child processes do not get it.
///
/// # Errors
/// Fails if no descriptor has this number.
pub fn take(number: RawFd) -> Result<OwnedFd, rustix::io::Errno> {
    if number < 0 {
        return Err(rustix::io::Errno::BADF);
    }
    // SAFETY: the descriptor is used only for this call, which fails if it is not open.
    fcntl_setfd(unsafe { BorrowedFd::borrow_raw(number) }, FdFlags::CLOEXEC)?;
    // SAFETY: the predecessor has left the descriptor open for this program, and no other code in it uses the number.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Serializes a descriptor as its number, for `#[serde(with = "descriptor")]`.
pub fn serialize<S: Serializer>(descriptor: &OwnedFd, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_i32(descriptor.as_raw_fd())
}

/// Takes over the descriptor with a serialized number.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<OwnedFd, D::Error> {
    let number = RawFd::deserialize(from)?;
    take(number).map_err(|errno| D::Error::custom(format!("descriptor {number}: {errno}")))
}
