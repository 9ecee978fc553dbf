//! The path of a request: reads, writes and discards of a device, in memory at once, or waiting for the
//! backing device, a base or memory.
//!
//! The rest of the program uses this room through [`Device`](freestone_core::device::Device).

pub(in crate::ram) mod extents;
pub(in crate::ram) mod fault_in;
pub(in crate::ram) mod fetch;
pub(in crate::ram) mod io;
pub(in crate::ram) mod submit;
pub(in crate::ram) mod wait;
pub(in crate::ram) mod write;
