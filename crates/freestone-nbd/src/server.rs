//! The public interface of the NBD server.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use freestone_core::allow::{AllowList, Denials};
use freestone_core::budget::Budget;
use freestone_core::device::{Device, Failures};
use freestone_core::sync::Mutex;
use freestone_core::unix_socket::Access;
use freestone_core::workers::Workers;

use crate::accept::listen::{self, BoundSockets, ListenError};
use crate::address::Address;
use crate::connection_threads;
use crate::limits::{Limits, SHUTDOWN_GRACE};
use crate::link::Link;
use crate::proto::MAX_STRING_BYTES;
use crate::shared::ServerShared;
use crate::shared::export::{Client, Export, ExportInfo, ExportOptions, Source, TemplateOptions};
use crate::shared::tables::{Listener, PublishError};
use crate::shared::template::{DeviceFactory, Template};
use crate::stats::Stats;
use crate::stream::tls::settings::{Credentials, Policy, TlsMode};

/// An NBD server with any number of addresses, each with its own exports. A client sees only the exports
/// published at the address to which it connected. Dropping the server calls [`shutdown`](Self::shutdown)
/// with [`SHUTDOWN_GRACE`].
///
/// One thread accepts connections at all addresses. All methods may be called from any thread, except from
/// the completion of a device request and from the functions of a template.
pub struct Server {
    pub(crate) shared: Arc<ServerShared>,
    /// The accepting thread, started with the first address. Leaf lock: taken under `binding` to start the
    /// thread, and with no other lock held to take the handle for the join.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Server {
    /// Creates a server that does not listen yet.
    pub fn new(limits: Limits) -> Self {
        Self::with_workers(limits, Workers::process())
    }

    /// Creates a server that uses `workers` for large requests instead of the workers of the process. With
    /// workers for a single CPU, each connection's thread executes all requests itself, in order.
    pub fn with_workers(limits: Limits, workers: &Workers) -> Self {
        Self { shared: Arc::new(ServerShared::new(limits, workers.clone())), thread: Mutex::default() }
    }

    /// Enables or requires TLS. Must be called at most once, before the server listens.
    pub fn enable_tls(&self, mode: TlsMode, credentials: Credentials) {
        let set = self.shared.tls.set(Policy::new(mode, credentials));
        debug_assert!(set.is_ok(), "the TLS mode is set once");
    }

    /// Replaces the credentials for new connections. Existing connections keep their credentials. Does
    /// nothing without TLS.
    pub fn renew_credentials(&self, credentials: Credentials) {
        if let Some(policy) = self.shared.tls.get() {
            policy.renew_credentials(credentials);
        }
    }

    /// Returns the TLS mode, or None if TLS is disabled.
    pub fn tls_mode(&self) -> Option<TlsMode> {
        self.shared.tls.get().map(|policy| policy.mode)
    }

    /// Starts to listen at an address. Does nothing if the server already listens there. Returns the address
    /// with an absolute path, or with the port that the system chose for port 0. A Unix socket has mode 0600.
    /// A stale socket, at which no process accepts, is replaced.
    pub fn listen(&self, address: &Address) -> Result<Address, ListenError> {
        self.listen_with_access(address, &Access::default(), None)
    }

    /// Starts to listen at an address with access rules. `access` sets mode, user and group of a new Unix
    /// socket. With an allow list, connections of other peers are closed as soon as they are accepted. If the
    /// server already listens at the address, its allow list does not change.
    pub fn listen_with_access(
        &self,
        address: &Address,
        access: &Access,
        allow: Option<AllowList>,
    ) -> Result<Address, ListenError> {
        let address = address.absolute();
        self.listen_with(&address, allow, || match self.inherited_sockets(&address, access)? {
            Some(bound) => Ok(bound),
            None => listen::bind_to(&address, access),
        })
    }

    /// Replaces the allow list of an address; `None` allows all peers. Existing connections continue. Returns
    /// false if the server does not listen there.
    pub fn set_allow_list(&self, address: &Address, allow: Option<AllowList>) -> bool {
        self.shared.tables.lock().set_allow_list(&address.absolute(), allow)
    }

    /// Returns the allow list of an address, or None if all peers are allowed or the server does not listen
    /// there.
    pub fn allow_list(&self, address: &Address) -> Option<AllowList> {
        self.shared.tables.lock().listener(&address.absolute())?.allow.clone()
    }

    /// Returns the counter of connections denied by allow lists. Other components may count their denials
    /// there too.
    pub fn denials(&self) -> &Arc<Denials> {
        &self.shared.denials
    }

    /// Takes over a socket that another process created and that listens already. Returns the socket's
    /// address. The socket file is not removed when the server ends.
    ///
    /// # Errors
    /// [`ListenError::Other`] if the socket does not listen. See [`ListenError`].
    pub fn adopt_socket(&self, socket: OwnedFd, allow: Option<AllowList>) -> Result<Address, ListenError> {
        let bound = listen::adopt_socket(socket)?;
        let address = bound.address.clone();
        self.listen_with(&address, allow, || Ok(bound))
    }

    /// Returns the sockets of a predecessor at an address, if any. On error they stay inherited. Called with
    /// `binding` locked.
    fn inherited_sockets(
        &self,
        address: &Address,
        access: &Access,
    ) -> Result<Option<BoundSockets>, ListenError> {
        // The lock is not held for `inherit`, which makes system calls.
        let Some(sockets) = self.shared.tables.lock().take_inherited(address) else { return Ok(None) };
        listen::inherit(address, sockets, access).map_err(|(error, sockets)| {
            self.shared.tables.lock().inherited.push((address.clone(), sockets));
            error
        })
    }

    fn listen_with(
        &self,
        address: &Address,
        allow: Option<AllowList>,
        bind: impl FnOnce() -> Result<BoundSockets, ListenError>,
    ) -> Result<Address, ListenError> {
        let _binding = self.shared.binding.lock();
        {
            let tables = self.shared.tables.lock();
            if tables.is_ending() {
                return Err(ListenError::ShuttingDown);
            }
            if tables.listener(address).is_some() {
                return Ok(address.clone());
            }
        }
        let bound = bind()?;
        let address = bound.address;
        let other = |source| ListenError::Other { address: address.clone(), source };
        {
            let mut thread = self.thread.lock();
            if thread.is_none() {
                *thread = Some(connection_threads::start(&self.shared).map_err(other)?);
            }
        }
        let mut tables = self.shared.tables.lock();
        if tables.is_ending() {
            return Err(ListenError::ShuttingDown);
        }
        let id = tables.add_listener(address.clone(), bound.file, allow);
        let acceptor = self.shared.acceptor().expect("created above");
        // The listener and its sockets are added under one lock, so that a thread that closes the address
        // finds both.
        if let Err(errno) = acceptor.add(id, bound.sockets) {
            let listener = tables.remove_listener(&address);
            drop(tables);
            drop(listener);
            return Err(other(errno.into()));
        }
        drop(tables);
        tracing::info!(%address, "listening");
        Ok(address)
    }

    /// Publishes `device` as `name` at an address at which the server listens.
    pub fn publish(
        &self,
        address: &Address,
        name: &str,
        device: Arc<dyn Device>,
        mut options: ExportOptions,
    ) -> Result<(), PublishError> {
        options.read_only |= device.geometry().read_only;
        self.publish_source(address, name, options, Source::Device(device))
    }

    /// Publishes a template as `name` at an address at which the server listens. For every connection that
    /// chooses it, `make` creates a device, which ends with the connection. If `make` fails, the client gets
    /// its error message and may choose another export. A client that only queries the export (`INFO`,
    /// metadata contexts) gets the properties of the device created last. If no device was created yet, one
    /// is created for the query and ended at once.
    pub fn publish_template(
        &self,
        address: &Address,
        name: &str,
        options: TemplateOptions,
        make: DeviceFactory,
    ) -> Result<(), PublishError> {
        let template = Template::new(make, options.ttl);
        self.publish_source(address, name, options.export, Source::Template(template))
    }

    fn publish_source(
        &self,
        address: &Address,
        name: &str,
        options: ExportOptions,
        source: Source,
    ) -> Result<(), PublishError> {
        freestone_core::trail::step!();
        if name.is_empty() {
            return Err(PublishError::NameEmpty);
        }
        if name.len() > MAX_STRING_BYTES {
            return Err(PublishError::NameTooLong(name.len()));
        }
        if name.contains('\0') {
            return Err(PublishError::NameInvalid(name.to_owned()));
        }
        if options.description.len() > MAX_STRING_BYTES {
            return Err(PublishError::DescriptionTooLong(options.description.len()));
        }
        let export = Arc::new(Export {
            name: name.to_owned(),
            address: address.absolute(),
            source,
            read_only: options.read_only,
            default: options.default,
            without_fua: options.without_fua,
            visible_to: options.visible_to,
            description: options.description,
            failures: options.failures,
            places: options.places,
            users: 0.into(),
        });
        // If publishing fails, the export and its device are dropped after the lock is released.
        self.shared.tables.lock().publish(&export)
    }

    /// Unpublishes `name` at all addresses and returns the number of these addresses. With `force`, the
    /// connections that use the export complete the requests they have received and end. Connections
    /// that have not ended after [`SHUTDOWN_GRACE`] are cut.
    ///
    /// # Errors
    /// [`PublishError::NotPublished`]; [`PublishError::Busy`] if clients use the export and `force` is not
    /// set.
    pub fn unpublish(&self, name: &str, force: bool) -> Result<usize, PublishError> {
        self.unpublish_from(name, None, force)
    }

    /// Unpublishes `name` at one address, and ends only the connections accepted there.
    pub fn unpublish_at(&self, name: &str, address: &Address, force: bool) -> Result<(), PublishError> {
        self.unpublish_from(name, Some(&address.absolute()), force).map(drop)
    }

    fn unpublish_from(&self, name: &str, only: Option<&Address>, force: bool) -> Result<usize, PublishError> {
        let (removed, links) = self.shared.tables.lock().unpublish(name, only, force)?;
        self.shared.end_connections(links, SHUTDOWN_GRACE);
        // Dropping the exports may drop their devices, which may wait for a disk. The lock was released
        // before.
        Ok(removed.len())
    }

    /// Simulates a power loss as clients see it. Cuts the connections that use `name` at all addresses,
    /// without replies to requests in flight. Then runs `action`, and serves the export again. Clients that
    /// choose the export meanwhile wait. Returns the number of cut connections, and the result of `action`. A
    /// connection's thread that is blocked in the device for more than a second may still run during
    /// `action`.
    pub fn cut_connections_during<T>(&self, name: &str, action: impl FnOnce() -> T) -> (usize, T) {
        /// Serves the export again, even if `action` panics.
        struct HoldGuard<'a>(&'a ServerShared, &'a str);
        impl Drop for HoldGuard<'_> {
            fn drop(&mut self) {
                self.0.release(self.1);
            }
        }
        let links = self.shared.tables.lock().hold(name);
        let _guard = HoldGuard(&self.shared, name);
        let ended = links.len();
        self.shared.cut_connections(links);
        (ended, action())
    }

    /// Replaces the device of a published name at all its addresses. `device` returns the new device for an
    /// address and must not block. Existing connections keep the old device; end these connections first,
    /// with [`cut_connections_during`](Self::cut_connections_during).
    pub fn replace(
        &self,
        name: &str,
        device: &dyn Fn(&Address) -> Arc<dyn Device>,
        description: &str,
        failures: &Arc<Failures>,
    ) {
        // Dropping the old device may wait for a disk, so the lock is released before.
        let replaced = self.shared.tables.lock().replace(name, device, description, failures);
        drop(replaced);
    }

    /// Returns all exports, in the order of publishing at each address.
    pub fn exports(&self) -> Vec<ExportInfo> {
        self.mark_tls_only(self.shared.tables.lock().exports())
    }

    /// Returns the exports named `name` at all addresses. The cost does not depend on other exports.
    pub fn exports_named(&self, name: &str) -> Vec<ExportInfo> {
        self.mark_tls_only(self.shared.tables.lock().exports_named(name))
    }

    /// Returns the exports at an address, in the order of publishing. The cost does not depend on other
    /// addresses.
    pub fn exports_at(&self, address: &Address) -> Vec<ExportInfo> {
        self.mark_tls_only(self.shared.tables.lock().exports_at(&address.absolute()))
    }

    /// Marks every export as TLS only if the server requires TLS.
    fn mark_tls_only(&self, mut exports: Vec<ExportInfo>) -> Vec<ExportInfo> {
        if self.tls_mode() == Some(TlsMode::Required) {
            for export in &mut exports {
                export.tls = true;
            }
        }
        exports
    }

    /// Returns the number of connections that use the exports named `name`, at all addresses.
    pub fn connections(&self, name: &str) -> usize {
        self.shared.tables.lock().user_count(name)
    }

    /// Returns the clients of the exports named `name`, at all addresses. A client occurs once for each of
    /// its connections.
    pub fn clients(&self, name: &str) -> Vec<Client> {
        // The lock is not held for `Link::process`, which makes a system call.
        let links = self.shared.tables.lock().links_of(name);
        let client = |link: Arc<Link>| match link.process() {
            Some(process) => Client::Process(process),
            None => Client::Peer(link.peer().to_owned()),
        };
        links.into_iter().map(client).collect()
    }

    /// Returns the addresses, in the order in which the server started to listen.
    pub fn addresses(&self) -> Vec<Address> {
        self.shared.tables.lock().listeners.values().map(|listener| listener.address.clone()).collect()
    }

    /// Returns true if the server listens at an address.
    pub fn is_listening_at(&self, address: &Address) -> bool {
        self.shared.tables.lock().listener(&address.absolute()).is_some()
    }

    /// Returns true if the server listens at an address without exports.
    pub fn is_unused(&self, address: &Address) -> bool {
        self.shared
            .tables
            .lock()
            .listener(&address.absolute())
            .is_some_and(|listener| listener.exports.is_empty())
    }

    /// Stops listening at an address, removes its socket and its exports, and ends its connections. The
    /// connections complete the requests they have received, and are cut after [`SHUTDOWN_GRACE`]. Does
    /// nothing if the server does not listen there.
    pub fn close(&self, address: &Address) {
        let address = address.absolute();
        let removed = self.shared.tables.lock().remove_listener(&address);
        let Some((id, listener, links)) = removed else { return };
        self.stop(id, listener);
        self.shared.end_connections(links, SHUTDOWN_GRACE);
        tracing::info!(%address, "closed");
    }

    /// Removes the socket file of a listener and closes its sockets.
    fn stop(&self, id: u64, listener: Listener) {
        drop(listener.file);
        if let Some(acceptor) = self.shared.acceptor() {
            acceptor.remove(id);
        }
    }

    /// Serves the client of a connected, blocking socket on the calling thread until the connection ends. The
    /// connection counts as accepted at `address`, at which the server must listen. Meant for
    /// [`Address::Stdin`], and for tests with too many connections for one thread each.
    pub fn serve_socket(&self, address: &Address, socket: OwnedFd) {
        connection_threads::serve_socket(&self.shared, &address.absolute(), socket);
    }

    /// Returns the memory budget for requests in flight. Other components may share the budget.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.shared.budget
    }

    /// Returns the counters of the server.
    pub fn stats(&self) -> Stats {
        let denied = self.shared.denials.count();
        Stats { denied, ..self.shared.tables.lock().stats() }
    }

    /// Pauses accepting: clients that connect wait until [`resume`](Self::resume), so that they find all exports that
    /// are published before.
    pub fn pause(&self) {
        self.shared.tables.lock().is_paused = true;
    }

    /// Ends a [pause](Self::pause).
    pub fn resume(&self) {
        self.shared.tables.lock().is_paused = false;
        if let Some(acceptor) = self.shared.acceptor() {
            acceptor.wake();
        }
    }

    /// Shuts the server down for good: stops listening, removes the sockets, completes the requests that were
    /// received, and closes all connections. Connections that have not ended after `grace` are cut. A second
    /// call does nothing.
    pub fn shutdown(&self, grace: Duration) {
        let listeners = {
            let mut tables = self.shared.tables.lock();
            tables.shutting_down = true;
            tables.remove_all_listeners()
        };
        for (id, listener) in listeners {
            self.stop(id, listener);
        }
        self.close_unused_listeners();
        self.stop_accepting();
        let links = {
            let tables = self.shared.tables.lock();
            tables.links(tables.connections.keys())
        };
        self.shared.end_connections(links, grace);
        self.shared.idle_threads.end();
    }

    /// Ends the accepting thread. Called after the tables were marked as ending.
    pub(crate) fn stop_accepting(&self) {
        if let Some(acceptor) = self.shared.acceptor() {
            acceptor.wake();
        }
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            // The panic hook has already reported a panic of the thread.
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown(SHUTDOWN_GRACE);
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}
