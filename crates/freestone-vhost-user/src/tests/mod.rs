//! Tests with a frontend whose driver writes raw descriptors, including invalid ones.

mod features;
mod hostile;
mod inflight;
mod life;
mod zones;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::budget::{self, Budget};
use freestone_core::device::{Buffer, Device, Request};
use freestone_ram::ram::{Config, Ram};
use freestone_testkit::vhost_user::{self, Frontend, GuestMemory};
use freestone_testkit::{Manner, Model, TestDevice};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tempfile::TempDir;
use zerocopy::{FromBytes, IntoBytes};

use crate::wire::{
    BlkConfig, BlkHeader, BlkRange, ConfigPart, Descriptor, Header, MemRegion, NEED_REPLY, SingleRegion,
    VringAddr, VringState, descriptor, feature, message, protocol, request, status,
};
use crate::{Export, Options};

const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000;
const MEMORY_BYTES: u64 = 1 << 20;
const SIZE: u16 = 16;
const DESC: u64 = 0;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADERS: u64 = 0x3000;
const TABLE: u64 = 0x4000;
const DATA: u64 = 0x1_0000;
const PATIENCE: Duration = Duration::from_secs(20);

/// Returns a device over `inner` that completes each request later, on another thread.
fn delayed(inner: Arc<dyn Device>) -> Arc<dyn Device> {
    let device = TestDevice::over(inner).shaped(|geometry| geometry.volatile_cache = true);
    Arc::new(device.with_manner(Manner::Delayed(Duration::from_millis(20))))
}

/// Returns a device of its own that delays every completion.
fn stalled() -> Arc<dyn Device> {
    let device = TestDevice::over(Arc::new(Model::new(64 << 20, 512)));
    Arc::new(device.with_manner(Manner::Delayed(Duration::from_secs(1))))
}

fn ram() -> Arc<Ram> {
    Arc::new(Ram::new(Config { disksize: 64 << 20, ..Config::default() }).unwrap())
}

fn export(device: Arc<dyn Device>) -> (TempDir, Export) {
    let dir = tempfile::tempdir().unwrap();
    let export = Export::new(&dir.path().join("v"), "disk", device, options()).unwrap();
    (dir, export)
}

fn options() -> Options {
    Options::new(Budget::new(budget::DEFAULT_BYTES))
}

struct Client {
    front: Frontend,
    memory: Arc<GuestMemory>,
    kick: OwnedFd,
    call: OwnedFd,
    err: OwnedFd,
    next: u16,
    seen: u16,
}

fn event() -> OwnedFd {
    vhost_user::new_eventfd().unwrap()
}

fn region() -> SingleRegion {
    SingleRegion { padding: 0, region: MemRegion { guest: GUEST, size: MEMORY_BYTES, user: USER, offset: 0 } }
}

impl Client {
    fn connect(export: &Export) -> Self {
        let memory = Arc::new(GuestMemory::new(MEMORY_BYTES).unwrap());
        let front = Frontend::connect(export.path(), PATIENCE).unwrap();
        Self { front, memory, kick: event(), call: event(), err: event(), next: 0, seen: 0 }
    }

    fn send(&self, request: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        self.front.send(request, flags, body, fds).unwrap();
    }

    fn receive(&mut self, request: u32) -> Vec<u8> {
        self.front.receive_reply(request).unwrap().0
    }

    fn config(&mut self) -> BlkConfig {
        let part = ConfigPart { offset: 0, size: 96, flags: 0 };
        self.send(message::GET_CONFIG, 0, &[part.as_bytes(), &[0; 96]].concat(), &[]);
        BlkConfig::read_from_bytes(&self.receive(message::GET_CONFIG)[12..]).unwrap()
    }

    fn offer_flush(&mut self) {
        self.header(request::FLUSH, 0);
        let chain =
            [(GUEST + HEADERS, 16, descriptor::NEXT), (GUEST + HEADERS + 0x100, 1, descriptor::WRITE)];
        self.descriptors(DESC, &chain);
        self.offer(0);
    }

    fn number(&mut self, request: u32) -> u64 {
        self.front.number(request).unwrap()
    }

    /// Sends a message that requests an acknowledgement. Returns true if the server reports
    /// success.
    fn ask(&mut self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        self.front.send_checked(request, body, fds).unwrap()
    }

    fn state(&mut self, request: u32, index: u32, num: u32) -> bool {
        self.ask(request, VringState { index, num }.as_bytes(), &[])
    }

    /// Sets up a running queue, with all offered features except `without`.
    fn set_up(&mut self, without: u64) {
        let offered = self.number(message::GET_FEATURES);
        let features = (offered & !without).to_ne_bytes();
        self.send(message::SET_FEATURES, 0, &features, &[]);
        let protocols = self.number(message::GET_PROTOCOL_FEATURES);
        self.send(message::SET_PROTOCOL_FEATURES, 0, &protocols.to_ne_bytes(), &[]);
        assert!(self.ask(message::SET_FEATURES, &features, &[]), "a second time");
        let memory = Arc::clone(&self.memory);
        assert!(self.ask(message::ADD_MEM_REG, region().as_bytes(), &[memory.fd()]));
        self.start(0);
    }

    fn start(&mut self, base: u32) {
        assert!(self.state(message::SET_VRING_NUM, 0, SIZE.into()));
        assert!(self.state(message::SET_VRING_BASE, 0, base));
        let addr = VringAddr {
            index: 0,
            flags: 0,
            desc: USER + DESC,
            used: USER + USED,
            avail: USER + AVAIL,
            log: 0,
        };
        assert!(self.ask(message::SET_VRING_ADDR, addr.as_bytes(), &[]));
        for (what, fd) in [
            (message::SET_VRING_KICK, self.kick.try_clone().unwrap()),
            (message::SET_VRING_CALL, self.call.try_clone().unwrap()),
            (message::SET_VRING_ERR, self.err.try_clone().unwrap()),
        ] {
            assert!(self.ask(what, &0_u64.to_ne_bytes(), &[fd.as_fd()]));
        }
        assert!(self.state(message::SET_VRING_ENABLE, 0, 1));
        assert!(rustix::io::read(&self.call, &mut [0; 8]).is_ok(), "the driver is notified of the start");
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.put(at, bytes);
    }

    fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.get(at, &mut bytes);
        bytes
    }

    fn descriptors(&self, at: u64, chain: &[(u64, u32, u16)]) {
        for (i, (addr, len, flags)) in chain.iter().enumerate() {
            let next = if flags & descriptor::NEXT == 0 { 0 } else { i as u16 + 1 };
            let entry = Descriptor {
                addr: (*addr).into(),
                len: (*len).into(),
                flags: (*flags).into(),
                next: next.into(),
            };
            self.put(at + 16 * i as u64, entry.as_bytes());
        }
    }

    /// Makes the chain at descriptor `head` available.
    fn offer(&mut self, head: u16) {
        self.put(AVAIL + 4 + 2 * u64::from(self.next % SIZE), &head.to_le_bytes());
        self.next = self.next.wrapping_add(1);
        self.put(AVAIL + 2, &self.next.to_le_bytes());
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Waits for one completion, and returns the length in its used entry.
    fn answer(&mut self) -> u32 {
        let deadline = Instant::now() + PATIENCE;
        while u16::from_le_bytes(self.get(USED + 2)) == self.seen {
            assert!(Instant::now() < deadline, "no answer");
            std::thread::sleep(Duration::from_millis(1));
        }
        let at = USED + 4 + 8 * u64::from(self.seen % SIZE);
        self.seen = self.seen.wrapping_add(1);
        u32::from_le_bytes(self.get(at + 4))
    }

    fn header(&self, kind: u32, sector: u64) {
        let header = BlkHeader { kind: kind.into(), reserved: 0.into(), sector: sector.into() };
        self.put(HEADERS, header.as_bytes());
        self.put(HEADERS + 0x100, &[0xff]);
    }

    /// Runs a request with `len` bytes of data. Returns the status and the length in the used
    /// entry.
    fn request(&mut self, kind: u32, sector: u64, len: u32, indirect: bool) -> (u8, u32) {
        self.header(kind, sector);
        let to_us = matches!(kind, request::IN | request::GET_ID | request::ZONE_REPORT);
        let data_flags = if to_us { descriptor::WRITE } else { 0 } | descriptor::NEXT;
        let mut chain = vec![(GUEST + HEADERS, 16, descriptor::NEXT)];
        if len > 0 {
            chain.push((GUEST + DATA, len, data_flags));
        }
        chain.push((GUEST + HEADERS + 0x100, 1, descriptor::WRITE));
        if indirect {
            self.descriptors(TABLE, &chain);
            self.descriptors(DESC, &[(GUEST + TABLE, 16 * chain.len() as u32, descriptor::INDIRECT)]);
        } else {
            self.descriptors(DESC, &chain);
        }
        self.offer(0);
        let len = self.answer();
        let [status] = self.get(HEADERS + 0x100);
        (status, len)
    }

    fn is_readable(fd: impl AsFd) -> bool {
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        poll(&mut fds, Some(&patience)).unwrap() == 1
    }
}

/// Checks that a well-behaved frontend is served.
fn assert_served(export: &Export) {
    let mut client = Client::connect(export);
    client.set_up(0);
    client.put(DATA, &[7; 1024]);
    assert_eq!(client.request(request::OUT, 1, 1024, false), (status::OK, 1));
    client.put(DATA, &[0; 1024]);
    assert_eq!(client.request(request::IN, 1, 1024, true), (status::OK, 1025));
    assert_eq!(client.get::<1024>(DATA), [7; 1024]);
    assert!(Client::is_readable(&client.call), "the driver was notified");
}

#[test]
fn all_request_types_work() {
    for device in [ram() as Arc<dyn Device>, delayed(ram())] {
        let (_dir, export) = export(device);
        assert_served(&export);
        let mut client = Client::connect(&export);
        client.set_up(feature::EVENT_IDX);
        client.put(DATA, &[3; 8192]);
        assert_eq!(client.request(request::OUT, 0, 8192, true), (status::OK, 1));
        assert_eq!(client.request(request::FLUSH, 0, 0, false), (status::OK, 1));
        let range = BlkRange { sector: 8.into(), sectors: 8.into(), flags: 1.into() };
        client.put(DATA, range.as_bytes());
        assert_eq!(client.request(request::WRITE_ZEROES, 0, 16, false), (status::OK, 1));
        assert_eq!(client.request(request::DISCARD, 0, 16, false), (status::UNSUPP, 1), "its flags");
        assert_eq!(client.request(request::IN, 0, 8192, false), (status::OK, 8193));
        assert_eq!(client.get::<4096>(DATA), [3; 4096]);
        assert_eq!(client.get::<4096>(DATA + 4096), [0; 4096]);
        assert_eq!(client.request(request::GET_ID, 0, 20, false), (status::OK, 21));
        assert_eq!(&client.get::<20>(DATA), b"disk\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(client.request(99, 0, 0, false), (status::UNSUPP, 1));
        assert_eq!(client.request(request::IN, 1 << 40, 512, false), (status::IOERR, 1));
        assert_eq!(client.request(request::IN, u64::MAX, 512, false), (status::IOERR, 1));
        assert_eq!(client.request(request::OUT, 0, 100, false), (status::IOERR, 1));
        let too_much = 33 << 20;
        assert_eq!(client.request(request::IN, 0, too_much, false), (status::IOERR, 1));
        // The end of the data is outside the memory.
        assert_eq!(client.request(request::OUT, 0, 1 << 20, false), (status::IOERR, 1));
        assert_eq!(client.request(request::IN, 0, 512, false), (status::OK, 513), "the queue continues");
    }
}

/// Writes to a device that ignores data take no copy, but their addresses are checked.
#[test]
fn ignored_data_is_not_copied() {
    for ignores_data in [false, true] {
        let (tx, written) = std::sync::mpsc::channel();
        let tx = std::sync::Mutex::new(tx);
        let device = TestDevice::over(Arc::new(Model::new(64 << 20, 512)))
            .shaped(move |geometry| geometry.ignores_data = ignores_data)
            .on_try(move |model, request, buffer| {
                if let Buffer::Write(data) = &buffer {
                    tx.lock().unwrap().send(data.to_vec()).unwrap();
                }
                model.try_io(request, buffer)
            });
        let (_dir, export) = export(Arc::new(device));
        let mut client = Client::connect(&export);
        client.set_up(0);
        client.put(DATA, &[7; 1024]);
        assert_eq!(client.request(request::OUT, 0, 1024, false), (status::OK, 1));
        let expected = if ignores_data { [0; 1024] } else { [7; 1024] };
        assert_eq!(written.recv_timeout(PATIENCE).unwrap(), expected);
        // The end of the data is outside the memory.
        assert_eq!(client.request(request::OUT, 0, 1 << 20, false), (status::IOERR, 1));
        assert!(written.try_recv().is_err());
    }
}

#[test]
fn read_only_export_refuses_writes() {
    let ram = ram();
    let dir = tempfile::tempdir().unwrap();
    let options = Options { read_only: true, ..options() };
    let export = Export::new(&dir.path().join("v"), "disk", ram, options).unwrap();
    let mut client = Client::connect(&export);
    client.set_up(0);
    assert_ne!(client.number(message::GET_FEATURES) & feature::RO, 0);
    assert_eq!(client.request(request::OUT, 0, 512, false), (status::IOERR, 1));
    assert_eq!(client.request(request::IN, 0, 512, false), (status::OK, 513));
}

#[test]
fn optional_messages_are_accepted() {
    let (_dir, export) = export(delayed(ram()));
    let mut client = Client::connect(&export);
    client.set_up(0);
    let spare = event();
    assert!(client.ask(message::SET_BACKEND_REQ_FD, &[], &[spare.as_fd()]));
    for queue in [0_u64, 5] {
        for what in [message::SET_VRING_CALL, message::SET_VRING_ERR] {
            assert!(client.ask(what, &queue.to_ne_bytes(), &[spare.as_fd()]));
        }
    }
    assert!(client.state(message::SET_VRING_ENABLE, 5, 1), "a queue that was never set up");
    assert!(client.state(message::SET_VRING_ENABLE, 6, 0));
    for size in [57, 60, 256] {
        let part = ConfigPart { offset: 0, size, flags: 0 };
        let body = [part.as_bytes(), &vec![0; size as usize]].concat();
        client.send(message::GET_CONFIG, 0, &body, &[]);
        let reply = client.receive(message::GET_CONFIG);
        assert_eq!(reply.len(), 12 + size as usize);
        if let Ok((config, _)) = BlkConfig::read_from_prefix(&reply[12..]) {
            assert_eq!((config.capacity.get(), config.writeback), (64 << 11, 1));
        }
    }
    let writeback = ConfigPart { offset: 32, size: 1, flags: 0 };
    assert!(client.ask(message::SET_CONFIG, &[writeback.as_bytes(), &[0]].concat(), &[]));
    assert_eq!(client.request(request::OUT, 0, 512, false), (status::OK, 1));
    // A region is added, and removed with a file, while the queue runs.
    let mut other = region();
    (other.region.guest, other.region.user) = (GUEST << 8, USER << 8);
    let memory = Arc::clone(&client.memory);
    assert!(client.ask(message::ADD_MEM_REG, other.as_bytes(), &[memory.fd()]));
    assert!(!client.ask(message::ADD_MEM_REG, other.as_bytes(), &[memory.fd()]), "it overlaps");
    assert!(client.ask(message::REM_MEM_REG, other.as_bytes(), &[memory.fd()]));
    assert!(!client.ask(message::REM_MEM_REG, other.as_bytes(), &[]), "the region was already removed");
    let table = [&1_u64.to_ne_bytes(), region().region.as_bytes()].concat();
    assert!(client.ask(message::SET_MEM_TABLE, &table, &[memory.fd()]));
    assert_eq!(client.request(request::IN, 0, 512, false), (status::OK, 513));
    assert!(!client.ask(99, &[], &[]), "an unknown message");
    assert!(!client.ask(message::SET_FEATURES, &u64::MAX.to_ne_bytes(), &[]));
    assert!(!client.state(message::SET_VRING_NUM, 0, 3) && !client.state(message::SET_VRING_NUM, 64, 16));
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    assert!(!client.ask(message::SET_VRING_CALL, &[0; 8], &[pipe.as_fd()]), "no eventfd");
}

#[test]
fn stopped_queue_resumes_after_last_taken_chain() {
    let (_dir, export) = export(delayed(ram()));
    let mut client = Client::connect(&export);
    client.set_up(0);
    client.offer_flush();
    client.offer(0);
    client.send(message::GET_VRING_BASE, 0, VringState { index: 0, num: 0 }.as_bytes(), &[]);
    let state = VringState::read_from_bytes(&client.receive(message::GET_VRING_BASE)).unwrap();
    let used = u16::from_le_bytes(client.get(USED + 2));
    assert_eq!(u32::from(used), state.num, "every taken chain is used");
    client.start(state.num);
    client.answer();
    client.answer();
    assert_eq!(client.request(request::FLUSH, 0, 0, false), (status::OK, 1));
}

#[test]
fn next_frontend_is_served_after_abrupt_disconnect() {
    let (_dir, export) = export(delayed(ram()));
    for _ in 0..3 {
        let mut client = Client::connect(&export);
        client.set_up(0);
        client.offer_flush();
        for _ in 1..SIZE {
            client.offer(0);
        }
    }
    assert_served(&export);
}
