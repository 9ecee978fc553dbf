//! Configuration of a virtual machine.

/// Configuration of a virtual machine and its disk.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct Shape {
    /// Number of queues.
    pub queues: u16,
    /// Requests in flight per queue, at most 64.
    pub slots: u16,
    /// Maximum data of a request in bytes.
    pub slot_bytes: u64,
    /// Use indirect descriptors.
    pub indirect: bool,
    /// Use event indices to suppress notifications.
    pub event_idx: bool,
    /// Use an inflight region.
    pub inflight: bool,
    /// Disable the write cache.
    pub write_through: bool,
    /// Announce the memory with a memory table instead of single regions.
    pub table: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            queues: 1,
            slots: 32,
            slot_bytes: 256 << 10,
            indirect: true,
            event_idx: true,
            inflight: false,
            write_through: false,
            table: false,
        }
    }
}
