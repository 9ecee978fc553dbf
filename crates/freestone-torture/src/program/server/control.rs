//! Runs verbs, over the control socket or by the program's command line.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

#[derive(Debug, Clone)]
pub enum VerbError {
    Refused {
        code: i64,
        errno: String,
        message: String,
    },
    /// The server ended the connection; the string is the reason.
    Ended(String),
    /// The answer is not a valid JSON-RPC response; the string is the reason.
    Malformed(String),
}

/// Parses a JSON-RPC response, one line from a control socket, and returns the result of the verb.
pub fn answer(line: &str) -> Result<Value, VerbError> {
    let wrong =
        |why: &str| VerbError::Malformed(format!("{why}: {}", line.chars().take(400).collect::<String>()));
    let mut answer: Value = serde_json::from_str(line).map_err(|e| wrong(&e.to_string()))?;
    if answer["jsonrpc"] != "2.0" {
        return Err(wrong("no JSON-RPC"));
    }
    let error = answer["error"].take();
    if error.is_null() {
        return answer.get_mut("result").map(Value::take).ok_or_else(|| wrong("neither result nor error"));
    }
    match (error["code"].as_i64(), error["message"].as_str()) {
        (Some(code), Some(message)) => Err(VerbError::Refused {
            code,
            errno: error["data"]["errno"].as_str().unwrap_or_default().to_owned(),
            message: message.to_owned(),
        }),
        _ => Err(wrong("an error without code or message")),
    }
}

/// Runs one verb on a connection of its own, and returns the result.
pub fn ask(socket: &Path, method: &str, params: &Value) -> Result<Value, VerbError> {
    let ended = |e: std::io::Error| VerbError::Ended(e.to_string());
    let mut stream = UnixStream::connect(socket).map_err(ended)?;
    let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    stream.write_all(format!("{request}\n").as_bytes()).map_err(ended)?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).map_err(ended)?;
    if !line.ends_with('\n') {
        return Err(VerbError::Ended("no answer".into()));
    }
    answer(&line)
}

/// Runs a verb by the program's command line. A refusal must have exit status 1 or 2 and one line
/// of text.
pub fn ask_program(program: &Path, socket: &Path, words: &[String]) -> Result<Value, VerbError> {
    let mut command = Command::new(program);
    command
        .args(words)
        .arg("--json")
        .arg("--control")
        .arg(socket)
        .stdin(Stdio::null())
        .env_remove("RUST_LOG");
    let output = command.output().map_err(|e| VerbError::Malformed(format!("{}: {e}", program.display())))?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let wrong =
        || VerbError::Malformed(format!("{words:?}: {}, stdout {out:?}, stderr {err:?}", output.status));
    match output.status.code() {
        Some(0) if err.is_empty() => serde_json::from_str(&out).map_err(|_| wrong()),
        Some(1 | 2) if out.is_empty() && err.lines().count() == 1 => {
            let gone =
                ["cannot ask the server", "cannot read the server's answer", "no server at", "went away"];
            let message = err.trim_end().to_owned();
            Err(if gone.iter().any(|text| message.contains(text)) {
                VerbError::Ended(message)
            } else {
                VerbError::Refused { code: 0, errno: String::new(), message }
            })
        }
        _ => Err(wrong()),
    }
}
