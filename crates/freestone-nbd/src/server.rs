//! The server: what its owner does with it.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use freestone_core::allow::{AllowList, Denials};
use freestone_core::budget::Budget;
use freestone_core::device::{Device, Failures};
use freestone_core::unix_socket::Access;
use freestone_core::workers::Workers;

use crate::address::Address;
use crate::arrivals;
use crate::export::{Export, ExportInfo, ExportOptions, Source, TemplateOptions};
use crate::limits::{END_GRACE, Limits};
use crate::listen::{self, Bound, ListenError};
use crate::proto::MAX_STRING_BYTES;
use crate::shared::ServerShared;
use crate::stats::Stats;
use crate::tables::{Listener, PublishError};
use crate::template::{Make, Template};
use crate::tls::settings::{Credentials, Policy, TlsMode};

/// An NBD server: any number of addresses, each with exports of its own. A client sees what is
/// published at the address to which it connected, and nothing else. Dropping it is
/// [`shutdown`](Self::shutdown) with [`END_GRACE`].
///
/// One thread accepts at all addresses: an address costs its sockets and no thread. All calls may
/// come from any thread, except from a device's completion and from a template's functions.
pub struct Server {
    shared: Arc<ServerShared>,
    /// The accepting thread, from the first address on. Locked under `binding` to start it, or with
    /// no other lock held to take it out before it is joined; no other lock is taken under it.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Server {
    /// A server that listens nowhere yet.
    pub fn new(limits: Limits) -> Self {
        Self::with_workers(limits, Workers::process())
    }

    /// As [`new`](Self::new), with these workers for large requests instead of the process's. With
    /// those of one CPU, each connection's thread does all itself, in order.
    pub fn with_workers(limits: Limits, workers: &Workers) -> Self {
        Self { shared: Arc::new(ServerShared::new(limits, workers.clone())), thread: Mutex::default() }
    }

    /// Offers TLS from now on, or wants it; called once, before the server listens.
    pub fn secure(&self, mode: TlsMode, credentials: Credentials) {
        let set = self.shared.tls.set(Policy::new(mode, credentials));
        debug_assert!(set.is_ok(), "a server has one mode");
    }

    /// Shows other credentials to connections from now on; those that are there stay. Nothing happens
    /// without TLS.
    pub fn renew(&self, credentials: Credentials) {
        if let Some(policy) = self.shared.tls.get() {
            policy.renew(credentials);
        }
    }

    /// Whom TLS is for; `None`: there is none.
    pub fn tls(&self) -> Option<TlsMode> {
        self.shared.tls.get().map(|policy| policy.mode)
    }

    /// Starts to listen at an address; where it is listened on already, nothing changes. Returns
    /// the address with an absolute path, or with the port that the system chose for port 0. A Unix
    /// socket has mode 0600; one at which nobody accepts any more is replaced.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn listen(&self, address: &Address) -> Result<Address, ListenError> {
        self.listen_as(address, &Access::default(), None)
    }

    /// The same; to a Unix socket that is made for it those can connect to whom `access` gives it. Who
    /// is not on the list `allow`, where it is given, is closed as soon as accepted; where the address is
    /// listened on already, its list is left as it is.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn listen_as(
        &self,
        address: &Address,
        access: &Access,
        allow: Option<AllowList>,
    ) -> Result<Address, ListenError> {
        let address = address.absolute();
        self.listen_by(&address, allow, || listen::bind_to(&address, access))
    }

    /// Who may connect at an address from now on, `None`: whoever can. Connections that are there stay.
    /// False: it is not listened on.
    pub fn set_allow(&self, address: &Address, allow: Option<AllowList>) -> bool {
        self.shared.lock().set_allow(&address.absolute(), allow)
    }

    /// The list of who may connect at an address, where it has one.
    pub fn allow_at(&self, address: &Address) -> Option<AllowList> {
        self.shared.lock().listener(&address.absolute())?.allow.clone()
    }

    /// Who was not let in by such lists: of this server, and of who else counts there.
    pub fn denials(&self) -> &Arc<Denials> {
        &self.shared.denials
    }

    /// Listens with a socket that somebody else has made, at its own address, which is returned, and lets
    /// in whom `allow` does, where it is given. It is theirs: its file stays when the server ends.
    ///
    /// # Errors
    /// [`ListenError::Other`]: it is no socket that listens. See [`ListenError`].
    pub fn adopt(&self, socket: OwnedFd, allow: Option<AllowList>) -> Result<Address, ListenError> {
        let bound = listen::adopted(socket)?;
        let address = bound.address.clone();
        self.listen_by(&address, allow, || Ok(bound))
    }

    fn listen_by(
        &self,
        address: &Address,
        allow: Option<AllowList>,
        bind: impl FnOnce() -> Result<Bound, ListenError>,
    ) -> Result<Address, ListenError> {
        let _binding = self.shared.binding.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let tables = self.shared.lock();
            if tables.shutting_down {
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
            let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
            if thread.is_none() {
                *thread = Some(arrivals::start(&self.shared).map_err(other)?);
            }
        }
        let mut tables = self.shared.lock();
        if tables.shutting_down {
            return Err(ListenError::ShuttingDown);
        }
        let id = tables.add_listener(address.clone(), bound.file, allow);
        let acceptor = self.shared.acceptor().expect("it was started above");
        // Both under the lock, so that whoever closes the address finds both.
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

    /// Shows `device` as `name` at an address that is listened on.
    ///
    /// # Errors
    /// See [`PublishError`].
    pub fn publish(
        &self,
        address: &Address,
        name: &str,
        device: Arc<dyn Device>,
        mut options: ExportOptions,
    ) -> Result<(), PublishError> {
        options.read_only |= device.geometry().read_only;
        self.show(address, name, options, Source::Device(device))
    }

    /// Shows a template as `name` at an address that is listened on: every connection that chooses
    /// it gets a device that `make` makes for it, and that ends with the connection. Where `make`
    /// fails, the client is told its sentence and may go on with another export. A client that only
    /// asks about the export (`INFO`, metadata contexts) is told of the device that was made last;
    /// where there was none, one is made and ended at once.
    ///
    /// # Errors
    /// See [`PublishError`].
    pub fn publish_template(
        &self,
        address: &Address,
        name: &str,
        options: TemplateOptions,
        make: Make,
    ) -> Result<(), PublishError> {
        let template = Template::new(make, options.ttl);
        self.show(address, name, options.export, Source::Template(template))
    }

    fn show(
        &self,
        address: &Address,
        name: &str,
        options: ExportOptions,
        source: Source,
    ) -> Result<(), PublishError> {
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
            clients: options.clients,
            description: options.description,
            failures: options.failures,
            places: options.places,
            users: 0.into(),
        });
        // Where it is refused, the device goes after the lock.
        self.shared.lock().publish(&export)
    }

    /// Takes `name` away from all addresses and returns from how many. With `force` the connections
    /// that use it end after the requests they have received, or without these after [`END_GRACE`].
    ///
    /// # Errors
    /// [`PublishError::NotPublished`]; [`PublishError::Busy`] where clients use it and `force` is
    /// not set.
    pub fn unpublish(&self, name: &str, force: bool) -> Result<usize, PublishError> {
        self.unpublish_from(name, None, force)
    }

    /// The same at one address only, and for the connections that came in there.
    ///
    /// # Errors
    /// As [`unpublish`](Self::unpublish).
    pub fn unpublish_at(&self, name: &str, address: &Address, force: bool) -> Result<(), PublishError> {
        self.unpublish_from(name, Some(&address.absolute()), force).map(drop)
    }

    fn unpublish_from(&self, name: &str, only: Option<&Address>, force: bool) -> Result<usize, PublishError> {
        let (removed, links) = self.shared.lock().unpublish(name, only, force)?;
        self.shared.end(links, END_GRACE);
        // Their devices may go with them, which may wait for a disk: not under the lock.
        Ok(removed.len())
    }

    /// What a device's loss of power looks like from outside: cuts the connections that use `name`,
    /// at all addresses, with no answer to what they had in flight, runs `action`, and serves the
    /// export again. Who chooses it meanwhile waits for that. Returns how many connections ended. A
    /// thread that a device holds up for more than a second may still be in a call of the device
    /// when `action` runs.
    pub fn restart<T>(&self, name: &str, action: impl FnOnce() -> T) -> (usize, T) {
        /// Lets clients in again, also where `action` panics.
        struct Held<'a>(&'a ServerShared, &'a str);
        impl Drop for Held<'_> {
            fn drop(&mut self) {
                self.0.release(self.1);
            }
        }
        let links = self.shared.lock().hold(name);
        let _held = Held(&self.shared, name);
        let ended = links.len();
        self.shared.cut(links);
        (ended, action())
    }

    /// Shows another device under a name that is published, wherever it is: what `device` has for the
    /// address, which must not wait. Who uses the export goes on with the device that was there, and is
    /// best sent away before, by a [`restart`](Self::restart).
    pub fn replace(
        &self,
        name: &str,
        device: &dyn Fn(&Address) -> Arc<dyn Device>,
        description: &str,
        failures: &Arc<Failures>,
    ) {
        // The old device may go with it, which may wait for a disk: not under the lock.
        let replaced = self.shared.lock().replace(name, device, description, failures);
        drop(replaced);
    }

    /// Everything that is published, in the order of publishing at each address.
    pub fn exports(&self) -> Vec<ExportInfo> {
        self.told(self.shared.lock().exports())
    }

    /// What is published as `name`, at whatever address; does not look at other exports.
    pub fn exports_named(&self, name: &str) -> Vec<ExportInfo> {
        self.told(self.shared.lock().exports_named(name))
    }

    /// What is published at an address, in the order of publishing; does not look at other
    /// addresses.
    pub fn exports_at(&self, address: &Address) -> Vec<ExportInfo> {
        self.told(self.shared.lock().exports_at(&address.absolute()))
    }

    /// What is needed of the server counts for each export.
    fn told(&self, mut exports: Vec<ExportInfo>) -> Vec<ExportInfo> {
        if self.tls() == Some(TlsMode::Require) {
            for export in &mut exports {
                export.tls = true;
            }
        }
        exports
    }

    /// Connections that use `name`, at all addresses.
    pub fn connections(&self, name: &str) -> usize {
        self.shared.lock().users(name)
    }

    /// Where the server listens, in the order of listening.
    pub fn addresses(&self) -> Vec<Address> {
        self.shared.lock().listeners.values().map(|listener| listener.address.clone()).collect()
    }

    /// Whether the server listens at an address.
    pub fn listens_at(&self, address: &Address) -> bool {
        self.shared.lock().listener(&address.absolute()).is_some()
    }

    /// Stops listening at an address: removes its socket and its exports, and ends its connections
    /// after the requests they have received, or without these after [`END_GRACE`]. Nothing happens
    /// where it is not listened on.
    pub fn close(&self, address: &Address) {
        let address = address.absolute();
        let removed = self.shared.lock().remove_listener(&address);
        let Some((id, listener, links)) = removed else { return };
        self.stop(id, listener);
        self.shared.end(links, END_GRACE);
        tracing::info!(%address, "closed");
    }

    /// Removes the file of a listener and closes its sockets.
    fn stop(&self, id: u64, listener: Listener) {
        drop(listener.file);
        if let Some(acceptor) = self.shared.acceptor() {
            acceptor.remove(id);
        }
    }

    /// Serves the client at the other end of `socket`, a stream that blocks, on this thread, until the
    /// connection ends, as if it had come in at `address`, which is listened on: for
    /// [`Address::Stdin`], and for checks of very many connections, which have no time for a thread
    /// each.
    pub fn serve_here(&self, address: &Address, socket: OwnedFd) {
        arrivals::serve_here(&self.shared, &address.absolute(), socket);
    }

    /// What bounds the bytes of requests: of this server, and of who else takes from it.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.shared.budget
    }

    /// What the server has done so far.
    pub fn stats(&self) -> Stats {
        let denied = self.shared.denials.count();
        Stats { denied, ..self.shared.lock().stats() }
    }

    /// Stops listening everywhere and removes the sockets, answers the requests that were received,
    /// and closes all connections; those that are not done after `grace` are cut. The server does
    /// not come back. A second call finds nothing to do.
    pub fn shutdown(&self, grace: Duration) {
        let listeners = {
            let mut tables = self.shared.lock();
            tables.shutting_down = true;
            tables.remove_all_listeners()
        };
        for (id, listener) in listeners {
            self.stop(id, listener);
        }
        if let Some(acceptor) = self.shared.acceptor() {
            acceptor.wake();
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The thread runs no code but ours; were it to panic, that was reported.
            let _ = thread.join();
        }
        let links = {
            let tables = self.shared.lock();
            tables.links(tables.connections.keys())
        };
        self.shared.end(links, grace);
        self.shared.spares.end();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown(END_GRACE);
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}
