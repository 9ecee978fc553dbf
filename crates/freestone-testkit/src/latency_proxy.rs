//! A TCP proxy that adds latency and limits bandwidth.
//!
//! Each connection has two threads per direction. The first thread reads available data, up to 64
//! KiB at once, and computes the arrival time. The second thread sleeps until that time and
//! forwards the data.

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

/// Maximum number of bytes per read.
const MAX_PIECE_BYTES: usize = 64 << 10;
/// Maximum number of queued pieces per connection and direction: 16 MiB, which is one second at 128
/// Mbit/s.
const MAX_QUEUED_PIECES: usize = 256;

/// A TCP proxy in front of a server. Dropping it closes all its connections.
pub struct LatencyProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    one_way: Duration,
    /// Bandwidth of each direction in bytes per second, shared by all connections; `None` means
    /// unlimited.
    bytes_per_second: Option<u64>,
    /// State of the direction to the server, and of that from the server.
    lines: [Direction; 2],
    /// Number of requests by method and path. The lock is held only briefly.
    requests: Mutex<BTreeMap<(String, String), u64>>,
    /// The client's and the server's socket of each connection, by connection number.
    connections: Mutex<BTreeMap<u64, [TcpStream; 2]>>,
    has_ended: AtomicBool,
}

struct Direction {
    /// Time when the link has sent all data that it has accepted. The lock is held only briefly.
    free: Mutex<Instant>,
    bytes: AtomicU64,
}

impl LatencyProxy {
    /// Starts a proxy to `target`. `bits_per_second` is the bandwidth of each direction; `None`
    /// means unlimited.
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

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the HTTP URL to which clients connect.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the number of HTTP requests sent to the server, by method and path without query.
    /// Requests are no longer counted on a connection that carries something other than HTTP.
    pub fn requests(&self) -> BTreeMap<(String, String), u64> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// Returns the number of bytes sent to the server, and the number received from it.
    pub fn bytes(&self) -> (u64, u64) {
        let [to, from] = &self.shared.lines;
        (to.bytes.load(SeqCst), from.bytes.load(SeqCst))
    }
}

impl Drop for LatencyProxy {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, SeqCst);
        // Connect once, so that the accepting thread wakes up and ends.
        let _ = TcpStream::connect(self.address);
        for stream in self.shared.connections.lock().unwrap().values().flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

type Piece = (Instant, Vec<u8>);

impl Shared {
    fn connect(&self, number: u64, near: &TcpStream, target: SocketAddr) {
        // Connecting to the nearby server takes no time. To account for the handshake, delay the
        // first bytes by one round trip.
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

    /// Reads data from one side, computes when each piece arrives at the other, and queues the
    /// pieces.
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
        let line = LatencyProxy::start(echo(), Duration::from_millis(40), None);
        let since = Instant::now();
        let mut stream = TcpStream::connect(line.address()).unwrap();
        for round in 1..=3 {
            stream.write_all(b"ping").unwrap();
            stream.read_exact(&mut [0; 4]).unwrap();
            // Opening the connection takes one more round trip.
            assert!(since.elapsed() >= Duration::from_millis(40 * (round + 1)), "{:?}", since.elapsed());
        }
        assert!(since.elapsed() < Duration::from_secs(5));
        assert_eq!(line.bytes(), (12, 12));
        drop(line);
        assert_eq!(stream.read(&mut [0; 4]).unwrap_or(0), 0);
    }

    #[test]
    fn connections_share_bandwidth() {
        // The two connections send and receive 2 MB each. At 8 MB/s per direction, this takes half
        // a second.
        let line = LatencyProxy::start(echo(), Duration::ZERO, Some(64_000_000));
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
