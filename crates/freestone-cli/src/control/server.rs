//! The server's end of the control socket: a thread for each of a bounded number of connections.

use std::io::{self, BufRead, BufReader, BufWriter, Read as _, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::Value;
use tracing::{debug, warn};

use super::protocol::{self, Call, Fault, MAX_LINE_BYTES, Message, Response};
use super::socket::PrivateSocket;

/// Connections served at one time; one more is told so and closed.
const MAX_CONNECTIONS: usize = 64;
/// A client that does not read its answer for so long is cut off.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the end of the server waits for verbs that are running.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// Pause after an accept that failed (out of descriptors), so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What answers the requests.
pub trait Handler: Send + Sync + 'static {
    /// Runs one method.
    fn call(&self, method: &str, params: Option<Value>) -> Result<Value, Fault>;
}

/// A running control server. Dropping it stops it and removes its socket.
pub struct ControlServer {
    socket: Arc<PrivateSocket>,
    connections: Arc<Connections>,
    acceptor: Option<JoinHandle<()>>,
}

impl ControlServer {
    /// Serves at the socket; who connected before is served now.
    pub fn start(socket: PrivateSocket, handler: Arc<dyn Handler>) -> Result<Self> {
        let socket = Arc::new(socket);
        let connections = Arc::new(Connections::default());
        let acceptor = thread::Builder::new()
            .name("control".into())
            .spawn({
                let (socket, connections) = (Arc::clone(&socket), Arc::clone(&connections));
                move || accept_all(&socket, &connections, &handler)
            })
            .context("cannot start the thread of the control socket")?;
        Ok(Self { socket, connections, acceptor: Some(acceptor) })
    }

    /// Removes the socket's path and waits for nobody.
    pub fn remove_path(&self) {
        self.socket.path().remove();
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        self.connections.close();
        // Wakes accept(), which then fails.
        let _ = rustix::net::shutdown(self.socket.listener(), rustix::net::Shutdown::Both);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        self.connections.wait_empty(STOP_GRACE);
    }
}

/// The open connections. One lock, held for a few instructions.
#[derive(Default)]
struct Connections {
    state: Mutex<State>,
    one_ended: Condvar,
}

#[derive(Default)]
struct State {
    closing: bool,
    /// A number for each connection, and its socket for `close`.
    open: Vec<(u64, UnixStream)>,
    next: u64,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here can be half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_closing(&self) -> bool {
        self.lock().closing
    }

    /// Registers a connection; `None` where there is no room.
    fn add(self: &Arc<Self>, stream: &UnixStream) -> io::Result<Option<Registration>> {
        let clone = stream.try_clone()?;
        let mut state = self.lock();
        if state.closing || state.open.len() >= MAX_CONNECTIONS {
            return Ok(None);
        }
        let number = state.next;
        state.next += 1;
        state.open.push((number, clone));
        Ok(Some(Registration { connections: Arc::clone(self), number }))
    }

    /// No new connections, no new requests; what runs is finished and answered.
    fn close(&self) {
        let mut state = self.lock();
        state.closing = true;
        for (_, stream) in &state.open {
            let _ = stream.shutdown(Shutdown::Read);
        }
    }

    fn wait_empty(&self, grace: Duration) {
        let end = Instant::now() + grace;
        let mut state = self.lock();
        while !state.open.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.one_ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// A place among the connections, given back when dropped.
struct Registration {
    connections: Arc<Connections>,
    number: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.connections.lock().open.retain(|(number, _)| *number != self.number);
        self.connections.one_ended.notify_all();
    }
}

fn accept_all(socket: &PrivateSocket, connections: &Arc<Connections>, handler: &Arc<dyn Handler>) {
    loop {
        match socket.listener().accept() {
            _ if connections.is_closing() => return,
            Ok((stream, _)) => {
                if let Err(e) = start_connection(stream, connections, handler) {
                    warn!("control: cannot serve a connection: {e}");
                }
            }
            Err(e) => {
                warn!("control: cannot accept a connection: {e}");
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

fn start_connection(
    stream: UnixStream,
    connections: &Arc<Connections>,
    handler: &Arc<dyn Handler>,
) -> io::Result<()> {
    let Some(registration) = connections.add(&stream)? else {
        let full = Fault::invalid_request(format!("at most {MAX_CONNECTIONS} connections at one time"));
        // This thread accepts for everybody: the few bytes fit into the socket's buffer or are lost.
        stream.set_nonblocking(true)?;
        return answer(&mut &stream, Call::broken(full), handler.as_ref());
    };
    let handler = Arc::clone(handler);
    thread::Builder::new().name("control-client".into()).spawn(move || {
        let _registration = registration;
        if let Err(e) = serve(&stream, handler.as_ref()) {
            debug!("control: a connection ended: {e}");
        }
    })?;
    Ok(())
}

/// Answers line by line until the client is gone.
fn serve(stream: &UnixStream, handler: &dyn Handler) -> io::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let mut reader = BufReader::new(stream);
    let mut writer = BufWriter::new(stream);
    let mut line = Vec::new();
    loop {
        match read_line(&mut reader, &mut line)? {
            Line::End => return Ok(()),
            Line::TooLong => {
                let fault = Fault::invalid_request(format!("a line holds at most {MAX_LINE_BYTES} bytes"));
                answer(&mut writer, Call::broken(fault), handler)?;
            }
            Line::Whole if line.trim_ascii().is_empty() => {}
            Line::Whole => match protocol::parse(&line) {
                Message::Single(call) => answer(&mut writer, call, handler)?,
                Message::Batch(calls) => answer_batch(&mut writer, calls, handler)?,
            },
        }
        writer.flush()?;
    }
}

enum Line {
    Whole,
    TooLong,
    End,
}

/// Reads one line into `line`, which never grows beyond the limit; the rest of a longer one is skipped.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Line> {
    line.clear();
    let limit = MAX_LINE_BYTES as u64 + 1;
    if reader.by_ref().take(limit).read_until(b'\n', line)? == 0 {
        return Ok(Line::End);
    }
    if line.last() == Some(&b'\n') || line.len() <= MAX_LINE_BYTES {
        return Ok(Line::Whole);
    }
    reader.skip_until(b'\n')?;
    Ok(Line::TooLong)
}

fn answer(writer: &mut impl Write, call: Call, handler: &dyn Handler) -> io::Result<()> {
    if let Some(response) = respond(call, handler) {
        serde_json::to_writer(&mut *writer, &response)?;
        writer.write_all(b"\n")?;
    }
    Ok(())
}

/// Writes the answers one after the other as they come, so that no batch is held in memory.
fn answer_batch(writer: &mut impl Write, calls: Vec<Call>, handler: &dyn Handler) -> io::Result<()> {
    let mut begun = false;
    for call in calls {
        if let Some(response) = respond(call, handler) {
            writer.write_all(if begun { b"," } else { b"[" })?;
            serde_json::to_writer(&mut *writer, &response)?;
            begun = true;
        }
    }
    // A batch of notifications has no answer at all.
    if begun { writer.write_all(b"]\n") } else { Ok(()) }
}

fn respond(call: Call, handler: &dyn Handler) -> Option<Response> {
    let outcome = call.request.and_then(|(method, params)| {
        debug!(method, "control request");
        // A defect in one verb must not take the disks of everybody with it.
        catch_unwind(AssertUnwindSafe(|| handler.call(&method, params))).unwrap_or_else(|_| {
            Err(Fault::internal(format!("{method}: failed inside the server; see its log")))
        })
    });
    call.id.map(|id| Response::new(id, outcome))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::{ControlServer, Fault, Handler, MAX_CONNECTIONS, PrivateSocket};

    struct Echo;
    impl Handler for Echo {
        fn call(&self, method: &str, params: Option<Value>) -> Result<Value, Fault> {
            assert_ne!(method, "panic");
            Ok(json!([method, params]))
        }
    }

    fn ask(stream: &UnixStream, text: &str) -> Value {
        (&mut &*stream).write_all(text.as_bytes()).unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn start(dir: &Path) -> (ControlServer, std::path::PathBuf) {
        let path = dir.join("c");
        (ControlServer::start(PrivateSocket::bind(&path).unwrap(), Arc::new(Echo)).unwrap(), path)
    }

    #[test]
    fn a_panic_in_a_verb_is_an_answer() {
        let dir = tempfile::tempdir().unwrap();
        let (_server, path) = start(dir.path());
        let stream = UnixStream::connect(path).unwrap();
        let reply = ask(&stream, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"panic\"}\n");
        assert_eq!(reply["error"]["code"], -32603);
        let reply = ask(&stream, "{\"jsonrpc\":\"2.0\",\"id\":2,\"method\":\"x\"}\n");
        assert_eq!(reply, json!({"jsonrpc": "2.0", "result": ["x", null], "id": 2}));
    }

    #[test]
    fn notifications_are_not_answered() {
        let dir = tempfile::tempdir().unwrap();
        let (_server, path) = start(dir.path());
        let stream = UnixStream::connect(path).unwrap();
        let notification = "{\"jsonrpc\":\"2.0\",\"method\":\"x\"}";
        let request = "{\"jsonrpc\":\"2.0\",\"id\":3,\"method\":\"y\"}";
        let text = format!("{notification}\n[{notification},{notification}]\n[{notification},{request}]\n");
        assert_eq!(ask(&stream, &text), json!([{"jsonrpc": "2.0", "result": ["y", null], "id": 3}]));
    }

    #[test]
    fn connections_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let (server, path) = start(dir.path());
        let open: Vec<_> = (0..MAX_CONNECTIONS).map(|_| UnixStream::connect(&path).unwrap()).collect();
        // All of them are registered once the last one was answered, because they are accepted in order.
        ask(&open[MAX_CONNECTIONS - 1], "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"x\"}\n");
        let mut line = String::new();
        BufReader::new(UnixStream::connect(&path).unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("at most 64 connections"), "{line}");
        drop(open);
        drop(server);
        assert!(!path.exists());
    }
}
