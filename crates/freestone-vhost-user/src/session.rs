//! One frontend: its messages, one after the other.

use freestone_core::client_log;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::channel::{Gone, Message, receive, reply};
use crate::disk::{self, CONFIG_BYTES, MAX_QUEUES};
use crate::inflight::{self, Inflight};
use crate::memory::{MAX_REGIONS, Memory};
use crate::ring::{Addresses, MAX_QUEUE_SIZE};
use crate::vring::{Around, Vring, event};
use crate::wire::{
    ConfigPart, InflightArea, MAX_FDS, MemRegion, MemTable, NEED_REPLY, SingleRegion, VringAddr, VringState,
    WRITEBACK_OFFSET, feature, message, protocol,
};

/// What is offered of the protocol.
const PROTOCOL_FEATURES: u64 = protocol::MQ
    | protocol::REPLY_ACK
    | protocol::BACKEND_REQ
    | protocol::CONFIG
    | protocol::INFLIGHT_SHMFD
    | protocol::RESET_DEVICE
    | protocol::CONFIGURE_MEM_SLOTS;
/// Of the number in a message about an eventfd: the queue, and whether there is none.
const QUEUE_MASK: u64 = 0xff;
const NO_FD: u64 = 1 << 8;

/// A message that is not done; a sentence.
type Refusal = String;

/// What a message is answered with.
#[derive(Debug)]
enum Answer {
    /// That it is done, where the frontend wants to know.
    Done,
    /// This.
    Body(Vec<u8>),
    /// This, with a file.
    File(Vec<u8>, OwnedFd),
}

/// A connected frontend.
pub struct Session {
    around: Around,
    /// As offered when it connected.
    offered: u64,
    /// Features the driver has accepted; `None` before the first `SET_FEATURES` and after a reset.
    features: Option<u64>,
    protocol: u64,
    vrings: Vec<Vring>,
}

impl Session {
    /// Of a frontend that has said nothing yet.
    pub fn new(around: Around) -> Self {
        let offered = disk::features(&around.disk);
        let vrings = std::iter::repeat_with(Vring::default).take(MAX_QUEUES).collect();
        let session = Self { around, offered, features: None, protocol: 0, vrings };
        session.set_writeback(true);
        session
    }

    /// Answers messages until the frontend leaves, or breaks the protocol. When this returns,
    /// nothing of it is in flight any more.
    pub fn run(mut self) {
        let guest = Arc::clone(&self.around.guest);
        let socket = guest.socket.as_fd();
        loop {
            let message = match receive(socket) {
                Ok(message) => message,
                Err(Gone::Closed) => break,
                Err(Gone::Garbage(what)) => {
                    client_log!(warn, "{}: vhost-user: the frontend sent {what}", self.around.disk.name);
                    break;
                }
            };
            let (request, flags) = (message.request, message.flags);
            let wants_ack = flags & NEED_REPLY != 0 && self.protocol & protocol::REPLY_ACK != 0;
            let done = match self.handle(message) {
                Ok(Answer::Body(body)) => reply(socket, request, &body, None),
                Ok(Answer::File(body, file)) => reply(socket, request, &body, Some(file.as_fd())),
                Ok(Answer::Done) if wants_ack => reply(socket, request, &0_u64.to_ne_bytes(), None),
                Ok(Answer::Done) => Ok(()),
                Err(refusal) => {
                    client_log!(warn, "{}: vhost-user: message {request}: {refusal}", self.around.disk.name);
                    // Without an answer the frontend would go on as if it were done.
                    if wants_ack {
                        reply(socket, request, &1_u64.to_ne_bytes(), None)
                    } else {
                        Err(Gone::Closed)
                    }
                }
            };
            if done.is_err() {
                break;
            }
        }
        self.stop_all();
    }

    fn handle(&mut self, message: Message) -> Result<Answer, Refusal> {
        let Message { request, body, mut fds, .. } = message;
        match request {
            message::GET_FEATURES => return Ok(number(self.offered)),
            message::SET_FEATURES => self.set_features(parse(&body)?)?,
            message::GET_PROTOCOL_FEATURES => return Ok(number(PROTOCOL_FEATURES)),
            message::SET_PROTOCOL_FEATURES => {
                let features = parse::<u64>(&body)?;
                if features & !PROTOCOL_FEATURES != 0 {
                    return Err(format!("protocol features {features:#x} were not all offered"));
                }
                self.protocol = features;
            }
            message::GET_QUEUE_NUM => return Ok(number(MAX_QUEUES as u64)),
            message::GET_MAX_MEM_SLOTS => return Ok(number(MAX_REGIONS as u64)),
            message::GET_CONFIG => return self.get_config(&body),
            message::SET_CONFIG => self.set_config(&body)?,
            // There is one owner, the connection.
            message::SET_OWNER => {}
            message::SET_BACKEND_REQ_FD => {
                let socket = fds.pop().ok_or("there is no socket")?;
                self.around.guest.set_backend_socket(socket);
            }
            message::GET_INFLIGHT_FD => {
                let (area, file) = inflight::create(area(&body)?).map_err(|error| error.to_string())?;
                // As long as the question.
                return Ok(Answer::File(area.as_bytes()[..body.len()].to_vec(), file));
            }
            message::SET_INFLIGHT_FD => {
                let file = fds.first().ok_or("there is no file")?;
                let inflight = Inflight::new(area(&body)?, file).map_err(|error| error.to_string())?;
                // Queues begin with it, or not at all.
                self.stop_all();
                self.around.inflight = Some(inflight);
                self.settle_all()?;
            }
            message::RESET_OWNER | message::RESET_DEVICE => self.reset(),
            message::SET_MEM_TABLE => self.set_mem_table(&body, &fds)?,
            message::ADD_MEM_REG => {
                let region = parse::<SingleRegion>(&body)?.region;
                let file = fds.first().ok_or("a region has no file")?;
                let memory = self.around.guest.memory().with(region, file);
                self.set_memory(memory.map_err(|error| error.to_string())?);
            }
            message::REM_MEM_REG => {
                let region = parse::<SingleRegion>(&body)?.region;
                let memory = self.around.guest.memory().without(&region);
                self.set_memory(memory.map_err(|error| error.to_string())?);
            }
            message::SET_VRING_NUM => {
                let VringState { index, num } = parse(&body)?;
                let size =
                    u16::try_from(num).ok().filter(|size| size.is_power_of_two() && *size <= MAX_QUEUE_SIZE);
                let size = size.ok_or_else(|| format!("a queue cannot have {num} entries"))?;
                self.change(index, |vring| vring.size = size)?;
            }
            message::SET_VRING_ADDR => {
                let VringAddr { index, desc, used, avail, .. } = parse(&body)?;
                self.change(index, |vring| vring.addresses = Some(Addresses { desc, avail, used }))?;
            }
            message::SET_VRING_BASE => {
                let VringState { index, num } = parse(&body)?;
                let base = u16::try_from(num).map_err(|_| format!("a queue cannot be at {num}"))?;
                self.change(index, |vring| vring.base = base)?;
            }
            message::GET_VRING_BASE => {
                let index = parse::<VringState>(&body)?.index;
                let vring = self.vring(index.into())?;
                vring.stop();
                // It does not start again before it gets a new one.
                vring.kick = None;
                let state = VringState { index, num: vring.base.into() };
                return Ok(Answer::Body(state.as_bytes().to_vec()));
            }
            message::SET_VRING_KICK => {
                let (index, kick) = event_of(&body, &mut fds)?;
                let kick = kick.ok_or("a queue without a kick is not offered")?;
                // Before protocol features were known, a queue starts enabled.
                let always = !self.has(feature::PROTOCOL_FEATURES);
                self.change(index, |vring| {
                    vring.kick = Some(Arc::new(kick));
                    vring.enabled |= always;
                })?;
            }
            message::SET_VRING_CALL => {
                let (index, call) = event_of(&body, &mut fds)?;
                self.vring(index.into())?.set_call(call);
            }
            message::SET_VRING_ERR => {
                let (index, err) = event_of(&body, &mut fds)?;
                self.vring(index.into())?.err = err.map(Arc::new);
            }
            message::SET_VRING_ENABLE => {
                let VringState { index, num } = parse(&body)?;
                self.vring(index.into())?.enabled = num != 0;
                self.settle(index)?;
            }
            _ => return Err("it is not known".to_owned()),
        }
        Ok(Answer::Done)
    }

    fn set_features(&mut self, features: u64) -> Result<(), Refusal> {
        if features & !self.offered != 0 {
            return Err(format!("features {features:#x} were not all offered"));
        }
        if self.features != Some(features) {
            // Running queues use the features accepted before.
            for vring in &mut self.vrings {
                vring.stop();
            }
            self.features = Some(features);
            self.set_writeback(true);
            self.settle_all()?;
        }
        Ok(())
    }

    /// Returns true if the driver has accepted a feature.
    fn has(&self, feature: u64) -> bool {
        self.features.is_some_and(|features| features & feature != 0)
    }

    /// Switches write-back on or off. Write-back stays off for a driver that has not accepted FLUSH:
    /// such a driver cannot make its writes durable.
    fn set_writeback(&self, writeback: bool) {
        let can_flush = self.offered & feature::FLUSH == 0 || self.has(feature::FLUSH);
        self.around.guest.writeback.store(writeback && can_flush, Ordering::SeqCst);
    }

    fn get_config(&self, body: &[u8]) -> Result<Answer, Refusal> {
        let (part, _) = ConfigPart::read_from_prefix(body).map_err(|_| "it is too short")?;
        // Frontends read the configuration before the driver chooses: FLUSH gives it write-back.
        let writeback = self.offered & feature::CONFIG_WCE != 0
            && (self.features.is_none() || self.around.guest.writeback.load(Ordering::SeqCst));
        let config = disk::config(&self.around.disk, writeback);
        let from = part.offset as usize;
        let wanted = from.checked_add(part.size as usize).and_then(|end| config.get(from..end));
        // No bytes at all: it is refused.
        let bytes = wanted.unwrap_or_default();
        let part = ConfigPart { size: bytes.len() as u32, ..part };
        Ok(Answer::Body([part.as_bytes(), bytes].concat()))
    }

    fn set_config(&self, body: &[u8]) -> Result<(), Refusal> {
        let (part, bytes) = ConfigPart::read_from_prefix(body).map_err(|_| "it is too short")?;
        let end = part.offset.checked_add(part.size).filter(|end| *end as usize <= CONFIG_BYTES);
        if end.is_none() || bytes.len() != part.size as usize {
            return Err("it is not in the configuration".to_owned());
        }
        // All else is not the driver's to write.
        let at = WRITEBACK_OFFSET.checked_sub(part.offset);
        if self.has(feature::CONFIG_WCE)
            && let Some(writeback) = at.and_then(|at| bytes.get(at as usize))
        {
            self.set_writeback(*writeback != 0);
        }
        Ok(())
    }

    fn set_mem_table(&self, body: &[u8], fds: &[OwnedFd]) -> Result<(), Refusal> {
        let (table, behind) = MemTable::read_from_prefix(body).map_err(|_| "it is too short")?;
        let count = table.regions as usize;
        if count > MAX_FDS || count != fds.len() || behind.len() < count * size_of::<MemRegion>() {
            return Err(format!("{count} regions, {} files", fds.len()));
        }
        let mut memory = Memory::default();
        for (raw, file) in behind.chunks_exact(size_of::<MemRegion>()).zip(fds) {
            memory = memory.with(parse(raw)?, file).map_err(|error| error.to_string())?;
        }
        self.set_memory(memory);
        Ok(())
    }

    fn set_memory(&self, memory: Memory) {
        self.around.guest.set_memory(memory);
        for vring in &self.vrings {
            vring.wake();
        }
    }

    fn vring(&mut self, index: u64) -> Result<&mut Vring, Refusal> {
        let vring = usize::try_from(index).ok().and_then(|index| self.vrings.get_mut(index));
        vring.ok_or_else(|| format!("there is no queue {index}"))
    }

    /// Changes how a queue is set up; one that runs goes on with the change.
    fn change(&mut self, index: u32, change: impl FnOnce(&mut Vring)) -> Result<(), Refusal> {
        let vring = self.vring(index.into())?;
        vring.stop();
        change(vring);
        self.settle(index)
    }

    fn settle(&mut self, index: u32) -> Result<(), Refusal> {
        let features = self.features.unwrap_or(0);
        let vring = self.vrings.get_mut(index as usize).ok_or("there is no such queue")?;
        let settled = vring.settle(index as usize, &self.around, features);
        settled.map_err(|error| format!("queue {index}: {error}"))
    }

    /// One that does not start again leaves the others alone.
    fn settle_all(&mut self) -> Result<(), Refusal> {
        let mut settled = Ok(());
        for index in 0..MAX_QUEUES {
            let this = self.settle(index as u32);
            settled = settled.and(this);
        }
        settled
    }

    fn stop_all(&mut self) {
        // All at once, then one after the other.
        for vring in &self.vrings {
            vring.ask_to_stop();
        }
        for vring in &mut self.vrings {
            vring.stop();
        }
    }

    /// As it was before the driver came; the memory stays.
    fn reset(&mut self) {
        self.stop_all();
        for vring in &mut self.vrings {
            *vring = Vring::default();
        }
        self.features = None;
        self.set_writeback(true);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop_all();
    }
}

fn number(value: u64) -> Answer {
    Answer::Body(value.to_ne_bytes().to_vec())
}

fn parse<T: FromBytes + KnownLayout + Immutable>(body: &[u8]) -> Result<T, Refusal> {
    T::read_from_bytes(body).map_err(|_| format!("{} bytes are not its size", body.len()))
}

/// What is said of memory for what is in flight; some leave out the padding at its end.
fn area(body: &[u8]) -> Result<InflightArea, Refusal> {
    let mut raw = [0; size_of::<InflightArea>()];
    let least = raw.len() - 4;
    if body.len() != raw.len() && body.len() != least {
        return Err(format!("{} bytes are not its size", body.len()));
    }
    raw[..body.len()].copy_from_slice(body);
    parse(&raw)
}

/// The queue that a message is about, and its eventfd.
fn event_of(body: &[u8], fds: &mut Vec<OwnedFd>) -> Result<(u32, Option<OwnedFd>), Refusal> {
    let value: u64 = parse(body)?;
    let index = (value & QUEUE_MASK) as u32;
    if value & NO_FD != 0 {
        return Ok((index, None));
    }
    let fd = fds.pop().ok_or("it has no file descriptor")?;
    Ok((index, Some(event(fd).map_err(|error| error.to_string())?)))
}
