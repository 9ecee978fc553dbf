//! Devices that have lost their content with a server, and are not seen by anybody until somebody says
//! that they may be.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::places::Seen;

/// By device. Locked for a look or a change.
#[derive(Default)]
pub struct Withheld(Mutex<HashMap<String, One>>);

struct One {
    /// Where it is to be seen later.
    seen: Seen,
    /// Why a device is withheld that has lost nothing.
    whole: Option<&'static str>,
}

impl Withheld {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, One>> {
        // Nothing in here can be half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device is withheld.
    pub fn put(&self, name: &str, seen: Seen) {
        self.lock().insert(name.to_owned(), One { seen, whole: None });
    }

    /// A device is withheld that has lost nothing, for that reason.
    pub fn put_whole(&self, name: &str, seen: Seen, why: &'static str) {
        self.lock().insert(name.to_owned(), One { seen, whole: Some(why) });
    }

    /// Why a device is withheld that has lost nothing.
    pub fn why_whole(&self, name: &str) -> Option<&'static str> {
        self.lock().get(name)?.whole
    }

    /// Whether it is.
    pub fn has(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// Where it is to be seen; nothing where it is not withheld.
    pub fn of(&self, name: &str) -> Option<Seen> {
        self.lock().get(name).map(|one| one.seen.clone())
    }

    /// It is no longer withheld, or is gone.
    pub fn take(&self, name: &str) -> Option<Seen> {
        self.lock().remove(name).map(|one| one.seen)
    }
}
