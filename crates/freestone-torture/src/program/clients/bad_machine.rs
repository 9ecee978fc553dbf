//! Misbehaving frontends on the vhost-user sockets. The server may disconnect these frontends, but
//! no other client may be affected. None of the frontends writes to a device.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use freestone_testkit::Rng;
use freestone_testkit::vhost_user::{
    Data, Frontend, GuestMemory, Machine, MachineConfig, Queue, QueueRequest, new_eventfd, wire,
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::program::watch::{REQUEST_MAX, WatchedThread};
use crate::program::world::World;

/// Time for which an idle frontend stays connected.
const IDLE: Duration = Duration::from_millis(100);
/// Longest wait for a free socket: a vhost-user socket serves one machine at a time.
const TURN_MAX: Duration = Duration::from_secs(5);
const MEMORY_BYTES: u64 = 1 << 16;
/// Upper bound (exclusive) of the message numbers sent.
const MESSAGES: u64 = 48;

type Behaviour = fn(&mut BadClient<'_>, &Path) -> io::Result<()>;

const BEHAVIOURS: [(&str, Behaviour); 9] = [
    ("machine: garbage", garbage),
    ("machine: half a message", half_message),
    ("machine: messages in any order", any_messages),
    ("machine: stalls while it is set up", stalls),
    ("machine: memory that shrinks", shrinks),
    ("machine: nonsense in the rings", nonsense),
    ("machine: nonsense about what is in flight", nonsense_in_flight),
    ("machine: leaves with requests in flight", leaves),
    ("machine: a crowd that is silent", crowd),
];

struct BadClient<'a> {
    world: &'a World,
    slot: &'a WatchedThread,
    rng: Rng,
}

pub fn run(world: &World, slot: &WatchedThread, rng: Rng) {
    let mut bad = BadClient { world, slot, rng };
    while !world.is_stopped() {
        let paths: Vec<PathBuf> = world.disks(|_| true).iter().filter_map(|disk| disk.machine()).collect();
        let Some(path) = paths.get(bad.rng.below(paths.len() as u64) as usize) else {
            std::thread::sleep(IDLE);
            continue;
        };
        let (name, behaviour) = BEHAVIOURS[bad.rng.below(BEHAVIOURS.len() as u64) as usize];
        slot.begin(format!("bad {name}"), REQUEST_MAX);
        // An error is expected: the server may end the connection early.
        let _ = behaviour(&mut bad, path);
        world.counts.add("bad clients", name, 1);
        slot.end();
    }
}

impl BadClient<'_> {
    fn noise(&mut self, bytes: u64) -> Vec<u8> {
        let mut noise = vec![0; bytes as usize];
        self.rng.fill(&mut noise);
        noise
    }

    fn idle(&self) {
        if !self.world.is_stopped() {
            std::thread::sleep(IDLE);
        }
    }

    fn machine(&mut self, path: &Path) -> io::Result<Machine> {
        let (indirect, event_idx, inflight) = (self.rng.chance(50), self.rng.chance(50), self.rng.chance(50));
        let shape = MachineConfig {
            queues: 2,
            slots: 16,
            slot_bytes: 4096,
            indirect,
            event_idx,
            inflight,
            ..MachineConfig::default()
        };
        Machine::connect(path, shape, TURN_MAX)
    }

    fn begin_reads(machine: &mut Machine) {
        let block = machine.config().block() as usize;
        let read = QueueRequest { kind: wire::IN, offset: 0, data: Data::In(block), pieces: 1 };
        for queue in &mut machine.queues {
            while queue.begin(read).is_some() {}
        }
    }

    /// Checks that the server ends the connection of a misbehaving frontend.
    fn must_end(&self, what: &str, socket: &mut UnixStream) {
        // Read and ignore the server's remaining messages up to the end of the connection.
        let ended =
            socket.set_read_timeout(Some(REQUEST_MAX)).and_then(|()| socket.read_to_end(&mut Vec::new()));
        let reset = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionReset;
        if ended.as_ref().is_err_and(|error| !reset(error)) && !self.world.is_server_ending() {
            self.world.fail(format!("{what}: the server does not end the connection: {ended:?}"));
        }
    }
}

fn garbage(bad: &mut BadClient<'_>, path: &Path) -> io::Result<()> {
    let mut socket = UnixStream::connect(path)?;
    socket.set_write_timeout(Some(IDLE))?;
    let bytes = 16 + bad.rng.below(4096);
    let mut noise = bad.noise(bytes);
    // Set a length that exceeds that of any message.
    noise[8..12].copy_from_slice(&u32::MAX.to_ne_bytes());
    socket.write_all(&noise)?;
    bad.must_end("a frontend that sends garbage", &mut socket);
    Ok(())
}

fn half_message(bad: &mut BadClient<'_>, path: &Path) -> io::Result<()> {
    let mut socket = UnixStream::connect(path)?;
    let message = wire::message(wire::SET_VRING_ADDR, 0, &[0; 40]);
    let cut = 1 + bad.rng.below(message.len() as u64 - 1) as usize;
    socket.write_all(&message[..cut])?;
    if bad.rng.chance(50) {
        bad.idle();
    }
    Ok(())
}

fn any_messages(bad: &mut BadClient<'_>, path: &Path) -> io::Result<()> {
    let front = Frontend::connect(path, TURN_MAX)?;
    front.socket.set_write_timeout(Some(IDLE))?;
    let (memory, bell) = (GuestMemory::new(MEMORY_BYTES)?, new_eventfd()?);
    for _ in 0..60 {
        let request = bad.rng.below(MESSAGES) as u32;
        let bytes = [0, 8, 12, 24, 40][bad.rng.below(5) as usize];
        let body = if bad.rng.chance(50) { vec![0; bytes as usize] } else { bad.noise(bytes) };
        let files = [memory.fd(), bell.as_fd(), front.socket.as_fd()];
        let files = match bad.rng.below(5) {
            n @ 0..3 => &files[n as usize..=n as usize],
            3 => &files[..],
            _ => &[],
        };
        let flags = if bad.rng.chance(50) { wire::NEED_REPLY } else { 0 };
        front.send(request, flags, &body, files)?;
    }
    Ok(())
}

/// Performs the setup of a queue up to a random step, then stalls.
fn stalls(bad: &mut BadClient<'_>, path: &Path) -> io::Result<()> {
    let mut front = Frontend::connect(path, TURN_MAX)?;
    let (memory, kick) = (GuestMemory::new(MEMORY_BYTES)?, new_eventfd()?);
    let rings = wire::addresses(0, wire::USER, wire::USER + 0x2000, wire::USER + 0x1000);
    let region = wire::region(0, MEMORY_BYTES, wire::USER);
    let steps: [(u32, &[u8], &[_]); 8] = [
        (wire::SET_OWNER, &[], &[]),
        (wire::ADD_MEM_REG, &region, &[memory.fd()]),
        (wire::SET_VRING_NUM, &wire::u32s(&[0, 16]), &[]),
        (wire::SET_VRING_BASE, &wire::u32s(&[0, 0]), &[]),
        (wire::SET_VRING_ADDR, &rings, &[]),
        (wire::SET_VRING_KICK, &wire::u64s(&[0]), &[kick.as_fd()]),
        (wire::SET_VRING_CALL, &wire::u64s(&[0]), &[kick.as_fd()]),
        (wire::SET_VRING_ENABLE, &wire::u32s(&[0, 1]), &[]),
    ];
    let features = front.number(wire::GET_FEATURES)?;
    front.send(wire::SET_PROTOCOL_FEATURES, 0, &wire::u64s(&[wire::PROTOCOL]), &[])?;
    front.send_acknowledged(wire::SET_FEATURES, &wire::u64s(&[features]), &[])?;
    for (request, body, files) in &steps[..bad.rng.below(steps.len() as u64 + 1) as usize] {
        front.send_acknowledged(*request, body, files)?;
    }
    bad.idle();
    Ok(())
}

fn shrinks(bad: &mut BadClient<'_>, path: &Path) -> io::Result<()> {
    let mut machine = bad.machine(path)?;
    if bad.rng.chance(70) {
        BadClient::begin_reads(&mut machine);
    }
    machine.memory().truncate([0, 4096, 8192][bad.rng.below(3) as usize]);
    machine.queues.iter().for_each(Queue::kick);
    bad.slot.restart_timer();
    if bad.rng.chance(50) {
        // The server reads the rings of the first queue and finds the memory missing.
        machine.memory().truncate(0);
        machine.queues.iter().for_each(Queue::kick);
        bad.must_end("a machine without memory", machine.socket());
    }
    Ok(())
}

fn nonsense(bad: &mut BadClient<'_>, path: &Path) -> io::Result<()> {
    let machine = bad.machine(path)?;
    let size = machine.memory().bytes();
    // Overwrite the memory with noise, in large or small pieces.
    for _ in 0..=bad.rng.below(20) {
        let bytes = if bad.rng.chance(20) { size / 2 } else { 64 };
        let at = bad.rng.below(size - bytes + 1);
        let noise = bad.noise(bytes);
        machine.memory().put(at, &noise);
        machine.queues.iter().for_each(Queue::kick);
    }
    let noise = bad.noise(4096 + 64);
    machine.memory().put(0, &noise);
    machine.queues.iter().for_each(Queue::kick);
    bad.idle();
    Ok(())
}

fn nonsense_in_flight(bad: &mut BadClient<'_>, path: &Path) -> io::Result<()> {
    let mut front = Frontend::connect(path, TURN_MAX)?;
    front.send(wire::SET_PROTOCOL_FEATURES, 0, &wire::u64s(&[wire::PROTOCOL]), &[])?;
    let (area, _) = front.inflight(1, 16)?;
    let (memory, notes, kick) = (GuestMemory::new(MEMORY_BYTES)?, GuestMemory::new(4096)?, new_eventfd()?);
    let noise = bad.noise(4096);
    notes.put(0, &noise);
    // Use a valid version, so that the server evaluates the noise after it.
    notes.put(8, &1_u16.to_ne_bytes());
    let rings = wire::addresses(0, wire::USER, wire::USER + 0x2000, wire::USER + 0x1000);
    front.send_acknowledged(wire::SET_INFLIGHT_FD, &area, &[notes.fd()])?;
    front.send_acknowledged(wire::ADD_MEM_REG, &wire::region(0, MEMORY_BYTES, wire::USER), &[memory.fd()])?;
    front.send_acknowledged(wire::SET_VRING_NUM, &wire::u32s(&[0, 16]), &[])?;
    front.send_acknowledged(wire::SET_VRING_ADDR, &rings, &[])?;
    front.send_acknowledged(wire::SET_VRING_KICK, &wire::u64s(&[0]), &[kick.as_fd()])?;
    front.send_checked(wire::SET_VRING_ENABLE, &wire::u32s(&[0, 1]), &[])?;
    if bad.rng.chance(50) {
        notes.truncate(0);
    }
    bad.idle();
    Ok(())
}

fn leaves(bad: &mut BadClient<'_>, path: &Path) -> io::Result<()> {
    for _ in 0..3 {
        let mut machine = bad.machine(path)?;
        BadClient::begin_reads(&mut machine);
        bad.slot.restart_timer();
    }
    Ok(())
}

fn connect_at_once(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

fn crowd(bad: &mut BadClient<'_>, path: &Path) -> io::Result<()> {
    let count = 1 + bad.rng.below(40);
    // If a connection finds the backlog full, all of them close: the server accepts the next one
    // only after the first has left.
    let silent: Result<Vec<_>, _> = (0..count).map(|_| connect_at_once(path)).collect();
    bad.idle();
    silent.map(drop)
}
