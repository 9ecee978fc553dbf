//! Publishing of devices at NBD addresses, vhost-user sockets and as ublk block devices.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use freestone::device::{Counting, Device};
use freestone_control::protocol::RpcError;
use freestone_nbd::{Address, ExportOptions, ListenError, PublishError, TemplateOptions};
use freestone_spec::kinds::{Entry, KindSpec};
use freestone_spec::limits::LimitSpec;
use freestone_ublk as ublk;
use freestone_vhost_user as vhost_user;
use tracing::warn;

use super::checks::{check_not_connection_fork, errno_of};
use super::export_limits::ExportLimits;
use super::export_spec::{ExportAddress, ExportSpec};
use super::standalone_export::StandaloneExport;
use super::{Exports, LiveExport, lists, template};
use crate::devices::claims::Claim;
use crate::devices::loop_check;
use crate::settings::tls;

impl Exports {
    /// Listens for NBD clients at `address`, one of the server's own. Returns the address with the port that was
    /// chosen.
    pub fn listen_at_server_address(&self, address: &Address) -> Result<Address, RpcError> {
        self.tls.check_address(address).map_err(RpcError::invalid)?;
        self.add_server_address(self.nbd.listen_with_access(address, &self.access, self.server_allow_list()))
    }

    /// Adds an own address with a socket that already listens, such as one from systemd. Returns the address of the
    /// socket.
    pub fn adopt_server_socket(&self, socket: OwnedFd) -> Result<Address, RpcError> {
        let allow = self.server_allow_list();
        let at = self.add_server_address(self.nbd.adopt_socket(socket, allow.clone()))?;
        lists::check(allow.as_ref(), &at)?;
        self.tls.check_address(&at).map(|()| at).map_err(RpcError::invalid)
    }

    fn add_server_address(&self, listens: Result<Address, ListenError>) -> Result<Address, RpcError> {
        let at = listens.map_err(|e| rpc_error!(EADDRNOTAVAIL, "{e}"))?;
        loop_check::check_address(&self.registry, &at)?;
        self.table().server.push(at.clone());
        Ok(at)
    }

    /// Publishes a device at the server's own addresses.
    pub fn publish_at_server_addresses(&self, claim: &Claim<'_>, entry: &Arc<Entry>) -> Result<(), RpcError> {
        for address in self.server_addresses() {
            if !self.is_at(entry.name(), &address) {
                self.publish_at(claim, entry, &ExportSpec::at(ExportAddress::Nbd(address)))?;
            }
        }
        self.change(entry.name(), |device| device.absent_at_server = None);
        Ok(())
    }

    /// Refuses to publish a fork that belongs to a connection to a template. Refuses a device with an interrupted
    /// merge, or in exclusive use by another device.
    fn check_publish(&self, entry: &Arc<Entry>) -> Result<(), RpcError> {
        check_not_connection_fork(entry)?;
        entry.check_no_unfinished_merge()?;
        let Some(taken) = self.registry.exclusive_user(entry) else { return Ok(()) };
        let why = format!("{}: {taken}, so it cannot be published", entry.name());
        Err(rpc_error!(EBUSY, "{why}"))
    }

    /// Publishes a device at an NBD address. If the address is not open yet, the server listens there and admits the
    /// clients of `wanted.allow`; if it is open, that must be None or the list of the address. The first export of an
    /// address is also its default export.
    fn publish_at_nbd(
        &self,
        entry: &Arc<Entry>,
        address: &Address,
        wanted: &ExportSpec,
    ) -> Result<LiveExport, RpcError> {
        freestone_core::trail::step!();
        let name = entry.name();
        self.check_publish(entry)?;
        let limits = Arc::new(ExportLimits::new(wanted.limits));
        // With this claim, no other verb closes the address before the device is published.
        let _address = self.claims.address("publish", address)?;
        let (at, opened) = if self.nbd.is_listening_at(address) {
            self.check_same(name, address, wanted.allow.as_ref())?;
            (address.clone(), false)
        } else {
            self.tls.check_address(address).map_err(|why| rpc_error!(invalid, "{name}: {why}"))?;
            let listen = self.nbd.listen_with_access(address, &self.access, wanted.allow.clone());
            (listen.map_err(|e| rpc_error!(EADDRNOTAVAIL, "{name}: {e}"))?, true)
        };
        // A verb that creates an nbd device registers it first and then checks the open addresses, so one of both verbs
        // finds a loop.
        if opened && let Err(fault) = loop_check::check_address(&self.registry, &at) {
            self.nbd.close(&at);
            return Err(fault);
        }
        let may_be_default = self.table().reserved_defaults.get(&at).is_none_or(|owner| owner == name);
        let published = match self.publish_nbd(entry, &at, wanted.read_only, may_be_default, &limits) {
            Err(PublishError::DefaultTaken { .. }) => {
                self.publish_nbd(entry, &at, wanted.read_only, false, &limits)
            }
            published => published,
        };
        match published {
            Ok(()) => {
                if may_be_default {
                    self.table().reserved_defaults.remove(&at);
                }
                let read_only = wanted.read_only || entry.is_read_only();
                let at = ExportAddress::Nbd(at.absolute());
                Ok(LiveExport { at, read_only, limits, standalone: None })
            }
            Err(PublishError::Duplicate { .. }) => {
                Err(rpc_error!(EEXIST, "{name}: already published at {at}"))
            }
            Err(e) => {
                if opened {
                    self.nbd.close(&at);
                }
                Err(rpc_error!(EIO, "{name}: cannot be published at {at}: {e}"))
            }
        }
    }

    fn publish_nbd(
        &self,
        entry: &Arc<Entry>,
        at: &Address,
        read_only: bool,
        default: bool,
        limited: &Arc<ExportLimits>,
    ) -> Result<(), PublishError> {
        let description = description(entry);
        let without_fua = matches!(&entry.spec.kind, KindSpec::Null(null) if !null.fua);
        let read_only = read_only || entry.is_read_only();
        let failures = Arc::clone(&entry.failures);
        let clients = tls::clients_of(&entry.spec);
        let places = vec![Arc::clone(&limited.places), Arc::clone(&entry.clients)];
        let export = ExportOptions {
            read_only,
            default,
            without_fua,
            visible_to: clients,
            description,
            failures,
            places,
        };
        match (access_path(entry, at, Some(limited)), &entry.spec.kind) {
            (Some(device), _) => self.nbd.publish(at, entry.name(), device, export),
            (None, KindSpec::Template(spec)) => {
                let options = TemplateOptions { export, ttl: spec.ttl };
                self.nbd.publish_template(
                    at,
                    entry.name(),
                    options,
                    template::connection_fork_factory(&self.registry, entry, limited),
                )
            }
            (None, _) => unreachable!("only a template has no device"),
        }
    }

    /// Publishes a device at a vhost-user socket for a virtual machine.
    fn publish_vhost_user(
        &self,
        entry: &Arc<Entry>,
        path: &Path,
        wanted: &ExportSpec,
    ) -> Result<LiveExport, RpcError> {
        let name = entry.name();
        let device = self.local_access_path(entry)?;
        let options = vhost_user::Options {
            read_only: wanted.read_only || entry.is_read_only(),
            failures: Arc::clone(&entry.failures),
            access: self.access,
            allow: wanted.allow.clone(),
            denials: Arc::clone(self.nbd.denials()),
            places: vec![Arc::clone(&entry.clients)],
            ..vhost_user::Options::new(Arc::clone(self.nbd.budget()))
        };
        let limits = join_limits(name, &device, wanted.limits)?;
        let export = vhost_user::Export::new(path, name, Arc::clone(&device) as _, options);
        let export = export.map_err(|error| {
            let why = format!("{name}: cannot listen at vhost-user:{error}");
            rpc_error!(EADDRNOTAVAIL, "{why}")
        })?;
        Ok(live_standalone(StandaloneExport::VhostUser(export), &device, limits))
    }

    /// Publishes a device as a ublk block device of this machine with this number of queues; 0 means one queue for each
    /// CPU, at most 4.
    fn publish_ublk(
        &self,
        entry: &Arc<Entry>,
        queues: u16,
        wanted: &ExportSpec,
    ) -> Result<LiveExport, RpcError> {
        let name = entry.name();
        let device = self.local_access_path(entry)?;
        let recovery = self.block_recovery.get().and_then(|blocks| Some((blocks, blocks.of(entry)?)));
        let limits = join_limits(name, &device, wanted.limits)?;
        let options = ublk::Options {
            read_only: wanted.read_only || entry.is_read_only(),
            failures: Arc::clone(&entry.failures),
            queues,
            recovery: recovery.map(|(_, recovery)| recovery),
            ..ublk::Options::new(Arc::clone(self.nbd.budget()))
        };
        let export = ublk::Export::new(name, Arc::clone(&device) as _, options);
        let export =
            export.map_err(|error| RpcError::failed(errno_of(&error), format!("{name}: {error}")))?;
        if let Some((blocks, recovery)) = recovery {
            blocks.end(recovery);
        }
        Ok(live_standalone(StandaloneExport::Ublk(export), &device, limits))
    }

    /// Returns a new access path for a local export. Fails if the device must not be published, or is a template.
    fn local_access_path(&self, entry: &Arc<Entry>) -> Result<Arc<Counting>, RpcError> {
        self.check_publish(entry)?;
        entry.new_access_path().ok_or_else(|| {
            let why = "a template can only be published over NBD; make a fork with `freestone fork` and publish that";
            rpc_error!(EOPNOTSUPP, "{}: {why}", entry.name())
        })
    }

    /// Publishes a device as `wanted` specifies. The export is then no longer retried. Returns its address, with the
    /// port that was chosen.
    pub fn publish_at(
        &self,
        _: &Claim<'_>,
        entry: &Arc<Entry>,
        wanted: &ExportSpec,
    ) -> Result<ExportAddress, RpcError> {
        let checked = wanted.address.check_limits(&wanted.limits);
        checked.map_err(|why| rpc_error!(invalid, "{}: publish: {why}", entry.name()))?;
        let live = match &wanted.address {
            ExportAddress::Nbd(at) => self.publish_at_nbd(entry, at, wanted)?,
            ExportAddress::VhostUser(path) => self.publish_vhost_user(entry, path, wanted)?,
            ExportAddress::Ublk(queues) => self.publish_ublk(entry, *queues, wanted)?,
        };
        let at = live.at.clone();
        self.change(entry.name(), |device| device.set_live(wanted.clone(), live));
        Ok(at)
    }
}

/// Applies the limits of a vhost-user or ublk export to its access path.
fn join_limits(
    name: &str,
    access_path: &Arc<Counting>,
    limits: LimitSpec,
) -> Result<Arc<ExportLimits>, RpcError> {
    let limits = Arc::new(ExportLimits::new(limits));
    limits.join(access_path).map_err(|e| rpc_error!(ENOMEM, "{name}: {e}"))?;
    Ok(limits)
}

/// Returns the record of a vhost-user or ublk export.
fn live_standalone(
    export: StandaloneExport,
    access_path: &Arc<Counting>,
    limits: Arc<ExportLimits>,
) -> LiveExport {
    access_path.tally().set_address(&export.address());
    let (at, read_only) = (export.place(), export.is_read_only());
    LiveExport { at, read_only, limits, standalone: Some(Arc::new(export)) }
}

/// Returns a new access path into a device for the export at an address, or None for a template.
pub(super) fn access_path(
    entry: &Entry,
    at: &Address,
    limited: Option<&Arc<ExportLimits>>,
) -> Option<Arc<dyn Device>> {
    let counting = entry.new_access_path()?;
    counting.tally().set_address(&at.absolute().to_string());
    if let Some(Err(error)) = limited.map(|limited| limited.join(&counting)) {
        warn!(
            "{}: {at}: the limits of the export are not enforced: cannot start a thread: {error}",
            entry.name()
        );
    }
    Some(counting)
}

/// Returns the description of an export for NBD clients.
pub(super) fn description(entry: &Entry) -> String {
    format!("freestone {} device", entry.kind.name())
}
