//! A queue of the fake driver.
#![expect(unsafe_code)]
// UNSAFETY: copies to and from the server's buffers by address, like the driver.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};

use super::{ABORT, Outcome};
use crate::kernel::abi::{IoDesc, ZoneRow, op};
use crate::kernel::{RingEvent, RingEventKind};

#[expect(clippy::struct_excessive_bools, reason = "independent conditions of a queue")]
pub struct Lane {
    pub tags: Vec<Tag>,
    pub queued: VecDeque<Pending>,
    pub done: HashMap<u64, Outcome>,
    pub arrived: VecDeque<RingEvent>,
    /// Completed data fetches that are not delivered yet.
    pub fetched: VecDeque<RingEvent>,
    pub bell: OwnedFd,
    /// Number of calls to `enter`, and of requests.
    pub enters: u64,
    pub requests: u64,
    pub is_open: bool,
    pub aborted: bool,
    /// True while requests wait for the next server.
    pub quiesced: bool,
    pub user_copy: bool,
}

#[derive(Default)]
pub struct Tag {
    /// Buffer address of the tag's last fetch, until a request is assigned to the tag.
    pub fetched: Option<u64>,
    pub busy: Option<u64>,
    pub descriptor: IoDesc,
    data: Vec<u8>,
    /// Data of a write, which the next server gets if this one does not complete it.
    sent: Vec<u8>,
}

pub struct Pending {
    pub ticket: u64,
    pub descriptor: IoDesc,
    pub data: Vec<u8>,
}

pub fn ring_bell(bell: &OwnedFd) {
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

fn read_bytes(descriptor: &IoDesc) -> usize {
    match descriptor.op() {
        op::READ => descriptor.nr_sectors as usize * 512,
        op::REPORT_ZONES => descriptor.nr_sectors as usize * size_of::<ZoneRow>(),
        _ => 0,
    }
}

impl Lane {
    pub fn new(depth: u16, user_copy: bool) -> Self {
        Self {
            tags: (0..depth).map(|_| Tag::default()).collect(),
            queued: VecDeque::new(),
            done: HashMap::new(),
            arrived: VecDeque::new(),
            fetched: VecDeque::new(),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap(),
            enters: 0,
            requests: 0,
            is_open: false,
            aborted: false,
            quiesced: false,
            user_copy,
        }
    }

    pub fn is_busy(&self) -> bool {
        !self.queued.is_empty() || self.tags.iter().any(|tag| tag.busy.is_some())
    }

    /// Puts the requests that the server has not completed into the queue again.
    pub fn requeue(&mut self) {
        for tag in self.tags.iter_mut().rev() {
            tag.fetched = None;
            if let Some(ticket) = tag.busy.take() {
                let data = std::mem::take(&mut tag.sent);
                self.queued.push_front(Pending { ticket, descriptor: tag.descriptor, data });
            }
        }
    }

    /// Fails the requests in the queue.
    pub fn fail_all(&mut self) {
        self.done.extend(self.queued.drain(..).map(|pending| (pending.ticket, (-5, Vec::new()))));
    }

    /// Prepares the queue for the next server.
    pub fn reset(&mut self) {
        assert!(!self.is_open && self.tags.iter().all(|tag| tag.fetched.is_none() && tag.busy.is_none()));
        self.aborted = false;
        self.arrived.clear();
        self.fetched.clear();
    }

    /// Assigns queued requests to fetched tags.
    pub fn dispatch(&mut self) {
        if self.quiesced {
            return;
        }
        for (number, tag) in self.tags.iter_mut().enumerate() {
            if tag.fetched.is_none() {
                continue;
            }
            let Some(pending) = self.queued.pop_front() else { return };
            let addr = tag.fetched.take().unwrap();
            tag.busy = Some(pending.ticket);
            tag.descriptor = IoDesc { addr, ..pending.descriptor };
            tag.sent.clone_from(&pending.data);
            if self.user_copy {
                tag.data = pending.data;
            } else if pending.descriptor.op() == op::WRITE {
                let to = std::ptr::with_exposed_provenance_mut::<u8>(addr as usize);
                // SAFETY: the server keeps a buffer of the largest request at this address until
                // the tag completes.
                unsafe { to.copy_from_nonoverlapping(pending.data.as_ptr(), pending.data.len()) };
            }
            self.requests += 1;
            self.arrived.push_back(RingEvent { tag: number as u16, kind: RingEventKind::Command, result: 0 });
            ring_bell(&self.bell);
        }
    }

    pub fn commit(&mut self, number: u16, result: i32, addr: u64) {
        let tag = &mut self.tags[usize::from(number)];
        let ticket = tag.busy.take().expect("the tag has no request");
        let len = read_bytes(&tag.descriptor);
        let is_append = tag.descriptor.op() == op::ZONE_APPEND;
        let mut data = Vec::new();
        if self.user_copy {
            assert!(addr == 0 || is_append, "user copy must not pass a buffer");
            if len > 0 && result > 0 {
                data = std::mem::take(&mut tag.data);
                assert_eq!(data.len(), len, "read data must be sent before its commit");
                assert!(result as usize >= len, "short results loop");
            } else if is_append && result >= 0 {
                data = addr.to_ne_bytes().to_vec();
            }
        } else {
            assert_ne!(addr, 0, "a buffer is mandatory");
            if len > 0 && result > 0 {
                assert_eq!(result as usize, len, "short results loop");
                data = vec![0; len];
                let from = std::ptr::with_exposed_provenance::<u8>(addr as usize);
                // SAFETY: as in `dispatch`; the server does not own the tag yet.
                unsafe { from.copy_to_nonoverlapping(data.as_mut_ptr(), len) };
            }
        }
        self.done.insert(ticket, (result, data));
        self.fetch(number, if self.user_copy { 0 } else { addr });
    }

    pub fn fetch(&mut self, number: u16, addr: u64) {
        if self.aborted {
            self.arrived.push_back(RingEvent { tag: number, kind: RingEventKind::Command, result: ABORT });
            return ring_bell(&self.bell);
        }
        let tag = &mut self.tags[usize::from(number)];
        assert!(tag.fetched.is_none() && tag.busy.is_none(), "the kernel already owns the tag");
        assert_eq!(addr == 0, self.user_copy);
        tag.fetched = Some(addr);
    }

    /// Copies a request's data to the server. `fault` limits the length or fails the copy.
    pub fn fetch_data(&mut self, number: u16, to: u64, len: usize, fault: Option<i32>) -> i32 {
        let tag = &mut self.tags[usize::from(number)];
        assert!(tag.busy.is_some() && matches!(tag.descriptor.op(), op::WRITE | op::ZONE_APPEND));
        // If the test submits no data, the request writes zeroes.
        tag.data.resize(tag.descriptor.nr_sectors as usize * 512, 0);
        let moved = fault.unwrap_or(i32::MAX).min(tag.data.len().min(len) as i32);
        if moved > 0 {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(to as usize);
            // SAFETY: the server keeps `len` bytes at this address until the copy completes.
            unsafe { to.copy_from_nonoverlapping(tag.data[..moved as usize].as_ptr(), moved as usize) };
        }
        moved
    }

    /// Copies read data from the server. `fault` limits the length or fails the copy.
    pub fn send_data(&mut self, number: u16, from: u64, len: usize, fault: Option<i32>) -> i32 {
        let tag = &mut self.tags[usize::from(number)];
        assert!(tag.busy.is_some());
        tag.data = vec![0; read_bytes(&tag.descriptor)];
        let moved = fault.unwrap_or(i32::MAX).min(tag.data.len().min(len) as i32);
        if moved > 0 {
            let from = std::ptr::with_exposed_provenance::<u8>(from as usize);
            // SAFETY: as in `fetch_data`.
            unsafe { from.copy_to_nonoverlapping(tag.data.as_mut_ptr(), moved as usize) };
        }
        moved
    }
}
