//! A connection to one device: sends random requests, or reads the whole device, and judges each reply.

use std::collections::HashMap;
use std::sync::PoisonError;

use freestone_testkit::Rng;

use crate::oracle::{Fill, Kind as Write, Oracle, Outcome, SECTOR_BYTES, fill};
use crate::program::transport::Connection;
use crate::program::transport::machine::DATA_BYTES_MAX;
use crate::program::transport::protocol::{self, ConnectionError, Reply};
use crate::program::watch::{REQUEST_MAX, WatchedThread};
use crate::program::world::requests::{Intent, Request, Token};
use crate::program::world::{ConnectionMark, DeferredRead, Disk, Kind, World};

const SECTOR: u64 = SECTOR_BYTES as u64;
const DEPTH_MAX: u64 = 24;
const REQUESTS_MAX: u64 = 160;
/// An offset in bytes beyond the end of every device.
const FAR: u64 = 1 << 60;
/// An NBD command number that no export supports.
const NO_COMMAND: u16 = 77;

/// Requests in flight with their oracle tokens, by cookie.
pub(super) type SentRequests = HashMap<u64, (Request, Token)>;

pub(super) struct Session<'a> {
    pub(super) world: &'a World,
    pub(super) slot: &'a WatchedThread,
    pub(super) disk: &'a Disk,
    pub(super) mark: ConnectionMark,
    pub(super) link: Connection,
    pub(super) sent_requests: SentRequests,
    /// Content of the fork that belongs to this connection. `None` unless the device is a template.
    pub(super) own: Option<std::sync::Mutex<Oracle>>,
}

/// Ends requests that will not complete but may have taken effect. Returns the requests without
/// their tokens.
pub(super) fn end_requests(oracle: &mut Oracle, sent_requests: SentRequests) -> Vec<(u64, Request)> {
    let end = |(cookie, (request, token)): (u64, (Request, Token))| {
        match token {
            Token::Write(token) => oracle.end(token, Outcome::Failed),
            Token::Flush(token) => oracle.end_flush(token, false),
            Token::Read(token) => oracle.abandon(token),
            Token::Nothing => {}
        }
        (cookie, request)
    };
    sent_requests.into_iter().map(end).collect()
}

impl Session<'_> {
    fn oracle(&self) -> std::sync::MutexGuard<'_, Oracle> {
        match &self.own {
            Some(own) => own.lock().unwrap_or_else(PoisonError::into_inner),
            None => self.disk.oracle(),
        }
    }

    pub(super) fn check_size(&self) -> Result<(), ConnectionError> {
        let (size, known) = (self.link.properties().size, self.oracle().size() * SECTOR);
        if size > known {
            return Err(ConnectionError::Protocol(format!(
                "has {size} bytes, but should have at most {known}"
            )));
        }
        if self.link.properties().writable && !self.disk.writable {
            return Err(ConnectionError::Protocol("a read-only device is offered as writable".into()));
        }
        Ok(())
    }

    /// Handles replies until no request is in flight.
    pub(super) fn wait(&mut self) -> Result<(), ConnectionError> {
        while self.link.in_flight() > 0 {
            self.answer()?;
        }
        Ok(())
    }

    /// Reads the whole device and judges the bytes.
    pub(super) fn read_device(&mut self) -> Result<(), ConnectionError> {
        let size = self.link.properties().size / self.disk.block * self.disk.block;
        let depth = self.link.properties().depth.min(8);
        let mut at = 0;
        while at < size {
            let len = DATA_BYTES_MAX.min(size - at);
            while self.link.in_flight() >= depth {
                self.answer()?;
            }
            self.send((0, at, len), protocol::READ, Intent::Read(at / SECTOR), &[])?;
            at += len;
        }
        self.wait()
    }

    /// Sends a random number of random requests, and waits for their replies.
    pub(super) fn send_random_requests(&mut self, rng: &mut Rng) -> Result<(), ConnectionError> {
        let properties = self.link.properties();
        let size = properties.size;
        let depth = (1 + rng.below(DEPTH_MAX) as usize).min(properties.depth);
        let count = 1 + rng.below(REQUESTS_MAX);
        // Some connections use only the start of the device, so that their requests overlap those
        // of others.
        let part = if rng.chance(40) { size.min(1 << 20) } else { size };
        for _ in 0..count {
            if self.world.is_stopped() {
                break;
            }
            while self.link.in_flight() >= depth {
                self.answer()?;
            }
            self.ask(part, rng)?;
        }
        self.wait()
    }

    /// Draws a range of blocks: offset and length in bytes.
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

    fn ask(&mut self, part: u64, rng: &mut Rng) -> Result<(), ConnectionError> {
        let properties = self.link.properties();
        let writable = properties.writable;
        let (offset, len) = self.range(part, rng);
        let (first, last) = (offset / SECTOR, (offset + len) / SECTOR);
        let flagged = properties.fua && rng.chance(8);
        let fua = flagged || properties.write_through;
        let flag = if flagged { protocol::FUA } else { 0 };
        let wrong = |error| Intent::Invalid(if properties.is_coarse { protocol::EIO } else { error });
        let mut data = Vec::new();
        let mut sent = (flag, offset, len);
        let (command, intent) = match rng.below(100) {
            0..35 if writable => {
                let id = self.world.write_id(Fill::drawn(rng.below(40) as u8));
                data = vec![0; len as usize];
                fill(id, first, &mut data);
                (protocol::WRITE, Intent::Write { id, sectors: first..last, kind: Write::Write, fua })
            }
            35..41 if writable && properties.zeroes => {
                sent.0 |= if rng.chance(50) { protocol::NO_HOLE } else { 0 };
                (
                    protocol::WRITE_ZEROES,
                    Intent::Write { id: 0, sectors: first..last, kind: Write::Zeroes, fua },
                )
            }
            41..47 if writable && properties.trims => {
                let kind = Write::Discard { zeroing: false };
                (protocol::TRIM, Intent::Write { id: 0, sectors: first..last, kind, fua })
            }
            47..52 if writable => {
                sent = (0, 0, 0);
                (protocol::FLUSH, Intent::Flush)
            }
            52..55 if properties.contexts => {
                sent.0 = 0;
                (protocol::BLOCK_STATUS, Intent::Status(first, len))
            }
            55 if !properties.is_coarse => {
                sent.0 = 0;
                (protocol::CACHE, Intent::Cache)
            }
            56 if properties.is_raw => {
                sent = (0, FAR, len);
                (protocol::READ, wrong(protocol::EINVAL))
            }
            57 if properties.is_raw => {
                sent = (0, FAR, len);
                data = vec![0x5a; len as usize];
                (protocol::WRITE, wrong(if writable { protocol::ENOSPC } else { protocol::EPERM }))
            }
            58 if !properties.is_coarse => {
                // The read is longer than a server accepts, and may also exceed the device.
                sent = (0, 0, 1 << 31);
                (protocol::READ, wrong(protocol::EINVAL))
            }
            59 if properties.is_raw => {
                sent = (0, offset, len);
                let error = if properties.is_coarse { protocol::ENOTSUP } else { protocol::EINVAL };
                (NO_COMMAND, Intent::Invalid(error))
            }
            60 if !writable && properties.is_raw => {
                sent = (0, offset, len);
                data = vec![0x5a; len as usize];
                (protocol::WRITE, wrong(protocol::EPERM))
            }
            _ => {
                sent.0 = 0;
                (protocol::READ, Intent::Read(first))
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
    ) -> Result<(), ConnectionError> {
        let (name, kind) = (&self.disk.name, self.link.kind());
        let text = format!("{name}, {kind}: command {command}, flags {flags}, {len} bytes at {offset}");
        self.slot.begin(text.clone(), REQUEST_MAX);
        // Record the start before sending: the server may execute a request even if sending it
        // fails.
        let token = intent.begin(&mut self.oracle());
        self.sent_requests.insert(self.link.next(), (Request { command, offset, len, intent, text }, token));
        self.link.send(flags, command, offset, len as u32, data)
    }

    fn answer(&mut self) -> Result<(), ConnectionError> {
        let reply = self.link.reply()?;
        self.slot.restart_timer();
        self.world.completions.add();
        let Some((request, token)) = self.sent_requests.remove(&reply.cookie) else {
            return Err(ConnectionError::Protocol(format!("a reply with unknown cookie {}", reply.cookie)));
        };
        self.world.counts.add(
            "requests",
            format!("{} {}", self.link.kind(), command_name(request.command)),
            1,
        );
        let text = request.text.clone();
        let story = |why| ConnectionError::Protocol(format!("{text}: {why}\n  {}", self.disk.describe()));
        if self.link.survives_disconnects() && self.disk.may_have_ended(self.mark) {
            // A verb ends connections: the device may already have lost power while the oracle does
            // not know it. Do not judge the reply.
            self.sent_requests.insert(reply.cookie, (request, token));
            return Err(ConnectionError::Ended("a verb ends connections".into()));
        }
        self.judge(request, token, reply).map_err(story)
    }

    fn judge(&self, request: Request, token: Token, reply: Reply) -> Result<(), String> {
        let excuse = self.excuse(&request, reply.error);
        let Request { command, intent, text, .. } = request;
        let Reply { error, data, extents, .. } = reply;
        let mut oracle = self.oracle();
        match (intent, token) {
            (Intent::Invalid(wanted), _) if error == wanted => return Ok(()),
            (Intent::Invalid(wanted), _) if error == 0 => {
                return Err(format!("succeeds, but should fail with {wanted}"));
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
                self.check(&mut oracle, DeferredRead { read: token, first, data, text })?;
            }
            (Intent::Status(first, len), Token::Read(token)) if error == 0 => {
                // Extents reported as zeroes must read as zeroes.
                let (at, zeroes) = longest_zeroes(len, &extents)?;
                let data = vec![0; zeroes as usize];
                let text = format!("{text}: reported as zeroes");
                self.check(
                    &mut oracle,
                    DeferredRead { read: token, first: first + at / SECTOR, data, text },
                )?;
            }
            (_, Token::Read(token)) => oracle.abandon(token),
            (_, Token::Write(_) | Token::Nothing) => {}
        }
        drop(oracle);
        if error == 0 {
            return Ok(());
        }
        self.world.counts.add("errors", format!("{} {} {error}", self.link.kind(), command_name(command)), 1);
        match excuse {
            Some(_) => Ok(()),
            None => Err(format!("fails with error {error} without an accepted reason")),
        }
    }

    fn check(&self, oracle: &mut Oracle, read: DeferredRead) -> Result<(), String> {
        if self.own.is_none() {
            return self.disk.judge(oracle, read);
        }
        let judged = oracle.check_read(read.read, read.first, &read.data);
        judged.map_err(|wrong| wrong.to_string())
    }

    /// Returns the accepted reason why the request failed with this error, or `None` if there is
    /// none.
    fn excuse(&self, request: &Request, error: u32) -> Option<&'static str> {
        let (disk, properties, command) = (self.disk, self.link.properties(), request.command);
        let stores = matches!(command, protocol::WRITE | protocol::WRITE_ZEROES | protocol::TRIM)
            // A flush of a power layer writes unflushed data to the device below.
            || matches!(command, protocol::FLUSH) && disk.has_volatile_cache;
        let ends = self.world.is_server_ending() || disk.may_have_ended(self.mark);
        let is_full = error == protocol::EIO && properties.is_coarse
            || matches!(error, protocol::ENOSPC | protocol::ENOMEM);
        match error {
            // Requests to a device that is being removed, or to a server that ends, fail with these
            // errors.
            protocol::ESHUTDOWN | protocol::EIO if ends => {
                Some("the device is being removed, or the server ends")
            }
            _ if is_full && stores && disk.is_tight() => Some("the memory limit is small"),
            protocol::EIO if disk.may_fail() => Some("the device has faults, or its COW device is small"),
            protocol::EIO if request.offset + request.len > properties.size => {
                Some("the request was sent when the device was larger")
            }
            protocol::ESHUTDOWN if disk.kind == Kind::Template => Some("the base is being removed"),
            _ => None,
        }
    }

    /// Ends the connection of a machine, which may still be open: the server must not execute a request after the
    /// oracle has ended it. Does not judge the requests that complete before.
    pub(super) fn hang_up(&mut self) {
        let Connection::Machine(driver) = &mut self.link else { return };
        let completed = driver.hang_up();
        let completed = completed.iter().filter_map(|cookie| self.sent_requests.remove_entry(cookie));
        let completed = completed.collect();
        end_requests(&mut self.oracle(), completed);
    }

    /// Ends the requests in flight, which will not complete. Returns them for a reconnection.
    pub(super) fn end_requests(&mut self) -> Vec<(u64, Request)> {
        let sent_requests = std::mem::take(&mut self.sent_requests);
        end_requests(&mut self.oracle(), sent_requests)
    }
}

/// Returns the offset and the length in bytes of the longest extent that is reported as zeroes.
fn longest_zeroes(len: u64, extents: &[(u32, bool)]) -> Result<(u64, u64), String> {
    let mut at = 0;
    let mut longest = (0, 0);
    for (extent, zeroes) in extents {
        // The last extent may end beyond the requested range.
        let end = (at + u64::from(*extent)).min(len);
        if *zeroes && end - at > longest.1 {
            longest = (at, end - at);
        }
        at = end;
    }
    if at == 0 { Err("no extent".into()) } else { Ok(longest) }
}

fn command_name(command: u16) -> String {
    let names = ["read", "write", "disconnect", "flush", "trim", "cache", "write zeroes", "block status"];
    names.get(command as usize).map_or_else(|| format!("command {command}"), |name| (*name).to_owned())
}
