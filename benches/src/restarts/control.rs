//! Client of the control socket, which sends one request at a time.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

/// Time limit for a reply, above the duration of every verb that the benchmark calls.
const REPLY_WAIT_MAX: Duration = Duration::from_secs(600);

pub struct Control {
    stream: BufReader<UnixStream>,
    line: String,
}

impl Control {
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(REPLY_WAIT_MAX))?;
        Ok(Self { stream: BufReader::new(stream), line: String::new() })
    }

    /// Calls a verb. An error reply becomes an error.
    pub fn call(&mut self, method: &str, params: &Value) -> Result<Value> {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        self.stream.get_mut().write_all(format!("{request}\n").as_bytes())?;
        self.line.clear();
        ensure!(self.stream.read_line(&mut self.line)? > 0, "{method}: the server closed the connection");
        let mut reply: Value = serde_json::from_str(&self.line).with_context(|| method.to_owned())?;
        ensure!(reply["error"].is_null(), "{method}: {}", reply["error"]);
        Ok(reply["result"].take())
    }
}
