//! Test support for all Freestone crates. For development only.
//!
//! * [`conformance`]: checks a device against the contract of [`freestone_core::device`].
//! * [`Model`]: the simplest device, a byte vector under a mutex. Serves as the reference for other devices.
//! * [`TestDevice`]: a device over another one, with hooks, held or delayed requests, a bad byte and a log.
//! * [`DeferringDevice`]: a wrapper that returns "would block" and completes requests in shuffled order.
//! * [`FaultyDisk`]: a memory disk with fault injection: errors, hangs, torn writes, corruption, lack
//!   of space. [`DiskEngine`] is the part that it shares with the torture's disk.
//! * [`ModelZoned`]: the simplest zoned device.
//! * [`ExportedDevice`]: a device that is accessed through an export.
//! * [`s3`]: an S3 server in the test's process, with fault injection.
//! * [`LatencyProxy`]: a proxy with a given round-trip time and bandwidth, which counts traffic.
//! * [`certificates`]: TLS certificates, generated on demand.
//! * [`effort`]: selects the number of cases of a randomised test.
//! * [`librbd`]: a fake of Ceph's libraries, over files.
//! * [`nbd`]: an NBD client in plain bytes.
//! * [`objects`]: an in-memory object store with fault injection.
//! * [`process`]: child processes, killed when dropped.
//! * [`tools`]: external programs that tests need, and [`test`] for tests that need one.
//! * [`vhost_user`]: a vhost-user-blk frontend with a virtio driver.
//!
//! ```
//! use std::sync::Arc;
//! use freestone_testkit::{Model, conformance};
//!
//! let options = conformance::Options { rounds: 20, ..Default::default() };
//! conformance::check("model", &|| Arc::new(Model::new(1 << 20, 512)), options);
//! ```

#![allow(missing_docs, reason = "test support: only what a name does not say has a comment")]

pub mod certificates;
mod compare;
pub mod conformance;
mod deferred;
mod effort;
mod exported_device;
mod http_requests;
mod latency_proxy;
pub mod librbd;
mod model;
mod model_zoned;
pub mod nbd;
pub mod objects;
pub mod process;
mod rng;
pub mod s3;
mod simulated;
mod test_device;
pub mod tools;
pub mod vhost_user;

pub use compare::first_difference;
pub use deferred::{DeferPolicy, DeferringDevice};
pub use effort::{effort, scaled};
pub use exported_device::{ExportClient, ExportedDevice};
pub use freestone_testkit_macros::test;
pub use latency_proxy::LatencyProxy;
pub use model::Model;
pub use model_zoned::{ModelZoned, ZonedConfig};
pub use rng::Rng;
pub use simulated::{
    DiskEngine, DiskModel, DiskShared, FaultEffect, FaultSchedule, FaultyDisk, Job, OpCounts, Start,
    Violations,
};
pub use test_device::{Manner, SPOILT, TestDevice};
