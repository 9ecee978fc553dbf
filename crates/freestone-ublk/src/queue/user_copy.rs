//! Tracks user copies: data of writes that the ring fetches, and the order in which these writes
//! must begin.

use std::collections::VecDeque;

use freestone_core::device::IoBuf;

use crate::format::task::Task;
use crate::kernel::Ring;

/// A write whose data is being fetched or has arrived.
pub struct FetchedRequest {
    pub task: Task,
    pub buffer: IoBuf,
    /// Result of the fetch: a number of bytes or a negative errno; `None` while the fetch is in
    /// flight.
    pub result: Option<i32>,
    /// Set if the request was cut: it must fail without being executed.
    pub is_cut: bool,
}

/// User copies in flight.
#[derive(Default)]
pub struct UserCopies {
    /// Requests whose data is being fetched, in order of arrival. They begin in this order.
    fetching: VecDeque<FetchedRequest>,
    /// Number of copies of read data in flight, each before the completion of its read.
    sending: usize,
}

impl UserCopies {
    /// Queues a fetch of the request's data.
    pub fn fetch(&mut self, ring: &mut dyn Ring, task: Task, mut buffer: IoBuf) {
        ring.fetch_data(task.tag, buffer.as_mut_ptr().expose_provenance() as u64, task.len);
        self.fetching.push_back(FetchedRequest { task, buffer, result: None, is_cut: false });
    }

    /// Queues a copy of read data to the kernel. The caller must commit the request next.
    pub fn send(&mut self, ring: &mut dyn Ring, tag: u16, from: u64, len: usize) {
        ring.send_data(tag, from, len);
        self.sending += 1;
    }

    pub fn finish_fetch(&mut self, tag: u16, result: i32) {
        let is_in_flight =
            |fetched: &&mut FetchedRequest| fetched.task.tag == tag && fetched.result.is_none();
        if let Some(fetched) = self.fetching.iter_mut().find(is_in_flight) {
            fetched.result = Some(result);
        }
    }

    /// Records that a copy of read data ended. The result of the commit after it shows whether the
    /// copy failed.
    pub fn finish_send(&mut self) {
        self.sending = self.sending.saturating_sub(1);
    }

    /// Removes and returns the first request if its data has arrived. While requests are held,
    /// returns only cut requests.
    pub fn next_ready(&mut self, held: bool) -> Option<FetchedRequest> {
        let first = self.fetching.front()?;
        let is_next = first.result.is_some() && (first.is_cut || !held);
        if is_next { self.fetching.pop_front() } else { None }
    }

    /// Marks all requests whose data is being fetched as cut.
    pub fn cut(&mut self) {
        for fetched in &mut self.fetching {
            fetched.is_cut = true;
        }
    }

    pub fn is_empty(&self) -> bool {
        self.fetching.is_empty() && self.sending == 0
    }

    /// Leaks the buffers, because the kernel may still write to them.
    pub fn leak(self) {
        for fetched in self.fetching {
            std::mem::forget(fetched.buffer);
        }
    }
}
