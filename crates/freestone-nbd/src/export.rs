//! What is published.

use std::fmt;
use std::sync::Arc;

use freestone::device::Device;

use crate::address::Address;
use crate::proto::TransmissionFlags;

/// How a device is published.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExportOptions {
    /// Writes are refused, also where the device takes them.
    pub read_only: bool,
    /// The export also answers to the empty name at its address.
    pub default: bool,
    /// A text for people, at most 4096 bytes; may be empty.
    pub description: String,
}

/// What [`Server::exports`](crate::Server::exports) tells of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// Its name.
    pub name: String,
    /// Where it is seen.
    pub address: Address,
    /// Whether writes are refused, by option or by the device.
    pub read_only: bool,
    /// Whether it answers to the empty name.
    pub default: bool,
    /// The text for people.
    pub description: String,
    /// Connections that use it now.
    pub connections: usize,
}

/// A device under a name at one address.
pub struct Export {
    /// Its name.
    pub name: String,
    /// Where it is seen.
    pub address: Address,
    /// The device.
    pub device: Arc<dyn Device>,
    /// By option or by the device.
    pub read_only: bool,
    /// Answers to the empty name.
    pub default: bool,
    /// For people.
    pub description: String,
}

impl Export {
    /// What clients are told that they may do.
    pub fn flags(&self, structured: bool) -> TransmissionFlags {
        let mut flags = TransmissionFlags::HAS_FLAGS
            | TransmissionFlags::SEND_FLUSH
            | TransmissionFlags::SEND_FUA
            | TransmissionFlags::SEND_CACHE
            // Every connection goes straight to the one device, whose flush covers all that was answered.
            | TransmissionFlags::CAN_MULTI_CONN;
        if self.read_only {
            flags |= TransmissionFlags::READ_ONLY;
        } else {
            flags |= TransmissionFlags::SEND_WRITE_ZEROES | TransmissionFlags::SEND_FAST_ZERO;
            flags.set(TransmissionFlags::SEND_TRIM, self.device.geometry().discard_granularity != 0);
        }
        flags.set(TransmissionFlags::SEND_DF, structured);
        flags
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:?} at {})", self.name, self.address)
    }
}
