//! What every Freestone device is tested with (development only).
//!
//! * [`conformance`]: checks any device against the contract of [`freestone_core::device`], in both
//!   directions.
//! * [`Model`]: the plainest device there is, a byte vector under a mutex; the oracle.
//! * [`Deferred`]: a decorator that answers "would block" and completes in a shuffled order.
//! * [`Faulty`]: a disk in memory that fails, hangs, tears, corrupts and fills up when it is told
//!   to.
//! * [`ModelZoned`]: the plainest zoned device.
//! * [`Through`]: a device that is used by way of an export.
//! * [`s3`]: a server of objects, in this process, that fails as it is told.
//! * [`Latency`]: a line to a server with a round trip's time and a bandwidth, which counts what goes over it.
//! * [`certificates`]: for TLS.
//! * [`effort`]: how many cases a randomised test runs.
//! * [`librbd`]: a library that stands for Ceph's, over files.
//! * [`objects`]: a store of objects in memory that fails when it is told to.
//! * [`tools`]: programs that tests run, and [`test`] for tests that need some.
//! * [`vhost_user`]: a frontend, for exports to virtual machines.
//!
//! ```
//! use std::sync::Arc;
//! use freestone_testkit::{Model, conformance};
//!
//! let options = conformance::Options { rounds: 20, ..Default::default() };
//! conformance::check("model", &|| Arc::new(Model::new(1 << 20, 512)), options);
//! ```

pub mod certificates;
mod compare;
pub mod conformance;
mod deferred;
mod effort;
mod faulty;
mod heads;
mod latency;
pub mod librbd;
mod model;
mod model_zoned;
pub mod objects;
mod rng;
pub mod s3;
mod through;
pub mod tools;
pub mod vhost_user;

pub use compare::first_difference;
pub use deferred::{Deferred, Policy};
pub use effort::{effort, scaled};
pub use faulty::{Counts, Faulty, What, When};
pub use freestone_testkit_macros::test;
pub use latency::Latency;
pub use model::Model;
pub use model_zoned::{ModelZoned, ZonedConfig};
pub use rng::Rng;
pub use through::{Carrier, Through};
