//! Observation over HTTP: metrics for Prometheus, and the web page with its maps. The sites hold weak references to the
//! service, and only read. `server` starts them; no other room uses this one.

pub mod metrics;
pub mod page;
