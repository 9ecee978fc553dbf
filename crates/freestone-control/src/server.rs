//! The server of the control socket: one thread per connection, with a limit on connections.
//!
//! A verb runs on the thread of its connection, so a slow verb or a hanging disk delays only its
//! own client.

use std::io::{self, BufRead, BufReader, BufWriter, Read as _, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Once};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result};
use freestone_core::client_log;
use freestone_core::descriptor_reserve::DescriptorReserve;
use rustix::io::Errno;
use serde_json::Value;
use serde_json::value::RawValue;
use tracing::debug;

use super::caller::Caller;
use super::connections::{ACCEPT_PAUSE, Connections, Slot};
use super::protocol::{self, Call, MAX_LINE_BYTES, Message, Response, RpcError};
use super::socket::PrivateSocket;

/// Maximum number of connections served at once. Further clients wait until a connection ends.
const MAX_CONNECTIONS: usize = 2048;
/// Maximum number of connections served at once at the read-only socket. The limit is smaller, to
/// leave memory for the verbs of the control socket.
const MAX_READ_ONLY_CONNECTIONS: usize = 128;
/// Longest wait for a client to read its response. Then the client is disconnected.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait for running verbs when the server stops.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Implementation of the methods that requests name.
pub trait Handler: Send + Sync + 'static {
    /// Runs one method. Returns serialized JSON, because a tree of values would need many times the
    /// memory.
    fn call(&self, method: &str, params: Option<Value>) -> Result<Box<RawValue>, RpcError>;
}

/// A running control server. Dropping it stops the server and removes the socket.
pub struct ControlServer {
    socket: Arc<PrivateSocket>,
    connections: Arc<Connections>,
    acceptor: Option<JoinHandle<()>>,
    stopped: Once,
}

impl ControlServer {
    /// Starts serving at the socket, including clients that have connected already.
    pub fn start(socket: PrivateSocket, handler: Arc<dyn Handler>) -> Result<Self> {
        Self::start_for(MAX_CONNECTIONS, socket, handler)
    }

    /// Starts serving at the read-only socket, with its smaller limit of connections.
    pub fn start_read_only(socket: PrivateSocket, handler: Arc<dyn Handler>) -> Result<Self> {
        Self::start_for(MAX_READ_ONLY_CONNECTIONS, socket, handler)
    }

    fn start_for(limit: usize, socket: PrivateSocket, handler: Arc<dyn Handler>) -> Result<Self> {
        let socket = Arc::new(socket);
        let connections = Connections::new(limit);
        let spare = start_spare().context("cannot start the spare thread of the control socket")?;
        let acceptor = thread::Builder::new()
            .name("control".into())
            .spawn({
                let (socket, connections) = (Arc::clone(&socket), Arc::clone(&connections));
                move || accept_all(&socket, &connections, &handler, &spare)
            })
            .context("cannot start the thread of the control socket")?;
        Ok(Self { socket, connections, acceptor: Some(acceptor), stopped: Once::new() })
    }

    /// Stops accepting connections, and waits for running verbs for a bounded time.
    pub fn stop(&self) {
        self.stopped.call_once(|| {
            self.connections.close(self.socket.listener());
            self.connections.wait_empty(STOP_GRACE);
        });
    }

    /// Stops like [`stop`](Self::stop), for a successor: the socket stays at its path, and clients that connect later
    /// wait there for the successor. Returns the socket.
    ///
    /// # Errors
    /// No descriptor is left. The server has stopped all the same.
    pub fn pass_on(&self) -> io::Result<OwnedFd> {
        let socket = self.socket.listener().try_clone();
        self.stopped.call_once(|| {
            self.connections.close_for_successor();
            // Wakes the thread that accepts connections, which takes one more. A full backlog wakes it as well.
            drop(self.socket.path().connect());
            self.connections.wait_empty(STOP_GRACE);
        });
        socket.map(OwnedFd::from)
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        self.socket.path().path()
    }

    /// Removes the socket's path without waiting for verbs.
    pub fn remove_path(&self) {
        self.socket.path().remove();
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        self.stop();
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn accept_all(
    socket: &PrivateSocket,
    connections: &Arc<Connections>,
    handler: &Arc<dyn Handler>,
    spare: &SyncSender<Client>,
) {
    let accept = || match socket.listener().accept()? {
        (stream, _) if DescriptorReserve::CONTROL.includes(&stream) => Err(Errno::MFILE.into()),
        (stream, _) => Ok(stream),
    };
    let start = |stream| start_connection(stream, connections, handler, spare);
    connections.accept_all(accept, start, |error| {
        client_log!(warn, "control: cannot accept a connection: {error}");
        connections.close_idle();
    });
}

/// A connection, with the slot and the handler for its thread.
#[derive(Clone)]
struct Client {
    // The handler is dropped before the slot: once all slots are free, no connection keeps the
    // devices alive, and the server can drop them.
    handler: Arc<dyn Handler>,
    stream: Arc<UnixStream>,
    slot: Arc<Slot>,
}

impl Client {
    fn serve(self) {
        Caller::enter(&self.stream);
        if let Err(e) = serve(&self.stream, &self.slot, self.handler.as_ref()) {
            debug!("control: a connection ended: {e}");
        }
        Caller::leave();
    }
}

/// Starts a spare thread that serves connections when the system starts no more threads. So verbs
/// such as `shutdown` still work.
fn start_spare() -> io::Result<SyncSender<Client>> {
    // With capacity 0, a connection can be sent only while the thread is idle.
    let (sender, clients) = mpsc::sync_channel::<Client>(0);
    thread::Builder::new().name("control-spare".into()).spawn(move || {
        for client in clients {
            client.serve();
        }
    })?;
    Ok(sender)
}

/// Waits for a slot and a thread for the connection, and starts serving it. Later clients wait in
/// the socket's backlog.
fn start_connection(
    stream: UnixStream,
    connections: &Arc<Connections>,
    handler: &Arc<dyn Handler>,
    spare: &SyncSender<Client>,
) {
    let stream = Arc::new(stream);
    let Some(slot) = connections.add(Arc::clone(&stream) as _, true) else { return };
    let client = Client { handler: Arc::clone(handler), stream, slot: Arc::new(slot) };
    loop {
        let own = client.clone();
        let started = thread::Builder::new().name("control-client".into()).spawn(move || own.serve());
        match started {
            Ok(_) => return,
            Err(_) if connections.is_closing() => return,
            Err(_) if spare.try_send(client.clone()).is_ok() => return,
            Err(e) => {
                client_log!(warn, "control: cannot start a thread for a connection: {e}");
                connections.close_idle();
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// Serves requests line by line until the client disconnects.
fn serve(stream: &UnixStream, slot: &Slot, handler: &dyn Handler) -> io::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let mut reader = BufReader::new(stream);
    let mut writer = BufWriter::new(stream);
    let mut line = Vec::new();
    let run = &mut |call| respond(call, slot, handler);
    loop {
        match read_line(&mut reader, &mut line)? {
            LineRead::End => return Ok(()),
            LineRead::TooLong => {
                let fault = RpcError::invalid_request(format!("a line holds at most {MAX_LINE_BYTES} bytes"));
                answer(&mut writer, Call::broken(fault), run)?;
            }
            LineRead::Complete if line.trim_ascii().is_empty() => {}
            LineRead::Complete => answer_line(&mut writer, &line, run)?,
        }
        writer.flush()?;
    }
}

enum LineRead {
    Complete,
    TooLong,
    End,
}

/// Reads one line into `line`, up to [`MAX_LINE_BYTES`]. The rest of a longer line is skipped.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<LineRead> {
    line.clear();
    let limit = MAX_LINE_BYTES as u64 + 1;
    if reader.by_ref().take(limit).read_until(b'\n', line)? == 0 {
        return Ok(LineRead::End);
    }
    if line.last() == Some(&b'\n') || line.len() <= MAX_LINE_BYTES {
        return Ok(LineRead::Complete);
    }
    reader.skip_until(b'\n')?;
    Ok(LineRead::TooLong)
}

/// Function that runs a call and returns the response, or `None` for a notification.
type RunCall<'a> = &'a mut dyn FnMut(Call) -> io::Result<Option<Response>>;

/// Runs the requests of one line and writes the responses.
fn answer_line(writer: &mut impl Write, line: &[u8], run: RunCall<'_>) -> io::Result<()> {
    freestone_core::trail::arrive!();
    match protocol::parse(line) {
        Message::Single(call) => answer(writer, call, run),
        Message::Batch(calls) => answer_batch(writer, calls, run),
    }
}

/// Function that runs one method and returns its result as JSON.
type RunMethod<'a> = &'a dyn Fn(&str, Option<Value>) -> Result<Box<RawValue>, RpcError>;

/// Returns the response to a JSON request line that did not arrive on a connection, for fuzzing.
pub fn answer_to(line: &[u8], handle: RunMethod<'_>) -> Vec<u8> {
    let mut response = Vec::new();
    let run = &mut |call| Ok(outcome(call, handle));
    answer_line(&mut response, line, run).expect("a write to memory cannot fail");
    response
}

fn answer(writer: &mut impl Write, call: Call, run: RunCall<'_>) -> io::Result<()> {
    if let Some(response) = run(call)? {
        serde_json::to_writer(&mut *writer, &response)?;
        writer.write_all(b"\n")?;
    }
    Ok(())
}

/// Runs a batch. Each response is written at once, so that memory never holds all of them.
fn answer_batch(writer: &mut impl Write, calls: Vec<Call>, run: RunCall<'_>) -> io::Result<()> {
    let mut begun = false;
    for call in calls {
        if let Some(response) = run(call)? {
            writer.write_all(if begun { b"," } else { b"[" })?;
            serde_json::to_writer(&mut *writer, &response)?;
            begun = true;
        }
    }
    // A batch of notifications has no response.
    if begun { writer.write_all(b"]\n") } else { Ok(()) }
}

/// Runs a call of a connection and returns the response.
///
/// # Errors
/// Fails without running the call if the connection is being closed.
fn respond(call: Call, slot: &Slot, handler: &dyn Handler) -> io::Result<Option<Response>> {
    let Some(_running) = slot.begin_verb() else { return Err(io::ErrorKind::ConnectionAborted.into()) };
    Ok(outcome(call, &|method, params| handler.call(method, params)))
}

fn outcome(call: Call, handle: RunMethod<'_>) -> Option<Response> {
    let outcome = call.request.and_then(|(method, params)| {
        debug!(method, "control request");
        // A panic in one verb must not end the server and its devices.
        catch_unwind(AssertUnwindSafe(|| handle(&method, params))).unwrap_or_else(|_| {
            Err(RpcError::internal(format!("{method}: failed inside the server; see its log")))
        })
    });
    call.id.map(|id| Response::new(id, outcome))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::sync::{Arc, Condvar, Mutex};

    use freestone_nbd::Access;
    use serde_json::value::{RawValue, to_raw_value};
    use serde_json::{Value, json};

    use super::{ControlServer, Handler, PrivateSocket, RpcError};

    struct Echo;
    impl Handler for Echo {
        fn call(&self, method: &str, params: Option<Value>) -> Result<Box<RawValue>, RpcError> {
            assert_ne!(method, "panic");
            Ok(to_raw_value(&json!([method, params])).unwrap())
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
        (
            ControlServer::start(PrivateSocket::bind(&path, &Access::default()).unwrap(), Arc::new(Echo))
                .unwrap(),
            path,
        )
    }

    #[test]
    fn verb_panic_returns_internal_error() {
        let dir = tempfile::tempdir().unwrap();
        let (_server, path) = start(dir.path());
        let stream = UnixStream::connect(path).unwrap();
        let reply = ask(&stream, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"panic\"}\n");
        assert_eq!(reply["error"]["code"], -32603);
        let reply = ask(&stream, "{\"jsonrpc\":\"2.0\",\"id\":2,\"method\":\"x\"}\n");
        assert_eq!(reply, json!({"jsonrpc": "2.0", "result": ["x", null], "id": 2}));
    }

    #[test]
    fn notification_gets_no_response() {
        let dir = tempfile::tempdir().unwrap();
        let (_server, path) = start(dir.path());
        let stream = UnixStream::connect(path).unwrap();
        let notification = "{\"jsonrpc\":\"2.0\",\"method\":\"x\"}";
        let request = "{\"jsonrpc\":\"2.0\",\"id\":3,\"method\":\"y\"}";
        let text = format!("{notification}\n[{notification},{notification}]\n[{notification},{request}]\n");
        assert_eq!(ask(&stream, &text), json!([{"jsonrpc": "2.0", "result": ["y", null], "id": 3}]));
    }

    /// A handler whose method `wait` blocks until a test sets the flag in `running`.
    #[derive(Default)]
    struct BlockingHandler {
        running: Mutex<(usize, bool)>,
        changed: Condvar,
    }
    impl Handler for BlockingHandler {
        fn call(&self, method: &str, _: Option<Value>) -> Result<Box<RawValue>, RpcError> {
            let mut running = self.running.lock().unwrap();
            running.0 += 1;
            self.changed.notify_all();
            drop(self.changed.wait_while(running, |running| !running.1 && method == "wait").unwrap());
            Ok(to_raw_value(method).unwrap())
        }
    }

    const WAIT: &str = "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"wait\"}\n";
    const GO: &str = "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"go\"}\n";

    #[test]
    fn client_beyond_the_limit_waits_for_a_slot() {
        let dir = tempfile::tempdir().unwrap();
        let (path, held) = (dir.path().join("c"), Arc::new(BlockingHandler::default()));
        let socket = PrivateSocket::bind(&path, &Access::default()).unwrap();
        let server = ControlServer::start_for(2, socket, Arc::clone(&held) as _).unwrap();
        std::thread::scope(|scope| {
            let waiting: Vec<_> =
                (0..2).map(|_| scope.spawn(|| ask(&UnixStream::connect(&path).unwrap(), WAIT))).collect();
            let running = held.running.lock().unwrap();
            drop(held.changed.wait_while(running, |running| running.0 < 2).unwrap());
            let third = scope.spawn(|| ask(&UnixStream::connect(&path).unwrap(), GO));
            held.running.lock().unwrap().1 = true;
            held.changed.notify_all();
            for client in waiting {
                assert_eq!(client.join().unwrap()["result"], "wait");
            }
            assert_eq!(third.join().unwrap()["result"], "go");
        });
        drop(server);
        assert!(!path.exists());
    }

    #[test]
    fn dropped_server_releases_its_handler() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        for _ in 0..50 {
            let handler = Arc::new(Echo);
            let server = ControlServer::start(
                PrivateSocket::bind(&path, &Access::default()).unwrap(),
                Arc::clone(&handler) as _,
            );
            let streams: Vec<_> = (0..16).map(|_| UnixStream::connect(&path).unwrap()).collect();
            for stream in &streams {
                assert_eq!(ask(stream, GO)["result"], json!(["go", null]));
            }
            drop(server.unwrap());
            assert_eq!(Arc::strong_count(&handler), 1);
        }
    }

    #[test]
    fn idle_and_unread_connections_are_closed_for_new_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        let socket = PrivateSocket::bind(&path, &Access::default()).unwrap();
        let _server = ControlServer::start_for(3, socket, Arc::new(Echo)).unwrap();
        let idle = UnixStream::connect(&path).unwrap();
        let partial = UnixStream::connect(&path).unwrap();
        (&partial).write_all(b"{\"jsonrpc\":").unwrap();
        let unread = UnixStream::connect(&path).unwrap();
        unread.set_nonblocking(true).unwrap();
        let long = format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"{}\"}}\n", "x".repeat(1 << 19));
        // Fills both sockets with requests and unread responses.
        while (&unread).write(long.as_bytes()).is_ok() {}
        let others: Vec<_> = (0..3).map(|_| UnixStream::connect(&path).unwrap()).collect();
        for stream in &others {
            assert_eq!(ask(stream, GO)["result"], json!(["go", null]));
        }
        // The first three connections were closed.
        for mut stream in [&idle, &partial] {
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        }
        assert_eq!((&unread).write(b"\n").unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    }
}
