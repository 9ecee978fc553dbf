//! What the command line and a file say of the state, and of what is saved there.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use freestone_spec::config::{self, FileConfig};
use freestone_spec::times;

use crate::declared::Declared;
use crate::error::Usage;
use crate::records::NEEDS_STATE;
use crate::saves::Plan;

/// The options of `serve`.
#[derive(Debug, Args)]
pub struct StateArgs {
    /// Keep devices, forks, snapshots and exports in this directory, made where it is not there: the
    /// next server on it has them again
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Change what the state has otherwise than the devices and the file say; else that is refused
    #[arg(long)]
    apply: bool,
    /// With --state: save what devices with keep=yes hold so often, where it changed: a whole number with
    /// s, m or h
    #[arg(long, value_name = "TIME", value_parser = config::save_every)]
    save_every: Option<Duration>,
    /// With --state: save it whenever so many bytes of it have changed
    #[arg(long, value_name = "SIZE", value_parser = config::save_after)]
    save_after: Option<u64>,
    /// With --state: how long the end of the server waits for the last save [default: 5m]
    #[arg(long, value_name = "TIME", value_parser = times::parse)]
    save_timeout: Option<Duration>,
}

/// A state, and how it is used.
pub struct Asked {
    /// Its directory.
    pub dir: PathBuf,
    /// When content is saved.
    pub saves: Plan,
    /// What it has otherwise than the words say is changed.
    pub apply: bool,
    /// A file was given: what it does not say any more is to go.
    pub has_file: bool,
}

impl StateArgs {
    /// What is to be done; nothing without a state. Refuses what needs one.
    pub fn asked(&self, file: Option<&FileConfig>, devices: &[Declared]) -> Result<Option<Asked>> {
        let of_file = file.and_then(|file| Some(file.base.join(file.state.as_ref()?)));
        let Some(dir) = self.state.clone().or(of_file) else {
            self.check_stateless(file, devices)?;
            return Ok(None);
        };
        let dir = std::path::absolute(dir).context("--state: no path")?;
        let usual = Plan::default();
        let saves = Plan {
            every: self.save_every.or(file.and_then(|file| file.save_every)),
            after: self.save_after.or(file.and_then(|file| file.save_after)),
            timeout: self.save_timeout.or(file.and_then(|file| file.save_timeout)).unwrap_or(usual.timeout),
        };
        Ok(Some(Asked { dir, saves, apply: self.apply, has_file: file.is_some() }))
    }

    fn check_stateless(&self, file: Option<&FileConfig>, devices: &[Declared]) -> Result<(), Usage> {
        let said = |of_file: fn(&FileConfig) -> bool, of_line: bool| of_line || file.is_some_and(of_file);
        for (key, said) in [
            ("save_every", said(|file| file.save_every.is_some(), self.save_every.is_some())),
            ("save_after", said(|file| file.save_after.is_some(), self.save_after.is_some())),
            ("save_timeout", said(|file| file.save_timeout.is_some(), self.save_timeout.is_some())),
        ] {
            if said {
                return Err(Usage(format!("{key}: needs a state: --state DIR")));
            }
        }
        for Declared { spec, at, .. } in devices {
            if let Some(key) = spec.key_of_state() {
                return Err(Usage(format!("{at}{}: {key}: {NEEDS_STATE}", spec.name)));
            }
        }
        Ok(())
    }
}
