//! A queue of the driver's.
#![expect(unsafe_code)]
// UNSAFETY: copies to and from buffers by the addresses that it was given, as the driver does.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};

use super::{ABORT, Outcome};
use crate::abi::{IoDesc, ZoneRow, op};
use crate::kernel::{Arrived, Event};

pub struct Lane {
    pub tags: Vec<Tag>,
    pub queued: VecDeque<Pending>,
    pub done: HashMap<u64, Outcome>,
    pub arrived: VecDeque<Arrived>,
    /// Of data, not yet told.
    pub fetched: VecDeque<Arrived>,
    pub bell: OwnedFd,
    /// How often it was entered, and how many requests it had.
    pub enters: u64,
    pub requests: u64,
    pub is_open: bool,
    pub aborted: bool,
    /// The server copies data by itself.
    pub user_copy: bool,
}

#[derive(Default)]
pub struct Tag {
    /// The buffer it was fetched with, while no request has come.
    pub fetched: Option<u64>,
    pub busy: Option<u64>,
    pub descriptor: IoDesc,
    /// Of the request: what is written, or was read.
    data: Vec<u8>,
}

pub struct Pending {
    pub ticket: u64,
    pub descriptor: IoDesc,
    pub data: Vec<u8>,
}

pub fn ring_bell(bell: &OwnedFd) {
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

/// Bytes that a request reads.
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
            user_copy,
        }
    }

    pub fn is_busy(&self) -> bool {
        !self.queued.is_empty() || self.tags.iter().any(|tag| tag.busy.is_some())
    }

    /// Gives requests to tags that are fetched.
    pub fn dispatch(&mut self) {
        for (number, tag) in self.tags.iter_mut().enumerate() {
            if tag.fetched.is_none() {
                continue;
            }
            let Some(pending) = self.queued.pop_front() else { return };
            let addr = tag.fetched.take().unwrap();
            tag.busy = Some(pending.ticket);
            tag.descriptor = IoDesc { addr, ..pending.descriptor };
            if self.user_copy {
                tag.data = pending.data;
            } else if pending.descriptor.op() == op::WRITE {
                let to = std::ptr::with_exposed_provenance_mut::<u8>(addr as usize);
                // SAFETY: the server keeps a buffer of the largest request there until the tag arrives.
                unsafe { to.copy_from_nonoverlapping(pending.data.as_ptr(), pending.data.len()) };
            }
            self.requests += 1;
            self.arrived.push_back(Arrived { tag: number as u16, event: Event::Command, result: 0 });
            ring_bell(&self.bell);
        }
    }

    pub fn commit(&mut self, number: u16, result: i32, addr: u64) {
        let tag = &mut self.tags[usize::from(number)];
        let ticket = tag.busy.take().expect("a commit without a request");
        let len = read_bytes(&tag.descriptor);
        let is_append = tag.descriptor.op() == op::ZONE_APPEND;
        let mut data = Vec::new();
        if self.user_copy {
            assert!(addr == 0 || is_append, "a buffer where there is none");
            if len > 0 && result > 0 {
                data = std::mem::take(&mut tag.data);
                assert_eq!(data.len(), len, "what is told to be read was sent");
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
                // SAFETY: as above; the server has not got the tag back.
                unsafe { from.copy_to_nonoverlapping(data.as_mut_ptr(), len) };
            }
        }
        self.done.insert(ticket, (result, data));
        self.fetch(number, if self.user_copy { 0 } else { addr });
    }

    pub fn fetch(&mut self, number: u16, addr: u64) {
        if self.aborted {
            self.arrived.push_back(Arrived { tag: number, event: Event::Command, result: ABORT });
            return ring_bell(&self.bell);
        }
        let tag = &mut self.tags[usize::from(number)];
        assert!(tag.fetched.is_none() && tag.busy.is_none(), "a tag that is the kernel's");
        assert_eq!(addr == 0, self.user_copy);
        tag.fetched = Some(addr);
    }

    /// Copies what a request writes to the server; so much of it as `fault` says, or it fails.
    pub fn fetch_data(&mut self, number: u16, to: u64, len: usize, fault: Option<i32>) -> i32 {
        let tag = &mut self.tags[usize::from(number)];
        assert!(tag.busy.is_some() && matches!(tag.descriptor.op(), op::WRITE | op::ZONE_APPEND));
        // Where a test does not say, it is zeroes.
        tag.data.resize(tag.descriptor.nr_sectors as usize * 512, 0);
        let moved = fault.unwrap_or(i32::MAX).min(tag.data.len().min(len) as i32);
        if moved > 0 {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(to as usize);
            // SAFETY: the server keeps so many bytes there until it is told.
            unsafe { to.copy_from_nonoverlapping(tag.data[..moved as usize].as_ptr(), moved as usize) };
        }
        moved
    }

    /// Copies what was read from the server, the same way.
    pub fn send_data(&mut self, number: u16, from: u64, len: usize, fault: Option<i32>) -> i32 {
        let tag = &mut self.tags[usize::from(number)];
        assert!(tag.busy.is_some());
        tag.data = vec![0; read_bytes(&tag.descriptor)];
        let moved = fault.unwrap_or(i32::MAX).min(tag.data.len().min(len) as i32);
        if moved > 0 {
            let from = std::ptr::with_exposed_provenance::<u8>(from as usize);
            // SAFETY: as above.
            unsafe { from.copy_to_nonoverlapping(tag.data.as_mut_ptr(), moved as usize) };
        }
        moved
    }
}
