//! The server's end of the control socket: a thread for each of a bounded number of connections.
//!
//! A verb runs on the thread of its connection. So one that takes long, or whose disk hangs, holds
//! up nobody but its client.

use freestone_core::client_log;
use freestone_core::descriptor_reserve::Reserve;
use rustix::io::Errno;
use std::io::{self, BufRead, BufReader, BufWriter, Read as _, Write};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Once};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::Value;
use serde_json::value::RawValue;
use tracing::debug;

use super::caller::Caller;
use super::connections::{Connections, Place};
use super::protocol::{self, Call, Fault, MAX_LINE_BYTES, Message, Response};
use super::socket::PrivateSocket;

/// Connections served at one time; one more waits until there is room for it.
const MAX_CONNECTIONS: usize = 2048;
/// The same at the socket that is read-only: who looks takes no memory that verbs may need.
const MAX_READ_ONLY_CONNECTIONS: usize = 128;
/// A client that does not read its answer for so long is cut off.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the end of the server waits for verbs that are running.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// Pause after a connection could not be accepted or given a thread (out of descriptors or
/// threads), so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What answers the requests.
pub trait Handler: Send + Sync + 'static {
    /// Runs one method. The result is JSON already: a tree of it would take many times the memory.
    fn call(&self, method: &str, params: Option<Value>) -> Result<Box<RawValue>, Fault>;
}

/// A running control server. Dropping it stops it and removes its socket.
pub struct ControlServer {
    socket: Arc<PrivateSocket>,
    connections: Arc<Connections>,
    acceptor: Option<JoinHandle<()>>,
    stopped: Once,
}

impl ControlServer {
    /// Serves at the socket; who connected before is served now.
    pub fn start(socket: PrivateSocket, handler: Arc<dyn Handler>) -> Result<Self> {
        Self::start_for(MAX_CONNECTIONS, socket, handler)
    }

    /// The same for a socket at which others only look.
    pub fn start_read_only(socket: PrivateSocket, handler: Arc<dyn Handler>) -> Result<Self> {
        Self::start_for(MAX_READ_ONLY_CONNECTIONS, socket, handler)
    }

    fn start_for(places: usize, socket: PrivateSocket, handler: Arc<dyn Handler>) -> Result<Self> {
        let socket = Arc::new(socket);
        let connections = Connections::new(places);
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

    /// Lets nobody in any more, and waits for the verbs that are running, for a bounded time.
    pub fn stop(&self) {
        self.stopped.call_once(|| {
            self.connections.close();
            // Wakes accept(), which then fails.
            let _ = rustix::net::shutdown(self.socket.listener(), rustix::net::Shutdown::Both);
            self.connections.wait_empty(STOP_GRACE);
        });
    }

    /// Removes the socket's path and waits for nobody.
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
    loop {
        let accepted = match socket.listener().accept() {
            Ok((stream, _)) if Reserve::OF_VERBS.includes(&stream) => Err(Errno::MFILE.into()),
            accepted => accepted,
        };
        match accepted {
            _ if connections.is_closing() => return,
            Ok((stream, _)) => start_connection(stream, connections, handler, spare),
            Err(e) => {
                client_log!(warn, "control: cannot accept a connection: {e}");
                connections.make_room();
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// A connection that is about to be served.
#[derive(Clone)]
struct Client {
    // Dropped before the place: when all places are empty nobody holds devices, which end with the
    // server.
    handler: Arc<dyn Handler>,
    stream: Arc<UnixStream>,
    place: Arc<Place>,
}

impl Client {
    fn serve(self) {
        Caller::enter(&self.stream);
        if let Err(e) = serve(&self.stream, &self.place, self.handler.as_ref()) {
            debug!("control: a connection ended: {e}");
        }
        Caller::leave();
    }
}

/// Starts the thread for connections that get no thread of their own: verbs are answered, `shutdown`
/// among them, when the system starts no more threads.
fn start_spare() -> io::Result<SyncSender<Client>> {
    // Without room: a connection is taken only while the thread is idle.
    let (clients, coming) = mpsc::sync_channel::<Client>(0);
    thread::Builder::new().name("control-spare".into()).spawn(move || {
        for client in coming {
            client.serve();
        }
    })?;
    Ok(clients)
}

/// Waits for what the connection needs: who comes after it waits in the socket's queue.
fn start_connection(
    stream: UnixStream,
    connections: &Arc<Connections>,
    handler: &Arc<dyn Handler>,
    spare: &SyncSender<Client>,
) {
    let stream = Arc::new(stream);
    let Some(place) = connections.add(&stream) else { return };
    let client = Client { handler: Arc::clone(handler), stream, place: Arc::new(place) };
    loop {
        let own = client.clone();
        let started = thread::Builder::new().name("control-client".into()).spawn(move || own.serve());
        match started {
            Ok(_) => return,
            Err(_) if connections.is_closing() => return,
            Err(_) if spare.try_send(client.clone()).is_ok() => return,
            Err(e) => {
                client_log!(warn, "control: cannot start a thread for a connection: {e}");
                connections.make_room();
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// Answers line by line until the client is gone.
fn serve(stream: &UnixStream, place: &Place, handler: &dyn Handler) -> io::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let mut reader = BufReader::new(stream);
    let mut writer = BufWriter::new(stream);
    let mut line = Vec::new();
    let run = &mut |call| respond(call, place, handler);
    loop {
        match read_line(&mut reader, &mut line)? {
            Line::End => return Ok(()),
            Line::TooLong => {
                let fault = Fault::invalid_request(format!("a line holds at most {MAX_LINE_BYTES} bytes"));
                answer(&mut writer, Call::broken(fault), run)?;
            }
            Line::Whole if line.trim_ascii().is_empty() => {}
            Line::Whole => answer_line(&mut writer, &line, run)?,
        }
        writer.flush()?;
    }
}

enum Line {
    Whole,
    TooLong,
    End,
}

/// Reads one line into `line`, which never grows beyond the limit; the rest of a longer one is
/// skipped.
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

type Run<'a> = &'a mut dyn FnMut(Call) -> io::Result<Option<Response>>;

/// Answers one line.
fn answer_line(writer: &mut impl Write, line: &[u8], run: Run<'_>) -> io::Result<()> {
    match protocol::parse(line) {
        Message::Single(call) => answer(writer, call, run),
        Message::Batch(calls) => answer_batch(writer, calls, run),
    }
}

/// Runs one method.
type Handle<'a> = &'a dyn Fn(&str, Option<Value>) -> Result<Box<RawValue>, Fault>;

/// What a connection says to a line, without one.
pub fn answer_to(line: &[u8], handle: Handle<'_>) -> Vec<u8> {
    let mut said = Vec::new();
    let run = &mut |call| Ok(outcome(call, handle));
    answer_line(&mut said, line, run).expect("memory takes everything");
    said
}

fn answer(writer: &mut impl Write, call: Call, run: Run<'_>) -> io::Result<()> {
    if let Some(response) = run(call)? {
        serde_json::to_writer(&mut *writer, &response)?;
        writer.write_all(b"\n")?;
    }
    Ok(())
}

/// Writes the answers one after the other as they come, so that no batch is held in memory.
fn answer_batch(writer: &mut impl Write, calls: Vec<Call>, run: Run<'_>) -> io::Result<()> {
    let mut begun = false;
    for call in calls {
        if let Some(response) = run(call)? {
            writer.write_all(if begun { b"," } else { b"[" })?;
            serde_json::to_writer(&mut *writer, &response)?;
            begun = true;
        }
    }
    // A batch of notifications has no answer at all.
    if begun { writer.write_all(b"]\n") } else { Ok(()) }
}

/// Runs a call and answers it.
///
/// # Errors
/// The connection ends: the call was not run.
fn respond(call: Call, place: &Place, handler: &dyn Handler) -> io::Result<Option<Response>> {
    let Some(_running) = place.run() else { return Err(io::ErrorKind::ConnectionAborted.into()) };
    Ok(outcome(call, &|method, params| handler.call(method, params)))
}

fn outcome(call: Call, handle: Handle<'_>) -> Option<Response> {
    let outcome = call.request.and_then(|(method, params)| {
        debug!(method, "control request");
        // A defect in one verb must not take the disks of everybody with it.
        catch_unwind(AssertUnwindSafe(|| handle(&method, params))).unwrap_or_else(|_| {
            Err(Fault::internal(format!("{method}: failed inside the server; see its log")))
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

    use super::{ControlServer, Fault, Handler, PrivateSocket};

    struct Echo;
    impl Handler for Echo {
        fn call(&self, method: &str, params: Option<Value>) -> Result<Box<RawValue>, Fault> {
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

    /// Verbs that wait until they are let go.
    #[derive(Default)]
    struct Held {
        running: Mutex<(usize, bool)>,
        changed: Condvar,
    }
    impl Handler for Held {
        fn call(&self, method: &str, _: Option<Value>) -> Result<Box<RawValue>, Fault> {
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
    fn who_comes_beyond_the_bound_waits_for_who_runs() {
        let dir = tempfile::tempdir().unwrap();
        let (path, held) = (dir.path().join("c"), Arc::new(Held::default()));
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
            for one in waiting {
                assert_eq!(one.join().unwrap()["result"], "wait");
            }
            assert_eq!(third.join().unwrap()["result"], "go");
        });
        drop(server);
        assert!(!path.exists());
    }

    #[test]
    fn when_the_server_is_gone_nobody_holds_its_handler() {
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
    fn who_is_silent_or_does_not_read_holds_no_place_that_another_needs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        let socket = PrivateSocket::bind(&path, &Access::default()).unwrap();
        let _server = ControlServer::start_for(3, socket, Arc::new(Echo)).unwrap();
        let silent = UnixStream::connect(&path).unwrap();
        let half = UnixStream::connect(&path).unwrap();
        (&half).write_all(b"{\"jsonrpc\":").unwrap();
        let deaf = UnixStream::connect(&path).unwrap();
        deaf.set_nonblocking(true).unwrap();
        let long = format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"{}\"}}\n", "x".repeat(1 << 19));
        // Until neither the request nor its answer fits into the sockets any more.
        while (&deaf).write(long.as_bytes()).is_ok() {}
        let others: Vec<_> = (0..3).map(|_| UnixStream::connect(&path).unwrap()).collect();
        for stream in &others {
            assert_eq!(ask(stream, GO)["result"], json!(["go", null]));
        }
        // All three have ended.
        for mut stream in [&silent, &half] {
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        }
        assert_eq!((&deaf).write(b"\n").unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    }
}
