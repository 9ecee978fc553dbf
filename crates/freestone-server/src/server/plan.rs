//! The settings of a server, as the command line of `serve` or a [`ServerBuilder`](super::ServerBuilder) makes them.

use std::collections::HashSet;
use std::env;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use freestone_nbd::{Address, AllowList, Limits};
use freestone_spec::entries::Entries;
use freestone_spec::kinds::Spec;

use crate::declared::DeclaredDevice;
use crate::observe::metrics::MetricsConfig;
use crate::persistence::state_args::StateSettings;
use crate::recovery::HolderChoice;
use crate::settings::access::ServerAccess;
use crate::settings::paths;
use crate::settings::tls::Tls;
use crate::upgrade::Handover;
use crate::usage::Usage;

/// Settings of a server, checked as far as possible without opening devices and addresses.
#[derive(Default)]
pub struct Plan {
    pub devices: Vec<DeclaredDevice>,
    pub addresses: Vec<Address>,
    /// Listening NBD sockets that the service manager has passed.
    pub sockets: Vec<OwnedFd>,
    /// Path of the control socket, or `None` for a server without one.
    pub control: Option<PathBuf>,
    /// Path of the read-only control socket, or `None` for a server without one.
    pub control_read_only: Option<PathBuf>,
    pub access: ServerAccess,
    /// Allow list of the server's addresses. The boolean is true if the list comes from the command line.
    pub allow: Option<(AllowList, bool)>,
    pub tls: Tls,
    pub limits: Limits,
    /// True with `--ublk`: every published device also gets a ublk export.
    pub ublk: bool,
    /// State directory and its settings, or `None` without one.
    pub state: Option<StateSettings>,
    /// Process that holds the memory of recoverable devices, or `None` if they are not recoverable.
    pub holder: Option<HolderChoice>,
    /// Address and settings of the metrics, or `None` without metrics.
    pub metrics: Option<MetricsConfig>,
    /// Address of the web page, or `None` without one.
    pub page: Option<SocketAddr>,
    /// Sockets and descriptors of the predecessor, if this program is a successor.
    pub inherited: Option<Handover>,
}

/// Adds the devices with these specifications. Relative paths start at the working directory.
///
/// # Errors
/// Fails if a specification is invalid, or if two devices have the same name.
pub fn add_devices(devices: &mut Vec<DeclaredDevice>, words: &[String]) -> Result<()> {
    let mut names: HashSet<_> = devices.iter().map(|device| device.spec.name.clone()).collect();
    let here = env::current_dir().context("the working directory cannot be found")?;
    for text in words {
        let entries = Entries::parse_with_warnings(text).map_err(Usage::from)?;
        let spec = Spec::from_entries(entries.with_base(&here)).map_err(Usage::from)?;
        if !names.insert(spec.name.clone()) {
            return Err(Usage(format!("{}: two devices of that name", spec.name)).into());
        }
        devices.push(DeclaredDevice::word(spec));
    }
    Ok(())
}

/// Parses the NBD addresses of a server. A relative path starts at `base`, or else at the working directory. `key` is
/// the prefix of errors.
///
/// # Errors
/// Fails if an address is invalid or occurs twice.
pub fn parse_addresses(texts: &[String], base: Option<&Path>, key: &str) -> Result<Vec<Address>, Usage> {
    let mut addresses = Vec::new();
    for text in texts {
        let address = paths::parse_address(text, base).map_err(|e| Usage(format!("{key}: {e}")))?;
        // Port 0 can be specified several times: each address with port 0 gets a new port.
        if addresses.contains(&address) && !matches!(address, Address::Tcp { port: 0, .. }) {
            return Err(Usage(format!("{key}: {address}: given twice")));
        }
        addresses.push(address);
    }
    Ok(addresses)
}
