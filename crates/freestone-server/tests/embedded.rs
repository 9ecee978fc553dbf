//! The example `embedded`: its server serves NBD and metrics, and keeps content over a shutdown.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use freestone::device::{Completion, Device as _, IoBuf, Op, Request};
use freestone_nbd_client::{Config, Nbd};
use freestone_server::{Server, ServerError};

#[path = "../examples/embedded.rs"]
#[expect(dead_code, reason = "the test has its own main function")]
mod embedded;

const PATIENCE: Duration = Duration::from_secs(60);
/// Offset and length of the written data, in bytes.
const OFFSET: u64 = 1 << 20;
const LEN: usize = 4096;

/// Runs a request on the device `ram0` over NBD. Returns the data that was read.
fn request(server: &Server, op: Op, data: &[u8]) -> Vec<u8> {
    let uris = server.uris("ram0");
    let [uri] = &uris[..] else { panic!("{uris:?}") };
    let nbd = Nbd::open(&Config::new(uri.parse().unwrap())).unwrap();
    let (sender, receiver) = mpsc::channel();
    let done = Completion::new(move |outcome, buffer| sender.send(outcome.map(|()| buffer)).unwrap());
    let buffer = if op == Op::Read { IoBuf::zeroed(LEN).unwrap() } else { IoBuf::copy_of(data).unwrap() };
    nbd.submit(Request::new(op, OFFSET, LEN as u64), buffer, done);
    receiver.recv_timeout(PATIENCE).unwrap().unwrap().to_vec()
}

/// Returns the text of the metrics.
fn metrics(server: &Server) -> String {
    let url = server.metrics_url().unwrap();
    let (host, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let mut stream = TcpStream::connect(host).unwrap();
    write!(stream, "GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn example_serves_and_keeps_content() {
    let dir = tempfile::tempdir().unwrap();
    let data = vec![7; LEN];
    let server = embedded::start(dir.path()).unwrap();
    request(&server, Op::Write, &data);
    let text = metrics(&server);
    assert!(text.starts_with("HTTP/1.1 200 ") && text.contains("ram0"), "{text}");
    let url = server.metrics_url().unwrap().to_owned();
    server.shutdown().unwrap();
    assert!(!dir.path().join("nbd.sock").exists());
    let host = url.strip_prefix("http://").unwrap().split('/').next().unwrap();
    assert!(TcpStream::connect(host).is_err());
    let server = embedded::start(dir.path()).unwrap();
    assert_eq!(request(&server, Op::Read, &[]), data);
    // Without `shutdown`, dropping the server saves as well.
    request(&server, Op::Write, &[8; LEN]);
    drop(server);
    let server = embedded::start(dir.path()).unwrap();
    assert_eq!(request(&server, Op::Read, &[]), [8; LEN]);
    server.shutdown().unwrap();
}

#[test]
fn invalid_settings_start_nothing() {
    let builder = || Server::builder().device("n=null,size=1M");
    let invalid = |builder: freestone_server::ServerBuilder, why: &str| match builder.start() {
        Err(ServerError::Invalid(message)) => assert!(message.contains(why), "{message}"),
        other => panic!("{other:?}"),
    };
    invalid(Server::builder().device("n=nul"), "nul");
    invalid(builder().device("n=null,size=2M"), "n: two devices of that name");
    invalid(Server::builder().device("f=fork,base=n"), "there is no such device before it");
    invalid(builder().nbd("unix:a").nbd("unix:a"), "given twice");
    invalid(builder().metrics("0.0.0.0:0"), "other machines can reach this address");
    invalid(builder().max_connections(0), "max_connections=0: must be a number from 1 to 65536");
    invalid(builder().max_memory_in_flight(1), "must be at least 64M");
    invalid(builder().save_every(Duration::from_secs(1)), "save_every: needs a state");
    invalid(builder().state("s").save_every(Duration::ZERO), "at least 1s");
    let dir = tempfile::tempdir().unwrap();
    let missing = format!("f=file,path={}/no", dir.path().display());
    let socket = dir.path().join("nbd.sock");
    let started = Server::builder().device(missing).nbd(format!("unix:{}", socket.display())).start();
    assert!(matches!(started, Err(ServerError::Start(_))), "{started:?}");
    assert!(!socket.exists());
}

#[test]
fn two_servers_run_and_a_client_requests_the_shutdown() {
    let dir = tempfile::tempdir().unwrap();
    let start = |name: &str| {
        let control = dir.path().join(name);
        let nbd = format!("unix:{}.nbd", control.display());
        (Server::builder().device("n=null,size=1M").nbd(nbd).control(&control).start().unwrap(), control)
    };
    let ((one, control), (other, _)) = (start("one"), start("other"));
    ask_shutdown(&control);
    one.wait_for_shutdown_request();
    one.shutdown().unwrap();
    assert!(!control.exists());
    assert_eq!(other.uris("n").len(), 1);
    other.shutdown().unwrap();
}

/// Calls the verb `shutdown` over a control socket.
fn ask_shutdown(control: &Path) {
    let mut stream = UnixStream::connect(control).unwrap();
    stream.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"shutdown\"}\n").unwrap();
    let mut reply = [0; 256];
    let len = stream.read(&mut reply).unwrap();
    assert!(String::from_utf8_lossy(&reply[..len]).contains("\"pid\""));
}
