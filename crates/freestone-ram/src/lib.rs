//! The compressed RAM disk with its forks and snapshots. [`ram`] is the device interface, and
//! [`codec`] compresses pages. [`transfer`] reads and stores pages in their stored form, for crates
//! that save and restore devices.
//!
//! A family is a base and its forks, which share memory.

#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "the models use parts of the library"))]

#[cfg(not(loom))]
pub use freestone_codec as codec;

#[cfg(not(loom))]
mod age;
#[cfg(all(test, not(loom)))]
mod effort;
#[cfg(not(loom))]
mod pool;
#[cfg(not(loom))]
pub mod ram;

#[cfg(not(loom))]
pub mod transfer {
    //! Pages of devices in their stored form, for crates that save and restore devices.
    //!
    //! A save reads the pages of snapshots ([`ReadStored`]), whole or only those that changed
    //! ([`TrackChanges`], [`TrackSnapshot`]). A restore stores pages in new devices ([`StorePages`]), or
    //! creates devices that read them from a [`Source`] until a [`Loader`] has loaded them
    //! ([`RestoreInto`]).

    pub use crate::ram::content::export::{CollectedPages, ReadStored, StoredForm};
    pub use crate::ram::content::import::{RestoreInto, StorePages};
    pub use crate::ram::content::staged::Loader;
    pub use crate::ram::content::tracking::{TrackChanges, TrackSnapshot, WeakRam};
    pub use crate::ram::device::source::{Incoming, Source};
}

#[cfg(loom)]
mod pool {
    //! The part of the pool that loom models check: the states of spans.
    pub mod class;
    mod span_table;
    mod spans;

    #[cfg(test)]
    mod models;
}

#[cfg(loom)]
mod ram {
    //! The parts of RAM disks that loom models check: users of groups, and requests that wait for
    //! space.
    mod memory {
        mod groups {
            mod header;

            #[cfg(test)]
            mod header_models;
        }
    }

    mod waiting {
        mod space_waiters;

        #[cfg(test)]
        mod space_models;
    }
}
