//! Restart policy of a device in the registry: its value, and the checks before `keep` changes.

use super::identity::{RESTART_KEYS, RestartPolicy};
use super::registry::Registry;
use super::{Entry, KindSpec, RESTORED};
use crate::refusal::Refusal;

impl Entry {
    /// Returns the handling of the content when the server restarts.
    pub fn restart_policy(&self) -> RestartPolicy {
        *self.restart.lock()
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
        *self.restart.lock() = policy;
    }

    /// Checks that `keep` can be enabled or disabled for the device.
    ///
    /// # Errors
    /// `EINVAL` with the reason.
    pub fn check_keep(&self, registry: &Registry, keep: bool) -> Result<(), Refusal> {
        let name = self.name();
        let refuse = |value: &str, why: &str| Err(refusal!(EINVAL, "{name}: keep={value}: {why}"));
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
