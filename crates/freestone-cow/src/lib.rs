//! Origins and snapshots with exception stores on a device, as dm-snapshot has them: see [`cow`].

#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "the models use parts of the library"))]

#[cfg(not(loom))]
pub mod cow;

#[cfg(loom)]
mod cow {
    //! What of snapshots is modelled: how exceptions are made, and how copies in flight are
    //! bounded.
    pub mod exceptions;
    mod tokens;

    #[cfg(test)]
    mod models;
}
