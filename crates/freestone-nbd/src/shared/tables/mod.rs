//! The tables of a server: listeners, exports, connections, and the connections that use each export.
//!
//! No method blocks. Apart from the search trees, the cost of a change does not grow with the number of
//! listeners or exports.

pub mod connections;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use freestone_core::allow::AllowList;
use freestone_core::device::{Device, Failures};
use freestone_core::unix_socket::SocketFile;
use thiserror::Error;

use self::connections::{Connection, DeadlineAction};
use crate::accept::connect_rate::ConnectRate;
use crate::accept::pending_handshakes::PendingHandshakes;
use crate::address::Address;
use crate::link::Link;
use crate::proto::MAX_STRING_BYTES;
use crate::shared::export::{Export, ExportInfo, JoinError, Source, Visibility};
use crate::shared::passed::PassedConnection;
use crate::stats::Stats;

/// Why an export cannot be published or unpublished.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PublishError {
    /// The server does not listen at the address.
    #[error("the server does not listen at {0}")]
    NotListening(Address),
    /// The name is empty.
    #[error("an export needs a name")]
    NameEmpty,
    /// The name is longer than the protocol allows.
    #[error("the export name has {0} bytes, at most {MAX_STRING_BYTES} are allowed")]
    NameTooLong(usize),
    /// The name contains a NUL byte, which the protocol does not allow.
    #[error("the export name {0:?} contains a NUL byte")]
    NameInvalid(String),
    /// The description is longer than the protocol allows.
    #[error("the description has {0} bytes, at most {MAX_STRING_BYTES} are allowed")]
    DescriptionTooLong(usize),
    /// The name is already published at the address.
    #[error("`{name}` is already published at {address}")]
    Duplicate {
        /// The name.
        name: String,
        /// The address.
        address: Address,
    },
    /// The address has another default export.
    #[error("`{name}` is already the default export at {address}")]
    DefaultTaken {
        /// The name of the other export.
        name: String,
        /// The address.
        address: Address,
    },
    /// No export has this name.
    #[error("`{0}` is not published")]
    NotPublished(String),
    /// Clients use the export.
    #[error("`{name}` is in use by {connections} connection(s)")]
    Busy {
        /// The export name.
        name: String,
        /// Number of connections that use the export, at all addresses.
        connections: usize,
    },
}

/// The tables of a server, guarded by its lock.
#[derive(Debug, Default)]
pub struct Tables {
    /// Listeners by identifier, in the order in which the server started to listen.
    pub listeners: BTreeMap<u64, Listener>,
    by_address: HashMap<Address, u64>,
    /// Export names at all addresses. A name that is neither published nor in use has no entry.
    names: HashMap<String, NameEntry>,
    /// Connections by identifier.
    pub connections: HashMap<u64, Connection>,
    /// Connections that have not chosen an export.
    pub pending_handshakes: PendingHandshakes,
    /// Rate limit for new connections.
    pub connect_rate: ConnectRate,
    /// Held export names, with the number of holds. Clients that choose a held export wait.
    holds: HashMap<String, usize>,
    /// Deadlines of connections to templates, by time and connection.
    deadlines: BTreeMap<(Instant, u64), DeadlineAction>,
    /// The last identifier used. Listeners, exports and connections share one sequence.
    next_id: u64,
    /// Set at shutdown: the server accepts, listens and publishes no more.
    pub shutting_down: bool,
    /// Set when the server passes its connections to a successor. Handshakes in progress may still choose an
    /// export.
    pub is_passing: bool,
    /// Connections for the successor.
    pub passed: Vec<PassedConnection>,
    /// Listening sockets of a predecessor at addresses at which the server does not listen yet.
    pub inherited: Vec<(Address, Vec<OwnedFd>)>,
    /// True while connections wait in the backlogs of the listening sockets.
    pub is_paused: bool,
    /// See [`Stats::accepted`].
    pub accepted: u64,
    /// See [`Stats::refused`].
    pub refused: u64,
    /// See [`Stats::panics`].
    pub panics: u64,
    /// Totals of ended connections.
    ended_totals: Stats,
}

#[derive(Debug)]
pub struct Listener {
    pub address: Address,
    pub file: Option<SocketFile>,
    /// Peers that may connect; `None` allows all.
    pub allow: Option<AllowList>,
    /// Exports by identifier, in the order of publishing.
    pub exports: BTreeMap<u64, Arc<Export>>,
    by_name: HashMap<String, u64>,
    /// The export that the empty name selects.
    default: Option<u64>,
    connections: HashSet<u64>,
}

/// The listeners and users of an export name.
#[derive(Debug, Default)]
struct NameEntry {
    /// Listeners at which the name is published.
    listeners: BTreeSet<u64>,
    /// Connections that use the name, including those that outlive its unpublishing.
    users: HashSet<u64>,
}

/// The removed exports, and the links of the connections that use them.
pub type UnpublishResult = (Vec<Arc<Export>>, Vec<Arc<Link>>);

impl Tables {
    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Returns true if the server accepts and listens no more.
    pub fn is_ending(&self) -> bool {
        self.shutting_down || self.is_passing
    }

    pub fn listener(&self, address: &Address) -> Option<&Listener> {
        self.listeners.get(self.by_address.get(address)?)
    }

    pub fn listener_id(&self, address: &Address) -> Option<u64> {
        self.by_address.get(address).copied()
    }

    /// Adds a listener and returns its identifier.
    pub fn add_listener(
        &mut self,
        address: Address,
        file: Option<SocketFile>,
        allow: Option<AllowList>,
    ) -> u64 {
        let id = self.new_id();
        self.by_address.insert(address.clone(), id);
        let listener = Listener {
            address,
            file,
            allow,
            exports: BTreeMap::new(),
            by_name: HashMap::new(),
            default: None,
            connections: HashSet::new(),
        };
        self.listeners.insert(id, listener);
        id
    }

    /// Replaces the allow list of an address. Returns false if the server does not listen there.
    pub fn set_allow_list(&mut self, address: &Address, allow: Option<AllowList>) -> bool {
        let id = self.by_address.get(address);
        let listener = id.and_then(|id| self.listeners.get_mut(id));
        listener.map(|listener| listener.allow = allow).is_some()
    }

    /// Removes the listener at an address with its exports. Returns its identifier, the listener, and the
    /// links of its connections, or None if the server does not listen there.
    pub fn remove_listener(&mut self, address: &Address) -> Option<(u64, Listener, Vec<Arc<Link>>)> {
        let id = self.by_address.remove(address)?;
        let listener = self.listeners.remove(&id)?;
        for name in listener.by_name.keys() {
            self.change_name(name, |name| name.listeners.remove(&id));
        }
        let links = self.links(&listener.connections);
        Some((id, listener, links))
    }

    /// Removes and returns the listening sockets of a predecessor at an address.
    pub fn take_inherited(&mut self, address: &Address) -> Option<Vec<OwnedFd>> {
        let at = self.inherited.iter().position(|(inherited, _)| inherited == address)?;
        Some(self.inherited.remove(at).1)
    }

    /// Removes all listeners with their exports, at shutdown.
    pub fn remove_all_listeners(&mut self) -> BTreeMap<u64, Listener> {
        debug_assert!(self.shutting_down, "called only at shutdown");
        self.by_address.clear();
        self.names.values_mut().for_each(|name| name.listeners.clear());
        std::mem::take(&mut self.listeners)
    }

    pub fn publish(&mut self, export: &Arc<Export>) -> Result<(), PublishError> {
        freestone_core::trail::step!();
        let id = self.new_id();
        let at = self.by_address.get(&export.address);
        let Some((at, listener)) = at.and_then(|at| Some((*at, self.listeners.get_mut(at)?))) else {
            return Err(PublishError::NotListening(export.address.clone()));
        };
        let (name, address) = (export.name.clone(), export.address.clone());
        if listener.by_name.contains_key(&name) {
            return Err(PublishError::Duplicate { name, address });
        }
        if export.default {
            if let Some(other) = listener.default.and_then(|id| listener.exports.get(&id)) {
                return Err(PublishError::DefaultTaken { name: other.name.clone(), address });
            }
            listener.default = Some(id);
        }
        listener.by_name.insert(name.clone(), id);
        listener.exports.insert(id, Arc::clone(export));
        self.names.entry(name).or_default().listeners.insert(at);
        Ok(())
    }

    /// Removes the exports named `name` at all addresses, or only at `only`. Fails if connections use them,
    /// unless `force`.
    pub fn unpublish(
        &mut self,
        name: &str,
        only: Option<&Address>,
        force: bool,
    ) -> Result<UnpublishResult, PublishError> {
        let not_published = || PublishError::NotPublished(name.to_owned());
        let only = only.map(|address| self.listener_id(address).ok_or_else(not_published)).transpose()?;
        let known = self.names.get_mut(name).ok_or_else(not_published)?;
        let (at, rest): (BTreeSet<u64>, BTreeSet<u64>) =
            known.listeners.iter().partition(|at| only.is_none_or(|only| only == **at));
        if at.is_empty() {
            return Err(not_published());
        }
        let users = known.users.iter().filter_map(|id| self.connections.get(id));
        let users = users.filter(|connection| only.is_none_or(|only| only == connection.listener));
        let links: Vec<_> = users.map(|connection| Arc::clone(&connection.link)).collect();
        if !links.is_empty() && !force {
            return Err(PublishError::Busy { name: name.to_owned(), connections: links.len() });
        }
        known.listeners = rest;
        self.change_name(name, |_| ());
        let removed = at.iter().filter_map(|at| self.listeners.get_mut(at)?.remove(name)).collect();
        Ok((removed, links))
    }

    /// Replaces the device of a name at all its addresses. Returns the replaced exports.
    pub fn replace(
        &mut self,
        name: &str,
        device: &dyn Fn(&Address) -> Arc<dyn Device>,
        description: &str,
        failures: &Arc<Failures>,
    ) -> Vec<Arc<Export>> {
        let at = self.names.get(name).into_iter().flat_map(|known| &known.listeners);
        let mut replaced = Vec::new();
        for at in at {
            let Some(listener) = self.listeners.get_mut(at) else { continue };
            let export = listener.by_name.get(name).and_then(|id| listener.exports.get_mut(id));
            let Some(export) = export else { continue };
            let new = Export {
                name: export.name.clone(),
                address: export.address.clone(),
                source: Source::Device(device(&export.address)),
                read_only: export.read_only,
                default: export.default,
                without_fua: export.without_fua,
                visible_to: export.visible_to.clone(),
                description: description.to_owned(),
                failures: Arc::clone(failures),
                places: export.places.clone(),
                users: 0.into(),
            };
            replaced.push(std::mem::replace(export, Arc::new(new)));
        }
        replaced
    }

    /// Changes the entry of a name, and removes it if it is neither published nor used.
    fn change_name<T>(&mut self, name: &str, change: impl FnOnce(&mut NameEntry) -> T) {
        if let Some(known) = self.names.get_mut(name) {
            change(known);
            if known.listeners.is_empty() && known.users.is_empty() {
                self.names.remove(name);
            }
        }
    }

    /// Returns all exports, in the order of publishing at each address.
    pub fn exports(&self) -> Vec<ExportInfo> {
        self.listeners.values().flat_map(|at| at.exports.values()).map(|export| export_info(export)).collect()
    }

    pub fn exports_named(&self, name: &str) -> Vec<ExportInfo> {
        let at = self.names.get(name).into_iter().flat_map(|known| &known.listeners);
        let at = at.filter_map(|at| self.listeners.get(at));
        at.filter_map(|listener| listener.find_by_name(name)).map(|export| export_info(export)).collect()
    }

    /// Returns the exports at one address, in the order of publishing.
    pub fn exports_at(&self, address: &Address) -> Vec<ExportInfo> {
        let at = self.listener(address).into_iter();
        at.flat_map(|at| at.exports.values()).map(|export| export_info(export)).collect()
    }

    /// Returns the number of connections that use `name`, at all addresses.
    pub fn user_count(&self, name: &str) -> usize {
        self.names.get(name).map_or(0, |known| known.users.len())
    }

    /// Returns the links of the connections that use `name`, at all addresses.
    pub fn links_of(&self, name: &str) -> Vec<Arc<Link>> {
        self.links(self.names.get(name).into_iter().flat_map(|known| &known.users))
    }

    /// Finds an export at an address. The empty name selects the default export.
    pub fn find(&self, address: &Address, name: &str) -> Result<Arc<Export>, JoinError> {
        if self.shutting_down {
            return Err(JoinError::ShuttingDown);
        }
        let found = self.listener(address).and_then(|listener| match listener.default {
            Some(id) if name.is_empty() => listener.exports.get(&id),
            _ => listener.find_by_name(name),
        });
        found.cloned().ok_or(JoinError::Unknown)
    }
}

impl Listener {
    fn find_by_name(&self, name: &str) -> Option<&Arc<Export>> {
        self.exports.get(self.by_name.get(name)?)
    }

    fn remove(&mut self, name: &str) -> Option<Arc<Export>> {
        let id = self.by_name.remove(name)?;
        self.default.take_if(|default| *default == id);
        self.exports.remove(&id)
    }
}

fn export_info(export: &Export) -> ExportInfo {
    ExportInfo {
        name: export.name.clone(),
        address: export.address.clone(),
        read_only: export.read_only,
        default: export.default,
        template: export.template().is_some(),
        tls: export.visible_to != Visibility::All,
        description: export.description.clone(),
        connections: export.users.load(Ordering::SeqCst),
    }
}
