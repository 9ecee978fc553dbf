//! Where one server has its state and its sockets, one server after the other.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use super::Bench;
use super::control::Control;
use crate::place::Own;
use crate::served::Server;

/// The directory, and the program.
pub struct Home {
    own: Own,
    freestone: PathBuf,
}

impl Home {
    pub fn new(bench: &Bench<'_>) -> Result<Self> {
        Ok(Self { own: bench.place.server()?, freestone: bench.freestone.clone() })
    }

    /// A file of its own.
    pub fn file(&self, name: &str) -> PathBuf {
        self.own.image(name)
    }

    /// A socket of its own.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.own.socket(name)
    }

    /// The directory of the state.
    pub fn state(&self) -> PathBuf {
        self.file("state")
    }

    /// Where the server shows its devices.
    pub fn nbd(&self) -> PathBuf {
        self.socket("nbd")
    }

    /// A server without a state.
    pub fn stateless(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.freestone);
        command.arg("serve").args(words);
        command.arg("--nbd").arg(unix(&self.nbd()));
        // Not where the user's own server listens.
        command.arg("--control").arg(self.socket("control"));
        command
    }

    /// A server on the state.
    pub fn stateful(&self, words: &[&str]) -> Command {
        let mut command = self.stateless(words);
        command.arg("--state").arg(self.state());
        command
    }

    /// Starts a server, and returns when it is ready.
    pub fn start(&self, command: &Command) -> Result<(Server, Control)> {
        let socket = self.socket("control");
        let server = Server::start_until(command, &|| Control::connect(&socket).is_ok())?;
        Ok((server, self.control()?))
    }

    /// A connection to the server that runs.
    pub fn control(&self) -> Result<Control> {
        Control::connect(&self.socket("control"))
    }
}

/// A socket as an address.
pub fn unix(socket: &Path) -> String {
    format!("unix:{}", socket.display())
}
