//! An upgrade, seen from both programs: the end of a server for its successor, and the start of the successor.

use std::mem;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use freestone::cow;
use freestone_control::socket::PrivateSocket;
use freestone_nbd::{Access, Address};
use freestone_spec::kinds::Entry;
use freestone_spec::path_text;
use tracing::{error, warn};

use super::{JOBS_GRACE, Running, SHUTDOWN_GRACE};
use crate::devices::shutdown::{self, Closing};
use crate::service::Service;
use crate::settings::paths::{address_text, parse_address};
use crate::startup::adoption;
use crate::upgrade::{Connection, Handover, NamedDescriptor};

impl Running {
    /// Ends the server for a successor in the same process. Requests in flight are answered, devices are closed, and the
    /// memory of recoverable devices stays. Problems are logged: the successor is executed in any case.
    pub fn pass_on(mut self) -> Handover {
        // Most data is written while clients still work, so that they wait for less.
        let _ = shutdown::flush(&self.service.registry.all(), Instant::now() + shutdown::FLUSH_MAX);
        let mut handover = Handover {
            count: self.service.upgrades.last().0 + 1,
            paused_at: Handover::now(),
            ..Handover::default()
        };
        let no_waiting = self.refuse_new_work();
        // The successor saves the content that it adopts.
        self.service.saves.begin_stop();
        handover.addresses = self
            .service
            .exports
            .server_addresses()
            .iter()
            .map(|address| (address_text(address), self.sockets_of_manager.contains(address)))
            .collect();
        let passed = self.service.exports.pass_on(SHUTDOWN_GRACE);
        for (address, sockets) in passed.listeners {
            let name = address_text(&address);
            handover.listeners.extend(
                sockets.into_iter().map(|descriptor| NamedDescriptor { name: name.clone(), descriptor }),
            );
        }
        for connection in passed.connections {
            if let Some(entry) = self.service.registry.find(&connection.state.export) {
                handover.connections.push(Connection::new(connection, entry.identity.key()));
            }
        }
        for control in &self.controls {
            let name = path_text::text(control.path());
            match control.pass_on() {
                Ok(descriptor) if self.service.control.get().is_some_and(|path| path == control.path()) => {
                    handover.control = Some(NamedDescriptor { name, descriptor });
                }
                Ok(descriptor) => handover.control_read_only = Some(NamedDescriptor { name, descriptor }),
                Err(why) => warn!("{name}: clients have to connect again: {why}"),
            }
        }
        self.service.jobs.wait_ended(JOBS_GRACE);
        let end = Instant::now() + shutdown::FLUSH_MAX;
        // Failures are logged for each device.
        let _ = shutdown::flush(&recorded(&self.service), end) + self.service.pending_removals.wait(end);
        if let Some(holder) = self.service.recovery.get() {
            adoption::leave(&self.service.registry.all());
            match holder.stored() {
                Ok(stored) => {
                    let stored =
                        stored.into_iter().map(|(name, descriptor)| NamedDescriptor { name, descriptor });
                    handover.stored = stored.collect();
                }
                Err(why) => error!("the successor does not find the devices in memory: {why}"),
            }
        }
        // The paths of sockets belong to the successor.
        mem::forget(mem::take(&mut self.controls));
        mem::forget(mem::take(&mut self.sockets));
        let closing = Closing::of(&self.service.registry.all());
        let state = self.service.records.shared_state();
        drop((self, no_waiting));
        closing.wait(end);
        if let Some(state) = state {
            state.release();
        }
        handover
    }

    /// Continues the connections of the predecessor. A client of a device that has lost content must notice that, so its
    /// connection is closed.
    pub(super) fn adopt_connections(&mut self, connections: Vec<Connection>) {
        for (connection, content) in connections.into_iter().map(Connection::into_parts) {
            let export = connection.state.export.clone();
            let entry = self.service.registry.find(&export);
            if entry.is_none_or(|entry| entry.identity.key() != content) {
                warn!("{export}: a client has to connect again, because the device has lost content");
                continue;
            }
            // A refusal is logged there.
            let adopted = self.service.exports.nbd.adopt_connection(connection);
            self.adopted_connections += usize::from(adopted.is_ok());
        }
    }
}

/// Returns the devices whose data must be durable before the record that they are closed. The data of the others need not
/// be: it is lost with the machine only, not with the program.
fn recorded(service: &Service) -> Vec<Arc<Entry>> {
    let is_recorded = |entry: &Arc<Entry>| {
        let records_close = entry.cow_origin.as_ref().is_some_and(cow::Origin::records_close);
        let is_cow_device = service.registry.exclusive_user(entry).is_some();
        records_close || is_cow_device || entry.layers.power.is_some() || entry.layers.zones.is_some()
    };
    service.registry.all().into_iter().filter(is_recorded).collect()
}

/// Sockets of the predecessor that are not in use yet.
#[derive(Default)]
pub(super) struct Inherited {
    pub control: Option<OwnedFd>,
    pub control_read_only: Option<OwnedFd>,
    pub connections: Vec<Connection>,
}

impl Inherited {
    /// Gives the listening sockets to the NBD server, which uses them where it is to listen.
    pub fn new(service: &Service, handover: Option<Handover>) -> Self {
        let Some(mut handover) = handover else { return Self::default() };
        let connections = mem::take(&mut handover.connections);
        let mut listeners: Vec<(Address, Vec<OwnedFd>)> = Vec::new();
        for NamedDescriptor { name, descriptor: socket } in handover.listeners {
            // An invalid address cannot be that of an export.
            let Ok(address) = parse_address(&name, None) else { continue };
            match listeners.iter_mut().find(|(known, _)| *known == address) {
                Some((_, sockets)) => sockets.push(socket),
                None => listeners.push((address, vec![socket])),
            }
        }
        service.exports.nbd.inherit_listeners(listeners);
        let [control, control_read_only] = [handover.control, handover.control_read_only]
            .map(|passed| passed.map(|passed| passed.descriptor));
        Self { control, control_read_only, connections }
    }
}

/// Returns the predecessor's socket, or else a new one at the path.
pub(super) fn control_socket(
    inherited: Option<OwnedFd>,
    path: &std::path::Path,
    access: &Access,
) -> Result<PrivateSocket> {
    match inherited {
        Some(socket) => PrivateSocket::inherit(socket, path, access),
        None => PrivateSocket::bind(path, access),
    }
}
