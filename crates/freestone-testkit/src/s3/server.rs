//! Connections, and what goes wrong with them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufReader, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use super::Traffic;
use super::answer::{Answer, Odd, answer};
use super::http::{self, Request};
use super::kept::Kept;
use super::trouble::{Asked, Trouble};

type When = Box<dyn Fn(&Asked) -> bool + Send + Sync>;

/// What all connections of a server share. Of the locks each is held for a moment, and none with another.
pub struct Shared {
    pub kept: Kept,
    pub troubles: Mutex<Vec<(When, Trouble)>>,
    pub traffic: Mutex<Traffic>,
    /// Requests by method and key since the start.
    counts: Mutex<BTreeMap<(String, String), u64>>,
    /// By their numbers.
    connections: Mutex<BTreeMap<u64, TcpStream>>,
    has_ended: Mutex<bool>,
    ended: Condvar,
}

/// Starts to listen at a free port.
pub fn start() -> (SocketAddr, Arc<Shared>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("no free port");
    let address = listener.local_addr().expect("a listener has an address");
    let shared = Arc::new(Shared {
        kept: Kept::default(),
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
            let Ok(kept) = stream.try_clone() else { continue };
            accepting.connections.lock().unwrap().insert(number, kept);
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
        // Wakes who accepts.
        let _ = TcpStream::connect(address);
        self.cut();
    }

    /// Waits for that time, or for ever; false where the server ends meanwhile.
    fn wait(&self, time: Option<Duration>) -> bool {
        let ended = self.has_ended.lock().unwrap();
        let time = time.unwrap_or(Duration::from_secs(86_400));
        !*self.ended.wait_timeout_while(ended, time, |ended| !*ended).unwrap().0
    }

    /// Until the client goes, or something is wrong.
    fn serve(&self, stream: &TcpStream) {
        let _ = stream.set_nodelay(true);
        let mut reader = BufReader::with_capacity(256 << 10, stream);
        while let Ok(Some(request)) = http::read(&mut reader) {
            match self.one(stream, &request) {
                Ok(true) => {}
                Ok(false) => break,
                // It is closed as it is: one that is to be reset would not be after a shutdown.
                Err(_) => return,
            }
        }
        let _ = stream.shutdown(Shutdown::Both);
    }

    /// Answers a request; tells whether the connection goes on.
    fn one(&self, mut stream: &TcpStream, request: &Request) -> io::Result<bool> {
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
        let mut odd = Odd::default();
        match &trouble {
            Some(Trouble::Status(status, code)) => {
                return self.write(stream, request, &Answer::error(*status, code), None);
            }
            Some(Trouble::Stall(time)) if !self.wait(*time) => return Ok(false),
            Some(Trouble::ResetBefore) => return reset(stream),
            Some(Trouble::NoRange) => odd.ignores_range = true,
            Some(Trouble::OtherPart(bytes)) => odd.moved = *bytes,
            _ => {}
        }
        let answer = answer(&self.kept, request, bucket, key, odd);
        match &trouble {
            Some(Trouble::StatusAfter(status, code)) => {
                self.write(stream, request, &Answer::error(*status, code), None)
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
            _ => self.write(stream, request, &answer, trouble.as_ref()),
        }
    }

    fn send(&self, mut stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
        self.traffic.lock().unwrap().sent += bytes.len() as u64;
        stream.write_all(bytes)
    }

    /// Writes an answer, with what is wrong with its body.
    fn write(
        &self,
        stream: &TcpStream,
        request: &Request,
        answer: &Answer,
        trouble: Option<&Trouble>,
    ) -> io::Result<bool> {
        let mut body = &answer.body[answer.part.clone()];
        let announced = match trouble {
            Some(Trouble::Length(more)) => body.len() as i64 + more,
            _ => body.len() as i64,
        };
        let mut head = format!("HTTP/1.1 {} Answer\r\nContent-Length: {announced}\r\n", answer.status);
        for (name, value) in &answer.headers {
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

/// Ends a connection so that the other side sees it as reset.
fn reset(stream: &TcpStream) -> io::Result<bool> {
    rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO))?;
    Err(io::ErrorKind::ConnectionReset.into())
}
