//! A TCP proxy that adds latency and limits bandwidth.
//!
//! Each connection has two threads per direction. One reads available data, up to 64 KiB at once,
//! and computes its arrival time; the other sleeps until then and forwards the data.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::http_requests::RequestFinder;

/// Largest read in bytes.
const MAX_PIECE_BYTES: usize = 64 << 10;
/// Queued pieces per connection and direction: 16 MiB, one second at 128 Mbit/s.
const MAX_QUEUED_PIECES: usize = 256;

/// A proxy in front of a server. Dropping it closes its connections.
pub struct Latency {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    one_way: Duration,
    /// Bandwidth per direction, shared by all connections; `None` is unlimited.
    bytes_per_second: Option<u64>,
    /// Direction to the server, and from the server.
    lines: [Direction; 2],
    /// Counts by method and path; locked only briefly.
    requests: Mutex<BTreeMap<(String, String), u64>>,
    /// Both sockets of each connection, by its number.
    connections: Mutex<BTreeMap<u64, [TcpStream; 2]>>,
    has_ended: AtomicBool,
}

struct Direction {
    /// Time when all data accepted so far has been sent; locked only briefly.
    free: Mutex<Instant>,
    bytes: AtomicU64,
}

impl Latency {
    /// Starts a proxy to `target` with a round-trip time, and a bandwidth in bits per second for
    /// each direction.
    pub fn start(target: SocketAddr, round_trip: Duration, bits_per_second: Option<u64>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("no free port");
        let address = listener.local_addr().expect("a listener has an address");
        let line = || Direction { free: Mutex::new(Instant::now()), bytes: AtomicU64::new(0) };
        let shared = Arc::new(Shared {
            one_way: round_trip / 2,
            bytes_per_second: bits_per_second.map(|bits| (bits / 8).max(1)),
            lines: [line(), line()],
            requests: Mutex::default(),
            connections: Mutex::default(),
            has_ended: AtomicBool::new(false),
        });
        let acceptor = shared.clone();
        thread::spawn(move || {
            for (number, near) in (0..).zip(listener.incoming().flatten()) {
                if acceptor.has_ended.load(SeqCst) {
                    return;
                }
                let shared = acceptor.clone();
                thread::spawn(move || {
                    shared.connect(number, &near, target);
                    let _ = near.shutdown(Shutdown::Both);
                    shared.connections.lock().unwrap().remove(&number);
                });
            }
        });
        Self { address, shared }
    }

    /// Returns the address for clients.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the HTTP URL for clients.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the HTTP requests to the server by method and path, without queries. Counting stops
    /// on a connection that carries something other than HTTP.
    pub fn requests(&self) -> BTreeMap<(String, String), u64> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// Returns the bytes sent to the server, and received from it.
    pub fn bytes(&self) -> (u64, u64) {
        let [to, from] = &self.shared.lines;
        (to.bytes.load(SeqCst), from.bytes.load(SeqCst))
    }
}

impl Drop for Latency {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, SeqCst);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
        for stream in self.shared.connections.lock().unwrap().values().flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

type Piece = (Instant, Vec<u8>);

impl Shared {
    fn connect(&self, number: u64, near: &TcpStream, target: SocketAddr) {
        // Connecting to the nearby server takes no time, so the handshake's round trip delays the
        // first bytes.
        let Ok(far) = TcpStream::connect(target) else { return };
        let opened = Instant::now() + 2 * self.one_way;
        let (Ok(near_socket), Ok(far_socket)) = (near.try_clone(), far.try_clone()) else { return };
        self.connections.lock().unwrap().insert(number, [near_socket, far_socket]);
        if self.has_ended.load(SeqCst) {
            return;
        }
        for stream in [near, &far] {
            let _ = stream.set_nodelay(true);
        }
        thread::scope(|scope| {
            for (line, from, to) in [(0, near, &far), (1, &far, near)] {
                let (sender, receiver) = sync_channel(MAX_QUEUED_PIECES);
                let mut finder = (line == 0).then(RequestFinder::default);
                let mut count_request = move |bytes: &[u8]| {
                    if let Some(finder) = &mut finder {
                        finder.feed(bytes, &mut |method, target| self.count_request(method, target));
                    }
                };
                scope.spawn(move || self.read(&self.lines[line], from, &sender, opened, &mut count_request));
                scope.spawn(move || write(to, &receiver));
            }
        });
    }

    fn count_request(&self, method: &str, target: &str) {
        let path = target.split('?').next().unwrap_or_default();
        let request = (method.to_owned(), path.to_owned());
        *self.requests.lock().unwrap().entry(request).or_default() += 1;
    }

    /// Reads data and computes its arrival time.
    fn read(
        &self,
        line: &Direction,
        mut from: &TcpStream,
        sender: &SyncSender<Piece>,
        opened: Instant,
        count_request: &mut dyn FnMut(&[u8]),
    ) {
        let mut buffer = vec![0; MAX_PIECE_BYTES];
        while let Ok(bytes @ 1..) = from.read(&mut buffer) {
            line.bytes.fetch_add(bytes as u64, SeqCst);
            count_request(&buffer[..bytes]);
            let begins = Instant::now().max(opened);
            let sent = match self.bytes_per_second {
                None => begins,
                Some(rate) => {
                    let mut free = line.free.lock().unwrap();
                    let takes = Duration::from_nanos(bytes as u64 * 1_000_000_000 / rate);
                    *free = (*free).max(begins) + takes;
                    *free
                }
            };
            if sender.send((sent + self.one_way, buffer[..bytes].to_vec())).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Read);
    }
}

fn write(mut to: &TcpStream, receiver: &Receiver<Piece>) {
    for (arrives, bytes) in receiver {
        thread::sleep(arrives.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                thread::spawn(move || std::io::copy(&mut &stream, &mut &stream));
            }
        });
        address
    }

    #[test]
    fn round_trip_takes_configured_time() {
        let line = Latency::start(echo(), Duration::from_millis(40), None);
        let since = Instant::now();
        let mut stream = TcpStream::connect(line.address()).unwrap();
        for round in 1..=3 {
            stream.write_all(b"ping").unwrap();
            stream.read_exact(&mut [0; 4]).unwrap();
            // Plus one round trip for the connection.
            assert!(since.elapsed() >= Duration::from_millis(40 * (round + 1)), "{:?}", since.elapsed());
        }
        assert!(since.elapsed() < Duration::from_secs(5));
        assert_eq!(line.bytes(), (12, 12));
        drop(line);
        assert_eq!(stream.read(&mut [0; 4]).unwrap_or(0), 0);
    }

    #[test]
    fn connections_share_bandwidth() {
        // 4 MB there and back, 2 MB per connection, at 8 MB/s: half a second.
        let line = Latency::start(echo(), Duration::ZERO, Some(64_000_000));
        let since = Instant::now();
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut stream = TcpStream::connect(line.address()).unwrap();
                    let mut back = stream.try_clone().unwrap();
                    let reader = thread::spawn(move || back.read_exact(&mut vec![0; 2_000_000]));
                    stream.write_all(&vec![7; 2_000_000]).unwrap();
                    reader.join().unwrap().unwrap();
                });
            }
        });
        let took = since.elapsed();
        assert!(took >= Duration::from_millis(480) && took < Duration::from_secs(10), "{took:?}");
        assert_eq!(line.bytes(), (4_000_000, 4_000_000));
    }
}
