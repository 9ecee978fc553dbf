//! Status of a snapshot, in the format of `dmsetup status`.

use std::fmt;

/// Size of a sector in bytes, the unit of device mapper's tables and of [`Usage`].
pub const SECTOR_BYTES: u64 = 512;

/// Used space of the COW device, in 512-byte sectors as `dmsetup status` reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Number of allocated sectors, including metadata.
    pub allocated: u64,
    /// Size of the COW device in sectors.
    pub total: u64,
    /// Number of sectors of the header and the metadata areas; 0 for a transient store. A merge is
    /// finished when `allocated` equals `metadata`.
    pub metadata: u64,
}

/// Status of a snapshot. [`Display`](fmt::Display) uses the format of `dmsetup status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The snapshot is lost, because a copy failed or found no space on the COW device. Every
    /// access fails.
    Invalid,
    /// The merge of the snapshot stopped after an I/O error.
    MergeFailed,
    /// A write to the snapshot found the COW device full. Reads are correct, writes fail.
    Overflow,
    /// The snapshot works. Contains the used space of the COW device.
    Usage(Usage),
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} {}", self.allocated, self.total, self.metadata)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid => f.write_str("Invalid"),
            Self::MergeFailed => f.write_str("Merge failed"),
            Self::Overflow => f.write_str("Overflow"),
            Self::Usage(usage) => usage.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Status, Usage};

    #[test]
    fn status_displays_in_dmsetup_format() {
        let usage = Usage { allocated: 32, total: 2048, metadata: 32 };
        assert_eq!(Status::Usage(usage).to_string(), "32/2048 32");
        assert_eq!(Status::Invalid.to_string(), "Invalid");
        assert_eq!(Status::MergeFailed.to_string(), "Merge failed");
        assert_eq!(Status::Overflow.to_string(), "Overflow");
    }
}
