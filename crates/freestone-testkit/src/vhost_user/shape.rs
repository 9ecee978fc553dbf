//! The choices that a machine has.

/// What a machine is like.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct Shape {
    /// Queues.
    pub queues: u16,
    /// Requests of a queue at once, 64 at most.
    pub slots: u16,
    /// Bytes of data of a request at most.
    pub slot_bytes: u64,
    /// Chains are tables.
    pub indirect: bool,
    /// Each side says when it wants to be told.
    pub event_idx: bool,
    /// It is noted what is in flight.
    pub inflight: bool,
    /// Nothing may sit in a cache.
    pub write_through: bool,
    /// The memory is told of in one table.
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
