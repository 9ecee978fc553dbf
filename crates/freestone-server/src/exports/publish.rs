//! Publishing of devices at NBD addresses, vhost-user sockets and as ublk block devices.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use freestone::device::{Counting, Device};
use freestone_control::protocol::RpcError;
use freestone_nbd::{Address, AllowList, ExportOptions, ListenError, PublishError, TemplateOptions};
use freestone_spec::kinds::{Entry, KindSpec};
use freestone_spec::limits::LimitSpec;
use freestone_spec::refusal::Errno;
use freestone_ublk as ublk;
use freestone_vhost_user as vhost_user;
use tracing::warn;

use super::checks::{check_not_connection_fork, errno_of};
use super::export_limits::ExportLimits;
use super::export_spec::{ExportAddress, ExportSpec};
use super::standalone_export::{PublishedExport, StandaloneExport};
use super::{Exports, lists, template};
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
        let at = listens.map_err(|e| RpcError::failed(Errno::EADDRNOTAVAIL, e.to_string()))?;
        loop_check::check_address(&self.registry, &at)?;
        self.addresses().server.push(at.clone());
        Ok(at)
    }

    /// Publishes a device at the server's own addresses.
    pub fn publish_at_server_addresses(&self, claim: &Claim<'_>, entry: &Arc<Entry>) -> Result<(), RpcError> {
        for address in self.server_addresses() {
            if !self.is_at(entry.name(), &address) {
                self.publish(claim, entry, &address, false, None, LimitSpec::default())?;
            }
        }
        self.unpublished.remove(entry.name(), None);
        Ok(())
    }

    /// Refuses to publish a fork that belongs to a connection to a template. Refuses a device with an interrupted
    /// merge, or in exclusive use by another device.
    fn check_publish(&self, entry: &Arc<Entry>) -> Result<(), RpcError> {
        check_not_connection_fork(entry)?;
        entry.check_no_unfinished_merge()?;
        let Some(taken) = self.registry.exclusive_user(entry) else { return Ok(()) };
        let why = format!("{}: {taken}, so it cannot be published", entry.name());
        Err(RpcError::failed(Errno::EBUSY, why))
    }

    /// Publishes a device at an NBD address. If the address is not open yet, the server listens there and admits the
    /// clients of `allow`; if it is open, `allow` must be None or the list of the address. The first export of an
    /// address is also its default export. Returns the address with the port that was chosen.
    pub fn publish(
        &self,
        _: &Claim<'_>,
        entry: &Arc<Entry>,
        address: &Address,
        read_only: bool,
        allow: Option<&AllowList>,
        limits: LimitSpec,
    ) -> Result<Address, RpcError> {
        let name = entry.name();
        self.check_publish(entry)?;
        let limited = Arc::new(ExportLimits::new(limits));
        // With this claim, no other verb closes the address before the device is published.
        let _address = self.claims.address("publish", address)?;
        let (at, opened) = if self.nbd.is_listening_at(address) {
            self.check_same(name, address, allow)?;
            (address.clone(), false)
        } else {
            self.tls.check_address(address).map_err(|why| RpcError::invalid(format!("{name}: {why}")))?;
            let listen = self.nbd.listen_with_access(address, &self.access, allow.cloned());
            (listen.map_err(|e| RpcError::failed(Errno::EADDRNOTAVAIL, format!("{name}: {e}")))?, true)
        };
        // A verb that creates an nbd device registers it first and then checks the open addresses, so one of both verbs
        // finds a loop.
        if opened && let Err(fault) = loop_check::check_address(&self.registry, &at) {
            self.nbd.close(&at);
            return Err(fault);
        }
        let may_be_default = self.defaults.is_free_for(&at, name);
        let published = match self.publish_nbd(entry, &at, read_only, may_be_default, &limited) {
            Err(PublishError::DefaultTaken { .. }) => {
                self.publish_nbd(entry, &at, read_only, false, &limited)
            }
            published => published,
        };
        match published {
            Ok(()) => {
                self.defaults.settle(&at, name);
                self.limited.put(name, at.absolute().to_string(), limited);
                let mut addresses = self.addresses();
                if opened {
                    addresses.opened.insert(at.clone(), 0);
                }
                if let Some(exports) = addresses.opened.get_mut(&at) {
                    *exports += 1;
                }
                Ok(at)
            }
            Err(PublishError::Duplicate { .. }) => {
                Err(RpcError::failed(Errno::EEXIST, format!("{name}: already published at {at}")))
            }
            Err(e) => {
                if opened {
                    self.nbd.close(&at);
                }
                Err(RpcError::failed(Errno::EIO, format!("{name}: cannot be published at {at}: {e}")))
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
    pub fn publish_vhost_user(
        &self,
        _: &Claim<'_>,
        entry: &Arc<Entry>,
        path: &Path,
        read_only: bool,
        allow: Option<&AllowList>,
        limits: LimitSpec,
    ) -> Result<Arc<StandaloneExport>, RpcError> {
        let name = entry.name();
        let device = self.local_access_path(entry)?;
        let options = vhost_user::Options {
            read_only: read_only || entry.is_read_only(),
            failures: Arc::clone(&entry.failures),
            access: self.access,
            allow: allow.cloned(),
            denials: Arc::clone(self.nbd.denials()),
            places: vec![Arc::clone(&entry.clients)],
            ..vhost_user::Options::new(Arc::clone(self.nbd.budget()))
        };
        let export = vhost_user::Export::new(path, name, Arc::clone(&device) as _, options);
        let export = export.map_err(|error| {
            let why = format!("{name}: cannot listen at vhost-user:{error}");
            RpcError::failed(Errno::EADDRNOTAVAIL, why)
        })?;
        self.add_local(name, StandaloneExport::VhostUser(export), &device, limits)
    }

    /// Publishes a device as a ublk block device of this machine with this number of queues; 0 means one queue for each
    /// CPU, at most 4.
    pub fn publish_ublk(
        &self,
        _: &Claim<'_>,
        entry: &Arc<Entry>,
        queues: u16,
        read_only: bool,
        limits: LimitSpec,
    ) -> Result<Arc<StandaloneExport>, RpcError> {
        let name = entry.name();
        let device = self.local_access_path(entry)?;
        let options = ublk::Options {
            read_only: read_only || entry.is_read_only(),
            failures: Arc::clone(&entry.failures),
            queues,
            ..ublk::Options::new(Arc::clone(self.nbd.budget()))
        };
        let export = ublk::Export::new(name, Arc::clone(&device) as _, options);
        let export =
            export.map_err(|error| RpcError::failed(errno_of(&error), format!("{name}: {error}")))?;
        self.add_local(name, StandaloneExport::Ublk(export), &device, limits)
    }

    /// Returns a new access path for a local export. Fails if the device must not be published, or is a template.
    fn local_access_path(&self, entry: &Arc<Entry>) -> Result<Arc<Counting>, RpcError> {
        self.check_publish(entry)?;
        entry.new_access_path().ok_or_else(|| {
            let why = "a template can only be published over NBD; make a fork with `freestone fork` and publish that";
            RpcError::failed(Errno::EOPNOTSUPP, format!("{}: {why}", entry.name()))
        })
    }

    fn add_local(
        &self,
        name: &str,
        export: StandaloneExport,
        access_path: &Arc<Counting>,
        limits: LimitSpec,
    ) -> Result<Arc<StandaloneExport>, RpcError> {
        let address = export.address();
        access_path.tally().set_address(&address);
        let limited = Arc::new(ExportLimits::new(limits));
        limited.join(access_path).map_err(|e| RpcError::failed(Errno::ENOMEM, format!("{name}: {e}")))?;
        let export = Arc::new(export);
        self.lock_local().entry(name.to_owned()).or_default().push(Arc::clone(&export));
        self.limited.put(name, address, limited);
        Ok(export)
    }

    /// Publishes a device as `wanted` specifies. The export is then no longer retried.
    pub fn publish_at(
        &self,
        claim: &Claim<'_>,
        entry: &Arc<Entry>,
        wanted: &ExportSpec,
    ) -> Result<PublishedExport, RpcError> {
        let ExportSpec { address: place, read_only, allow, limits } = wanted;
        let (read_only, allow, limits) = (*read_only, allow.as_ref(), *limits);
        let checked = place.check_limits(&limits);
        checked.map_err(|why| RpcError::invalid(format!("{}: publish: {why}", entry.name())))?;
        let shown = match place {
            ExportAddress::Nbd(at) => {
                PublishedExport::Nbd(self.publish(claim, entry, at, read_only, allow, limits)?)
            }
            ExportAddress::VhostUser(path) => PublishedExport::Standalone(
                self.publish_vhost_user(claim, entry, path, read_only, allow, limits)?,
            ),
            ExportAddress::Ublk(queues) => {
                PublishedExport::Standalone(self.publish_ublk(claim, entry, *queues, read_only, limits)?)
            }
        };
        self.unpublished.remove(entry.name(), Some(place));
        Ok(shown)
    }
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
