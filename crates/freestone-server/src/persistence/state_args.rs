//! Options and keys for the state directory and for saving content in it.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use freestone_spec::times;

use crate::config::{self, FileConfig};
use crate::declared::DeclaredDevice;
use crate::persistence::records::NEEDS_STATE;
use crate::persistence::saves::SaveSchedule;
use crate::usage::Usage;

/// Options of `serve` for the state directory.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "State")]
pub struct StateArgs {
    /// State directory: devices, forks, snapshots and exports are restored by the next server; created if
    /// missing
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Change devices of the state that differ from the command line and file; without it they are refused
    #[arg(long)]
    pub apply: bool,
    /// Keep RAM disks, forks and snapshots in memory if the server is killed: the next server with this option
    /// adopts them
    #[arg(long)]
    pub recoverable: bool,
    /// Save changed devices with keep=yes at this interval: a whole number with s, m or h
    #[arg(long, value_name = "TIME", value_parser = config::parse_save_every)]
    pub save_every: Option<Duration>,
    /// Save a device with keep=yes when this many of its bytes have changed
    #[arg(long, value_name = "SIZE", value_parser = config::parse_save_after)]
    pub save_after: Option<u64>,
    /// Longest wait for the last save at the end of the server [default: 5m]
    #[arg(long, value_name = "TIME", value_parser = times::parse)]
    pub save_timeout: Option<Duration>,
}

/// Settings for the state directory.
pub struct StateSettings {
    /// The state directory.
    pub dir: PathBuf,
    /// Schedule of saves of devices with `keep=yes`.
    pub saves: SaveSchedule,
    /// True to change devices of the state that differ from the command line and file (`--apply`).
    pub apply: bool,
    /// True if devices in memory survive a killed server (`--recoverable`).
    pub recoverable: bool,
    /// True if a configuration file was given: with `apply`, devices that it no longer declares are removed.
    pub has_file: bool,
}

impl StateArgs {
    /// Combines the options with the keys of the configuration file. Returns `None` without a state
    /// directory.
    ///
    /// # Errors
    /// Fails if an option or a key of a device needs a state directory, but none is specified.
    pub fn settings(
        &self,
        file: Option<&FileConfig>,
        devices: &[DeclaredDevice],
    ) -> Result<Option<StateSettings>> {
        let of_file = file.and_then(|file| Some(file.base.join(file.state.as_ref()?)));
        let Some(dir) = self.state.clone().or(of_file) else {
            self.check_stateless(file, devices)?;
            return Ok(None);
        };
        let dir = std::path::absolute(dir).context("--state: no path")?;
        let usual = SaveSchedule::default();
        let saves = SaveSchedule {
            every: self.save_every.or(file.and_then(|file| file.save_every)),
            after: self.save_after.or(file.and_then(|file| file.save_after)),
            timeout: self.save_timeout.or(file.and_then(|file| file.save_timeout)).unwrap_or(usual.timeout),
        };
        let recoverable = self.recoverable || file.is_some_and(|file| file.recoverable);
        Ok(Some(StateSettings { dir, saves, apply: self.apply, recoverable, has_file: file.is_some() }))
    }

    fn check_stateless(&self, file: Option<&FileConfig>, devices: &[DeclaredDevice]) -> Result<(), Usage> {
        let said = |of_file: fn(&FileConfig) -> bool, of_line: bool| of_line || file.is_some_and(of_file);
        for (key, said) in [
            ("recoverable", said(|file| file.recoverable, self.recoverable)),
            ("save_every", said(|file| file.save_every.is_some(), self.save_every.is_some())),
            ("save_after", said(|file| file.save_after.is_some(), self.save_after.is_some())),
            ("save_timeout", said(|file| file.save_timeout.is_some(), self.save_timeout.is_some())),
        ] {
            if said {
                return Err(Usage(format!("{key}: needs a state: --state DIR")));
            }
        }
        for DeclaredDevice { spec, at, .. } in devices {
            if let Some(key) = spec.key_of_state() {
                return Err(Usage(format!("{at}{}: {key}: {NEEDS_STATE}", spec.name)));
            }
        }
        Ok(())
    }
}
