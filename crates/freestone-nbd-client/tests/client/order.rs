//! Which requests go together, over which connections, and how many.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use freestone_core::device::{Blocking as _, Flags, Request};
use freestone_nbd_client::Nbd;
use freestone_nbd_proto::{chunk, command};

use crate::fake::{Asked, Fake, Peer, TOLD, Talks, Told};
use crate::harness::{answer, begin, eventually};

/// How long a server waits for a request that must not come.
const WAIT: Duration = Duration::from_millis(200);
/// Requests on their way over one connection.
const IN_FLIGHT: usize = 32;
/// `CAN_MULTI_CONN`.
const SEVERAL: u16 = 1 << 8;

/// Nothing comes.
fn is_silent(peer: &mut Peer) -> bool {
    peer.0.set_read_timeout(Some(WAIT)).unwrap();
    let came = peer.asked();
    peer.0.set_read_timeout(None).unwrap();
    came.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

fn done(peer: &mut Peer, asked: &Asked) -> Talks<()> {
    if asked.command == command::READ {
        return peer.data(asked.cookie, true, asked.offset, &vec![1; asked.len as usize]);
    }
    peer.chunk(asked.cookie, chunk::NONE, true, &[])
}

#[test]
fn what_overlaps_a_write_is_asked_when_that_is_answered() {
    let fake = Fake::new(|_, peer| {
        peer.welcome(TOLD)?;
        let write = peer.asked()?;
        let elsewhere = peer.asked()?;
        assert_eq!((write.command, write.offset, elsewhere.offset), (1, 4096, 65536));
        done(peer, &elsewhere)?;
        assert!(is_silent(peer));
        done(peer, &write)?;
        // Both reads, and not the write that overlaps them.
        let (first, second) = (peer.asked()?, peer.asked()?);
        assert_eq!((first.command, second.command), (0, 0));
        assert!(is_silent(peer));
        done(peer, &second)?;
        done(peer, &first)?;
        let last = peer.asked()?;
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
        answer(&told).unwrap();
    }
    assert_eq!(fake.connections(), 1);
}

#[test]
fn more_than_a_connection_carries_waits_in_order() {
    let fake = Fake::new(|_, peer| {
        peer.welcome(TOLD)?;
        let all: Vec<_> = (0..IN_FLIGHT).map(|_| peer.asked()).collect::<Talks<_>>()?;
        assert!(all.iter().map(|asked| asked.offset).eq((0..IN_FLIGHT as u64).map(|n| n * 512)));
        assert!(is_silent(peer));
        done(peer, &all[7])?;
        let next = peer.asked()?;
        assert_eq!(next.offset, IN_FLIGHT as u64 * 512);
        assert!(is_silent(peer));
        for asked in all.iter().filter(|asked| asked.cookie != all[7].cookie).chain([&next]) {
            done(peer, asked)?;
        }
        loop {
            let asked = peer.asked()?;
            done(peer, &asked)?;
        }
    });
    let mut config = fake.config();
    config.timeout = Duration::from_secs(20);
    let device = Nbd::open(&config).unwrap();
    let all: Vec<_> = (0..200).map(|n| begin(&device, Request::read(n * 512, 512), &[])).collect();
    for told in all {
        answer(&told).unwrap();
    }
    assert_eq!(fake.connections(), 1);
}

#[test]
fn several_connections_only_where_the_server_says_so() {
    for (flags, connections) in [(0, 1), (SEVERAL, 3), (2, 3)] {
        let told = Told { flags: TOLD.flags | flags, ..TOLD };
        let used = Arc::new(Mutex::new(HashSet::new()));
        let fake = Fake::new({
            let used = Arc::clone(&used);
            move |number, peer| {
                peer.welcome(told)?;
                loop {
                    let asked = peer.asked()?;
                    used.lock().unwrap().insert(number);
                    // Long enough for another request to go elsewhere.
                    std::thread::sleep(Duration::from_millis(5));
                    done(peer, &asked)?;
                }
            }
        });
        let mut config = fake.config();
        config.connections = 3;
        let device = Nbd::open(&config).unwrap();
        eventually("all are open", || device.connections() == connections);
        let all: Vec<_> = (0..30).map(|n| begin(&device, Request::read(n * 512, 512), &[])).collect();
        for told in all {
            answer(&told).unwrap();
        }
        assert_eq!(fake.connections(), connections);
        assert_eq!(used.lock().unwrap().len(), connections, "each has its part");
    }
}

#[test]
fn no_request_is_larger_than_the_server_takes() {
    let told = Told { blocks: Some((512, 4096, 64 << 10)), ..TOLD };
    let fake = Fake::serving(told, |peer, asked| {
        assert!(asked.len <= 64 << 10 || asked.data.is_empty());
        done(peer, asked)
    });
    let device = Nbd::open(&fake.config()).unwrap();
    let mut data = vec![0; 1 << 20];
    device.write_at(0, &data, Flags::FUA).unwrap();
    device.read_at(0, &mut data).unwrap();
    assert!(data.iter().all(|byte| *byte == 1));
    assert_eq!(fake.connections(), 1);
}
