//! Devices that have lost their content with a server, and are not seen by anybody until somebody says
//! that they may be.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::places::Seen;

/// By device: where it is to be seen then. Locked for a look or a change.
#[derive(Default)]
pub struct Withheld(Mutex<HashMap<String, Seen>>);

impl Withheld {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Seen>> {
        // Nothing in here can be half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device is withheld.
    pub fn put(&self, name: &str, seen: Seen) {
        self.lock().insert(name.to_owned(), seen);
    }

    /// Whether it is.
    pub fn has(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// Where it is to be seen; nothing where it is not withheld.
    pub fn of(&self, name: &str) -> Option<Seen> {
        self.lock().get(name).cloned()
    }

    /// It is no longer withheld, or is gone.
    pub fn take(&self, name: &str) -> Option<Seen> {
        self.lock().remove(name)
    }
}

/// What people are told of such a device; of one whose content is older than it was, of when it is;
/// of one whose base changed while no server ran, the file that did.
pub fn told(name: &str, content_of: Option<&str>, changed_base: Option<&Path>) -> String {
    let what = match (content_of, changed_base) {
        (Some(when), _) => format!("has the content of {when}, and"),
        (None, Some(file)) => {
            format!("has a base that changed while no server ran ({}), and", file.display())
        }
        (None, None) => "has lost content, and".to_owned(),
    };
    format!("{name}: {what} is withheld; `freestone publish {name}` shows it as it is")
}
