//! Connections of the server, and their faults.

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
use super::storage::Storage;
use super::trouble::{Asked, Trouble};

type When = Box<dyn Fn(&Asked) -> bool + Send + Sync>;

/// State shared by all connections. Each lock is held briefly, and never together with another.
pub struct Shared {
    pub storage: Storage,
    pub troubles: Mutex<Vec<(When, Trouble)>>,
    pub traffic: Mutex<Traffic>,
    /// Requests by method and key since the start.
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
        troubles: Mutex::default(),
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
        // Wakes the accepting thread.
        let _ = TcpStream::connect(address);
        self.cut();
    }

    /// Waits for `time`, or forever. Returns false if the server ends first.
    fn wait(&self, time: Option<Duration>) -> bool {
        let ended = self.has_ended.lock().unwrap();
        let time = time.unwrap_or(Duration::from_secs(86_400));
        !*self.ended.wait_timeout_while(ended, time, |ended| !*ended).unwrap().0
    }

    /// Serves a connection until the client closes it or an error occurs.
    fn serve(&self, stream: &TcpStream) {
        let _ = stream.set_nodelay(true);
        let mut reader = BufReader::with_capacity(256 << 10, stream);
        while let Ok(Some(request)) = http::read(&mut reader) {
            match self.handle(stream, &request) {
                Ok(true) => {}
                Ok(false) => break,
                // Closed without a shutdown, which would prevent a reset.
                Err(_) => return,
            }
        }
        let _ = stream.shutdown(Shutdown::Both);
    }

    /// Responds to a request. Returns true if the connection stays open.
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
        let asked = Asked { method: &request.method, bucket, key, nth };
        let trouble = {
            let troubles = self.troubles.lock().unwrap();
            troubles.iter().find(|(when, _)| when(&asked)).map(|(_, trouble)| trouble.clone())
        };
        let mut deviation = Deviation::default();
        match &trouble {
            Some(Trouble::Status(status, code)) => {
                return self.write(stream, request, &Response::error(*status, code), None);
            }
            Some(Trouble::Stall(time)) if !self.wait(*time) => return Ok(false),
            Some(Trouble::ResetBefore) => return reset(stream),
            Some(Trouble::NoRange) => deviation.ignores_range = true,
            Some(Trouble::OtherPart(bytes)) => deviation.shift = *bytes,
            _ => {}
        }
        let response = respond(&self.storage, request, bucket, key, deviation);
        match &trouble {
            Some(Trouble::StatusAfter(status, code)) => {
                self.write(stream, request, &Response::error(*status, code), None)
            }
            Some(Trouble::ResetAfter) => reset(stream),
            Some(Trouble::Raw(bytes)) => {
                self.send(stream, bytes)?;
                Ok(false)
            }
            Some(Trouble::Endless(head)) => {
                self.send(stream, head.as_bytes())?;
                let zeroes = vec![0; 64 << 10];
                while !*self.has_ended.lock().unwrap() {
                    stream.write_all(&zeroes)?;
                }
                Ok(false)
            }
            _ => self.write(stream, request, &response, trouble.as_ref()),
        }
    }

    fn send(&self, mut stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
        self.traffic.lock().unwrap().sent += bytes.len() as u64;
        stream.write_all(bytes)
    }

    /// Sends a response, with faults of its body.
    fn write(
        &self,
        stream: &TcpStream,
        request: &Request,
        response: &Response,
        trouble: Option<&Trouble>,
    ) -> io::Result<bool> {
        let mut body = &response.body[response.part.clone()];
        let announced = match trouble {
            Some(Trouble::Length(more)) => body.len() as i64 + more,
            _ => body.len() as i64,
        };
        let mut head = format!("HTTP/1.1 {} Answer\r\nContent-Length: {announced}\r\n", response.status);
        for (name, value) in &response.headers {
            // Writing to a string does not fail.
            let _ = write!(head, "{name}: {value}\r\n");
        }
        head += "\r\n";
        self.send(stream, head.as_bytes())?;
        if request.method == "HEAD" {
            return Ok(true);
        }
        let flipped;
        match trouble {
            Some(Trouble::Cut(bytes)) => {
                self.send(stream, &body[..body.len().min(*bytes)])?;
                return Ok(false);
            }
            Some(Trouble::Flip(byte)) if *byte < body.len() => {
                let mut copy = body.to_vec();
                copy[*byte] ^= 1;
                flipped = copy;
                body = &flipped;
            }
            Some(Trouble::StallInBody(bytes, time)) => {
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
        Ok(!matches!(trouble, Some(Trouble::Length(_))))
    }
}

/// Closes a connection with a TCP reset.
fn reset(stream: &TcpStream) -> io::Result<bool> {
    rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO))?;
    Err(io::ErrorKind::ConnectionReset.into())
}
