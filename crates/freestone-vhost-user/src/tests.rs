//! A frontend of its own, which does what no honest one does. Its memory is a file that is read and
//! written as a file.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::device::{Buffer, Completion, Device, Extent, Geometry, IoBuf, Request, Result, Tried};
use freestone_ram::ram::{Config, Ram};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
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
/// Places in the memory.
const DESC: u64 = 0;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADERS: u64 = 0x3000;
const TABLE: u64 = 0x4000;
const DATA: u64 = 0x1_0000;
const PATIENCE: Duration = Duration::from_secs(20);

/// A device that answers each request later, on another thread.
struct Late(Arc<Ram>);

impl Device for Late {
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..self.0.geometry() }
    }
    fn try_io(&self, request: &Request, _: Buffer<'_>) -> Result<Tried> {
        request.check(&self.geometry())?;
        Ok(Tried::WouldBlock)
    }
    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let ram = Arc::clone(&self.0);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            ram.submit(request, buffer, done);
        });
    }
    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.0.extents(offset, len, row)
    }
}

fn ram() -> Arc<Ram> {
    Arc::new(Ram::new(Config { disksize: 64 << 20, ..Config::default() }).unwrap())
}

fn export(device: Arc<dyn Device>) -> (TempDir, Export) {
    let dir = tempfile::tempdir().unwrap();
    let export = Export::new(&dir.path().join("v"), "disk", device, Options::default()).unwrap();
    (dir, export)
}

struct Client {
    socket: UnixStream,
    memory: File,
    kick: OwnedFd,
    call: OwnedFd,
    err: OwnedFd,
    next: u16,
    seen: u16,
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn region() -> SingleRegion {
    SingleRegion { padding: 0, region: MemRegion { guest: GUEST, size: MEMORY_BYTES, user: USER, offset: 0 } }
}

impl Client {
    fn connect(export: &Export) -> Self {
        let memory = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(MEMORY_BYTES).unwrap();
        let socket = UnixStream::connect(export.path()).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { socket, memory, kick: event(), call: event(), err: event(), next: 0, seen: 0 }
    }

    fn send(&self, request: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        let header = Header { request, flags: 1 | flags, size: body.len() as u32 };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let slices = [IoSlice::new(header.as_bytes()), IoSlice::new(body)];
        sendmsg(&self.socket, &slices, &mut control, SendFlags::NOSIGNAL).unwrap();
    }

    fn receive(&mut self, request: u32) -> Vec<u8> {
        let mut header = [0; size_of::<Header>()];
        self.socket.read_exact(&mut header).unwrap();
        let header = Header::read_from_bytes(&header).unwrap();
        assert_eq!((header.request, header.flags), (request, 5));
        let mut body = vec![0; header.size as usize];
        self.socket.read_exact(&mut body).unwrap();
        body
    }

    fn number(&mut self, request: u32) -> u64 {
        self.send(request, 0, &[], &[]);
        u64::read_from_bytes(&self.receive(request)).unwrap()
    }

    /// Sends what has no answer of its own; answers whether it was done.
    fn ask(&mut self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        self.send(request, NEED_REPLY, body, fds);
        u64::read_from_bytes(&self.receive(request)).unwrap() == 0
    }

    fn state(&mut self, request: u32, index: u32, num: u32) -> bool {
        self.ask(request, VringState { index, num }.as_bytes(), &[])
    }

    /// All up to a queue that runs, with these features less.
    fn set_up(&mut self, without: u64) {
        let offered = self.number(message::GET_FEATURES);
        let features = (offered & !without).to_ne_bytes();
        self.send(message::SET_FEATURES, 0, &features, &[]);
        let protocols = self.number(message::GET_PROTOCOL_FEATURES);
        self.send(message::SET_PROTOCOL_FEATURES, 0, &protocols.to_ne_bytes(), &[]);
        assert!(self.ask(message::SET_FEATURES, &features, &[]), "a second time");
        let memory = self.memory.try_clone().unwrap();
        assert!(self.ask(message::ADD_MEM_REG, region().as_bytes(), &[memory.as_fd()]));
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
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, at).unwrap();
    }

    fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.read_exact_at(&mut bytes, at).unwrap();
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

    /// Makes the chain at descriptor 0 available.
    fn offer(&mut self, head: u16) {
        self.put(AVAIL + 4 + 2 * u64::from(self.next % SIZE), &head.to_le_bytes());
        self.next = self.next.wrapping_add(1);
        self.put(AVAIL + 2, &self.next.to_le_bytes());
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Waits for one answer; its length.
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

    /// The usual chain, with so much data; its status and length.
    fn request(&mut self, kind: u32, sector: u64, len: u32, indirect: bool) -> (u8, u32) {
        self.header(kind, sector);
        let to_us = matches!(kind, request::IN | request::GET_ID);
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

/// A frontend that does nothing wrong finds the device served.
fn works(export: &Export) {
    let mut client = Client::connect(export);
    client.set_up(0);
    client.put(DATA, &[7; 1024]);
    assert_eq!(client.request(request::OUT, 1, 1024, false), (status::OK, 1));
    client.put(DATA, &[0; 1024]);
    assert_eq!(client.request(request::IN, 1, 1024, true), (status::OK, 1025));
    assert_eq!(client.get::<1024>(DATA), [7; 1024]);
    assert!(Client::is_readable(&client.call), "it was told");
}

#[test]
fn all_requests_do_what_they_say() {
    for device in [ram() as Arc<dyn Device>, Arc::new(Late(ram()))] {
        let (_dir, export) = export(device);
        works(&export);
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
        // Its end is outside of the memory.
        assert_eq!(client.request(request::OUT, 0, 1 << 20, false), (status::IOERR, 1));
        assert_eq!(client.request(request::IN, 0, 512, false), (status::OK, 513), "it goes on");
    }
}

#[test]
fn a_read_only_export_is_not_written() {
    let ram = ram();
    let dir = tempfile::tempdir().unwrap();
    let options = Options { read_only: true, ..Options::default() };
    let export = Export::new(&dir.path().join("v"), "disk", ram, options).unwrap();
    let mut client = Client::connect(&export);
    client.set_up(0);
    assert_ne!(client.number(message::GET_FEATURES) & feature::RO, 0);
    assert_eq!(client.request(request::OUT, 0, 512, false), (status::IOERR, 1));
    assert_eq!(client.request(request::IN, 0, 512, false), (status::OK, 513));
}

#[test]
fn what_frontends_send_beside_passes() {
    let (_dir, export) = export(Arc::new(Late(ram())));
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
    // Memory that is added, and removed with a file, while the queue runs.
    let mut other = region();
    (other.region.guest, other.region.user) = (GUEST << 8, USER << 8);
    let memory = client.memory.try_clone().unwrap();
    assert!(client.ask(message::ADD_MEM_REG, other.as_bytes(), &[memory.as_fd()]));
    assert!(!client.ask(message::ADD_MEM_REG, other.as_bytes(), &[memory.as_fd()]), "it overlaps");
    assert!(client.ask(message::REM_MEM_REG, other.as_bytes(), &[memory.as_fd()]));
    assert!(!client.ask(message::REM_MEM_REG, other.as_bytes(), &[]), "it is not there");
    let table = [&1_u64.to_ne_bytes(), region().region.as_bytes()].concat();
    assert!(client.ask(message::SET_MEM_TABLE, &table, &[memory.as_fd()]));
    assert_eq!(client.request(request::IN, 0, 512, false), (status::OK, 513));
    assert!(!client.ask(99, &[], &[]), "an unknown message");
    assert!(!client.ask(message::SET_FEATURES, &u64::MAX.to_ne_bytes(), &[]));
    assert!(!client.state(message::SET_VRING_NUM, 0, 3) && !client.state(message::SET_VRING_NUM, 64, 16));
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    assert!(!client.ask(message::SET_VRING_CALL, &[0; 8], &[pipe.as_fd()]), "no eventfd");
}

#[test]
fn a_stopped_queue_has_done_what_it_took_and_goes_on_there() {
    let (_dir, export) = export(Arc::new(Late(ram())));
    let mut client = Client::connect(&export);
    client.set_up(0);
    client.header(request::FLUSH, 0);
    let chain = [(GUEST + HEADERS, 16, descriptor::NEXT), (GUEST + HEADERS + 0x100, 1, descriptor::WRITE)];
    client.descriptors(DESC, &chain);
    client.offer(0);
    client.offer(0);
    client.send(message::GET_VRING_BASE, 0, VringState { index: 0, num: 0 }.as_bytes(), &[]);
    let state = VringState::read_from_bytes(&client.receive(message::GET_VRING_BASE)).unwrap();
    let used = u16::from_le_bytes(client.get(USED + 2));
    assert_eq!(u32::from(used), state.num, "what was taken is answered");
    client.start(state.num);
    client.answer();
    client.answer();
    assert_eq!(client.request(request::FLUSH, 0, 0, false), (status::OK, 1));
}

#[test]
fn a_frontend_that_leaves_with_requests_in_flight_makes_room_for_the_next() {
    let (_dir, export) = export(Arc::new(Late(ram())));
    for _ in 0..3 {
        let mut client = Client::connect(&export);
        client.set_up(0);
        client.header(request::FLUSH, 0);
        let chain =
            [(GUEST + HEADERS, 16, descriptor::NEXT), (GUEST + HEADERS + 0x100, 1, descriptor::WRITE)];
        client.descriptors(DESC, &chain);
        for _ in 0..SIZE {
            client.offer(0);
        }
    }
    works(&export);
}

/// A descriptor: address, length, flags.
type Entry = (u64, u32, u16);

#[test]
fn a_broken_chain_ends_its_queue() {
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
    works(&export);
}

#[test]
fn what_is_no_message_ends_the_connection_only() {
    let (_dir, export) = export(ram());
    let header = |request, flags, size| Header { request, flags, size };
    for header in [header(1, 0, 0), header(1, 1, u32::MAX), header(u32::MAX, 1, 4)] {
        let mut client = Client::connect(&export);
        client.socket.write_all(header.as_bytes()).unwrap();
        let _ = client.socket.write_all(&[0; 4]);
        let mut rest = Vec::new();
        // Closed with unread bytes: a reset, or an end.
        let _ = client.socket.read_to_end(&mut rest);
        assert_eq!(rest, []);
    }
    // Every message with no body, and with one of zeroes.
    for request in 0..48 {
        for size in [0, 8, 40] {
            let client = Client::connect(&export);
            client.send(request, NEED_REPLY, &vec![0; size], &[]);
        }
    }
    works(&export);
}

#[test]
fn memory_that_is_cut_off_ends_its_connection() {
    let (_dir, export) = export(ram());
    let mut client = Client::connect(&export);
    client.set_up(0);
    assert_eq!(client.request(request::IN, 0, 512, false), (status::OK, 513));
    client.memory.set_len(0).unwrap();
    rustix::io::write(&client.kick, &1_u64.to_ne_bytes()).unwrap();
    let mut rest = Vec::new();
    assert!(matches!(client.socket.read_to_end(&mut rest), Ok(0)), "the connection ends");
    works(&export);
}

#[test]
fn regions_lie_in_their_files() {
    let (_dir, export) = export(ram());
    let mut client = Client::connect(&export);
    client.send(message::SET_PROTOCOL_FEATURES, 0, &protocol::REPLY_ACK.to_ne_bytes(), &[]);
    let memory = client.memory.try_clone().unwrap();
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
        assert!(!client.ask(message::ADD_MEM_REG, wrong.as_bytes(), &[memory.as_fd()]), "{wrong:?}");
    }
    let socket = client.socket.try_clone().unwrap();
    assert!(!client.ask(message::ADD_MEM_REG, region().as_bytes(), &[socket.as_fd()]), "no file");
    assert!(!client.ask(message::ADD_MEM_REG, region().as_bytes(), &[]), "none at all");
    assert!(client.ask(message::ADD_MEM_REG, region().as_bytes(), &[memory.as_fd()]));
}

#[test]
fn a_socket_that_is_left_is_replaced_and_one_in_use_is_not() {
    let (dir, mut first) = export(ram());
    let path = dir.path().join("v");
    let again = || Export::new(&path, "disk", ram(), Options::default());
    assert!(again().unwrap_err().to_string().ends_with("another server listens there"));
    assert!(first.end(PATIENCE) && first.end(PATIENCE));
    assert!(!path.exists());
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    works(&again().unwrap());
    std::fs::write(&path, "").unwrap();
    assert!(again().unwrap_err().to_string().ends_with("that is no socket"));
}

#[test]
fn a_frontend_that_is_there_does_not_hold_up_the_end() {
    let (_dir, mut export) = export(ram());
    let mut client = Client::connect(&export);
    client.set_up(0);
    assert!(export.is_connected());
    assert!(export.end(PATIENCE));
    assert_eq!(client.socket.read(&mut [0]).unwrap(), 0);
}
