//! Tests of frontends and drivers that violate the protocol.

use std::io::{Read, Write};
use std::os::fd::AsFd;

use zerocopy::IntoBytes;

use super::*;

/// A descriptor: address, length and flags.
type Entry = (u64, u32, u16);

#[test]
fn broken_chain_ends_queue() {
    let (_dir, export) = export(ram());
    let (next, write) = (descriptor::NEXT, descriptor::WRITE);
    let header = (GUEST + HEADERS, 16, next);
    let status = (GUEST + HEADERS + 0x100, 1, write);
    let chains: [(&str, Vec<Entry>); 9] = [
        ("no status", vec![(GUEST + HEADERS, 16, 0)]),
        ("no header", vec![status]),
        ("a short header", vec![(GUEST + HEADERS, 15, next), status]),
        ("a header outside", vec![(0, 16, next), status]),
        ("a status outside", vec![header, (u64::MAX, 1, write)]),
        ("an order", vec![header, (GUEST + DATA, 512, write | next), (GUEST + DATA, 512, 0)]),
        ("a table of no bytes", vec![(GUEST + TABLE, 0, descriptor::INDIRECT)]),
        ("a table outside", vec![(0, 32, descriptor::INDIRECT)]),
        ("a table with another behind", vec![(GUEST + TABLE, 32, descriptor::INDIRECT | next), status]),
    ];
    for (what, chain) in chains {
        let mut client = Client::connect(&export);
        client.set_up(0);
        client.header(request::FLUSH, 0);
        client.descriptors(DESC, &chain);
        client.offer(0);
        assert!(Client::is_readable(&client.err), "{what}");
    }
    for what in ["a circle", "a head outside", "too much available"] {
        let mut client = Client::connect(&export);
        client.set_up(0);
        match what {
            "a circle" => {
                let circle =
                    Descriptor { addr: GUEST.into(), len: 1.into(), flags: next.into(), next: 0.into() };
                client.put(DESC, circle.as_bytes());
                client.offer(0);
            }
            "a head outside" => client.offer(SIZE),
            _ => {
                client.next = SIZE;
                client.offer(0);
            }
        }
        assert!(Client::is_readable(&client.err), "{what}");
        assert!(client.state(message::SET_VRING_ENABLE, 0, 1), "the connection lives");
    }
    assert_served(&export);
}

#[test]
fn invalid_message_ends_only_its_connection() {
    let (_dir, export) = export(ram());
    let header = |request, flags, size| Header { request, flags, size };
    for header in [header(1, 0, 0), header(1, 1, u32::MAX), header(u32::MAX, 1, 4)] {
        let mut client = Client::connect(&export);
        client.front.socket.write_all(header.as_bytes()).unwrap();
        let _ = client.front.socket.write_all(&[0; 4]);
        let mut rest = Vec::new();
        // The client sees a close with unread bytes as a reset or an end of file.
        let _ = client.front.socket.read_to_end(&mut rest);
        assert!(rest.is_empty(), "{rest:?}");
    }
    // Every message number, without a body and with a zeroed one.
    for request in 0..48 {
        for size in [0, 8, 40] {
            let client = Client::connect(&export);
            client.send(request, NEED_REPLY, &vec![0; size], &[]);
        }
    }
    assert_served(&export);
}

#[test]
fn truncated_memory_ends_connection() {
    let (_dir, export) = export(ram());
    let mut client = Client::connect(&export);
    client.set_up(0);
    assert_eq!(client.request(request::IN, 0, 512, false), (status::OK, 513));
    client.memory.truncate(0);
    rustix::io::write(&client.kick, &1_u64.to_ne_bytes()).unwrap();
    let mut rest = Vec::new();
    assert!(matches!(client.front.socket.read_to_end(&mut rest), Ok(0)), "the connection ends");
    assert_served(&export);
}

#[test]
fn truncated_memory_ends_idle_connection() {
    let (_dir, export) = export(ram());
    let mut client = Client::connect(&export);
    client.set_up(0);
    // The queue is asleep when its memory is truncated.
    std::thread::sleep(Duration::from_millis(50));
    client.memory.truncate(0);
    rustix::io::write(&client.kick, &1_u64.to_ne_bytes()).unwrap();
    let mut rest = Vec::new();
    assert!(matches!(client.front.socket.read_to_end(&mut rest), Ok(0)), "the connection ends");
    assert_served(&export);
}

#[test]
fn region_beyond_its_file_is_refused() {
    let (_dir, export) = export(ram());
    let mut client = Client::connect(&export);
    client.send(message::SET_PROTOCOL_FEATURES, 0, &protocol::REPLY_ACK.to_ne_bytes(), &[]);
    let memory = Arc::clone(&client.memory);
    let with = |change: fn(&mut MemRegion)| {
        let mut single = region();
        change(&mut single.region);
        single
    };
    for wrong in [
        with(|region| region.size += 1),
        with(|region| region.size = 0),
        with(|region| region.size = u64::MAX),
        with(|region| region.guest = u64::MAX),
        with(|region| region.offset = u64::MAX - 4096),
        with(|region| region.offset = 4096),
    ] {
        assert!(!client.ask(message::ADD_MEM_REG, wrong.as_bytes(), &[memory.fd()]), "{wrong:?}");
    }
    let socket = client.front.socket.try_clone().unwrap();
    assert!(!client.ask(message::ADD_MEM_REG, region().as_bytes(), &[socket.as_fd()]), "no file");
    assert!(!client.ask(message::ADD_MEM_REG, region().as_bytes(), &[]), "none at all");
    assert!(client.ask(message::ADD_MEM_REG, region().as_bytes(), &[memory.fd()]));
}
