//! The settings of `serve`: combines and checks the command line and the configuration file.

use std::mem;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use freestone_nbd::{Address, Limits};
use freestone_server::config::FileConfig;
use freestone_server::declared::{self, DeclaredDevice};
use freestone_server::exports::export_spec::ExportAddress;
use freestone_server::plan::{Plan, add_devices, parse_addresses};
use freestone_server::recovery::{HolderChoice, ServiceManager};
use freestone_server::settings::access::ServerAccess;
use freestone_server::settings::tls::Tls;
use freestone_server::settings::{allow, paths};
use freestone_server::upgrade::{Handover, NamedDescriptor};
use freestone_server::usage::Usage;
use tempfile::TempDir;

use super::supervisor::{self, Descriptors, ManagerStore};
use super::{DEFAULT_DEVICE, ServeArgs};

/// Combines the command line and the configuration file that it names. A successor uses the
/// addresses and devices of its predecessor (`inherited`). Also returns the temporary directory of the
/// sockets, to be removed at the end.
///
/// # Errors
/// Fails if a setting is invalid, or if the directory of the sockets cannot be created.
pub(super) fn plan(args: &ServeArgs, mut inherited: Option<Handover>) -> Result<(Plan, Option<TempDir>)> {
    let file = args.config.as_deref().map(declared::read).transpose()?;
    let mut devices = devices(args, file.as_ref())?;
    if args.ublk || file.as_ref().is_some_and(|file| file.ublk) {
        declared::as_block_devices(&mut devices);
    }
    let mut state = args.state.settings(file.as_ref(), &devices)?;
    if inherited.is_some() {
        // The state has the devices as they are, with all changes since the start.
        devices.clear();
        if let Some(state) = &mut state {
            (state.apply, state.has_file) = (false, false);
        }
    }
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
    let mut addresses = parse_addresses(texts, base, &key)?;
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
    let Descriptors { sockets, stored } = match &mut inherited {
        Some(inherited) => {
            let taken = take_sockets(inherited);
            let own = inherited
                .addresses
                .iter()
                .filter(|(_, by_manager)| !by_manager)
                .map(|(text, _)| text.clone());
            addresses = parse_addresses(&own.collect::<Vec<_>>(), None, "--nbd")?;
            control = inherited.control.as_ref().map(NamedDescriptor::path).or(control);
            taken
        }
        None if args.single => Descriptors::default(),
        None => supervisor::take_descriptors()?,
    };
    if !args.check && !args.single && ((addresses.is_empty() && sockets.is_empty()) || control.is_none()) {
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
    let is_recoverable = state.as_ref().is_some_and(|state| state.recoverable);
    if !stored.is_empty() && !is_recoverable {
        let why = "the service manager has stored devices of a killed server: --recoverable adopts them";
        bail!("{why}, `systemctl clean --what=fdstore` of the stopped service frees them");
    }
    let holder = is_recoverable.then(|| match supervisor::max_stored() {
        Some(max) => HolderChoice::Manager(ServiceManager { store: Box::new(ManagerStore), max, stored }),
        // The link refers to this program even if the package manager has replaced its file.
        None => HolderChoice::Process(vec!["/proc/self/exe".into(), "hold".into()]),
    });
    let plan = Plan {
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
        holder,
        metrics,
        page,
        inherited,
    };
    Ok((plan, private))
}

/// Takes the sockets that the service manager has created, and the files that it stores, out of `inherited`.
fn take_sockets(inherited: &mut Handover) -> Descriptors {
    let of_manager: Vec<_> = inherited
        .addresses
        .iter()
        .filter(|(_, by_manager)| *by_manager)
        .map(|(text, _)| text.clone())
        .collect();
    let (sockets, listeners) = mem::take(&mut inherited.listeners)
        .into_iter()
        .partition(|passed: &NamedDescriptor| of_manager.contains(&passed.name));
    inherited.listeners = listeners;
    let sockets = sockets.into_iter().map(|passed: NamedDescriptor| passed.descriptor).collect();
    let stored =
        mem::take(&mut inherited.stored).into_iter().map(|passed| (passed.name, passed.descriptor)).collect();
    Descriptors { sockets, stored }
}

fn devices(args: &ServeArgs, file: Option<&FileConfig>) -> Result<Vec<DeclaredDevice>> {
    let mut devices = match (file, &args.config) {
        (Some(file), Some(path)) => declared::devices(file, path)?,
        _ => Vec::new(),
    };
    add_devices(&mut devices, &args.devices)?;
    // The default device is added only if there is neither a file nor a state directory: a file without devices
    // is valid, and a state has its own devices.
    if devices.is_empty() && file.is_none() && args.state.state.is_none() {
        devices.push(DeclaredDevice::word(DEFAULT_DEVICE.parse()?));
    }
    declared::check_order(&devices)?;
    Ok(devices)
}
