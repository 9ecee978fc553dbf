//! Requests that wait for memory or space, and the queues they wait in.
//!
//! The room owns the submitted request (`job`), the queues (`keeper`, `removals`, `space_waiters`) and
//! the policy for writes that find no space (`full_policy`, `device_space`). All other rooms may use
//! this one. Every lock in here is a leaf lock.

pub(in crate::ram) mod device_space;
pub(in crate::ram) mod full_policy;
pub(in crate::ram) mod job;
pub(in crate::ram) mod keeper;
pub(in crate::ram) mod parent_zeroes;
pub(in crate::ram) mod removals;
pub(in crate::ram) mod space_waiters;
