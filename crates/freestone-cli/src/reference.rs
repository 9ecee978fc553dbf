//! Facts of the program from which the reference tables of the documentation are generated.

pub use freestone_spec::refusal::Errno;

pub use crate::control::protocol::CODES;
pub use crate::help::GROUPS;
pub use crate::help::devices::topics;
pub use crate::metrics::names::{Metric, Type, all as metrics};
