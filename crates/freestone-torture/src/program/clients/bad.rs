//! Misbehaving clients on the NBD sockets and on the control socket. The server may refuse or
//! disconnect these clients, but no other client may be affected.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use freestone_testkit::Rng;
use freestone_testkit::nbd::handshake;
use freestone_testkit::nbd::wire::{GO, LIST, READ, WRITE, info_data, option, request};
use serde_json::Value;

use crate::oracle::{Fill, Kind as Write, Outcome, SECTOR_BYTES};
use crate::program::server;
use crate::program::transport::nbd_client::NbdClient;
use crate::program::transport::protocol::ConnectionError;
use crate::program::watch::{REQUEST_MAX, WatchedThread};
use crate::program::world::{Disk, World};

/// Time for which an idle client stays connected.
const IDLE: Duration = Duration::from_millis(150);
const SECTOR: u64 = SECTOR_BYTES as u64;

type Behaviour = fn(&mut BadClient<'_>) -> std::io::Result<()>;

const BEHAVIOURS: [(&str, Behaviour); 16] = [
    ("garbage in the handshake", garbage),
    ("half an option", half_option),
    ("an option without end", huge_option),
    ("unknown options and exports", strange_options),
    ("wrong magic", wrong_magic),
    ("half a request", half_request),
    ("half a payload", half_payload),
    ("a payload without end", huge_payload),
    ("never reads replies", never_reads),
    ("a crowd that is silent", crowd),
    ("a crowd in the handshake", crowd_greeted),
    ("garbage for JSON", bad_json),
    ("half a line", half_line),
    ("a line without end", long_line),
    ("a batch, and nested arrays", batch),
    ("never reads answers", never_reads_control),
];

struct BadClient<'a> {
    world: &'a World,
    slot: &'a WatchedThread,
    rng: Rng,
}

pub fn run(world: &World, slot: &WatchedThread, rng: Rng) {
    let mut bad = BadClient { world, slot, rng };
    while !world.is_stopped() {
        let (name, behaviour) = BEHAVIOURS[bad.rng.below(BEHAVIOURS.len() as u64) as usize];
        slot.begin(format!("bad client: {name}"), REQUEST_MAX);
        // An error is expected: the server may end the connection early.
        let _ = behaviour(&mut bad);
        world.counts.add("bad clients", name, 1);
        slot.end();
    }
}

impl BadClient<'_> {
    fn path(&self, name: &str) -> std::path::PathBuf {
        self.world.dir().join(name)
    }

    fn nbd(&self) -> std::io::Result<UnixStream> {
        connect(&self.path(server::NBD))
    }

    fn control(&self) -> std::io::Result<UnixStream> {
        connect(&self.path(server::CONTROL))
    }

    fn noise(&mut self, most: u64) -> Vec<u8> {
        let mut noise = vec![0; 1 + self.rng.below(most) as usize];
        self.rng.fill(&mut noise);
        noise
    }

    fn disk(&mut self) -> Option<Arc<Disk>> {
        let disks = self.world.disks(|disk| disk.writable && disk.oracle().size() > 2048);
        disks.get(self.rng.below(disks.len() as u64) as usize).cloned()
    }

    /// Opens an NBD connection that has chosen an export, to send raw bytes in the transmission
    /// phase.
    fn negotiate(disk: &Disk) -> std::io::Result<UnixStream> {
        let path = disk.nbd().ok_or(ErrorKind::NotFound)?;
        let mut stream = connect(&path)?;
        handshake::enter(&mut stream, &disk.name)?;
        Ok(stream)
    }

    fn idle(&self) {
        if !self.world.is_stopped() {
            std::thread::sleep(IDLE);
        }
    }
}

fn connect(path: &Path) -> std::io::Result<UnixStream> {
    let stream = UnixStream::connect(path)?;
    // If the server does not read, a write fails after this time instead of blocking.
    stream.set_write_timeout(Some(IDLE))?;
    stream.set_read_timeout(Some(REQUEST_MAX))?;
    Ok(stream)
}

fn garbage(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let mut stream = bad.nbd()?;
    let noise = bad.noise(4096);
    stream.write_all(&noise)?;
    bad.idle();
    Ok(())
}

fn half_option(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let mut stream = bad.nbd()?;
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    bytes.extend(option(GO, &info_data("r0", &[])));
    let cut = 1 + bad.rng.below(bytes.len() as u64 - 1) as usize;
    stream.write_all(&bytes[..cut])?;
    if bad.rng.chance(50) {
        bad.idle();
    }
    Ok(())
}

fn huge_option(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let mut stream = bad.nbd()?;
    stream.write_all(&3_u32.to_be_bytes())?;
    let len = [u32::MAX, 64 << 10, (64 << 10) + 1, 16 << 20, (16 << 20) + 1][bad.rng.below(5) as usize];
    let kind = 1 + bad.rng.below(12) as u32;
    let mut bytes = option(kind, &[]);
    bytes[12..16].copy_from_slice(&len.to_be_bytes());
    stream.write_all(&bytes)?;
    let zeroes = vec![0; 64 << 10];
    for _ in 0..16 {
        stream.write_all(&zeroes)?;
    }
    Ok(())
}

fn strange_options(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let mut stream = bad.nbd()?;
    stream.write_all(&3_u32.to_be_bytes())?;
    for _ in 0..50 {
        let kind = bad.rng.below(300) as u32;
        let noise = bad.noise(200);
        // The unknown export ends the connection; the options sent before get a reply.
        stream.write_all(&option(kind, &noise))?;
        if bad.rng.chance(20) {
            stream.write_all(&option(GO, &info_data("no such export", &[])))?;
            stream.write_all(&option(LIST, &[]))?;
        }
    }
    let mut answers = [0; 256];
    stream.read_exact(&mut answers)
}

fn wrong_magic(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let Some(disk) = bad.disk() else { return Ok(()) };
    let mut stream = BadClient::negotiate(&disk)?;
    let mut bytes = request(0, WRITE, 1, 0, 512);
    bytes[bad.rng.below(4) as usize] ^= 0x11;
    bytes.extend(vec![0x77; 4096]);
    stream.write_all(&bytes)?;
    let left = stream.read(&mut [0; 64])?;
    if left != 0 && !bad.world.is_server_ending() {
        bad.world.fail(format!("{}: the server replied to an invalid request", disk.name));
    }
    Ok(())
}

fn half_request(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let Some(disk) = bad.disk() else { return Ok(()) };
    let mut stream = BadClient::negotiate(&disk)?;
    let bytes = request(0, WRITE, 1, 0, 4096);
    let cut = 1 + bad.rng.below(bytes.len() as u64 - 1) as usize;
    stream.write_all(&bytes[..cut])?;
    if bad.rng.chance(50) {
        bad.idle();
    }
    Ok(())
}

fn half_payload(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let Some(disk) = bad.disk() else { return Ok(()) };
    let mark = disk.mark();
    let _inside = disk.gate.read().unwrap_or_else(PoisonError::into_inner);
    let mut stream = BadClient::negotiate(&disk)?;
    if disk.may_have_ended(mark) {
        // A verb ends connections: the device may already have lost power while the oracle does not
        // know it.
        return Ok(());
    }
    let len = (1 + bad.rng.below(128)) * 4096;
    // The write must fit in the device: the server would refuse a larger one as a whole.
    let len = len.min(disk.oracle().size() * SECTOR / 8192 * 4096);
    let id = bad.world.write_id(Fill::Noise);
    let mut data = vec![0; len as usize];
    crate::oracle::fill(id, 0, &mut data);
    let cut = bad.rng.below(len) as usize;
    // The server may execute all or a part of the truncated write.
    let token = disk.oracle().begin_write(id, 0..len / SECTOR, Write::Write);
    let sent =
        stream.write_all(&request(0, WRITE, 1, 0, len as u32)).and_then(|()| stream.write_all(&data[..cut]));
    stream.shutdown(std::net::Shutdown::Write)?;
    // Wait until the server has closed the connection: it then executes nothing more of the
    // request.
    let _ = stream.read_to_end(&mut Vec::new());
    disk.oracle().end(token, Outcome::Failed);
    sent
}

fn huge_payload(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let Some(disk) = bad.disk() else { return Ok(()) };
    let mut stream = BadClient::negotiate(&disk)?;
    let len = [u32::MAX, (32 << 20) + 1, 1 << 31][bad.rng.below(3) as usize];
    stream.write_all(&request(0, WRITE, 1, 0, len))?;
    let noise = bad.noise(64 << 10);
    for _ in 0..8 {
        stream.write_all(&noise)?;
    }
    Ok(())
}

fn never_reads(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let Some(disk) = bad.disk() else { return Ok(()) };
    let mut stream = BadClient::negotiate(&disk)?;
    for cookie in 0..300 {
        stream.write_all(&request(0, READ, cookie, 0, 1 << 20))?;
    }
    bad.idle();
    Ok(())
}

fn crowd(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let count = 1 + bad.rng.below(300);
    let silent: Vec<_> = (0..count).map(|_| bad.nbd()).collect::<Result<_, _>>()?;
    bad.idle();
    drop(silent);
    Ok(())
}

/// Opens a crowd of connections that have chosen an export and send nothing more.
fn crowd_greeted(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let Some(disk) = bad.disk() else { return Ok(()) };
    let mut held = Vec::new();
    for _ in 0..=bad.rng.below(60) {
        let Some(path) = disk.nbd() else { break };
        bad.slot.restart_timer();
        match NbdClient::connect(&path, &disk.name, &mut bad.rng) {
            Ok(wire) => held.push(wire),
            Err(ConnectionError::Protocol(why)) => bad.world.fail(format!("{}: {why}", disk.name)),
            Err(ConnectionError::Ended(why)) => return Err(std::io::Error::other(why)),
            Err(ConnectionError::Refused(..)) => break,
        }
    }
    bad.idle();
    Ok(())
}

/// Checks that the server replies with a JSON-RPC error that has one of these codes.
fn must_fail(bad: &BadClient<'_>, stream: &mut UnixStream, codes: &[i64]) -> std::io::Result<()> {
    let mut line = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    let answer: Value = serde_json::from_slice(&line)?;
    let code = answer["error"]["code"].as_i64();
    if !code.is_some_and(|code| codes.contains(&code)) && !bad.world.is_server_ending() {
        bad.world.fail(format!("an invalid request was answered with {answer}"));
    }
    Ok(())
}

/// Invalid JSON-RPC requests, and the error code that the server must return for each.
const NO_REQUESTS: [(&str, i64); 9] = [
    ("{", -32700),
    ("]", -32700),
    ("nonsense", -32700),
    ("{\"jsonrpc\":\"1.0\",\"id\":1,\"method\":\"list\"}", -32600),
    ("[]", -32600),
    ("7", -32600),
    ("{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"explode\"}", -32601),
    ("{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"remove\",\"params\":{\"name\":7}}", -32602),
    ("{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"list\",\"params\":[1]}", -32602),
];

fn bad_json(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let mut stream = bad.control()?;
    for _ in 0..=bad.rng.below(20) {
        let (line, code) = NO_REQUESTS[bad.rng.below(NO_REQUESTS.len() as u64) as usize];
        stream.write_all(format!("{line}\n").as_bytes())?;
        must_fail(bad, &mut stream, &[code])?;
    }
    let mut noise = bad.noise(400);
    noise.iter_mut().filter(|byte| **byte == b'\n').for_each(|byte| *byte = b'x');
    noise.extend(b"x\n");
    noise[0] = b'}';
    stream.write_all(&noise)?;
    must_fail(bad, &mut stream, &[-32700])
}

fn half_line(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let mut stream = bad.control()?;
    let line = b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"remove\",\"params\":{\"name\":\"r0\"}}";
    let cut = 1 + bad.rng.below(line.len() as u64 - 2) as usize;
    stream.write_all(&line[..cut])?;
    bad.idle();
    Ok(())
}

fn long_line(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let mut stream = bad.control()?;
    let piece = vec![b'['; 64 << 10];
    for _ in 0..17 {
        stream.write_all(&piece)?;
    }
    stream.write_all(b"\n")?;
    must_fail(bad, &mut stream, &[-32600])
}

fn batch(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let mut stream = bad.control()?;
    let deep = "[".repeat(10_000);
    stream.write_all(format!("{deep}\n").as_bytes())?;
    must_fail(bad, &mut stream, &[-32700, -32600])?;
    let one = "{\"jsonrpc\":\"2.0\",\"method\":\"stat\"}";
    // JSON-RPC notifications have no id, so the server sends no reply to them.
    stream.write_all(format!("[{}]\n", vec![one; 40].join(",")).as_bytes())?;
    let many = vec!["1"; 257].join(",");
    stream.write_all(format!("[{many}]\n").as_bytes())?;
    must_fail(bad, &mut stream, &[-32600])
}

fn never_reads_control(bad: &mut BadClient<'_>) -> std::io::Result<()> {
    let mut stream = bad.control()?;
    for _ in 0..2000 {
        stream.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"stat\"}\n")?;
    }
    bad.idle();
    Ok(())
}
