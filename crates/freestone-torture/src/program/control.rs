//! The control socket, and the program's own command line.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

/// Why a verb has no result.
#[derive(Debug, Clone)]
pub enum No {
    /// The server refused it.
    Refused { code: i64, errno: String, message: String },
    /// The server went away.
    Ended(String),
    /// What came is no answer.
    Wrong(String),
}

/// Takes one line of a control socket apart.
pub fn answer(line: &str) -> Result<Value, No> {
    let wrong = |why: &str| No::Wrong(format!("{why}: {}", line.chars().take(400).collect::<String>()));
    let mut answer: Value = serde_json::from_str(line).map_err(|e| wrong(&e.to_string()))?;
    if answer["jsonrpc"] != "2.0" {
        return Err(wrong("no JSON-RPC"));
    }
    let error = answer["error"].take();
    if error.is_null() {
        return answer.get_mut("result").map(Value::take).ok_or_else(|| wrong("neither result nor error"));
    }
    match (error["code"].as_i64(), error["message"].as_str()) {
        (Some(code), Some(message)) => Err(No::Refused {
            code,
            errno: error["data"]["errno"].as_str().unwrap_or_default().to_owned(),
            message: message.to_owned(),
        }),
        _ => Err(wrong("an error without code or message")),
    }
}

/// One verb on a connection of its own.
pub fn ask(socket: &Path, method: &str, params: &Value) -> Result<Value, No> {
    let ended = |e: std::io::Error| No::Ended(e.to_string());
    let mut stream = UnixStream::connect(socket).map_err(ended)?;
    let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    stream.write_all(format!("{request}\n").as_bytes()).map_err(ended)?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).map_err(ended)?;
    if !line.ends_with('\n') {
        return Err(No::Ended("no answer".into()));
    }
    answer(&line)
}

/// The same by the program: exit status 1 or 2 and one sentence where it is refused.
pub fn ask_program(program: &Path, socket: &Path, words: &[String]) -> Result<Value, No> {
    let mut command = Command::new(program);
    command
        .args(words)
        .arg("--json")
        .arg("--control")
        .arg(socket)
        .stdin(Stdio::null())
        .env_remove("RUST_LOG");
    let output = command.output().map_err(|e| No::Wrong(format!("{}: {e}", program.display())))?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let wrong = || No::Wrong(format!("{words:?}: {}, stdout {out:?}, stderr {err:?}", output.status));
    match output.status.code() {
        Some(0) if err.is_empty() => serde_json::from_str(&out).map_err(|_| wrong()),
        Some(1 | 2) if out.is_empty() && err.lines().count() == 1 => {
            let gone =
                ["cannot ask the server", "cannot read the server's answer", "no server at", "went away"];
            let message = err.trim_end().to_owned();
            Err(if gone.iter().any(|text| message.contains(text)) {
                No::Ended(message)
            } else {
                No::Refused { code: 0, errno: String::new(), message }
            })
        }
        _ => Err(wrong()),
    }
}
