//! Verbs on jobs and on the server itself.

pub mod cancel;
#[expect(clippy::module_inception, reason = "the verb `jobs`")]
pub mod jobs;
pub mod shutdown;
pub mod upgrade;
