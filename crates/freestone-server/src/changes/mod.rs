//! Changes of a running server's devices and exports: a configuration file that is applied, records in the state, and
//! retries of exports. Verbs, the start and SIGHUP use this room; it owns nothing but the thread that retries exports.

pub mod apply;
pub mod export_retry;
pub mod recording;
