//! Clients whose every answer is judged.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};

use freestone_testkit::Rng;

use super::asleep::{Asleep, Intent, Request, Token};
use super::link::{Link, Place};
use super::machine::DATA_BYTES_MAX;
use super::said::{self, Broken, Reply};
use super::watch::{REQUEST_MAX, Slot};
use super::world::{Disk, Held, Kind, Mark, World};
use crate::oracle::{Durability, Fill, Kind as Write, Oracle, Outcome, SECTOR_BYTES, fill};

const SECTOR: u64 = SECTOR_BYTES as u64;
const DEPTH_MAX: u64 = 24;
const REQUESTS_MAX: u64 = 160;
/// Beyond every device.
const FAR: u64 = 1 << 60;
/// No command of any export.
const NO_COMMAND: u16 = 77;

/// What is on its way, by cookie.
type Sent = HashMap<u64, (Request, Token)>;

/// One connection, and what it has asked.
struct Session<'a> {
    world: &'a World,
    slot: &'a Slot,
    disk: &'a Disk,
    mark: Mark,
    link: Link,
    asked: Sent,
    /// Of a template: what this connection's device holds.
    own: Option<std::sync::Mutex<Oracle>>,
}

/// Runs until the world stops.
pub fn run(world: &World, slot: &Slot, mut rng: Rng) {
    while !world.stopped() {
        if !one(world, slot, &mut rng) {
            std::thread::yield_now();
        }
    }
}

/// One connection to some device; false where there is none.
pub fn one(world: &World, slot: &Slot, rng: &mut Rng) -> bool {
    let disks = world.disks(|disk| !disk.addresses().is_empty());
    if disks.is_empty() {
        return false;
    }
    let any = &disks[rng.below(disks.len() as u64) as usize];
    let disk = disks.iter().find(|disk| rng.chance(50) && world.is_missed(disk)).unwrap_or(any);
    // Some look at all of it, so that what got lost is not only found by chance.
    let talk = if rng.chance(15) { Talk::Sweep } else { Talk::Random };
    visit(world, slot, disk, rng, talk);
    slot.end();
    true
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
    let any = rng.below(addresses.len() as u64) as usize;
    // A machine that waits for its disk goes first.
    let wakes = world.is_missed(disk).then(|| addresses.iter().find(|at| matches!(at, Place::Machine(_))));
    let place = wakes.flatten().unwrap_or(&addresses[any]);
    slot.begin(format!("{}: connects at {place:?}", disk.name), REQUEST_MAX);
    // Who cuts its power waits until nobody is inside.
    let _inside = disk.gate.read().unwrap_or_else(PoisonError::into_inner);
    if disk.addresses().is_empty() {
        return;
    }
    let own = (disk.kind == Kind::Template).then(|| {
        let base = disk.of.as_ref().expect("a template has a base");
        std::sync::Mutex::new(base.oracle().snapshot(&disk.name, Durability::Answered))
    });
    let (link, asked) = match connect(world, disk, place, rng) {
        Ok(connected) => connected,
        Err(broken) => {
            if !world.dying() && !disk.may_have_ended(mark) {
                world.fail(format!("{}: a client cannot connect at {place:?}: {broken:?}", disk.name));
            }
            return;
        }
    };
    let mut session = Session { world, slot, disk, mark, link, asked, own };
    // After a verb that ends connections this may be the device after a loss of power already, of
    // which the oracle is not told yet.
    let outcome = if disk.may_have_ended(mark) {
        Err(Broken::Ended("a verb ends connections".into()))
    } else {
        world.counts.add("clients", session.link.kind(), 1);
        session.check_size().and_then(|()| session.wait()).and_then(|()| match talk {
            Talk::Random => session.random(rng),
            Talk::Sweep => session.sweep(),
        })
    };
    let asked = session.forget();
    let link = session.link;
    match outcome {
        Ok(()) => link.leave(),
        Err(Broken::Ended(why)) => {
            if !world.dying() && !disk.may_have_ended(mark) {
                world.fail(format!("{}: the server ended a judged connection: {why}", disk.name));
            }
            // Who connects again finds what was in flight done, and is told so.
            if let Link::Machine(driver) = link
                && driver.can_reconnect()
            {
                world.falls_asleep(Asleep { disk: disk.name.clone(), driver, asked });
            }
        }
        Err(Broken::Wrong(why)) => world.fail(format!("{}: {why}", disk.name)),
        Err(Broken::Refused(kind, why)) => world.fail(format!("{}: refused late: {kind:x} {why}", disk.name)),
    }
}

/// A new connection, or that of a machine that was connected before, with what it had in flight.
fn connect(world: &World, disk: &Disk, place: &Place, rng: &mut Rng) -> Result<(Link, Sent), Broken> {
    let Place::Machine(path) = place else {
        return Ok((Link::connect(place, &disk.name, rng)?, HashMap::new()));
    };
    let Some(Asleep { mut driver, asked, .. }) = world.wakes(&disk.name) else {
        return Ok((Link::connect(place, &disk.name, rng)?, HashMap::new()));
    };
    // All of it may be done from here on.
    let mut oracle = disk.oracle();
    let begin = |(cookie, request): (u64, Request)| {
        let token = request.intent.begin(&mut oracle);
        (cookie, (request, token))
    };
    let asked: Sent = asked.into_iter().map(begin).collect();
    drop(oracle);
    if let Err(broken) = driver.reconnect(path) {
        // Nobody knows how much of it was done and answered: this machine gives up.
        forget(&mut disk.oracle(), asked);
        return Err(broken);
    }
    world.counts.add("clients", "vhost-user, again", 1);
    world.counts.add("clients", "requests done again or for the first time", asked.len() as u64);
    Ok((Link::Machine(driver), asked))
}

/// What was asked and will have no answer may have been done.
fn forget(oracle: &mut Oracle, asked: Sent) -> Vec<(u64, Request)> {
    let end = |(cookie, (request, token)): (u64, (Request, Token))| {
        match token {
            Token::Write(token) => oracle.end(token, Outcome::Failed),
            Token::Flush(token) => oracle.end_flush(token, false),
            Token::Read(token) => oracle.abandon(token),
            Token::Nothing => {}
        }
        (cookie, request)
    };
    asked.into_iter().map(end).collect()
}

impl Session<'_> {
    fn oracle(&self) -> std::sync::MutexGuard<'_, Oracle> {
        match &self.own {
            Some(own) => own.lock().unwrap_or_else(PoisonError::into_inner),
            None => self.disk.oracle(),
        }
    }

    fn check_size(&self) -> Result<(), Broken> {
        let (size, known) = (self.link.offers().size, self.oracle().size() * SECTOR);
        if size > known {
            return Err(Broken::Wrong(format!("has {size} bytes, should have {known}")));
        }
        if self.link.offers().writable && !self.disk.writable {
            return Err(Broken::Wrong("a device that is only read is offered for writing".into()));
        }
        Ok(())
    }

    /// Until nothing is in flight.
    fn wait(&mut self) -> Result<(), Broken> {
        while self.link.on_the_way() > 0 {
            self.answer()?;
        }
        Ok(())
    }

    /// Reads the whole device.
    fn sweep(&mut self) -> Result<(), Broken> {
        let size = self.link.offers().size / self.disk.block * self.disk.block;
        let depth = self.link.offers().depth.min(8);
        let mut at = 0;
        while at < size {
            let len = DATA_BYTES_MAX.min(size - at);
            while self.link.on_the_way() >= depth {
                self.answer()?;
            }
            self.send((0, at, len), said::READ, Intent::Read(at / SECTOR), &[])?;
            at += len;
        }
        self.wait()
    }

    /// Random requests.
    fn random(&mut self, rng: &mut Rng) -> Result<(), Broken> {
        let offers = self.link.offers();
        let size = offers.size;
        let depth = (1 + rng.below(DEPTH_MAX) as usize).min(offers.depth);
        let count = 1 + rng.below(REQUESTS_MAX);
        // Some look only at a part, where they meet others.
        let part = if rng.chance(40) { size.min(1 << 20) } else { size };
        for _ in 0..count {
            if self.world.stopped() {
                break;
            }
            while self.link.on_the_way() >= depth {
                self.answer()?;
            }
            self.ask(part, rng)?;
        }
        self.wait()
    }

    /// A range of blocks: first byte and length.
    fn range(&self, part: u64, rng: &mut Rng) -> (u64, u64) {
        let block = self.disk.block;
        let most = DATA_BYTES_MAX.min(part);
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

    fn ask(&mut self, part: u64, rng: &mut Rng) -> Result<(), Broken> {
        let offers = self.link.offers();
        let writable = offers.writable;
        let (offset, len) = self.range(part, rng);
        let (first, last) = (offset / SECTOR, (offset + len) / SECTOR);
        let flagged = offers.fua && rng.chance(8);
        let fua = flagged || offers.write_through;
        let flag = if flagged { said::FUA } else { 0 };
        let wrong = |error| Intent::Wrong(if offers.is_coarse { said::EIO } else { error });
        let mut data = Vec::new();
        let mut sent = (flag, offset, len);
        let (command, intent) = match rng.below(100) {
            0..35 if writable => {
                let id = self.world.write_id(Fill::ALL[rng.below(5) as usize]);
                data = vec![0; len as usize];
                fill(id, first, &mut data);
                (said::WRITE, Intent::Write { id, sectors: first..last, kind: Write::Write, fua })
            }
            35..41 if writable && offers.zeroes => {
                sent.0 |= if rng.chance(50) { said::NO_HOLE } else { 0 };
                (said::WRITE_ZEROES, Intent::Write { id: 0, sectors: first..last, kind: Write::Zeroes, fua })
            }
            41..47 if writable && offers.trims => {
                let kind = Write::Discard { zeroing: false };
                (said::TRIM, Intent::Write { id: 0, sectors: first..last, kind, fua })
            }
            47..52 if writable => {
                sent = (0, 0, 0);
                (said::FLUSH, Intent::Flush)
            }
            52..55 if offers.contexts => {
                sent.0 = 0;
                (said::BLOCK_STATUS, Intent::Status(first, len))
            }
            55 if !offers.is_coarse => {
                sent.0 = 0;
                (said::CACHE, Intent::Cache)
            }
            56 if offers.is_raw => {
                sent = (0, FAR, len);
                (said::READ, wrong(said::EINVAL))
            }
            57 if offers.is_raw => {
                sent = (0, FAR, len);
                data = vec![0x5a; len as usize];
                (said::WRITE, wrong(if writable { said::ENOSPC } else { said::EPERM }))
            }
            58 if !offers.is_coarse => {
                // Longer than the device, too.
                sent = (0, 0, 1 << 31);
                (said::READ, wrong(said::EINVAL))
            }
            59 if offers.is_raw => {
                sent = (0, offset, len);
                let error = if offers.is_coarse { said::EOPNOTSUPP } else { said::EINVAL };
                (NO_COMMAND, Intent::Wrong(error))
            }
            60 if !writable && offers.is_raw => {
                sent = (0, offset, len);
                data = vec![0x5a; len as usize];
                (said::WRITE, wrong(said::EPERM))
            }
            _ => {
                sent.0 = 0;
                (said::READ, Intent::Read(first))
            }
        };
        self.send(sent, command, intent, &data)
    }

    fn send(
        &mut self,
        (flags, offset, len): (u16, u64, u64),
        command: u16,
        intent: Intent,
        data: &[u8],
    ) -> Result<(), Broken> {
        let (name, kind) = (&self.disk.name, self.link.kind());
        let text = format!("{name}, {kind}: command {command}, flags {flags}, {len} bytes at {offset}");
        self.slot.begin(text.clone(), REQUEST_MAX);
        // Known before it is sent: what cannot be sent may have been done all the same.
        let token = intent.begin(&mut self.oracle());
        self.asked.insert(self.link.next(), (Request { command, offset, len, intent, text }, token));
        self.link.send(flags, command, offset, len as u32, data)
    }

    fn answer(&mut self) -> Result<(), Broken> {
        let reply = self.link.reply()?;
        self.slot.moved();
        self.world.answers.add();
        let Some((request, token)) = self.asked.remove(&reply.cookie) else {
            return Err(Broken::Wrong(format!("an answer to cookie {}", reply.cookie)));
        };
        self.world.counts.add("requests", format!("{} {}", self.link.kind(), name(request.command)), 1);
        let text = request.text.clone();
        let story = |why| Broken::Wrong(format!("{text}: {why}\n  {}", self.disk.story()));
        if self.link.stays() && self.disk.may_have_ended(self.mark) {
            // It may be the device after a loss of power already, as in `visit`.
            self.asked.insert(reply.cookie, (request, token));
            return Err(Broken::Ended("a verb ends connections".into()));
        }
        self.judge(request, token, reply).map_err(story)
    }

    fn judge(&self, request: Request, token: Token, reply: Reply) -> Result<(), String> {
        let excuse = self.excuse(&request, reply.error);
        let Request { command, intent, text, .. } = request;
        let Reply { error, data, extents, .. } = reply;
        let mut oracle = self.oracle();
        match (intent, token) {
            (Intent::Wrong(wanted), _) if error == wanted => return Ok(()),
            (Intent::Wrong(wanted), _) if error == 0 => {
                return Err(format!("is answered well and not with {wanted}"));
            }
            (Intent::Write { fua, .. }, Token::Write(token)) => {
                let outcome = match error {
                    0 => Outcome::Done { fua },
                    _ => Outcome::Failed,
                };
                oracle.end(token, outcome);
            }
            (_, Token::Flush(token)) => oracle.end_flush(token, error == 0),
            (Intent::Read(first), Token::Read(token)) if error == 0 => {
                self.check(&mut oracle, Held { read: token, first, data, text })?;
            }
            (Intent::Status(first, len), Token::Read(token)) if error == 0 => {
                // What is told to be zeroes has to read as zeroes.
                let (at, zeroes) = longest_zeroes(len, &extents)?;
                let data = vec![0; zeroes as usize];
                let text = format!("{text}: told to be zeroes");
                self.check(&mut oracle, Held { read: token, first: first + at / SECTOR, data, text })?;
            }
            (_, Token::Read(token)) => oracle.abandon(token),
            (_, Token::Write(_) | Token::Nothing) => {}
        }
        drop(oracle);
        if error == 0 {
            return Ok(());
        }
        self.world.counts.add("errors", format!("{} {} {error}", self.link.kind(), name(command)), 1);
        match excuse {
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
    fn excuse(&self, request: &Request, error: u32) -> Option<&'static str> {
        let (disk, offers, command) = (self.disk, self.link.offers(), request.command);
        let stores = matches!(command, said::WRITE | said::WRITE_ZEROES | said::TRIM)
            // What was kept apart goes to the device only then.
            || matches!(command, said::FLUSH) && disk.cut;
        let ends = self.world.dying() || disk.may_have_ended(self.mark);
        let is_full = error == said::EIO && offers.is_coarse || matches!(error, said::ENOSPC | said::ENOMEM);
        match error {
            // What is held back is answered so.
            said::ESHUTDOWN | said::EIO if ends => Some("it is being removed, or the server ends"),
            _ if is_full && stores && disk.is_tight() => Some("its limit is small"),
            said::EIO if disk.may_fail() => Some("faults were asked for, or its store is small"),
            said::EIO if request.offset + request.len > offers.size => {
                Some("it was sent when the device was larger")
            }
            said::ESHUTDOWN if disk.kind == Kind::Template => Some("its base goes"),
            _ => None,
        }
    }

    /// What was asked and will have no answer.
    fn forget(&mut self) -> Vec<(u64, Request)> {
        let asked = std::mem::take(&mut self.asked);
        forget(&mut self.oracle(), asked)
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
