//! The server: addresses, exports, connections, and their ends.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use freestone::device::Device;
use thiserror::Error;

use crate::address::Address;
use crate::connection;
use crate::export::{Export, ExportInfo, ExportOptions};
use crate::link::Link;
use crate::listen::{self, Bound, ListenError};
use crate::proto::MAX_STRING_BYTES;
use crate::stats::Stats;

/// How long [`Server::close`], a forced [`Server::unpublish`] and dropping a server wait for requests in flight.
pub const END_GRACE: Duration = Duration::from_secs(5);
/// How long a connection that was cut may take to notice; only a device call that hangs takes longer.
const CUT_WAIT: Duration = Duration::from_secs(1);

/// What clients may use up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once, over all addresses. One more is closed as soon as it is accepted. Each may hold
    /// [`CONNECTION_MEMORY_BYTES`](crate::CONNECTION_MEMORY_BYTES) and one thread.
    pub max_connections: usize,
    /// A handshake in which the client is silent for so long is ended.
    pub handshake_silence: Duration,
    /// A handshake that takes longer is ended.
    pub handshake_total: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            handshake_silence: Duration::from_secs(10),
            handshake_total: Duration::from_secs(60),
        }
    }
}

/// Why something cannot be published or unpublished.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PublishError {
    /// The server does not listen there.
    #[error("the server does not listen at {0}")]
    NotListening(Address),
    /// An export without a name.
    #[error("an export needs a name")]
    NameEmpty,
    /// The name is longer than the protocol's strings.
    #[error("the export name has {0} bytes, at most {MAX_STRING_BYTES} are allowed")]
    NameTooLong(usize),
    /// A NUL byte, which the protocol does not allow.
    #[error("the export name {0:?} contains a NUL byte")]
    NameInvalid(String),
    /// The description is longer than the protocol's strings.
    #[error("the description has {0} bytes, at most {MAX_STRING_BYTES} are allowed")]
    DescriptionTooLong(usize),
    /// The name is taken.
    #[error("`{name}` is already published at {address}")]
    Duplicate {
        /// The name.
        name: String,
        /// The address.
        address: Address,
    },
    /// Another export answers to the empty name.
    #[error("`{name}` is already the default export at {address}")]
    DefaultTaken {
        /// The other export.
        name: String,
        /// The address.
        address: Address,
    },
    /// No such export.
    #[error("`{0}` is not published")]
    NotPublished(String),
    /// Clients use the export.
    #[error("`{name}` is in use by {connections} connection(s)")]
    Busy {
        /// The export.
        name: String,
        /// How many connections use it, at all addresses.
        connections: usize,
    },
}

/// An NBD server: any number of addresses, each with exports of its own. A client sees what is published at the
/// address to which it connected, and nothing else. Dropping it is [`shutdown`](Self::shutdown) with [`END_GRACE`].
///
/// All calls may come from any thread, except from a device's completion.
pub struct Server {
    shared: Arc<Shared>,
    limits: Limits,
}

/// What connections need of their server.
///
/// Lock order: 1. `binding`, held while a socket is made; 2. `state`, held for lookups and changes of the tables, never
/// across a call of a device, a wait, or I/O.
#[derive(Debug, Default)]
pub struct Shared {
    binding: Mutex<()>,
    state: Mutex<State>,
    /// A connection has ended.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    listeners: Vec<Listener>,
    connections: HashMap<u64, Connection>,
    next_id: u64,
    shutting_down: bool,
    accepted: u64,
    refused: u64,
    panics: u64,
    /// Counted by connections that have ended.
    past: Stats,
}

#[derive(Debug)]
struct Listener {
    bound: Arc<Bound>,
    exports: Vec<Arc<Export>>,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Connection {
    link: Arc<Link>,
    export: Option<Arc<Export>>,
}

impl Server {
    /// A server that listens nowhere yet.
    pub fn new(limits: Limits) -> Self {
        Self { shared: Arc::default(), limits }
    }

    /// Starts to listen at an address; where it is listened on already, nothing changes. Returns the address with an
    /// absolute path, or with the port that the system chose for port 0. A Unix socket has mode 0600; one at which
    /// nobody accepts any more is replaced.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn listen(&self, address: &Address) -> Result<Address, ListenError> {
        let address = address.absolute();
        let _binding = self.shared.binding.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let state = self.shared.lock();
            if state.shutting_down {
                return Err(ListenError::ShuttingDown);
            }
            if state.listener(&address).is_some() {
                return Ok(address);
            }
        }
        let bound = Arc::new(listen::bind_to(&address)?);
        let address = bound.address.clone();
        let thread = {
            let (shared, bound, limits) = (Arc::clone(&self.shared), Arc::clone(&bound), self.limits.clone());
            thread::Builder::new()
                .name("nbd-accept".to_owned())
                .spawn(move || accept(&shared, &bound, &limits))
                .map_err(|source| ListenError::Other { address: address.clone(), source })?
        };
        let listener = Listener { bound, exports: Vec::new(), thread };
        let mut state = self.shared.lock();
        if state.shutting_down {
            drop(state);
            listener.stop();
            return Err(ListenError::ShuttingDown);
        }
        state.listeners.push(listener);
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
        options: ExportOptions,
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
        let address = address.absolute();
        let export = Arc::new(Export {
            name: name.to_owned(),
            address: address.clone(),
            read_only: options.read_only || device.geometry().read_only,
            device,
            default: options.default,
            description: options.description,
        });
        let mut state = self.shared.lock();
        let exports = match state.listener_mut(&address) {
            Some(listener) => &mut listener.exports,
            None => return Err(PublishError::NotListening(address)),
        };
        if exports.iter().any(|other| other.name == name) {
            return Err(PublishError::Duplicate { name: name.to_owned(), address });
        }
        if options.default
            && let Some(other) = exports.iter().find(|other| other.default)
        {
            return Err(PublishError::DefaultTaken { name: other.name.clone(), address });
        }
        exports.push(export);
        Ok(())
    }

    /// Takes `name` away from all addresses and returns from how many. With `force` the connections that use it end
    /// after the requests they have received, or without these after [`END_GRACE`].
    ///
    /// # Errors
    /// [`PublishError::NotPublished`]; [`PublishError::Busy`] where clients use it and `force` is not set.
    pub fn unpublish(&self, name: &str, force: bool) -> Result<usize, PublishError> {
        let mut state = self.shared.lock();
        let published =
            state.listeners.iter().flat_map(|listener| &listener.exports).any(|export| export.name == name);
        if !published {
            return Err(PublishError::NotPublished(name.to_owned()));
        }
        let users =
            |connection: &Connection| connection.export.as_ref().is_some_and(|export| export.name == name);
        let connections = state.connections.values().filter(|connection| users(connection)).count();
        if connections > 0 && !force {
            return Err(PublishError::Busy { name: name.to_owned(), connections });
        }
        let mut removed: Vec<Arc<Export>> = Vec::new();
        for listener in &mut state.listeners {
            removed.extend(listener.exports.extract_if(.., |export| export.name == name));
        }
        let links = state.links(users);
        drop(state);
        self.shared.end(&links, END_GRACE);
        // Their devices may go with them, which may wait for a disk: not under the lock.
        Ok(removed.len())
    }

    /// Everything that is published, in the order of publishing at each address.
    pub fn exports(&self) -> Vec<ExportInfo> {
        let state = self.shared.lock();
        let exports = state.listeners.iter().flat_map(|listener| &listener.exports);
        exports
            .map(|export| ExportInfo {
                name: export.name.clone(),
                address: export.address.clone(),
                read_only: export.read_only,
                default: export.default,
                description: export.description.clone(),
                connections: state
                    .count(|connection| connection.export.as_ref().is_some_and(|e| Arc::ptr_eq(e, export))),
            })
            .collect()
    }

    /// Connections that use `name`, at all addresses.
    pub fn connections(&self, name: &str) -> usize {
        self.shared
            .lock()
            .count(|connection| connection.export.as_ref().is_some_and(|export| export.name == name))
    }

    /// Where the server listens.
    pub fn addresses(&self) -> Vec<Address> {
        self.shared.lock().listeners.iter().map(|listener| listener.bound.address.clone()).collect()
    }

    /// Stops listening at an address: removes its socket and its exports, and ends its connections after the requests
    /// they have received, or without these after [`END_GRACE`]. Nothing happens where it is not listened on.
    pub fn close(&self, address: &Address) {
        let address = address.absolute();
        let listener = {
            let mut state = self.shared.lock();
            let at = state.listeners.iter().position(|listener| listener.bound.address == address);
            at.map(|at| state.listeners.remove(at))
        };
        let Some(listener) = listener else { return };
        listener.stop();
        let links = self.shared.lock().links(|connection| connection.link.address == address);
        self.shared.end(&links, END_GRACE);
        tracing::info!(%address, "closed");
    }

    /// What the server has done so far.
    pub fn stats(&self) -> Stats {
        let state = self.shared.lock();
        let mut sum = state.past;
        for connection in state.connections.values() {
            sum.add(&connection.link.counters().read());
        }
        sum.accepted = state.accepted;
        sum.refused = state.refused;
        sum.panics = state.panics;
        sum.connections = state.connections.len() as u64;
        sum
    }

    /// Stops listening everywhere and removes the sockets, answers the requests that were received, and closes all
    /// connections; those that are not done after `grace` are cut. The server does not come back. A second call finds
    /// nothing to do.
    pub fn shutdown(&self, grace: Duration) {
        let listeners = {
            let mut state = self.shared.lock();
            state.shutting_down = true;
            std::mem::take(&mut state.listeners)
        };
        for listener in listeners {
            listener.stop();
        }
        let links = self.shared.lock().links(|_| true);
        self.shared.end(&links, grace);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown(END_GRACE);
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Listener {
    /// Ends the thread, closes the sockets and removes their file.
    fn stop(self) {
        self.bound.stop();
        // The thread runs no code but ours; were it to panic, that was reported.
        let _ = self.thread.join();
    }
}

impl State {
    fn listener(&self, address: &Address) -> Option<&Listener> {
        self.listeners.iter().find(|listener| listener.bound.address == *address)
    }

    fn listener_mut(&mut self, address: &Address) -> Option<&mut Listener> {
        self.listeners.iter_mut().find(|listener| listener.bound.address == *address)
    }

    fn find(&self, address: &Address, name: &str) -> Result<Arc<Export>, EnterError> {
        if self.shutting_down {
            return Err(EnterError::ShuttingDown);
        }
        let exports = self.listener(address).map_or(&[][..], |listener| &listener.exports);
        let matches = |export: &&Arc<Export>| {
            if name.is_empty() { export.default } else { export.name == name }
        };
        exports.iter().find(matches).cloned().ok_or(EnterError::Unknown)
    }

    fn count(&self, of: impl Fn(&Connection) -> bool) -> usize {
        self.connections.values().filter(|connection| of(connection)).count()
    }

    fn links(&self, of: impl Fn(&Connection) -> bool) -> Vec<Arc<Link>> {
        let chosen = self.connections.values().filter(|connection| of(connection));
        chosen.map(|connection| Arc::clone(&connection.link)).collect()
    }
}

/// Why a client gets no export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnterError {
    /// There is none of the name at the client's address.
    Unknown,
    /// The server is going away.
    ShuttingDown,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock leaves the tables half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The export of this name at an address.
    pub fn find(&self, address: &Address, name: &str) -> Result<Arc<Export>, EnterError> {
        self.lock().find(address, name)
    }

    /// As [`find`](Self::find), and from now on the connection counts as a user of the export.
    pub fn enter(&self, link: &Link, name: &str) -> Result<Arc<Export>, EnterError> {
        let mut state = self.lock();
        let export = state.find(&link.address, name)?;
        let connection = state.connections.get_mut(&link.id).ok_or(EnterError::ShuttingDown)?;
        connection.export = Some(Arc::clone(&export));
        Ok(export)
    }

    /// What a client at this address sees.
    pub fn seen_at(&self, address: &Address) -> Vec<Arc<Export>> {
        self.lock().listener(address).map_or(Vec::new(), |listener| listener.exports.clone())
    }

    /// The connection's thread is about to end.
    pub fn leave(&self, link: &Link, panicked: bool) {
        let mut state = self.lock();
        let gone = state.connections.remove(&link.id);
        state.past.add(&link.counters().read());
        state.panics += u64::from(panicked);
        self.ended.notify_all();
        drop(state);
        // The device may go with its last user, which may wait for a disk: not under the lock.
        drop(gone);
    }

    /// Ends connections: what they received is answered, what takes longer than `grace` is cut.
    fn end(&self, links: &[Arc<Link>], grace: Duration) {
        for link in links {
            link.drain();
        }
        if self.wait_for_end(links, grace) {
            return;
        }
        let late: Vec<_> = {
            let state = self.lock();
            links.iter().filter(|link| state.connections.contains_key(&link.id)).collect()
        };
        for link in late {
            tracing::warn!(peer = %link.peer(), "the connection did not end in time and is cut");
            link.cut();
        }
        self.wait_for_end(links, CUT_WAIT);
    }

    /// True: all of them have ended.
    fn wait_for_end(&self, links: &[Arc<Link>], time: Duration) -> bool {
        let deadline = Instant::now().checked_add(time);
        let mut state = self.lock();
        while links.iter().any(|link| state.connections.contains_key(&link.id)) {
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return false;
            }
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// The thread of one address.
fn accept(shared: &Arc<Shared>, bound: &Bound, limits: &Limits) {
    bound.accept(
        |socket, peer| connect(shared, &bound.address, limits, socket, peer),
        |errno| {
            tracing::warn!(address = %bound.address, error = %errno, "a connection could not be accepted");
            shared.lock().refused += 1;
        },
    );
}

fn connect(shared: &Arc<Shared>, address: &Address, limits: &Limits, socket: OwnedFd, peer: String) {
    let link = {
        let mut state = shared.lock();
        state.accepted += 1;
        let id = state.next_id;
        state.next_id += 1;
        if state.connections.len() >= limits.max_connections {
            state.refused += 1;
            drop(state);
            tracing::warn!(
                %address, peer, max_connections = limits.max_connections,
                "too many connections: a new one is closed"
            );
            return;
        }
        match Link::new(id, address.clone(), peer, socket) {
            Ok(link) => {
                let link = Arc::new(link);
                state.connections.insert(id, Connection { link: Arc::clone(&link), export: None });
                link
            }
            Err(error) => {
                state.refused += 1;
                drop(state);
                tracing::warn!(%address, %error, "no resources for a connection");
                return;
            }
        }
    };
    let spawned = {
        let (shared, link, limits) = (Arc::clone(shared), Arc::clone(&link), limits.clone());
        thread::Builder::new()
            .name(format!("nbd-{}", link.id))
            .spawn(move || connection::run(&shared, &link, &limits))
    };
    if let Err(error) = spawned {
        tracing::warn!(%address, %error, "no thread for a connection");
        shared.leave(&link, false);
        shared.lock().refused += 1;
    }
}
