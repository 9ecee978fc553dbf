//! A session with one frontend: handles the frontend's messages in order.

use freestone_core::client_log;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::channel::{ConnectionError, Message, receive, reply};
use crate::disk::{self, CONFIG_BYTES, MAX_QUEUES};
use crate::inflight::{self, InflightLog};
use crate::memory::{MAX_REGIONS, Memory};
use crate::ring::{Addresses, MAX_QUEUE_SIZE};
use crate::vring::{ConnectionConfig, Vring, check_eventfd};
use crate::wire::{
    ConfigPart, InflightArea, MAX_FDS, MemRegion, MemTable, NEED_REPLY, SingleRegion, VringAddr, VringState,
    WRITEBACK_OFFSET, feature, message, protocol,
};

/// The vhost-user protocol features that the backend offers.
const PROTOCOL_FEATURES: u64 = protocol::MQ
    | protocol::REPLY_ACK
    | protocol::BACKEND_REQ
    | protocol::CONFIG
    | protocol::INFLIGHT_SHMFD
    | protocol::RESET_DEVICE
    | protocol::CONFIGURE_MEM_SLOTS;
/// Parts of the number in eventfd messages: the queue index, and a flag for a missing eventfd.
const QUEUE_MASK: u64 = 0xff;
const NO_FD: u64 = 1 << 8;

type Refusal = String;

#[derive(Debug)]
enum Reply {
    /// An acknowledgement, sent only if the frontend requested one.
    Ack,
    Body(Vec<u8>),
    File(Vec<u8>, OwnedFd),
}

pub struct Session {
    config: ConnectionConfig,
    /// Virtio features offered at the start of the session.
    offered: u64,
    /// Virtio features that the driver has accepted; `None` before the first `SET_FEATURES` and after a
    /// reset.
    features: Option<u64>,
    protocol: u64,
    vrings: Vec<Vring>,
}

impl Session {
    pub fn new(config: ConnectionConfig) -> Self {
        let offered = disk::features(&config.disk);
        let vrings = std::iter::repeat_with(Vring::default).take(MAX_QUEUES).collect();
        let session = Self { config, offered, features: None, protocol: 0, vrings };
        session.set_writeback(true);
        session
    }

    /// Handles messages until the frontend leaves or violates the protocol. No requests are in
    /// flight when this returns.
    pub fn run(mut self) {
        let frontend = Arc::clone(&self.config.frontend);
        let socket = frontend.socket.as_fd();
        loop {
            let message = match receive(socket) {
                Ok(message) => message,
                Err(ConnectionError::Closed) => break,
                Err(ConnectionError::Invalid(what)) => {
                    client_log!(warn, "{}: vhost-user: the frontend sent {what}", self.config.disk.name);
                    break;
                }
            };
            let (request, flags) = (message.request, message.flags);
            let wants_ack = flags & NEED_REPLY != 0 && self.protocol & protocol::REPLY_ACK != 0;
            let done = match self.handle(message) {
                Ok(Reply::Body(body)) => reply(socket, request, &body, None),
                Ok(Reply::File(body, file)) => reply(socket, request, &body, Some(file.as_fd())),
                Ok(Reply::Ack) if wants_ack => reply(socket, request, &0_u64.to_ne_bytes(), None),
                Ok(Reply::Ack) => Ok(()),
                Err(refusal) => {
                    client_log!(warn, "{}: vhost-user: message {request}: {refusal}", self.config.disk.name);
                    // Without a reply the frontend would continue as if the message had succeeded.
                    if wants_ack {
                        reply(socket, request, &1_u64.to_ne_bytes(), None)
                    } else {
                        Err(ConnectionError::Closed)
                    }
                }
            };
            if done.is_err() {
                break;
            }
        }
        self.stop_all();
    }

    fn handle(&mut self, message: Message) -> Result<Reply, Refusal> {
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
            // Nothing to do: the connection itself is the owner.
            message::SET_OWNER => {}
            message::SET_BACKEND_REQ_FD => {
                let socket = fds.pop().ok_or("the socket is missing")?;
                self.config.frontend.set_backend_socket(socket);
            }
            message::GET_INFLIGHT_FD => {
                let (area, file) = inflight::create(parse_area(&body)?).map_err(|error| error.to_string())?;
                // The reply has the length of the request, which may omit the padding.
                return Ok(Reply::File(area.as_bytes()[..body.len()].to_vec(), file));
            }
            message::SET_INFLIGHT_FD => {
                let file = fds.first().ok_or("the file is missing")?;
                let inflight =
                    InflightLog::new(parse_area(&body)?, file).map_err(|error| error.to_string())?;
                // Queues use the log from their start, so all queues are restarted.
                self.stop_all();
                self.config.inflight = Some(inflight);
                self.apply_all()?;
            }
            message::RESET_OWNER | message::RESET_DEVICE => self.reset(),
            message::SET_MEM_TABLE => self.set_mem_table(&body, &fds)?,
            message::ADD_MEM_REG => {
                let region = parse::<SingleRegion>(&body)?.region;
                let file = fds.first().ok_or("the file of the region is missing")?;
                let memory = self.config.frontend.memory().with_region(region, file);
                self.set_memory(memory.map_err(|error| error.to_string())?);
            }
            message::REM_MEM_REG => {
                let region = parse::<SingleRegion>(&body)?.region;
                let memory = self.config.frontend.memory().without_region(&region);
                self.set_memory(memory.map_err(|error| error.to_string())?);
            }
            message::SET_VRING_NUM => {
                let VringState { index, num } = parse(&body)?;
                let size =
                    u16::try_from(num).ok().filter(|size| size.is_power_of_two() && *size <= MAX_QUEUE_SIZE);
                let size = size.ok_or_else(|| format!("a queue cannot have {num} entries"))?;
                self.reconfigure(index, |vring| vring.size = size)?;
            }
            message::SET_VRING_ADDR => {
                let VringAddr { index, desc, used, avail, .. } = parse(&body)?;
                self.reconfigure(index, |vring| vring.addresses = Some(Addresses { desc, avail, used }))?;
            }
            message::SET_VRING_BASE => {
                let VringState { index, num } = parse(&body)?;
                let base = u16::try_from(num).map_err(|_| format!("invalid available index {num}"))?;
                self.reconfigure(index, |vring| vring.base = base)?;
            }
            message::GET_VRING_BASE => {
                let index = parse::<VringState>(&body)?.index;
                let vring = self.vring(index.into())?;
                vring.stop();
                // The queue starts again only after the frontend sends a new eventfd.
                vring.kick = None;
                let state = VringState { index, num: vring.base.into() };
                return Ok(Reply::Body(state.as_bytes().to_vec()));
            }
            message::SET_VRING_KICK => {
                let (index, kick) = take_event(&body, &mut fds)?;
                let kick = kick.ok_or("queues without a kick eventfd are not supported")?;
                // A frontend without protocol features cannot enable queues, so they are enabled from the
                // start.
                let always = !self.has(feature::PROTOCOL_FEATURES);
                self.reconfigure(index, |vring| {
                    vring.kick = Some(Arc::new(kick));
                    vring.enabled |= always;
                })?;
            }
            message::SET_VRING_CALL => {
                let (index, call) = take_event(&body, &mut fds)?;
                self.vring(index.into())?.set_call(call);
            }
            message::SET_VRING_ERR => {
                let (index, err) = take_event(&body, &mut fds)?;
                self.vring(index.into())?.err = err.map(Arc::new);
            }
            message::SET_VRING_ENABLE => {
                let VringState { index, num } = parse(&body)?;
                self.vring(index.into())?.enabled = num != 0;
                self.apply_config(index)?;
            }
            _ => return Err("unknown message".to_owned()),
        }
        Ok(Reply::Ack)
    }

    fn set_features(&mut self, features: u64) -> Result<(), Refusal> {
        if features & !self.offered != 0 {
            return Err(format!("features {features:#x} were not all offered"));
        }
        if self.features != Some(features) {
            // Running queues use the previously accepted features, so they are restarted.
            for vring in &mut self.vrings {
                vring.stop();
            }
            self.features = Some(features);
            self.set_writeback(true);
            self.apply_all()?;
        }
        Ok(())
    }

    /// Returns true if the driver has accepted `feature`.
    fn has(&self, feature: u64) -> bool {
        self.features.is_some_and(|features| features & feature != 0)
    }

    /// Switches write-back on or off. Write-back stays off for a driver that has not accepted FLUSH:
    /// such a driver cannot make its writes durable.
    fn set_writeback(&self, writeback: bool) {
        let can_flush = self.offered & feature::FLUSH == 0 || self.has(feature::FLUSH);
        self.config.frontend.writeback.store(writeback && can_flush, Ordering::SeqCst);
    }

    fn get_config(&self, body: &[u8]) -> Result<Reply, Refusal> {
        let (part, _) = ConfigPart::read_from_prefix(body).map_err(|_| "the body is too short")?;
        // Before the driver accepts features, write-back is reported: a driver that accepts FLUSH will use
        // it.
        let writeback = self.offered & feature::CONFIG_WCE != 0
            && (self.features.is_none() || self.config.frontend.writeback.load(Ordering::SeqCst));
        let config = disk::config(&self.config.disk, writeback);
        let from = part.offset as usize;
        let wanted = from.checked_add(part.size as usize).and_then(|end| config.get(from..end));
        // An empty reply refuses the read.
        let bytes = wanted.unwrap_or_default();
        let part = ConfigPart { size: bytes.len() as u32, ..part };
        Ok(Reply::Body([part.as_bytes(), bytes].concat()))
    }

    fn set_config(&self, body: &[u8]) -> Result<(), Refusal> {
        let (part, bytes) = ConfigPart::read_from_prefix(body).map_err(|_| "the body is too short")?;
        let end = part.offset.checked_add(part.size).filter(|end| *end as usize <= CONFIG_BYTES);
        if end.is_none() || bytes.len() != part.size as usize {
            return Err("the range is outside the configuration space".to_owned());
        }
        // The driver can write only the write-back field. Other bytes are ignored.
        let at = WRITEBACK_OFFSET.checked_sub(part.offset);
        if self.has(feature::CONFIG_WCE)
            && let Some(writeback) = at.and_then(|at| bytes.get(at as usize))
        {
            self.set_writeback(*writeback != 0);
        }
        Ok(())
    }

    fn set_mem_table(&self, body: &[u8], fds: &[OwnedFd]) -> Result<(), Refusal> {
        let (table, behind) = MemTable::read_from_prefix(body).map_err(|_| "the body is too short")?;
        let count = table.regions as usize;
        if count > MAX_FDS || count != fds.len() || behind.len() < count * size_of::<MemRegion>() {
            return Err(format!("{count} regions with {} files", fds.len()));
        }
        let mut memory = Memory::default();
        for (raw, file) in behind.chunks_exact(size_of::<MemRegion>()).zip(fds) {
            memory = memory.with_region(parse(raw)?, file).map_err(|error| error.to_string())?;
        }
        self.set_memory(memory);
        Ok(())
    }

    fn set_memory(&self, memory: Memory) {
        self.config.frontend.set_memory(memory);
        for vring in &self.vrings {
            vring.wake();
        }
    }

    fn vring(&mut self, index: u64) -> Result<&mut Vring, Refusal> {
        let vring = usize::try_from(index).ok().and_then(|index| self.vrings.get_mut(index));
        vring.ok_or_else(|| format!("there is no queue {index}"))
    }

    /// Stops a queue, changes its configuration, and starts it again.
    fn reconfigure(&mut self, index: u32, change: impl FnOnce(&mut Vring)) -> Result<(), Refusal> {
        let vring = self.vring(index.into())?;
        vring.stop();
        change(vring);
        self.apply_config(index)
    }

    fn apply_config(&mut self, index: u32) -> Result<(), Refusal> {
        let features = self.features.unwrap_or(0);
        let vring = self.vrings.get_mut(index as usize).ok_or("there is no such queue")?;
        let result = vring.apply_config(index as usize, &self.config, features);
        result.map_err(|error| format!("queue {index}: {error}"))
    }

    /// Starts or stops all queues. A queue that fails to start does not affect the others. Returns
    /// the first error.
    fn apply_all(&mut self) -> Result<(), Refusal> {
        let mut result = Ok(());
        for index in 0..MAX_QUEUES {
            let this = self.apply_config(index as u32);
            result = result.and(this);
        }
        result
    }

    fn stop_all(&mut self) {
        // Signal all queues first, so that they stop in parallel.
        for vring in &self.vrings {
            vring.begin_stop();
        }
        for vring in &mut self.vrings {
            vring.stop();
        }
    }

    /// Resets the device to its state before the driver started. The frontend's memory stays mapped.
    fn reset(&mut self) {
        self.stop_all();
        for vring in &mut self.vrings {
            *vring = Vring::default();
        }
        self.features = None;
        self.set_writeback(true);
        self.config.frontend.has_driver.store(false, Ordering::SeqCst);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop_all();
    }
}

fn number(value: u64) -> Reply {
    Reply::Body(value.to_ne_bytes().to_vec())
}

fn parse<T: FromBytes + KnownLayout + Immutable>(body: &[u8]) -> Result<T, Refusal> {
    T::read_from_bytes(body).map_err(|_| format!("unexpected body size of {} bytes", body.len()))
}

/// Parses the description of an in-flight log. Some frontends omit the padding at its end.
fn parse_area(body: &[u8]) -> Result<InflightArea, Refusal> {
    let mut raw = [0; size_of::<InflightArea>()];
    let least = raw.len() - 4;
    if body.len() != raw.len() && body.len() != least {
        return Err(format!("unexpected body size of {} bytes", body.len()));
    }
    raw[..body.len()].copy_from_slice(body);
    parse(&raw)
}

/// Parses the queue index of an eventfd message, and takes its eventfd.
fn take_event(body: &[u8], fds: &mut Vec<OwnedFd>) -> Result<(u32, Option<OwnedFd>), Refusal> {
    let value: u64 = parse(body)?;
    let index = (value & QUEUE_MASK) as u32;
    if value & NO_FD != 0 {
        return Ok((index, None));
    }
    let fd = fds.pop().ok_or("the eventfd is missing")?;
    Ok((index, Some(check_eventfd(fd).map_err(|error| error.to_string())?)))
}
