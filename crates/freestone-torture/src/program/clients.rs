//! Clients whose every answer is judged.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};

use freestone_testkit::Rng;

use super::watch::Slot;
use super::wire::{self, Broken, Reply, Wire};
use super::world::{Disk, Held, Kind, Mark, REQUEST_MAX, World};
use crate::oracle::{
    Durability, Fill, FlushToken, Kind as Write, Oracle, Outcome, ReadToken, SECTOR_BYTES, WriteToken, fill,
};

const SECTOR: u64 = SECTOR_BYTES as u64;
/// Largest request, in bytes.
const REQUEST_BYTES_MAX: u64 = 256 << 10;
const DEPTH_MAX: u64 = 24;
const REQUESTS_MAX: u64 = 160;
/// Beyond every device.
const FAR: u64 = 1 << 60;

/// A request on its way.
struct Asked {
    command: u16,
    what: What,
    text: String,
}

enum What {
    Write(WriteToken, bool),
    Flush(FlushToken),
    Read(ReadToken, u64),
    Status(ReadToken, u64, u64),
    Cache,
    /// What it must be answered with.
    Wrong(u32),
}

/// One connection, and what it has asked.
struct Session<'a> {
    world: &'a World,
    slot: &'a Slot,
    disk: &'a Disk,
    mark: Mark,
    wire: Wire,
    asked: HashMap<u64, Asked>,
    /// Of a template: what this connection's device holds.
    own: Option<std::sync::Mutex<Oracle>>,
}

/// Runs until the world stops.
pub fn run(world: &World, slot: &Slot, mut rng: Rng) {
    while !world.stopped() {
        let disks = world.disks(|disk| !disk.addresses().is_empty());
        if disks.is_empty() {
            std::thread::yield_now();
            continue;
        }
        let disk = &disks[rng.below(disks.len() as u64) as usize];
        // Some look at all of it, so that what got lost is not only found by chance.
        let talk = if rng.chance(15) { Talk::Sweep } else { Talk::Random };
        visit(world, slot, disk, &mut rng, talk);
        slot.end();
    }
}

/// Reads all that is there, in the order of the devices.
pub fn sweep_all(world: &World) {
    let slot = world.watch.slot("sweep".into());
    let mut rng = Rng::new(world.number());
    for disk in world.disks(|disk| !disk.addresses().is_empty()) {
        visit(world, &slot, &disk, &mut rng, Talk::Sweep);
    }
    slot.end();
}

/// What a connection is for.
#[derive(Clone, Copy)]
enum Talk {
    /// Random requests.
    Random,
    /// To read all of the device.
    Sweep,
}

/// One connection to one device.
fn visit(world: &World, slot: &Slot, disk: &Arc<Disk>, rng: &mut Rng, talk: Talk) {
    let mark = disk.mark();
    let addresses = disk.addresses();
    if addresses.is_empty() {
        return;
    }
    let path = &addresses[rng.below(addresses.len() as u64) as usize];
    slot.begin(format!("{}: connects", disk.name), REQUEST_MAX);
    // Who cuts its power waits until nobody is inside.
    let _inside = disk.gate.read().unwrap_or_else(PoisonError::into_inner);
    if disk.addresses().is_empty() {
        return;
    }
    let wire = match Wire::connect(path, &disk.name, rng) {
        Ok(wire) => wire,
        Err(broken) => {
            if !world.dying() && !disk.may_have_ended(mark) {
                world.fail(format!("{}: a client cannot connect: {broken:?}", disk.name));
            }
            return;
        }
    };
    if disk.may_have_ended(mark) {
        // This may be the device after a loss of power already, of which the oracle is not told
        // yet.
        return;
    }
    let own = (disk.kind == Kind::Template).then(|| {
        let base = disk.of.as_ref().expect("a template has a base");
        std::sync::Mutex::new(base.oracle().snapshot(&disk.name, Durability::Answered))
    });
    let mut session = Session { world, slot, disk, mark, wire, asked: HashMap::new(), own };
    let outcome = session.check_size().and_then(|()| match talk {
        Talk::Random => session.random(rng),
        Talk::Sweep => session.sweep(),
    });
    session.forget();
    let Session { wire, .. } = session;
    match outcome {
        Ok(()) => drop(wire.leave()),
        Err(Broken::Ended(why)) => {
            if !world.dying() && !disk.may_have_ended(mark) {
                world.fail(format!("{}: the server ended a judged connection: {why}", disk.name));
            }
        }
        Err(Broken::Wrong(why)) => world.fail(format!("{}: {why}", disk.name)),
        Err(Broken::Refused(kind, why)) => world.fail(format!("{}: refused late: {kind:x} {why}", disk.name)),
    }
}

impl Session<'_> {
    fn oracle(&self) -> std::sync::MutexGuard<'_, Oracle> {
        match &self.own {
            Some(own) => own.lock().unwrap_or_else(PoisonError::into_inner),
            None => self.disk.oracle(),
        }
    }

    fn check_size(&self) -> Result<(), Broken> {
        let (size, known) = (self.wire.size, self.oracle().size() * SECTOR);
        if size > known {
            return Err(Broken::Wrong(format!("has {size} bytes, should have {known}")));
        }
        if self.writable() && !self.disk.writable {
            return Err(Broken::Wrong("a device that is only read is offered for writing".into()));
        }
        Ok(())
    }

    fn writable(&self) -> bool {
        self.wire.flags & wire::READ_ONLY == 0
    }

    /// Reads the whole device.
    fn sweep(&mut self) -> Result<(), Broken> {
        let size = self.wire.size / self.disk.block * self.disk.block;
        let mut at = 0;
        while at < size {
            let len = REQUEST_BYTES_MAX.min(size - at);
            while self.wire.on_the_way() >= 8 {
                self.answer()?;
            }
            let what = What::Read(self.oracle().begin_read(), at / SECTOR);
            self.send((0, at, len), wire::READ, what, &[])?;
            at += len;
        }
        while self.wire.on_the_way() > 0 {
            self.answer()?;
        }
        Ok(())
    }

    /// Random requests.
    fn random(&mut self, rng: &mut Rng) -> Result<(), Broken> {
        let (size, writable) = (self.wire.size, self.writable());
        let depth = 1 + rng.below(DEPTH_MAX) as usize;
        let count = 1 + rng.below(REQUESTS_MAX);
        // Some look only at a part, where they meet others.
        let part = if rng.chance(40) { size.min(1 << 20) } else { size };
        for _ in 0..count {
            if self.world.stopped() {
                break;
            }
            while self.wire.on_the_way() >= depth {
                self.answer()?;
            }
            self.ask(part, writable, rng)?;
        }
        while self.wire.on_the_way() > 0 {
            self.answer()?;
        }
        Ok(())
    }

    /// A range of blocks: first byte and length.
    fn range(&self, part: u64, rng: &mut Rng) -> (u64, u64) {
        let block = self.disk.block;
        let most = REQUEST_BYTES_MAX.min(part);
        let (unit, most) = match rng.below(10) {
            0..3 => (block, 8192.max(block)),
            3..8 => (4096.max(block), 32 << 10),
            _ => (4096.max(block), most),
        };
        let len = (1 + rng.below(most / unit)) * unit;
        let len = len.min(part / block * block);
        let places = (part - len) / unit + 1;
        (rng.below(places) * unit, len)
    }

    fn ask(&mut self, part: u64, writable: bool, rng: &mut Rng) -> Result<(), Broken> {
        let (offset, len) = self.range(part, rng);
        let (first, last) = (offset / SECTOR, (offset + len) / SECTOR);
        let fua = rng.chance(8);
        let flag = if fua { wire::FUA } else { 0 };
        let mut data = Vec::new();
        let mut sent = (flag, offset, len);
        let (command, what) = match rng.below(100) {
            0..35 if writable => {
                let id = self.world.write_id(Fill::ALL[rng.below(5) as usize]);
                data = vec![0; len as usize];
                fill(id, first, &mut data);
                (wire::WRITE, What::Write(self.oracle().begin_write(id, first..last, Write::Write), fua))
            }
            35..41 if writable && self.wire.flags & wire::SEND_WRITE_ZEROES != 0 => {
                sent.0 |= if rng.chance(50) { wire::NO_HOLE } else { 0 };
                let token = self.oracle().begin_write(0, first..last, Write::Zeroes);
                (wire::WRITE_ZEROES, What::Write(token, fua))
            }
            41..47 if writable && self.wire.flags & wire::SEND_TRIM != 0 => {
                let kind = Write::Discard { zeroing: false };
                let token = self.oracle().begin_write(0, first..last, kind);
                (wire::TRIM, What::Write(token, fua))
            }
            47..52 if writable => {
                sent = (0, 0, 0);
                (wire::FLUSH, What::Flush(self.oracle().begin_flush()))
            }
            52..55 if self.wire.contexts => {
                sent.0 = 0;
                (wire::BLOCK_STATUS, What::Status(self.oracle().begin_read(), first, len))
            }
            55 => {
                sent.0 = 0;
                (wire::CACHE, What::Cache)
            }
            56 => {
                sent = (0, FAR, len);
                (wire::READ, What::Wrong(wire::EINVAL))
            }
            57 => {
                sent = (0, FAR, len);
                data = vec![0x5a; len as usize];
                let error = if writable { wire::ENOSPC } else { wire::EPERM };
                (wire::WRITE, What::Wrong(error))
            }
            58 => {
                // Longer than the device, too.
                sent = (0, 0, 1 << 31);
                (wire::READ, What::Wrong(wire::EINVAL))
            }
            59 => {
                sent = (0, offset, len);
                (77, What::Wrong(wire::EINVAL))
            }
            60 if !writable => {
                sent = (0, offset, len);
                data = vec![0x5a; len as usize];
                (wire::WRITE, What::Wrong(wire::EPERM))
            }
            _ => {
                sent.0 = 0;
                (wire::READ, What::Read(self.oracle().begin_read(), first))
            }
        };
        self.send(sent, command, what, &data)
    }

    fn send(
        &mut self,
        (flags, offset, len): (u16, u64, u64),
        command: u16,
        what: What,
        data: &[u8],
    ) -> Result<(), Broken> {
        let text = format!("{}: command {command}, flags {flags}, {len} bytes at {offset}", self.disk.name);
        self.slot.begin(text.clone(), REQUEST_MAX);
        // Known before it is sent: what cannot be sent may have been done all the same.
        let cookie = self.wire.next();
        self.asked.insert(cookie, Asked { command, what, text });
        self.wire.send(flags, command, offset, len as u32, data)?;
        Ok(())
    }

    fn answer(&mut self) -> Result<(), Broken> {
        let reply = self.wire.reply()?;
        self.slot.moved();
        let Some(asked) = self.asked.remove(&reply.cookie) else {
            return Err(Broken::Wrong(format!("an answer to cookie {}", reply.cookie)));
        };
        self.world.counts.add("requests", name(asked.command), 1);
        let text = asked.text.clone();
        let story = |why| Broken::Wrong(format!("{text}: {why}\n  {}", self.disk.story()));
        self.judge(asked, reply).map_err(story)
    }

    fn judge(&self, asked: Asked, reply: Reply) -> Result<(), String> {
        let Asked { command, what, text } = asked;
        let Reply { error, data, extents, .. } = reply;
        let mut oracle = self.oracle();
        match what {
            What::Wrong(wanted) if error == wanted => return Ok(()),
            What::Wrong(wanted) if error == 0 => {
                return Err(format!("is answered well and not with {wanted}"));
            }
            What::Write(token, fua) => {
                let outcome = match error {
                    0 => Outcome::Done { fua },
                    _ => Outcome::Failed,
                };
                oracle.end(token, outcome);
            }
            What::Flush(token) => oracle.end_flush(token, error == 0),
            What::Read(token, first) if error == 0 => {
                self.check(&mut oracle, Held { read: token, first, data, text })?;
            }
            What::Status(token, first, len) if error == 0 => {
                // What is told to be zeroes has to read as zeroes.
                let (at, zeroes) = longest_zeroes(len, &extents)?;
                let data = vec![0; zeroes as usize];
                let text = format!("{text}: told to be zeroes");
                self.check(&mut oracle, Held { read: token, first: first + at / SECTOR, data, text })?;
            }
            What::Read(token, ..) | What::Status(token, ..) => oracle.abandon(token),
            What::Wrong(_) | What::Cache => {}
        }
        drop(oracle);
        if error == 0 {
            return Ok(());
        }
        self.world.counts.add("errors", format!("{} {error}", name(command)), 1);
        match self.excuse(command, error) {
            Some(_) => Ok(()),
            None => Err(format!("is answered with error {error}, for which there is no reason")),
        }
    }

    fn check(&self, oracle: &mut Oracle, read: Held) -> Result<(), String> {
        if self.own.is_none() {
            return self.disk.judge(oracle, read);
        }
        let judged = oracle.check_read(read.read, read.first, &read.data);
        judged.map_err(|wrong| wrong.to_string())
    }

    /// Why this error may be.
    fn excuse(&self, command: u16, error: u32) -> Option<&'static str> {
        let disk = self.disk;
        let stores = matches!(command, wire::WRITE | wire::WRITE_ZEROES | wire::TRIM)
            // What was kept apart goes to the device only then.
            || command == wire::FLUSH && disk.cut;
        let ends = self.world.dying() || disk.may_have_ended(self.mark);
        match error {
            // What is held back is answered so.
            wire::ESHUTDOWN | wire::EIO if ends => Some("it is being removed, or the server ends"),
            wire::ENOSPC | wire::ENOMEM if stores && disk.is_tight() => Some("its limit is small"),
            wire::EIO if disk.may_fail() => Some("faults were asked for, or its store is small"),
            wire::ESHUTDOWN if disk.kind == Kind::Template => Some("its base goes"),
            _ => None,
        }
    }

    /// What was asked and will have no answer may have been done.
    fn forget(&mut self) {
        let asked: Vec<_> = self.asked.drain().collect();
        let mut oracle = self.oracle();
        for (_, asked) in asked {
            match asked.what {
                What::Write(token, _) => oracle.end(token, Outcome::Failed),
                What::Flush(token) => oracle.end_flush(token, false),
                What::Read(token, ..) | What::Status(token, ..) => oracle.abandon(token),
                What::Cache | What::Wrong(_) => {}
            }
        }
    }
}

/// The longest piece that is told to be zeroes: where it begins and how long it is, in bytes.
fn longest_zeroes(len: u64, extents: &[(u32, bool)]) -> Result<(u64, u64), String> {
    let mut at = 0;
    let mut longest = (0, 0);
    for (extent, zeroes) in extents {
        // The last one may reach beyond what was asked for.
        let end = (at + u64::from(*extent)).min(len);
        if *zeroes && end - at > longest.1 {
            longest = (at, end - at);
        }
        at = end;
    }
    if at == 0 { Err("no extent".into()) } else { Ok(longest) }
}

fn name(command: u16) -> String {
    let names = ["read", "write", "disconnect", "flush", "trim", "cache", "write zeroes", "block status"];
    names.get(command as usize).map_or_else(|| format!("command {command}"), |name| (*name).to_owned())
}
