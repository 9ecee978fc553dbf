//! A vhost-user-blk frontend with a virtio driver, independent of the code under test. Tests, the
//! torture program and the fuzz targets use it in place of a virtual machine.
//!
//! * [`wire`]: protocol constants.
//! * [`GuestMemory`]: guest memory.
//! * [`Frontend`]: single messages, valid or not.
//! * [`Queue`]: the driver of a queue, with many requests in flight.
//! * [`Machine`]: a complete machine, which can reconnect to another server with requests in
//!   flight.

mod export_client;
mod frontend;
mod machine;
mod machine_config;
mod memory;
mod queue;
#[expect(missing_docs, reason = "the names are those of the standards")]
pub mod wire;

pub use frontend::{Config, Frontend};
pub use machine::Machine;
pub use machine_config::MachineConfig;
pub use memory::{GuestMemory, new_eventfd};
pub use queue::{Data, Queue, QueueCompletion, QueueRequest};
