//! A frontend of vhost-user-blk with a virtio driver, written apart from the code under test: what
//! tests, the torture and the fuzz targets use in place of a virtual machine.
//!
//! * [`wire`]: the numbers.
//! * [`Memory`]: what a machine shares.
//! * [`Frontend`]: the messages, one by one, right or wrong.
//! * [`Queue`]: a queue's driver, with many requests in flight.
//! * [`Machine`]: all of it set up, and set up again at another server with what was in flight.

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
