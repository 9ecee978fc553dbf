//! What comes from outside, for the checks of very many inputs: up to where files would be opened, and without sockets. No
//! part of the library's interface.

use std::path::Path;

use serde_json::Value;

use crate::config;
use crate::control::protocol::Fault;
use crate::control::server::{Handler, answer_to};
use crate::entries::Entries;
use crate::open::{OpenError, Opened, open_device};
use crate::spec::Spec;

/// A device as it was written: name, kind, keys and values.
pub type Written = (String, String, Vec<(String, String)>);
/// The same, and whether it can be meant; else a sentence.
pub type Checked = (Written, Result<(), String>);

fn checked(entries: Entries) -> Checked {
    let written = (entries.name.clone(), entries.kind.clone(), entries.pairs.clone());
    let spec = Spec::from_entries(entries.with_base(Path::new("/base")));
    (written, spec.map(|_| ()).map_err(|error| error.to_string()))
}

/// Takes one device of a command line apart, and checks its kind, keys and values.
///
/// # Errors
/// A sentence: it cannot be taken apart.
pub fn device_words(text: &str) -> Result<Checked, String> {
    Entries::parse(text).map(checked).map_err(|error| error.to_string())
}

/// Takes a file of `serve --config` apart, and checks each of its devices.
///
/// # Errors
/// A sentence: it cannot be taken apart.
pub fn config_file(text: &str) -> Result<Vec<Checked>, String> {
    Ok(config::parse(text)?.devices.into_iter().map(checked).collect())
}

/// Devices behind a control socket that is not there.
pub struct Control(Opened);

impl Control {
    /// With these devices.
    ///
    /// # Errors
    /// They cannot be set up.
    pub fn new(words: &str) -> Result<Self, OpenError> {
        open_device(words).map(Self)
    }

    /// What a connection says to a line. Requests that `runs` does not want are refused.
    pub fn answer(&self, line: &[u8], runs: fn(&str, Option<&Value>) -> bool) -> Vec<u8> {
        answer_to(line, &|method, params| {
            if runs(method, params.as_ref()) {
                self.0.service.call(method, params)
            } else {
                Err(Fault::invalid(format!("{method}: not here")))
            }
        })
    }
}
