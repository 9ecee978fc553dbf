//! Identity of a device, and the policy for its content when the server restarts.

use std::sync::PoisonError;

use uuid::Uuid;

use super::registry::Registry;
use super::{Entry, KindSpec, RESTORED, Spec};
use crate::keys::parse_bool;
use crate::refusal::{Errno, Refusal};

/// Handling of the exports of a device whose content was lost when the server restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DataLossPolicy {
    /// The exports are withheld: not created until a user accepts the loss of the content.
    #[default]
    Withhold,
    /// The exports are created. The device is empty, or has the content of its base.
    Empty,
}

impl Spec {
    /// Returns the name of a key in the specification that needs a state directory, or `None` if no
    /// such key is set.
    pub fn key_of_state(&self) -> Option<&'static str> {
        if self.on_data_loss.is_some() { Some("on_data_loss") } else { self.keep.then_some("keep") }
    }
}

/// Keys of a [`RestartPolicy`], which are also attributes.
pub const RESTART_KEYS: [&str; 2] = ["keep", "on_data_loss"];

/// Handling of a device's content when the server restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RestartPolicy {
    /// True if the content is saved in the state directory of the server.
    pub keep: bool,
    /// Handling of the exports if the content is lost, or `None` for the default.
    pub on_data_loss: Option<DataLossPolicy>,
}

impl RestartPolicy {
    /// Sets the value of a key. Returns false if the policy has no such key.
    ///
    /// # Errors
    /// Returns the reason, which lists the allowed values of the key.
    pub(crate) fn take(&mut self, key: &str, text: &str) -> Result<bool, String> {
        match key {
            "keep" => self.keep = parse_bool(text)?,
            "on_data_loss" => self.on_data_loss = Some(parse_data_loss_policy(text)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Returns the value of a key as it is written in a specification, or `None` if the policy has
    /// no such key.
    pub(crate) fn value(self, key: &str) -> Option<&'static str> {
        match key {
            "keep" => Some(if self.keep { "yes" } else { "no" }),
            "on_data_loss" => Some(match self.on_data_loss.unwrap_or_default() {
                DataLossPolicy::Withhold => "withhold",
                DataLossPolicy::Empty => "empty",
            }),
            _ => None,
        }
    }
}

impl Entry {
    /// Returns the handling of the content when the server restarts.
    pub fn restart_policy(&self) -> RestartPolicy {
        // The policy is replaced as a whole, so a panic leaves it valid and poisoning is ignored.
        *self.restart.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the content of the device is saved in the state directory.
    pub fn is_kept(&self) -> bool {
        self.restart_policy().keep
    }

    /// Returns the keys of [`RestartPolicy`] that apply to the device.
    pub(crate) fn restart_keys(&self) -> &'static [&'static str] {
        let [_, on_data_loss] = &RESTART_KEYS;
        if self.spec.words.kind == RESTORED {
            &[]
        } else if self.kind.ram().is_some() {
            &RESTART_KEYS
        } else if self.spec.is_volatile() || self.spec.kind.parent_name().is_some() {
            std::slice::from_ref(on_data_loss)
        } else {
            &[]
        }
    }

    pub(crate) fn set_restart_policy(&self, policy: RestartPolicy) {
        *self.restart.lock().unwrap_or_else(PoisonError::into_inner) = policy;
    }

    /// Checks that `keep` can be enabled or disabled for the device.
    ///
    /// # Errors
    /// `EINVAL` with the reason.
    pub fn check_keep(&self, registry: &Registry, keep: bool) -> Result<(), Refusal> {
        let name = self.name();
        let refuse = |value: &str, why: &str| {
            Err(Refusal::failed(Errno::EINVAL, format!("{name}: keep={value}: {why}")))
        };
        if !keep {
            let fork =
                registry.all().into_iter().find(|fork| fork.fork_base() == Some(name) && fork.is_kept());
            return match fork.filter(|_| self.kind.ram().is_some()) {
                Some(fork) => {
                    let fork = fork.name();
                    refuse("no", &format!("its fork {fork} is kept; set keep=no there first"))
                }
                None => Ok(()),
            };
        }
        if self.kind.ram().is_none() {
            return refuse("yes", "copies of a file's snapshot in memory are not kept; cow=PATH keeps them");
        }
        if let Some(why) = self.spec.why_not_kept() {
            return refuse("yes", why);
        }
        match self.fork_base().and_then(|base| registry.find(base)) {
            Some(base) if base.kind.ram().is_some() && !base.is_kept() => {
                refuse("yes", &format!("its base {} is not kept; set keep=yes there first", base.name()))
            }
            _ => Ok(()),
        }
    }

    /// Returns the name of the base of a fork, or `None` if the device is not a fork.
    fn fork_base(&self) -> Option<&str> {
        match &self.spec.kind {
            KindSpec::Fork(_) | KindSpec::Restored(_) => self.spec.kind.parent_name(),
            _ => None,
        }
    }
}

pub(super) fn parse_data_loss_policy(text: &str) -> Result<DataLossPolicy, String> {
    match text {
        "withhold" => Ok(DataLossPolicy::Withhold),
        "empty" => Ok(DataLossPolicy::Empty),
        _ => Err("must be withhold or empty".into()),
    }
}

/// Identity of a device across restarts of the server.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    /// Random identifier of the device, which stays the same for its whole life, including restarts
    /// of the server.
    pub uuid: Uuid,
    /// Generation of the content: 1, plus the number of times that the content was lost at the end
    /// of a server process.
    pub generation: u64,
}

impl Identity {
    /// Creates the identity of a new device.
    pub(super) fn new() -> Self {
        Self { uuid: Uuid::new_v4(), generation: 1 }
    }
}
