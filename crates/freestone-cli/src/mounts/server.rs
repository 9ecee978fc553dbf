//! The server of a mount, reached over its control socket.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use freestone_control::protocol::RpcError;
use freestone_spec::refusal::Errno;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::helper::wait_until;
use super::processes::ProcessId;
use crate::client::connection::Client;

/// Longest wait for a response. A server that does not respond within this time counts as hanging.
const RESPONSE_MAX: Duration = Duration::from_secs(5);
/// Timeout of a verb, which may wait for another verb on the device.
const VERB_MAX: Duration = Duration::from_secs(40);
/// Longest time to repeat an unpublish while clients disconnect, before the export counts as in use. The kernel's NBD
/// client or nbdfuse was just detached, and disconnects by itself.
const UNPUBLISH_MAX: Duration = Duration::from_secs(2);

/// A connection to a server that responds.
pub struct Server {
    client: Client,
    /// Identity of the server's process.
    pub process: Option<ProcessId>,
    device: Option<Device>,
}

/// A device of the server.
#[derive(Debug, Clone, Deserialize)]
pub struct Device {
    name: String,
    /// Kind of the device: `ram`, `fork`, `template` and others.
    pub kind: String,
    /// The exports of the device.
    pub exports: Vec<Export>,
}

/// An export of a device.
#[derive(Debug, Clone, Deserialize)]
pub struct Export {
    /// Address: `unix:PATH`, `tcp:HOST:PORT`, `vhost-user:PATH` or `/dev/ublkbN`.
    pub address: String,
    /// NBD URI, or `None` if the address is not an NBD address.
    pub uri: Option<String>,
    /// True if clients cannot write.
    pub read_only: bool,
    /// Number of open connections.
    pub connections: usize,
    /// Entries of the allow list; empty if every client may connect.
    #[serde(default)]
    pub allow: Vec<String>,
}

impl Export {
    /// Returns true if the export is a ublk block device.
    pub fn is_ublk(&self) -> bool {
        self.address.starts_with("/dev/")
    }
}

/// The part of the result of the verb `list` that mounts need.
#[derive(Deserialize)]
struct DeviceList {
    devices: Vec<Device>,
}

/// State of the server at a control socket.
pub enum ServerState {
    /// The server responds.
    Responds(Box<Server>),
    /// No server listens at the control socket.
    Dead(anyhow::Error),
    /// The server listens, but does not respond.
    Hangs(Option<ProcessId>),
}

impl ServerState {
    /// Connects to the server at `control`, and looks up the device `name`.
    pub fn of(control: &Path, name: &str) -> Self {
        let client = match Client::connect(Some(control)) {
            Ok(client) => client,
            Err(error) => return Self::Dead(error),
        };
        let process = client.server_pid().ok().and_then(ProcessId::of);
        let mut server = Server { client, process, device: None };
        match server.list(name, RESPONSE_MAX) {
            Ok(()) => Self::Responds(Box::new(server)),
            // The server ended just now, or the process at the socket is not a server.
            Err(error) if !is_timeout(&error) => Self::Dead(error),
            Err(_) => Self::Hangs(process),
        }
    }

    /// Returns the connection to the server.
    ///
    /// # Errors
    /// Fails if the server does not respond.
    pub fn into_server(self, control: &Path) -> Result<Server> {
        match self {
            Self::Responds(server) => Ok(*server),
            Self::Dead(error) => Err(error),
            Self::Hangs(process) => bail!(rpc_error!(ETIMEDOUT, "{}", hang_message(control, process))),
        }
    }
}

/// Returns the error text for a server that does not respond.
pub fn hang_message(control: &Path, process: Option<ProcessId>) -> String {
    let who = process.map_or_else(String::new, |process| format!(" (pid {})", process.pid));
    format!("the server{who} at {} has not answered for {} s", control.display(), RESPONSE_MAX.as_secs())
}

fn is_timeout(error: &anyhow::Error) -> bool {
    let kinds = [std::io::ErrorKind::WouldBlock, std::io::ErrorKind::TimedOut];
    error.chain().filter_map(|part| part.downcast_ref::<std::io::Error>()).any(|e| kinds.contains(&e.kind()))
}

impl Server {
    fn list(&mut self, name: &str, max: Duration) -> Result<()> {
        self.client.set_timeout(max)?;
        let answer = self.client.call("list", &json!({ "pattern": name }))?;
        let DeviceList { devices } =
            serde_json::from_str(answer.get()).context("list: the server's answer is not understood")?;
        // `list` treats the name as a pattern, which may match other devices.
        self.device = devices.into_iter().find(|device| device.name == name);
        Ok(())
    }

    /// Returns the device as of the last look-up, or `None` if it did not exist.
    pub fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// Looks up the device `name` again.
    pub fn refresh(&mut self, name: &str) -> Result<()> {
        self.list(name, RESPONSE_MAX)
    }

    /// Returns the number of connections to all exports of the device, as of the last look-up.
    pub fn connections(&self) -> usize {
        self.device.iter().flat_map(|device| &device.exports).map(|export| export.connections).sum()
    }

    /// Runs a verb on the server and returns its result as JSON.
    pub fn call(&mut self, verb: &str, params: &Value) -> Result<Box<RawValue>> {
        self.client.set_timeout(VERB_MAX)?;
        self.client.call(verb, params)
    }

    /// Unpublishes the device at one address. Waits for a client that is disconnecting.
    pub fn unpublish(&mut self, name: &str, at: &str) -> Result<()> {
        let mut answer = Ok(());
        wait_until(UNPUBLISH_MAX, || {
            let params = json!({ "name": name, "at": at });
            answer = self.call("unpublish", &params).map(drop);
            !answer.as_ref().is_err_and(|error| has_errno(error, Errno::EBUSY))
        });
        answer
    }
}

/// Returns true if an error was returned by the server with this errno.
pub fn has_errno(error: &anyhow::Error, errno: Errno) -> bool {
    error.downcast_ref::<RpcError>().is_some_and(|fault| fault.has_errno(errno))
}
