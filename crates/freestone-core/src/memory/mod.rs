//! Memory whose pages can be returned to the kernel: the arenas of page tables and pools, mapped buffers, stacks.
//!
//! Page tables, pools and exports use these modules, which take only the errors from the device interface.

pub mod arena;
pub mod mapped_buffer;
pub mod stack;
