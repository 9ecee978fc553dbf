//! Configuration of a simulated virtual machine.

/// Configuration of a simulated virtual machine and its vhost-user-blk disk.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct MachineConfig {
    /// Number of virtqueues of the disk.
    pub queues: u16,
    /// Maximum number of requests in flight per queue, at most 64.
    pub slots: u16,
    /// Maximum number of data bytes per request.
    pub slot_bytes: u64,
    /// Uses indirect descriptors, if the server offers them.
    pub indirect: bool,
    /// Uses event indices to suppress notifications.
    pub event_idx: bool,
    /// Uses an inflight region, which keeps requests in flight across a reconnection.
    pub inflight: bool,
    /// Disables the volatile write cache of the disk.
    pub write_through: bool,
    /// Announces the memory to the server with a memory table instead of single regions.
    pub table: bool,
}

impl Default for MachineConfig {
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
