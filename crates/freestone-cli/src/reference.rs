//! Facts of the program from which the reference tables of the documentation are generated.

pub use crate::help::GROUPS;
pub use freestone_control::protocol::CODES;
pub use freestone_server::observe::metrics::names::{Metric, Type, all as metrics};
pub use freestone_spec::refusal::Errno;
pub use freestone_spec::schema::{Topic, topics};
