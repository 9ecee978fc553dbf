//! Device images in object storage: push, read on demand, and prune.

#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "the models use parts of the library"))]

#[cfg(not(loom))]
pub mod cache;
#[cfg(not(loom))]
mod clock;
#[cfg(not(loom))]
pub mod format;
#[cfg(not(loom))]
pub mod image;
#[cfg(not(loom))]
pub mod objects;
#[cfg(not(loom))]
mod parallel;
#[cfg(not(loom))]
pub mod prune;
#[cfg(not(loom))]
pub mod push;
#[cfg(not(loom))]
pub mod retention;
mod rt;
#[cfg(not(loom))]
pub mod store;
#[cfg(not(loom))]
mod timing;
#[cfg(not(loom))]
pub mod url;

#[cfg(loom)]
mod image {
    //! Parts of `image` that loom models cover: fetches and the queue of the readers.
    mod fetches;
    mod queue;

    #[cfg(test)]
    mod models;
}
