//! Tests of the in-flight log: a killed server and a frontend that reconnects.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;

use zerocopy::IntoBytes;

use super::*;
use crate::wire::InflightArea;

impl Client {
    fn inflight(&mut self) -> (InflightArea, OwnedFd) {
        let (body, file) = self.front.inflight(1, SIZE).unwrap();
        (InflightArea::read_from_bytes(&body).unwrap(), file)
    }

    fn use_log(&mut self, area: InflightArea, file: &OwnedFd) {
        let protocols = self.number(message::GET_PROTOCOL_FEATURES);
        self.send(message::SET_PROTOCOL_FEATURES, 0, &protocols.to_ne_bytes(), &[]);
        assert!(self.ask(message::SET_INFLIGHT_FD, area.as_bytes(), &[file.as_fd()]));
    }

    /// Connects to another export with the same memory, like a frontend whose server was killed.
    fn reconnect(&self, export: &Export) -> Self {
        let mut next = Self::connect(export);
        next.memory = Arc::clone(&self.memory);
        (next.next, next.seen) = (self.next, u16::from_le_bytes(self.get(USED + 2)));
        next
    }

    /// Makes a separate chain available, which writes one block filled with `byte`.
    fn offer_write(&mut self, number: u16, sector: u64, byte: u8) {
        let n = u64::from(number);
        let (header, data, done) = (HEADERS + 32 * n, DATA + 512 * n, HEADERS + 0x800 + n);
        let write = BlkHeader { kind: request::OUT.into(), reserved: 0.into(), sector: sector.into() };
        self.put(header, write.as_bytes());
        self.put(data, &[byte; 512]);
        let head = number * 3;
        let chain = [
            (GUEST + header, 16, descriptor::NEXT, head + 1),
            (GUEST + data, 512, descriptor::NEXT, head + 2),
            (GUEST + done, 1, descriptor::WRITE, 0),
        ];
        for (i, (addr, len, flags, next)) in (0..).zip(chain) {
            let entry =
                Descriptor { addr: addr.into(), len: len.into(), flags: flags.into(), next: next.into() };
            self.put(DESC + 16 * (u64::from(head) + i), entry.as_bytes());
        }
        self.offer(head);
    }
}

/// Waits until `count` requests of queue 0 are in the in-flight log.
fn wait_until_logged(file: &OwnedFd, count: usize) -> bool {
    let file = File::from(file.try_clone().unwrap());
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut log = [0; 16 * (SIZE as usize + 1)];
        file.read_exact_at(&mut log, 0).unwrap();
        if log[16..].chunks(16).filter(|entry| entry[0] == 1).count() == count {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn next_server_repeats_requests_in_order() {
    let ram = ram();
    let (_dir, first) = export(stalled());
    let mut client = Client::connect(&first);
    let protocols = client.number(message::GET_PROTOCOL_FEATURES);
    assert_ne!(protocols & protocol::INFLIGHT_SHMFD, 0);
    let (area, file) = client.inflight();
    client.use_log(area, &file);
    client.set_up(0);
    // All writes go to one sector, whose content shows their order.
    for number in 0..4 {
        client.offer_write(number, 8, 10 + number as u8);
    }
    assert!(wait_until_logged(&file, 4), "all four writes have begun");
    assert_eq!(u16::from_le_bytes(client.get(USED + 2)), 0);
    // Like a killed server, the export publishes no completion.
    assert!(first.hold().disconnect());

    let (_dir, second) = export(ram.clone());
    let mut next = client.reconnect(&second);
    next.use_log(area, &file);
    // The frontend treats unpublished requests as not completed.
    next.set_up(0);
    for _ in 0..4 {
        next.answer();
    }
    next.offer_write(4, 9, 99);
    next.answer();
    assert_eq!(u16::from_le_bytes(next.get(USED + 2)), 5, "each request ran once");
    let mut blocks = [0; 1024];
    ram.try_io(&Request::read(8 * 512, 1024), Buffer::Read(&mut blocks)).unwrap();
    assert_eq!((blocks[0], blocks[512]), (13, 99), "the last write wins");
    for number in 0..5 {
        assert_eq!(next.get::<1>(HEADERS + 0x800 + number), [status::OK]);
    }
    // All requests have completed, so a third server finds none in the inflight area to execute again.
    drop(second);
    let (_dir, third) = export(ram);
    let mut last = next.reconnect(&third);
    last.send(message::SET_PROTOCOL_FEATURES, 0, &protocols.to_ne_bytes(), &[]);
    assert!(last.ask(message::SET_INFLIGHT_FD, &area.as_bytes()[..20], &[file.as_fd()]));
    last.set_up(0);
    last.offer_write(0, 10, 1);
    last.answer();
    assert_eq!(u16::from_le_bytes(last.get(USED + 2)), 6);
}

/// A killed server may have published completions without a notification. QEMU sets the driver's eventfd again after
/// it has enabled a queue.
#[test]
fn next_server_announces_published_completions() {
    let (_dir, first) = export(ram());
    let mut client = Client::connect(&first);
    let (area, file) = client.inflight();
    client.use_log(area, &file);
    client.set_up(0);
    assert_eq!(client.request(request::OUT, 0, 512, false), (status::OK, 1));
    let (_dir, second) = export(ram());
    let mut next = client.reconnect(&second);
    next.use_log(area, &file);
    next.set_up(0);
    let call = event();
    assert!(next.ask(message::SET_VRING_CALL, &0_u64.to_ne_bytes(), &[call.as_fd()]));
    assert!(Client::is_readable(&call));
    assert_eq!(u16::from_le_bytes(next.get(USED + 2)), 1, "nothing is executed again");
}

#[test]
fn invalid_or_truncated_inflight_log_is_handled() {
    let (_dir, export) = export(ram());
    let mut client = Client::connect(&export);
    let protocols = client.number(message::GET_PROTOCOL_FEATURES);
    client.send(message::SET_PROTOCOL_FEATURES, 0, &protocols.to_ne_bytes(), &[]);
    let (area, file) = client.inflight();
    for wrong in [
        InflightArea { queues: 2, ..area },
        InflightArea { size: 1024, ..area },
        InflightArea { size: 0, ..area },
        InflightArea { offset: u64::MAX - 8, ..area },
        InflightArea { offset: 8, ..area },
    ] {
        assert!(!client.ask(message::SET_INFLIGHT_FD, wrong.as_bytes(), &[file.as_fd()]), "{wrong:?}");
    }
    assert!(!client.ask(message::SET_INFLIGHT_FD, area.as_bytes(), &[]), "no file");
    assert!(!client.ask(message::GET_INFLIGHT_FD, &[0; 24], &[]), "no queues");
    let own = GuestMemory::new(area.bytes).unwrap();
    assert!(client.ask(message::SET_INFLIGHT_FD, area.as_bytes(), &[own.fd()]));
    client.set_up(0);
    assert_eq!(client.request(request::IN, 0, 512, false), (status::OK, 513));
    own.truncate(0);
    client.offer_write(0, 0, 1);
    let mut rest = Vec::new();
    assert!(matches!(client.front.socket.read_to_end(&mut rest), Ok(0)), "the connection ends");
    assert_served(&export);
}
