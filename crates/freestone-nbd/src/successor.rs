//! Passing sockets and connections to a successor, and taking them over.

use std::borrow::Cow;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use freestone_core::client_log;
use rustix::io::FdFlags;
use rustix::net::getpeername;

use crate::accept::acceptor::describe_peer;
use crate::accept::listen;
use crate::address::Address;
use crate::connection::AdoptedSession;
use crate::connection_threads;
use crate::handshake::Negotiation;
use crate::link::Link;
use crate::server::Server;
use crate::shared::export::JoinError;
use crate::shared::ids;
use crate::shared::passed::{AdoptError, ConnectionState, Passed, PassedConnection};
use crate::stream::input::RECEIVE_BUFFER_BYTES;
use crate::stream::tls::settings::TlsMode;
use crate::wire::contexts::Contexts;
use crate::wire::headers::Headers;

/// Longest time for which handshakes may still choose an export after [`Server::pass_on`] was called.
const HANDSHAKE_TIME: Duration = Duration::from_secs(1);

impl Server {
    /// Shuts the server down like [`shutdown`](Self::shutdown), for a successor. Returns the listening
    /// sockets, whose backlogs hold the clients that connect meanwhile, and the connections. The files of Unix
    /// sockets stay and belong to the successor.
    ///
    /// A connection is passed at the boundary of a request. Requests that have begun are completed and
    /// answered; the payload of a write is awaited. Requests that were received but have not begun are part of
    /// the state of the connection. Connections with TLS or to a template end as in a shutdown. Handshakes may
    /// complete for a second. Connections that take longer than `grace` are cut.
    ///
    /// A second call, or a call after [`shutdown`](Self::shutdown), returns nothing.
    pub fn pass_on(&self, grace: Duration) -> Passed {
        let begun = Instant::now();
        {
            let mut tables = self.shared.tables.lock();
            if tables.is_ending() {
                return Passed::default();
            }
            tables.is_passing = true;
        }
        self.stop_accepting();
        let mut left = {
            let links = {
                let tables = self.shared.tables.lock();
                tables.links(tables.connections.keys())
            };
            for link in &links {
                link.begin_pass();
            }
            ids(&links)
        };
        self.shared.wait_for_end(&mut left, grace.min(HANDSHAKE_TIME));
        let (listeners, inherited, handshakes) = {
            let mut tables = self.shared.tables.lock();
            tables.shutting_down = true;
            let inherited = std::mem::take(&mut tables.inherited);
            (tables.remove_all_listeners(), inherited, tables.links_in_handshake())
        };
        for link in handshakes {
            client_log!(warn, peer = %link.peer(), "the handshake did not end in time for the successor");
            link.cut();
        }
        let mut passed = Passed::default();
        for (id, listener) in listeners {
            if let Some(file) = listener.file {
                file.keep();
            }
            let sockets = self.shared.acceptor().map(|acceptor| acceptor.remove(id)).unwrap_or_default();
            if !sockets.is_empty() {
                passed.listeners.push((listener.address, sockets));
            }
        }
        passed.listeners.extend(inherited);
        self.shared.wait_for_end(&mut left, grace.saturating_sub(begun.elapsed()));
        self.shared.cut_late(&left);
        self.shared.idle_threads.end();
        // All connections have ended, were cut, or are in the list: `ServerShared::pass` adds them under the
        // same lock with which they become safe from a cut.
        passed.connections = std::mem::take(&mut self.shared.tables.lock().passed);
        passed
    }

    /// Takes over the listening sockets of a predecessor. [`listen`](Self::listen) and
    /// [`listen_with_access`](Self::listen_with_access) at one of these addresses use them, and apply their
    /// own access rules and allow list. The server removes the files of Unix sockets at its end. A socket whose
    /// file is not the server's must be passed to [`adopt_socket`](Self::adopt_socket) instead.
    pub fn inherit_listeners(&self, listeners: Vec<(Address, Vec<OwnedFd>)>) {
        let listeners = listeners.into_iter().map(|(address, sockets)| (address.absolute(), sockets));
        self.shared.tables.lock().inherited.extend(listeners);
    }

    /// Closes the inherited sockets at whose addresses the server does not listen, and removes their files.
    pub fn close_unused_listeners(&self) {
        let unused = std::mem::take(&mut self.shared.tables.lock().inherited);
        for (address, sockets) in unused {
            listen::discard(&address, sockets);
            tracing::info!(%address, "closed");
        }
    }

    /// Continues a connection of a predecessor on a thread of its own. The server must listen at the address
    /// of the connection, and export the device there. The connection counts like a new one. If it is refused,
    /// its socket is closed.
    ///
    /// # Errors
    /// [`AdoptError`], which is also logged.
    pub fn adopt_connection(&self, connection: PassedConnection) -> Result<(), AdoptError> {
        let adopted = self.try_adopt(connection);
        if let Err(error) = &adopted {
            client_log!(warn, %error, "a connection of the predecessor is closed");
            self.shared.tables.lock().refused += 1;
        }
        adopted
    }

    fn try_adopt(&self, PassedConnection { socket, state }: PassedConnection) -> Result<(), AdoptError> {
        let (address, headers, contexts) = check(&state)?;
        let ConnectionState { export: name, unread, .. } = state;
        let refused = |reason: Cow<'static, str>| AdoptError::Refused {
            export: name.clone(),
            address: address.clone(),
            reason,
        };
        let resources =
            |source| AdoptError::Resources { export: name.clone(), address: address.clone(), source };
        if self.tls_mode() == Some(TlsMode::Required) {
            return Err(refused(JoinError::TlsRequired.into_message()));
        }
        rustix::io::fcntl_setfd(&socket, FdFlags::CLOEXEC).map_err(|error| resources(error.into()))?;
        // Fails if the peer has gone: the session then reads the end of the stream.
        let peer = describe_peer(&socket, getpeername(&socket).ok().flatten());
        let (link, export) = {
            let mut tables = self.shared.tables.lock();
            if tables.connections.len() >= self.shared.limits.max_connections {
                let most = self.shared.limits.max_connections;
                return Err(refused(format!("too many connections: at most {most}").into()));
            }
            let Some(listener) = tables.listener_id(&address) else {
                return Err(refused("the server does not listen there".into()));
            };
            let link = tables.connect(listener, |id, at| Link::new(id, at.clone(), peer, socket));
            let link = link.ok_or_else(|| refused("the server does not listen there".into()))?;
            let link = link.map_err(&resources)?;
            let export = tables.adopt(&link, &name);
            if tables.pending_handshakes.remove(link.id) {
                self.shared.wake();
            }
            tables.accepted += u64::from(export.is_ok());
            (link, export)
        };
        let opened = export.and_then(|export| match export.open() {
            Ok((device, _)) => Ok((export, device)),
            Err(text) => Err(JoinError::Failed(text)),
        });
        let (export, device) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                self.shared.remove_connection(&link, false);
                return Err(refused(error.into_message()));
            }
        };
        let negotiated = Negotiation { export, device, headers, contexts };
        connection_threads::resume(&self.shared, &link, AdoptedSession { negotiated, unread })
            .map_err(&resources)
    }
}

/// Validates the state of a passed connection.
fn check(state: &ConnectionState) -> Result<(Address, Headers, Contexts), AdoptError> {
    let invalid = |reason: String| AdoptError::State {
        export: state.export.clone(),
        address: state.address.clone(),
        reason,
    };
    let address = state.address.parse::<Address>().map_err(|error| invalid(error.to_string()))?;
    let headers = Headers::by_name(&state.headers)
        .ok_or_else(|| invalid(format!("unknown headers `{}`", state.headers)))?;
    let contexts = Contexts::by_names(&state.contexts)
        .map_err(|name| invalid(format!("unknown metadata context `{name}`")))?;
    if !contexts.is_empty() && !headers.have_chunks() {
        return Err(invalid("metadata contexts need structured replies".to_owned()));
    }
    let len = state.unread.len();
    if len > RECEIVE_BUFFER_BYTES {
        return Err(invalid(format!("{len} unread bytes, at most {RECEIVE_BUFFER_BYTES} are allowed")));
    }
    Ok((address.absolute(), headers, contexts))
}
