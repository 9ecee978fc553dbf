//! Checks that refuse a verb because clients use a device.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use std::{fs, thread};

use freestone_control::protocol::RpcError;
use freestone_nbd::Client;
use freestone_spec::kinds::Entry;
use freestone_spec::refusal::Errno;
use freestone_ublk as ublk;

use super::Exports;
use super::blocks::Blocks;

/// Longest time until the server notices that a client has disconnected. `freestone mount` waits as long before it
/// counts the clients of a device.
pub const DISCONNECT_MAX: Duration = Duration::from_millis(200);
/// Poll interval while waiting for clients to disconnect.
const DISCONNECT_PAUSE: Duration = Duration::from_millis(2);
/// Advice about `--force` at the end of error messages.
pub const FORCE: &str = "--force goes ahead";
/// Advice about `--force` at the end of error messages, if clients would stay connected while the content is replaced.
const FORCE_WIPE: &str = "unmount a file system on it first, as its cached blocks would corrupt the new content; \
                          --force goes ahead";
/// Largest number of clients that an error names. Further clients are only counted.
const NAMED_MAX: usize = 3;

impl Exports {
    /// Fails if clients are connected. First waits for up to [`DISCONNECT_MAX`], because the server notices a
    /// disconnect late.
    pub fn check_idle(&self, entry: &Entry) -> Result<(), RpcError> {
        let name = entry.name();
        let of_template = usize::from(entry.template.is_some());
        wait_until_none(|| self.connections(name));
        match self.users(name) + of_template {
            0 => Ok(()),
            connections => Err(in_use(name, connections, FORCE)),
        }
    }

    /// Refuses to replace the content while clients that may cache it are connected, unless `force` is set. For a
    /// device with zones or unflushed writes, `force` has no effect, because clients rely on that state. The returned
    /// guard keeps block devices from being mounted until the content is replaced.
    pub fn check_wipe(&self, entry: &Entry, force: bool) -> Result<Blocks, RpcError> {
        let name = entry.name();
        let changes = entry.changes_since_wipe();
        let connections = || {
            let machines = self.standalone(name).iter().filter(|export| export.is_driven()).count();
            self.nbd.connections(name) + machines
        };
        let layers = &entry.layers;
        let has_state = layers.power.is_some() || layers.zones.is_some();
        // With `force` the clients that are connected change nothing.
        let waited = if force && !has_state { Duration::ZERO } else { wait_until_none(connections) };
        let mut users = self.clients_of(name);
        if let Some(template) = &entry.template {
            users.push(format!("1 connection to the template {template} is open"));
        }
        let users = users.join(", ");
        if has_state {
            let what = if layers.zones.is_some() { "it is zoned" } else { "it keeps unflushed writes apart" };
            let advice =
                format!("{what}, and its clients would not notice; `freestone unpublish {name}` first");
            if !users.is_empty() {
                return Err(rpc_error!(EBUSY, "{name}: {users}; {advice}"));
            }
            return self.claim_blocks(entry, false, &advice);
        }
        if !users.is_empty() && !force {
            let now = entry.changes_since_wipe();
            let count = match now {
                0 => "no change".to_owned(),
                1 => "1 change".to_owned(),
                now => format!("{now} changes"),
            };
            let recent = if now > changes {
                ", the last one just now".to_owned()
            } else if now > 0 && waited >= DISCONNECT_MAX {
                format!(", none in the last {} ms", DISCONNECT_MAX.as_millis())
            } else {
                String::new()
            };
            let activity = format!("{count} since it was made or last wiped{recent}");
            return Err(rpc_error!(EBUSY, "{name}: {users}; {activity}; {FORCE_WIPE}"));
        }
        self.claim_blocks(entry, force, FORCE)
    }

    /// Returns a phrase for each client of a device that may cache content: a program, a host or a virtual machine.
    /// Excludes users of block devices.
    fn clients_of(&self, name: &str) -> Vec<String> {
        let mut connections: BTreeMap<String, usize> = BTreeMap::new();
        for client in self.nbd.clients(name) {
            *connections.entry(name_client(&client)).or_default() += 1;
        }
        let clients = connections.len();
        let phrase = |(client, connections): (String, usize)| match connections {
            1 => format!("1 connection of {client} is open"),
            _ => format!("{connections} connections of {client} are open"),
        };
        let mut all: Vec<_> = connections.into_iter().map(phrase).take(NAMED_MAX).collect();
        if clients > NAMED_MAX {
            all.push(format!("and of {} more clients", clients - NAMED_MAX));
        }
        let local = self.standalone(name);
        let machines = local.iter().filter(|export| export.is_driven());
        all.extend(machines.map(|export| format!("a virtual machine uses {}", export.address())));
        all
    }
}

/// Waits until `connections` returns 0, for at most [`DISCONNECT_MAX`]. Returns the time waited.
fn wait_until_none(connections: impl Fn() -> usize) -> Duration {
    let begin = Instant::now();
    while connections() > 0 && begin.elapsed() < DISCONNECT_MAX {
        thread::sleep(DISCONNECT_PAUSE);
    }
    begin.elapsed()
}

/// Returns a client's name: program and pid for a process of this machine, otherwise the host.
fn name_client(client: &Client) -> String {
    match client {
        Client::Process(process) => match fs::read_to_string(format!("/proc/{process}/comm")) {
            Ok(program) => format!("{} (pid {process})", program.trim_end()),
            Err(_) => format!("pid {process}"),
        },
        Client::Peer(peer) => peer.parse::<SocketAddr>().map_or(peer.clone(), |peer| peer.ip().to_string()),
    }
}

/// Returns the error for a device that clients use. `force` is the advice at the end of the message.
pub(super) fn in_use(name: &str, connections: usize, force: &str) -> RpcError {
    let clients =
        if connections == 1 { "a client is".to_owned() } else { format!("{connections} clients are") };
    rpc_error!(EBUSY, "{name}: {clients} connected; {force}")
}

/// Returns the errno for the reason why a ublk block device could not be created.
pub(super) fn errno_of(error: &ublk::StartError) -> Errno {
    match error {
        ublk::StartError::NoDriver
        | ublk::StartError::DriverTooOld
        | ublk::StartError::NoZones
        | ublk::StartError::UnprivilegedZones
        | ublk::StartError::UnsupportedZones(_) => Errno::EOPNOTSUPP,
        _ => Errno::EIO,
    }
}

/// Refuses a fork that belongs to a connection to a template.
pub fn check_not_connection_fork(entry: &Entry) -> Result<(), RpcError> {
    let Some(template) = &entry.template else { return Ok(()) };
    let why = format!(
        "{}: belongs to a connection to the template {template}, and is removed with it",
        entry.name()
    );
    Err(rpc_error!(EBUSY, "{why}"))
}
