//! A vhost-user-blk frontend with a virtio driver, independent of the code under test. Tests, the
//! torture program and the fuzz targets use it in place of a virtual machine.
//!
//! * [`wire`]: protocol constants.
//! * [`Memory`]: guest memory.
//! * [`Frontend`]: single messages, valid or not.
//! * [`Queue`]: the driver of a queue, with many requests in flight.
//! * [`Machine`]: a complete machine, which can reconnect to another server with requests in
//!   flight.

mod carrier;
mod frontend;
mod machine;
mod memory;
mod queue;
mod shape;
#[expect(missing_docs, reason = "the names are those of the standards")]
pub mod wire;

pub use frontend::{Config, Frontend};
pub use machine::Machine;
pub use memory::{Memory, event};
pub use queue::{Answer, Asked, Data, Queue};
pub use shape::Shape;
