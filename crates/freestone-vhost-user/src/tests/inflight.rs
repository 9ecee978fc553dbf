//! Servers that are killed, and frontends that come again.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;

use zerocopy::IntoBytes;

use super::*;
use crate::wire::InflightArea;

impl Client {
    /// Asks for memory in which it is noted what is in flight.
    fn inflight(&mut self) -> (InflightArea, OwnedFd) {
        let (body, file) = self.front.inflight(1, SIZE).unwrap();
        (InflightArea::read_from_bytes(&body).unwrap(), file)
    }

    /// Connects anew with the same memory, as a frontend does after its server was killed.
    fn again(&self, export: &Export) -> Self {
        let mut next = Self::connect(export);
        next.memory = Arc::clone(&self.memory);
        (next.next, next.seen) = (self.next, u16::from_le_bytes(self.get(USED + 2)));
        next
    }

    /// Makes a chain of its own available, which writes one block of this byte.
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

/// Waits until so many requests of queue 0 are noted as in flight.
fn until_noted(file: &OwnedFd, count: usize) -> bool {
    let file = File::from(file.try_clone().unwrap());
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut notes = [0; 16 * (SIZE as usize + 1)];
        file.read_exact_at(&mut notes, 0).unwrap();
        if notes[16..].chunks(16).filter(|entry| entry[0] == 1).count() == count {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_was_begun_is_done_again_by_the_next_server_in_its_order() {
    let ram = ram();
    let (_dir, first) = export(Arc::new(Never(ram.clone())));
    let mut client = Client::connect(&first);
    let protocols = client.number(message::GET_PROTOCOL_FEATURES);
    assert_ne!(protocols & protocol::INFLIGHT_SHMFD, 0);
    client.send(message::SET_PROTOCOL_FEATURES, 0, &protocols.to_ne_bytes(), &[]);
    let (area, file) = client.inflight();
    assert!(client.ask(message::SET_INFLIGHT_FD, area.as_bytes(), &[file.as_fd()]));
    client.set_up(0);
    // All to one place, so their order is seen.
    for number in 0..4 {
        client.offer_write(number, 8, 10 + number as u8);
    }
    assert!(until_noted(&file, 4), "they are begun");
    assert_eq!(u16::from_le_bytes(client.get(USED + 2)), 0);
    // As if it were killed: nothing is answered.
    assert!(first.hold().cut());

    let (_dir, second) = export(ram.clone());
    let mut next = client.again(&second);
    let protocols = next.number(message::GET_PROTOCOL_FEATURES);
    next.send(message::SET_PROTOCOL_FEATURES, 0, &protocols.to_ne_bytes(), &[]);
    assert!(next.ask(message::SET_INFLIGHT_FD, area.as_bytes(), &[file.as_fd()]));
    // The frontend takes nothing for done that was not answered.
    next.set_up(0);
    for _ in 0..4 {
        next.answer();
    }
    next.offer_write(4, 9, 99);
    next.answer();
    assert_eq!(u16::from_le_bytes(next.get(USED + 2)), 5, "each once");
    let mut blocks = [0; 1024];
    ram.try_io(&Request::read(8 * 512, 1024), Buffer::Read(&mut blocks)).unwrap();
    assert_eq!((blocks[0], blocks[512]), (13, 99), "the last one is the last one");
    for number in 0..5 {
        assert_eq!(next.get::<1>(HEADERS + 0x800 + number), [status::OK]);
    }
    // A third one has nothing to do again.
    drop(second);
    let (_dir, third) = export(ram);
    let mut last = next.again(&third);
    last.send(message::SET_PROTOCOL_FEATURES, 0, &protocols.to_ne_bytes(), &[]);
    assert!(last.ask(message::SET_INFLIGHT_FD, &area.as_bytes()[..20], &[file.as_fd()]));
    last.set_up(0);
    last.offer_write(0, 10, 1);
    last.answer();
    assert_eq!(u16::from_le_bytes(last.get(USED + 2)), 6);
}

#[test]
fn memory_for_it_that_is_wrong_is_refused_and_cut_off_ends_the_connection() {
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
    let own = Memory::new(area.bytes).unwrap();
    assert!(client.ask(message::SET_INFLIGHT_FD, area.as_bytes(), &[own.fd()]));
    client.set_up(0);
    assert_eq!(client.request(request::IN, 0, 512, false), (status::OK, 513));
    own.cut(0);
    client.offer_write(0, 0, 1);
    let mut rest = Vec::new();
    assert!(matches!(client.front.socket.read_to_end(&mut rest), Ok(0)), "the connection ends");
    works(&export);
}
