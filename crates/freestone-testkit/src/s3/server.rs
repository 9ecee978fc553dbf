//! The connections of the S3 server, and the faults of requests.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufReader, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use super::Traffic;
use super::http::{self, Request};
use super::response::{Deviation, Response, respond};
use super::server_fault::{S3Request, ServerFault};
use super::storage::Storage;

type When = Box<dyn Fn(&S3Request) -> bool + Send + Sync>;

/// State shared by all connections. Each lock is held only briefly, and no two at the same time.
pub struct Shared {
    pub storage: Storage,
    pub faults: Mutex<Vec<(When, ServerFault)>>,
    pub traffic: Mutex<Traffic>,
    /// Number of requests by method and key since the start.
    counts: Mutex<BTreeMap<(String, String), u64>>,
    connections: Mutex<BTreeMap<u64, TcpStream>>,
    has_ended: Mutex<bool>,
    ended: Condvar,
}

pub fn start() -> (SocketAddr, Arc<Shared>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("no free port");
    let address = listener.local_addr().expect("a listener has an address");
    let shared = Arc::new(Shared {
        storage: Storage::default(),
        faults: Mutex::default(),
        traffic: Mutex::default(),
        counts: Mutex::default(),
        connections: Mutex::default(),
        has_ended: Mutex::new(false),
        ended: Condvar::new(),
    });
    let accepting = shared.clone();
    thread::spawn(move || {
        for (number, stream) in (0..).zip(listener.incoming()) {
            if *accepting.has_ended.lock().unwrap() {
                return;
            }
            let Ok(stream) = stream else { continue };
            let Ok(socket) = stream.try_clone() else { continue };
            accepting.connections.lock().unwrap().insert(number, socket);
            let shared = accepting.clone();
            thread::spawn(move || {
                shared.serve(&stream);
                shared.connections.lock().unwrap().remove(&number);
            });
        }
    });
    (address, shared)
}

impl Shared {
    pub fn cut(&self) {
        for stream in self.connections.lock().unwrap().values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    pub fn end(&self, address: SocketAddr) {
        *self.has_ended.lock().unwrap() = true;
        self.ended.notify_all();
        // Connect once, so that the accepting thread wakes up and ends.
        let _ = TcpStream::connect(address);
        self.cut();
    }

    /// Waits for `time`, or at most a day for `None`. Returns false if the server ends meanwhile.
    fn wait(&self, time: Option<Duration>) -> bool {
        let ended = self.has_ended.lock().unwrap();
        let time = time.unwrap_or(Duration::from_secs(86_400));
        !*self.ended.wait_timeout_while(ended, time, |ended| !*ended).unwrap().0
    }

    /// Serves the requests of a connection until the client closes it or an error occurs.
    fn serve(&self, stream: &TcpStream) {
        let _ = stream.set_nodelay(true);
        let mut reader = BufReader::with_capacity(256 << 10, stream);
        while let Ok(Some(request)) = http::read(&mut reader) {
            match self.handle(stream, &request) {
                Ok(true) => {}
                Ok(false) => break,
                // Close the socket without a shutdown: after a shutdown, the close would not reset
                // the connection.
                Err(_) => return,
            }
        }
        let _ = stream.shutdown(Shutdown::Both);
    }

    /// Responds to a request. Returns true if the connection stays open for further requests.
    fn handle(&self, mut stream: &TcpStream, request: &Request) -> io::Result<bool> {
        let path = request.path.trim_start_matches('/');
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let counted = if key.is_empty() { format!("{bucket}/") } else { key.to_owned() };
        let counted = (request.method.clone(), counted);
        let nth = *self.counts.lock().unwrap().entry(counted.clone()).and_modify(|n| *n += 1).or_insert(1);
        {
            let mut traffic = self.traffic.lock().unwrap();
            traffic.received += request.bytes;
            *traffic.requests.entry(counted).or_default() += 1;
        }
        let asked = S3Request { method: &request.method, bucket, key, nth };
        let fault = {
            let faults = self.faults.lock().unwrap();
            faults.iter().find(|(when, _)| when(&asked)).map(|(_, fault)| fault.clone())
        };
        let mut deviation = Deviation::default();
        match &fault {
            Some(ServerFault::Status(status, code)) => {
                return self.write(stream, request, &Response::error(*status, code), None);
            }
            Some(ServerFault::Stall(time)) if !self.wait(*time) => return Ok(false),
            Some(ServerFault::ResetBefore) => return reset(stream),
            Some(ServerFault::NoRange) => deviation.ignores_range = true,
            Some(ServerFault::OtherPart(bytes)) => deviation.shift = *bytes,
            _ => {}
        }
        let response = respond(&self.storage, request, bucket, key, deviation);
        match &fault {
            Some(ServerFault::StatusAfter(status, code)) => {
                self.write(stream, request, &Response::error(*status, code), None)
            }
            Some(ServerFault::ResetAfter) => reset(stream),
            Some(ServerFault::Raw(bytes)) => {
                self.send(stream, bytes)?;
                Ok(false)
            }
            Some(ServerFault::Endless(head)) => {
                self.send(stream, head.as_bytes())?;
                let zeroes = vec![0; 64 << 10];
                while !*self.has_ended.lock().unwrap() {
                    stream.write_all(&zeroes)?;
                }
                Ok(false)
            }
            _ => self.write(stream, request, &response, fault.as_ref()),
        }
    }

    fn send(&self, mut stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
        self.traffic.lock().unwrap().sent += bytes.len() as u64;
        stream.write_all(bytes)
    }

    /// Sends a response, with the faults that affect its header or body. Returns true if the
    /// connection stays open.
    fn write(
        &self,
        stream: &TcpStream,
        request: &Request,
        response: &Response,
        fault: Option<&ServerFault>,
    ) -> io::Result<bool> {
        let mut body = &response.body[response.part.clone()];
        let announced = match fault {
            Some(ServerFault::Length(more)) => body.len() as i64 + more,
            _ => body.len() as i64,
        };
        let mut head = format!("HTTP/1.1 {} Answer\r\nContent-Length: {announced}\r\n", response.status);
        for (name, value) in &response.headers {
            // Writing to a string cannot fail.
            let _ = write!(head, "{name}: {value}\r\n");
        }
        head += "\r\n";
        self.send(stream, head.as_bytes())?;
        if request.method == "HEAD" {
            return Ok(true);
        }
        let flipped;
        match fault {
            Some(ServerFault::Cut(bytes)) => {
                self.send(stream, &body[..body.len().min(*bytes)])?;
                return Ok(false);
            }
            Some(ServerFault::Flip(byte)) if *byte < body.len() => {
                let mut copy = body.to_vec();
                copy[*byte] ^= 1;
                flipped = copy;
                body = &flipped;
            }
            Some(ServerFault::StallInBody(bytes, time)) => {
                let (now, then) = body.split_at(body.len().min(*bytes));
                self.send(stream, now)?;
                if !self.wait(*time) {
                    return Ok(false);
                }
                body = then;
            }
            _ => {}
        }
        self.send(stream, body)?;
        Ok(!matches!(fault, Some(ServerFault::Length(_))))
    }
}

/// Makes the close of a connection send a TCP reset. Always returns an error, which ends the
/// connection.
fn reset(stream: &TcpStream) -> io::Result<bool> {
    rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO))?;
    Err(io::ErrorKind::ConnectionReset.into())
}
