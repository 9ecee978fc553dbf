//! The settings of `serve`: combines and checks the command line and the configuration file.

use std::collections::HashSet;
use std::env;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use freestone_nbd::{Address, AllowList, Limits};
use freestone_spec::config::FileConfig;
use freestone_spec::entries::Entries;
use freestone_spec::kinds::Spec;
use tempfile::TempDir;

use super::{DEFAULT_DEVICE, ServeArgs};
use crate::access::ServerAccess;
use crate::allow;
use crate::declared::{self, DeclaredDevice};
use crate::error::Usage;
use crate::export_spec::ExportAddress;
use crate::metrics::MetricsConfig;
use crate::paths;
use crate::state_args::StateSettings;
use crate::supervisor;
use crate::tls::Tls;

/// Settings of a server, checked as far as possible without opening devices and addresses.
pub(super) struct Plan {
    pub(super) devices: Vec<DeclaredDevice>,
    pub(super) addresses: Vec<Address>,
    /// Listening NBD sockets that the service manager has passed.
    pub(super) sockets: Vec<OwnedFd>,
    /// Path of the control socket, or `None` for a server without one.
    pub(super) control: Option<PathBuf>,
    /// Path of the read-only control socket, or `None` for a server without one.
    pub(super) control_read_only: Option<PathBuf>,
    pub(super) access: ServerAccess,
    /// Allow list of the server's addresses. The boolean is true if the list comes from the command line.
    pub(super) allow: Option<(AllowList, bool)>,
    pub(super) tls: Tls,
    pub(super) limits: Limits,
    /// True with `--ublk`: every published device also gets a ublk export.
    pub(super) ublk: bool,
    /// State directory and its settings, or `None` without one.
    pub(super) state: Option<StateSettings>,
    /// Address and settings of the metrics, or `None` without metrics.
    pub(super) metrics: Option<MetricsConfig>,
    /// Address of the web page, or `None` without one.
    pub(super) page: Option<SocketAddr>,
    /// Temporary directory of the sockets, removed at the end.
    pub(super) private: Option<TempDir>,
}

impl Plan {
    /// Combines the command line and the configuration file that it names.
    ///
    /// # Errors
    /// Fails if a setting is invalid, or if the directory of the sockets cannot be created.
    pub(super) fn new(args: &ServeArgs) -> Result<Self> {
        let file = args.config.as_deref().map(declared::read).transpose()?;
        let mut devices = devices(args, file.as_ref())?;
        if args.ublk || file.as_ref().is_some_and(|file| file.ublk) {
            declared::as_block_devices(&mut devices);
        }
        let state = args.state.settings(file.as_ref(), &devices)?;
        let metrics = args.metrics.resolve(file.as_ref())?;
        let page = args.page.resolve(file.as_ref())?;
        let source = file.as_ref().zip(args.config.as_deref());
        let access = ServerAccess::new(&args.access, source)?;
        let tls = Tls::new(&args.tls, source.map(|(file, path)| (&file.tls, path, &*file.base)))?;
        let mut limits = Limits::default();
        args.handshake.put(file.as_ref(), tls.mode().is_some(), &mut limits)?;
        let allow = allow::of_server(&args.allow, source)?;
        let FileConfig {
            nbd,
            control,
            control_read_only,
            max_connections,
            max_memory_in_flight,
            base: file_dir,
            ..
        } = file.unwrap_or_default();
        let (texts, base) =
            if args.nbd.is_empty() { (&nbd, Some(file_dir.as_path())) } else { (&args.nbd, None) };
        let key = match &args.config {
            Some(path) if args.nbd.is_empty() => format!("{}: nbd", path.display()),
            _ => "--nbd".to_owned(),
        };
        let mut addresses = Vec::new();
        for text in texts {
            let address = paths::parse_address(text, base).map_err(|e| Usage(format!("{key}: {e}")))?;
            // Port 0 can be specified several times: each address with port 0 gets a new port.
            if addresses.contains(&address) && !matches!(address, Address::Tcp { port: 0, .. }) {
                return Err(Usage(format!("{key}: {address}: given twice")).into());
            }
            addresses.push(address);
        }
        if args.check {
            let declared = devices.iter().flat_map(|device| &device.exports);
            let nbd = declared.filter_map(|export| match &export.address {
                ExportAddress::Nbd(address) => Some(address),
                ExportAddress::VhostUser(_) | ExportAddress::Ublk(_) => None,
            });
            addresses.iter().chain(nbd).try_for_each(|address| tls.check_address(address)).map_err(Usage)?;
        }
        if args.single {
            if !addresses.is_empty() {
                return Err(Usage(format!("{key}: cannot be used with --single")).into());
            }
            addresses.push(Address::Stdin);
        }
        let mut control = match (&args.control, control) {
            (Some(path), _) => Some(path.clone()),
            // A server for one command or client must not use the socket of the environment variable.
            (None, path) if args.run.is_some() || args.single => path.map(|path| file_dir.join(path)),
            (None, path) => paths::control_of_environment().or_else(|| path.map(|path| file_dir.join(path))),
        };
        let mut private = None;
        // With --single, the socket of the service manager is the connection of the client.
        let sockets = if args.single { Vec::new() } else { supervisor::take_listen_sockets()? };
        if !args.check && !args.single && ((addresses.is_empty() && sockets.is_empty()) || control.is_none())
        {
            let dir = if args.run.is_some() {
                private.insert(paths::private_dir()?).path().to_path_buf()
            } else {
                let dir = paths::runtime_dir()?;
                paths::create_private(&dir)?;
                let has_nbd = addresses.is_empty() && sockets.is_empty();
                access.warn_of_private(&dir, has_nbd, control.is_none());
                dir
            };
            if addresses.is_empty() && sockets.is_empty() {
                addresses.push(Address::Unix(dir.join(paths::NBD_SOCKET)));
            }
            control.get_or_insert_with(|| dir.join(paths::CONTROL_SOCKET));
        }
        let control = control.map(std::path::absolute).transpose().context("--control: no path")?;
        let control_read_only = match (&args.control_read_only, control_read_only) {
            (Some(path), _) => Some(std::path::absolute(path).context("--control-read-only: no path")?),
            (None, path) => path.map(|path| std::path::absolute(file_dir.join(path))).transpose()?,
        };
        access.check_read_only(control_read_only.is_some())?;
        if let Some(path) = control_read_only.as_ref().filter(|path| control.as_ref() == Some(path)) {
            let why = "is already the path of the control socket";
            return Err(Usage(format!("--control-read-only: {}: {why}", path.display())).into());
        }
        if let Some(most) = args.max_connections.or(max_connections) {
            limits.max_connections = most as usize;
        }
        if let Some(bytes) = args.max_memory_in_flight.or(max_memory_in_flight) {
            limits.max_memory_in_flight = bytes;
        }
        if args.single && allow.is_some() {
            let why = "cannot be used with --single";
            return Err(Usage(format!("--allow: {why}")).into());
        }
        if let Some((list, is_of_line)) = &allow {
            let key = match &args.config {
                Some(path) if !is_of_line => format!("{}: allow", path.display()),
                _ => "--allow".to_owned(),
            };
            let default = Address::Unix(PathBuf::from(paths::NBD_SOCKET));
            let is_default = addresses.is_empty() && sockets.is_empty();
            let mut all = addresses.iter().chain(is_default.then_some(&default));
            all.try_for_each(|address| allow::check(list, address))
                .map_err(|why| Usage(format!("{key}: {why}")))?;
        }
        let home = allow.as_ref().map(|(list, _)| list);
        declared::check_lists(&devices, &addresses, home)?;
        Ok(Self {
            devices,
            addresses,
            sockets,
            control,
            control_read_only,
            access,
            allow,
            tls,
            limits,
            ublk: args.ublk,
            state,
            metrics,
            page,
            private,
        })
    }
}

fn devices(args: &ServeArgs, file: Option<&FileConfig>) -> Result<Vec<DeclaredDevice>> {
    let mut devices = match (file, &args.config) {
        (Some(file), Some(path)) => declared::devices(file, path)?,
        _ => Vec::new(),
    };
    let mut names: HashSet<_> = devices.iter().map(|device| device.spec.name.clone()).collect();
    let here = env::current_dir().context("the working directory cannot be found")?;
    for text in &args.devices {
        let entries = Entries::parse_with_warnings(text).map_err(|e| Usage(e.to_string()))?;
        let spec = Spec::from_entries(entries.with_base(&here)).map_err(|e| Usage(e.to_string()))?;
        if !names.insert(spec.name.clone()) {
            return Err(Usage(format!("{}: two devices of that name", spec.name)).into());
        }
        devices.push(DeclaredDevice::word(spec));
    }
    // The default device is added only if there is neither a file nor a state directory: a file without devices
    // is valid, and a state has its own devices.
    if devices.is_empty() && file.is_none() && args.state.state.is_none() {
        devices.push(DeclaredDevice::word(DEFAULT_DEVICE.parse()?));
    }
    declared::check_order(&devices)?;
    Ok(devices)
}
