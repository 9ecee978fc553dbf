//! Stalled clients, hanging disks and long verbs must not delay others.

mod clients;
mod disks;
mod job_queue;
mod long_verbs;
mod progress_bars;

use std::io::{BufRead as _, BufReader};

use crate::harness::prelude::*;

/// Path of a server's control socket. Each request uses a connection of its own, so threads can
/// share the path.
#[derive(Clone)]
struct Control(PathBuf);

impl Control {
    fn of(serve: &Serve) -> Self {
        Self(serve.path("control"))
    }

    /// Sends one request on a new connection. Returns the result, or the error object of the reply.
    fn ask(&self, method: &str, params: &Value) -> Result<Value, Value> {
        let failed =
            |what: &str, e: &dyn std::fmt::Display| -> ! { panic!("{method} {params}: {what}: {e}") };
        let stream = UnixStream::connect(&self.0);
        let mut stream = stream.unwrap_or_else(|e| failed("connect", &e));
        stream.set_read_timeout(Some(ANSWER_MAX)).unwrap();
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        stream.write_all(format!("{request}\n").as_bytes()).unwrap_or_else(|e| failed("ask", &e));
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap_or_else(|e| failed("read", &e));
        let mut answer: Value = serde_json::from_str(&line).unwrap_or_else(|e| failed(&line, &e));
        match answer["result"].take() {
            Value::Null => Err(answer["error"].take()),
            result => Ok(result),
        }
    }

    #[track_caller]
    fn ok(&self, method: &str, params: &Value) -> Value {
        self.ask(method, params).unwrap_or_else(|error| panic!("{method} {params}: {error}"))
    }

    /// Runs verbs that must complete whatever other clients, disks and verbs do.
    fn check_responsive(&self) {
        self.ok("list", &json!({}));
        self.ok("stat", &json!({}));
    }

    /// Polls `stat` of a device until `done` returns true. Fails after a time limit, with the
    /// message `what`.
    #[track_caller]
    fn until(&self, what: &str, device: &str, done: impl Fn(&Value) -> bool) {
        wait_until(what, || done(&self.ok("stat", &json!({ "name": device }))));
    }
}
