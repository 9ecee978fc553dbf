//! Files of a server that is restarted during a benchmark: its state directory and its sockets.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use super::Bench;
use super::control::Control;
use crate::programs::run_dir::ServerDir;
use crate::programs::server_process::Server;

/// Directory of the server, and the program to start.
pub struct Home {
    server_dir: ServerDir,
    freestone: PathBuf,
}

impl Home {
    pub fn new(bench: &Bench<'_>) -> Result<Self> {
        Ok(Self { server_dir: bench.run_dir.server()?, freestone: bench.freestone.clone() })
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.server_dir.image(name)
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.server_dir.socket(name)
    }

    pub fn state(&self) -> PathBuf {
        self.file("state")
    }

    pub fn nbd_socket(&self) -> PathBuf {
        self.socket("nbd")
    }

    /// Returns the command of a server without a state directory.
    pub fn command_without_state(&self, words: &[&str]) -> Command {
        self.server_dir.serve(&self.freestone, words)
    }

    /// Returns the command of a server with a state directory.
    pub fn command_with_state(&self, words: &[&str]) -> Command {
        let mut command = self.command_without_state(words);
        command.arg("--state").arg(self.state());
        command
    }

    /// Starts a server and waits until its control socket accepts connections.
    pub fn start(&self, command: &Command) -> Result<(Server, Control)> {
        let socket = self.socket("control");
        let server = Server::start_until(command, &|| Control::connect(&socket).is_ok())?;
        Ok((server, self.control()?))
    }

    /// Connects to the control socket of the running server.
    pub fn control(&self) -> Result<Control> {
        Control::connect(&self.socket("control"))
    }
}

pub fn unix(socket: &Path) -> String {
    format!("unix:{}", socket.display())
}
