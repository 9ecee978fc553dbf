//! Tests of the order of overlapping requests, the use of connections, and the in-flight limit.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use freestone_core::device::{Blocking as _, Flags, Request};
use freestone_nbd_client::Nbd;
use freestone_nbd_proto::{chunk, command};

use crate::fake::{ClientRequest, DEFAULT_EXPORT, ExportSpec, Fake, Peer, PeerResult};
use crate::harness::{begin, eventually, wait_result};

/// Time that a server waits before it concludes that no request arrives.
const WAIT: Duration = Duration::from_millis(200);
/// In-flight limit of one connection, in requests.
const IN_FLIGHT: usize = 32;
/// The transmission flag `CAN_MULTI_CONN`.
const SEVERAL: u16 = 1 << 8;

/// Returns true if no request arrives within [`WAIT`].
fn is_silent(peer: &mut Peer) -> bool {
    peer.0.set_read_timeout(Some(WAIT)).unwrap();
    let came = peer.request();
    peer.0.set_read_timeout(None).unwrap();
    came.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

fn done(peer: &mut Peer, request: &ClientRequest) -> PeerResult<()> {
    if request.command == command::READ {
        return peer.data(request.cookie, true, request.offset, &vec![1; request.len as usize]);
    }
    peer.chunk(request.cookie, chunk::NONE, true, &[])
}

#[test]
fn overlapping_requests_wait_for_write() {
    let fake = Fake::new(|_, peer| {
        peer.welcome(DEFAULT_EXPORT)?;
        let write = peer.request()?;
        let elsewhere = peer.request()?;
        assert_eq!((write.command, write.offset, elsewhere.offset), (1, 4096, 65536));
        done(peer, &elsewhere)?;
        assert!(is_silent(peer));
        done(peer, &write)?;
        // The server receives both reads, but not yet the second write, which overlaps them.
        let (first, second) = (peer.request()?, peer.request()?);
        assert_eq!((first.command, second.command), (0, 0));
        assert!(is_silent(peer));
        done(peer, &second)?;
        done(peer, &first)?;
        let last = peer.request()?;
        assert_eq!(last.command, 1);
        done(peer, &last)
    });
    let mut config = fake.config();
    config.timeout = Duration::from_secs(20);
    let device = Nbd::open(&config).unwrap();
    let data = [1; 8192];
    let all = [
        begin(&device, Request::write(4096, 8192), &data),
        begin(&device, Request::read(4096, 512), &[]),
        begin(&device, Request::read(8192, 8192), &[]),
        begin(&device, Request::write(0, 8704), &[1; 8704]),
        begin(&device, Request::read(65536, 512), &[]),
    ];
    for told in all {
        wait_result(&told).unwrap();
    }
    assert_eq!(fake.connections(), 1);
}

#[test]
fn requests_beyond_in_flight_limit_wait_in_order() {
    let fake = Fake::new(|_, peer| {
        peer.welcome(DEFAULT_EXPORT)?;
        let all: Vec<_> = (0..IN_FLIGHT).map(|_| peer.request()).collect::<PeerResult<_>>()?;
        assert!(all.iter().map(|request| request.offset).eq((0..IN_FLIGHT as u64).map(|n| n * 512)));
        assert!(is_silent(peer));
        done(peer, &all[7])?;
        let next = peer.request()?;
        assert_eq!(next.offset, IN_FLIGHT as u64 * 512);
        assert!(is_silent(peer));
        for request in all.iter().filter(|request| request.cookie != all[7].cookie).chain([&next]) {
            done(peer, request)?;
        }
        loop {
            let request = peer.request()?;
            done(peer, &request)?;
        }
    });
    let mut config = fake.config();
    config.timeout = Duration::from_secs(20);
    let device = Nbd::open(&config).unwrap();
    let all: Vec<_> = (0..200).map(|n| begin(&device, Request::read(n * 512, 512), &[])).collect();
    for told in all {
        wait_result(&told).unwrap();
    }
    assert_eq!(fake.connections(), 1);
}

#[test]
fn several_connections_need_multi_conn() {
    for (flags, connections) in [(0, 1), (SEVERAL, 3), (2, 3)] {
        let told = ExportSpec { flags: DEFAULT_EXPORT.flags | flags, ..DEFAULT_EXPORT };
        let used = Arc::new(Mutex::new(HashSet::new()));
        let fake = Fake::new({
            let used = Arc::clone(&used);
            move |number, peer| {
                peer.welcome(told)?;
                loop {
                    let request = peer.request()?;
                    used.lock().unwrap().insert(number);
                    // The delay is long enough for another request to use another connection.
                    std::thread::sleep(Duration::from_millis(5));
                    done(peer, &request)?;
                }
            }
        });
        let mut config = fake.config();
        config.connections = 3;
        let device = Nbd::open(&config).unwrap();
        eventually("all are open", || device.connections() == connections);
        let all: Vec<_> = (0..30).map(|n| begin(&device, Request::read(n * 512, 512), &[])).collect();
        for told in all {
            wait_result(&told).unwrap();
        }
        assert_eq!(fake.connections(), connections);
        assert_eq!(used.lock().unwrap().len(), connections, "each has its part");
    }
}

#[test]
fn requests_respect_maximum_payload() {
    let told = ExportSpec { blocks: Some((512, 4096, 64 << 10)), ..DEFAULT_EXPORT };
    let fake = Fake::serving(told, |peer, request| {
        assert!(request.len <= 64 << 10 || request.data.is_empty());
        done(peer, request)
    });
    let device = Nbd::open(&fake.config()).unwrap();
    let mut data = vec![0; 1 << 20];
    device.write_at(0, &data, Flags::FUA).unwrap();
    device.read_at(0, &mut data).unwrap();
    assert!(data.iter().all(|byte| *byte == 1));
    assert_eq!(fake.connections(), 1);
}
