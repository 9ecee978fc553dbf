//! The state of a snapshot, in dm's words.

use std::fmt;

/// Bytes of a sector, the unit of dm's tables and of [`Usage`].
pub const SECTOR_BYTES: u64 = 512;

/// How much of the COW device is used, in sectors of 512 bytes as `dmsetup status` counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Handed out so far, metadata included.
    pub allocated: u64,
    /// Size of the COW device.
    pub total: u64,
    /// Header and areas; 0 for a transient store. A merge is finished when `allocated` is equal to
    /// it.
    pub metadata: u64,
}

/// State of a snapshot. [`Display`](fmt::Display) writes it as `dmsetup status` does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The snapshot is lost: a copy failed, or there was no room for one. Every access fails.
    Invalid,
    /// A merge met an I/O error and stopped.
    MergeFailed,
    /// There was no room for a write to the snapshot: reads are correct, writes fail.
    Overflow,
    /// All is well.
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
    fn states_are_written_as_dmsetup_writes_them() {
        let usage = Usage { allocated: 32, total: 2048, metadata: 32 };
        assert_eq!(Status::Usage(usage).to_string(), "32/2048 32");
        assert_eq!(Status::Invalid.to_string(), "Invalid");
        assert_eq!(Status::MergeFailed.to_string(), "Merge failed");
        assert_eq!(Status::Overflow.to_string(), "Overflow");
    }
}
