//! The client of the control socket: connects, calls one method, and returns the result or the error.

use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use freestone_control::protocol::{MAX_LINE_BYTES, Response};
use freestone_control::socket;
use freestone_server::settings::paths;
use rustix::net::sockopt::socket_peercred;
use rustix::process::Pid;
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// Largest response line accepted, in bytes. A longer line is truncated, and then fails to parse.
const MAX_RESPONSE_BYTES: u64 = 1 << 30;

/// A connection to the control socket of a server.
pub struct Client {
    stream: UnixStream,
    path: PathBuf,
}

impl Client {
    /// Returns the path of the control socket, and the command that starts a server there. The path is `path`, else
    /// that of the environment variable, else the default.
    pub fn locate(path: Option<&Path>) -> Result<(PathBuf, String)> {
        let path = path.map(Path::to_path_buf).or_else(paths::control_of_environment);
        Ok(match path {
            Some(path) => {
                let start = format!("freestone serve --control {}", path.display());
                (path, start)
            }
            None => (paths::runtime_dir()?.join(paths::CONTROL_SOCKET), "freestone serve".into()),
        })
    }

    /// Connects to the server at `path`, else at the path of the environment variable, else at the default path.
    pub fn connect(path: Option<&Path>) -> Result<Self> {
        let (path, start) = Self::locate(path)?;
        socket::check_length(&path)?;
        let at = path.display();
        match UnixStream::connect(&path) {
            // connect() fails with the same errors for a socket without a listener or without permission.
            Err(e)
                if matches!(e.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::PermissionDenied)
                    && is_not_socket(&path) =>
            {
                bail!("{at}: is not a socket; --control takes the path of a server's control socket")
            }
            Ok(stream) => Ok(Self { stream, path }),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                bail!(rpc_error!(ECONNREFUSED, "no server at {at}; start one with `{start}`"))
            }
            Err(e) => Err(e).with_context(|| format!("{at}: cannot connect to the control socket")),
        }
    }

    /// Returns the path of the control socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the process ID of the server.
    pub fn server_pid(&self) -> Result<Pid> {
        let peer = socket_peercred(&self.stream);
        Ok(peer.with_context(|| format!("{}: cannot tell whose it is", self.path.display()))?.pid)
    }

    /// Sets the longest time that later calls wait for the server to read the request, and for data of its response.
    pub fn set_timeout(&self, time: Duration) -> Result<()> {
        let at = self.path.display();
        let set = self.stream.set_read_timeout(Some(time)).and(self.stream.set_write_timeout(Some(time)));
        set.with_context(|| format!("{at}: cannot limit the time of an answer"))
    }

    /// Calls one method and returns its result as JSON. An error of the server is returned as an [`RpcError`].
    pub fn call(&mut self, method: &str, params: &Value) -> Result<Box<RawValue>> {
        let at = self.path.display();
        let mut request =
            json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params }).to_string();
        if request.len() > MAX_LINE_BYTES {
            bail!("{method}: the request is longer than {MAX_LINE_BYTES} bytes");
        }
        request.push('\n');
        self.stream.write_all(request.as_bytes()).with_context(|| format!("{at}: cannot ask the server"))?;
        let mut line = String::new();
        BufReader::new(&self.stream)
            .take(MAX_RESPONSE_BYTES)
            .read_line(&mut line)
            .with_context(|| format!("{at}: cannot read the server's answer"))?;
        if line.is_empty() {
            bail!("{at}: the server went away without an answer");
        }
        let response: Response = serde_json::from_str(&line)
            .with_context(|| format!("{at}: the answer is not understood; is it a freestone server?"))?;
        match response.error {
            Some(fault) => Err(fault.into()),
            None => Ok(response.result.unwrap_or_else(|| RawValue::NULL.to_owned())),
        }
    }
}

fn is_not_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| !meta.file_type().is_socket())
}
