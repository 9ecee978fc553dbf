//! Identity of a device, and what the next start of the server does with its content.

use std::sync::PoisonError;

use uuid::Uuid;

use super::registry::Registry;
use super::{Entry, KindSpec, RESTORED, Spec};
use crate::keys::parse_bool;
use crate::refusal::{Errno, Refusal};

/// What a restarted server does with the exports of a device whose content was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnLost {
    /// The exports are withheld until a user accepts the device as it is.
    #[default]
    Withhold,
    /// The exports are created. The device is empty, or shows its base.
    Empty,
}

impl Spec {
    /// Returns a key that needs a state directory, if one is set.
    pub fn key_of_state(&self) -> Option<&'static str> {
        if self.on_lost.is_some() { Some("on_lost") } else { self.keep.then_some("keep") }
    }
}

/// Keys of a [`RestartPolicy`], which are attributes as well.
pub const RESTART_KEYS: [&str; 2] = ["keep", "on_lost"];

/// What the next start of the server does with a device's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RestartPolicy {
    /// The content is saved in the state directory of the server.
    pub keep: bool,
    /// What the start does with the exports if the content is lost; None for the default.
    pub on_lost: Option<OnLost>,
}

impl RestartPolicy {
    /// Sets the value of a key. Returns false if the policy has no such key.
    ///
    /// # Errors
    /// The values that the key can have.
    pub(crate) fn take(&mut self, key: &str, text: &str) -> Result<bool, String> {
        match key {
            "keep" => self.keep = parse_bool(text)?,
            "on_lost" => self.on_lost = Some(parse_on_lost(text)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Returns the value of a key, as it is written.
    pub(crate) fn value(self, key: &str) -> Option<&'static str> {
        match key {
            "keep" => Some(if self.keep { "yes" } else { "no" }),
            "on_lost" => Some(match self.on_lost.unwrap_or_default() {
                OnLost::Withhold => "withhold",
                OnLost::Empty => "empty",
            }),
            _ => None,
        }
    }
}

impl Entry {
    /// Returns what the next start does with the content.
    pub fn restart_policy(&self) -> RestartPolicy {
        // The policy is replaced as a whole, so a panic leaves it valid.
        *self.restart.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the content is saved in the state directory.
    pub fn is_kept(&self) -> bool {
        self.restart_policy().keep
    }

    /// Returns the keys of the policy that the device can have.
    pub(crate) fn restart_keys(&self) -> &'static [&'static str] {
        let [_, on_lost] = &RESTART_KEYS;
        if self.spec.words.kind == RESTORED {
            &[]
        } else if self.kind.ram().is_some() {
            &RESTART_KEYS
        } else if self.spec.is_lost() || self.spec.kind.below().is_some() {
            std::slice::from_ref(on_lost)
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

    /// Returns the name of the device that a fork reads from.
    fn fork_base(&self) -> Option<&str> {
        match &self.spec.kind {
            KindSpec::Fork(_) | KindSpec::Restored(_) => self.spec.kind.below(),
            _ => None,
        }
    }
}

pub(super) fn parse_on_lost(text: &str) -> Result<OnLost, String> {
    match text {
        "withhold" => Ok(OnLost::Withhold),
        "empty" => Ok(OnLost::Empty),
        _ => Err("must be withhold or empty".into()),
    }
}

/// Identity of a device.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    /// Identifies the device for its whole life, including restarts of the server.
    pub uuid: Uuid,
    /// Generation of the content: 1, plus the number of times that a server end has lost it.
    pub generation: u64,
}

impl Identity {
    /// Creates the identity of a new device.
    pub(super) fn new() -> Self {
        Self { uuid: Uuid::new_v4(), generation: 1 }
    }
}
