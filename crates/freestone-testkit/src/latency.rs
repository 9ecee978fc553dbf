//! A line to a server that takes time.
//!
//! Each connection has two threads for each direction. One reads what is there, up to 64 KiB at once, and
//! notes when it would arrive; the other waits for that moment and passes it on. Nothing polls.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::heads::Heads;

/// Read at once.
const PIECE_BYTES_MAX: usize = 64 << 10;
/// Pieces of a connection that are under way in one direction: 16 MiB are a second at 128 Mbit/s.
const PIECES_MAX: usize = 256;

/// A proxy in front of a server. It ends, and its connections with it, when it is dropped.
pub struct Latency {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    one_way: Duration,
    /// Of each direction, shared by all connections; without one it takes no time to send.
    bytes_per_second: Option<u64>,
    /// To the server, and from it.
    lines: [Line; 2],
    /// By method and path; held for a moment.
    requests: Mutex<BTreeMap<(String, String), u64>>,
    /// Both ends of each, by its number.
    connections: Mutex<BTreeMap<u64, [TcpStream; 2]>>,
    has_ended: AtomicBool,
}

/// One direction.
struct Line {
    /// When all has been sent that was begun; held for a moment.
    free: Mutex<Instant>,
    bytes: AtomicU64,
}

impl Latency {
    /// A line to `target` with that round trip, and that many bits a second in each direction.
    pub fn start(target: SocketAddr, round_trip: Duration, bits_per_second: Option<u64>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("no free port");
        let address = listener.local_addr().expect("a listener has an address");
        let line = || Line { free: Mutex::new(Instant::now()), bytes: AtomicU64::new(0) };
        let shared = Arc::new(Shared {
            one_way: round_trip / 2,
            bytes_per_second: bits_per_second.map(|bits| (bits / 8).max(1)),
            lines: [line(), line()],
            requests: Mutex::default(),
            connections: Mutex::default(),
            has_ended: AtomicBool::new(false),
        });
        let accepting = shared.clone();
        thread::spawn(move || {
            for (number, near) in (0..).zip(listener.incoming().flatten()) {
                if accepting.has_ended.load(SeqCst) {
                    return;
                }
                let shared = accepting.clone();
                thread::spawn(move || {
                    shared.connect(number, &near, target);
                    let _ = near.shutdown(Shutdown::Both);
                    shared.connections.lock().unwrap().remove(&number);
                });
            }
        });
        Self { address, shared }
    }

    /// Where its clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its URL, for a server that speaks HTTP.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The requests of HTTP that went to the server, by method and path, without queries. A connection on
    /// which something else is sent has none from there on.
    pub fn requests(&self) -> BTreeMap<(String, String), u64> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// Bytes that went to the server, and that came from it.
    pub fn bytes(&self) -> (u64, u64) {
        let [to, from] = &self.shared.lines;
        (to.bytes.load(SeqCst), from.bytes.load(SeqCst))
    }
}

impl Drop for Latency {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, SeqCst);
        // Wakes who accepts.
        let _ = TcpStream::connect(self.address);
        for stream in self.shared.connections.lock().unwrap().values().flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

type Piece = (Instant, Vec<u8>);

impl Shared {
    fn connect(&self, number: u64, near: &TcpStream, target: SocketAddr) {
        // The server is near: what a connection takes to come about is added to its first bytes.
        let Ok(far) = TcpStream::connect(target) else { return };
        let opened = Instant::now() + 2 * self.one_way;
        let (Ok(kept_near), Ok(kept_far)) = (near.try_clone(), far.try_clone()) else { return };
        self.connections.lock().unwrap().insert(number, [kept_near, kept_far]);
        if self.has_ended.load(SeqCst) {
            return;
        }
        for stream in [near, &far] {
            let _ = stream.set_nodelay(true);
        }
        thread::scope(|scope| {
            for (line, from, to) in [(0, near, &far), (1, &far, near)] {
                let (sender, receiver) = sync_channel(PIECES_MAX);
                let mut heads = (line == 0).then(Heads::default);
                let mut note = move |bytes: &[u8]| {
                    if let Some(heads) = &mut heads {
                        heads.feed(bytes, &mut |method, target| self.note(method, target));
                    }
                };
                scope.spawn(move || self.read(&self.lines[line], from, &sender, opened, &mut note));
                scope.spawn(move || write(to, &receiver));
            }
        });
    }

    fn note(&self, method: &str, target: &str) {
        let path = target.split('?').next().unwrap_or_default();
        let request = (method.to_owned(), path.to_owned());
        *self.requests.lock().unwrap().entry(request).or_default() += 1;
    }

    /// Takes what comes, and says when it arrives.
    fn read(
        &self,
        line: &Line,
        mut from: &TcpStream,
        sender: &SyncSender<Piece>,
        opened: Instant,
        note: &mut dyn FnMut(&[u8]),
    ) {
        let mut buffer = vec![0; PIECE_BYTES_MAX];
        while let Ok(bytes @ 1..) = from.read(&mut buffer) {
            line.bytes.fetch_add(bytes as u64, SeqCst);
            note(&buffer[..bytes]);
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

    /// Gives back what it gets.
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
    fn a_round_trip_takes_its_time() {
        let line = Latency::start(echo(), Duration::from_millis(40), None);
        let since = Instant::now();
        let mut stream = TcpStream::connect(line.address()).unwrap();
        for round in 1..=3 {
            stream.write_all(b"ping").unwrap();
            stream.read_exact(&mut [0; 4]).unwrap();
            // One more for the connection.
            assert!(since.elapsed() >= Duration::from_millis(40 * (round + 1)), "{:?}", since.elapsed());
        }
        assert!(since.elapsed() < Duration::from_secs(5));
        assert_eq!(line.bytes(), (12, 12));
        drop(line);
        assert_eq!(stream.read(&mut [0; 4]).unwrap_or(0), 0);
    }

    #[test]
    fn all_connections_share_the_line() {
        // 4 MB there and back, 2 MB a connection, at 8 MB/s: half a second.
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
