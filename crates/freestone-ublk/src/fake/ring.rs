//! The rings of the fake driver.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Driver;
use crate::kernel::abi::{IoDesc, state};
use crate::kernel::{COMMIT_CANCELLED, CharDevice, Ring, RingEvent, RingEventKind, Wait};

impl CharDevice for Driver {
    fn ring(&self, queue: u16, _: u16, user_copy: bool, wake: &OwnedFd) -> io::Result<Box<dyn Ring>> {
        let lane = usize::from(queue);
        let mut state = self.state();
        assert_eq!(state.lanes[lane].user_copy, user_copy);
        state.lanes[lane].is_open = true;
        drop(state);
        Ok(Box::new(FakeRing { driver: self.clone(), lane, queued: Vec::new(), wake: wake.try_clone()? }))
    }
}

enum Entry {
    Fetch(u16, u64),
    Commit(u16, i32, u64),
    FetchData(u16, u64, usize),
    SendData(u16, u64, usize),
}

struct FakeRing {
    driver: Driver,
    lane: usize,
    queued: Vec<Entry>,
    wake: OwnedFd,
}

impl Ring for FakeRing {
    fn fetch(&mut self, tag: u16, buffer: u64) {
        self.queued.push(Entry::Fetch(tag, buffer));
    }

    fn commit(&mut self, tag: u16, result: i32, buffer: u64) {
        self.queued.push(Entry::Commit(tag, result, buffer));
    }

    fn fetch_data(&mut self, tag: u16, to: u64, len: usize) {
        self.queued.push(Entry::FetchData(tag, to, len));
    }

    fn send_data(&mut self, tag: u16, from: u64, len: usize) {
        self.queued.push(Entry::SendData(tag, from, len));
    }

    fn has_queued(&mut self) -> bool {
        !self.queued.is_empty()
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        self.driver.check_alive()?;
        let bell = {
            let mut state = self.driver.state();
            let (refuses, holds) = (state.no_fetch, state.holds_fetched);
            let mut copies = std::mem::take(&mut state.copies);
            let lane = &mut state.lanes[self.lane];
            lane.enters += 1;
            // The tag whose send failed; its commit follows and is canceled.
            let mut broken = None;
            for entry in self.queued.drain(..) {
                let arrived = |tag, event, result| RingEvent { tag, kind: event, result };
                match entry {
                    Entry::Fetch(tag, _) if refuses => {
                        lane.arrived.push_back(arrived(tag, RingEventKind::Command, -22));
                    }
                    Entry::Fetch(tag, buffer) => lane.fetch(tag, buffer),
                    Entry::Commit(tag, ..) if broken.take() == Some(tag) => {
                        lane.arrived.push_back(arrived(tag, RingEventKind::Command, COMMIT_CANCELLED));
                    }
                    Entry::Commit(tag, result, buffer) => lane.commit(tag, result, buffer),
                    Entry::FetchData(tag, to, len) => {
                        let result = lane.fetch_data(tag, to, len, copies.pop_front());
                        let into = if holds { &mut lane.fetched } else { &mut lane.arrived };
                        into.push_back(arrived(tag, RingEventKind::Fetched, result));
                    }
                    Entry::SendData(tag, from, len) => {
                        let result = lane.send_data(tag, from, len, copies.pop_front());
                        lane.arrived.push_back(arrived(tag, RingEventKind::Sent, result));
                        broken = (result != len as i32).then_some(tag);
                    }
                }
            }
            lane.dispatch();
            self.driver.inner.changed.notify_all();
            let bell = if wait == Wait::No || !lane.arrived.is_empty() {
                None
            } else {
                Some(lane.bell.try_clone()?)
            };
            state.copies = copies;
            let Some(bell) = bell else { return Ok(()) };
            bell
        };
        let time = match wait {
            Wait::AtMost(time) => Some(Timespec::try_from(time).unwrap()),
            Wait::No | Wait::Forever => None,
        };
        let mut fds = [&bell, &self.wake].map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN));
        let _ = poll(&mut fds, time.as_ref());
        for fd in [&bell, &self.wake] {
            let _ = rustix::io::read(fd, &mut [0_u8; 8]);
        }
        Ok(())
    }

    fn take_events(&mut self, into: &mut Vec<RingEvent>) {
        into.extend(self.driver.state().lanes[self.lane].arrived.drain(..));
    }

    fn descriptor(&self, tag: u16) -> IoDesc {
        self.driver.state().lanes[self.lane].tags[usize::from(tag)].descriptor
    }

    fn is_deferred(&self) -> bool {
        true
    }
}

impl Drop for FakeRing {
    fn drop(&mut self) {
        let mut state = self.driver.state();
        let waits = state.is_recoverable();
        let lane = &mut state.lanes[self.lane];
        (lane.is_open, lane.aborted) = (false, true);
        lane.requeue();
        if waits {
            lane.quiesced = true;
            if !state.lanes.iter().any(|lane| lane.is_open) {
                state.info.as_mut().unwrap().state = state::QUIESCED;
            }
        } else {
            // Requests that the server has not completed then fail.
            lane.fail_all();
        }
        self.driver.inner.changed.notify_all();
    }
}
