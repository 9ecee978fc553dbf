//! dm-snapshot in user space: origins and snapshots with an exception store on a COW device. See
//! [`cow`].

#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "the models use parts of the library"))]

#[cfg(not(loom))]
pub mod cow;

#[cfg(loom)]
mod cow {
    //! The modules checked by loom models: the table of exceptions, and the tokens that limit the
    //! copies in flight.
    pub mod exceptions;
    mod tokens;

    #[cfg(test)]
    mod models;
}
