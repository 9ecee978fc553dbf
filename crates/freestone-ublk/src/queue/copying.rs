//! Data that the server copies itself: where it is, and in which order requests go on.

use std::collections::VecDeque;

use freestone_core::device::IoBuf;

use crate::kernel::Ring;
use crate::task::Task;

/// A request that has its data, or whose data did not come.
pub struct Copied {
    /// The request.
    pub task: Task,
    /// Where its data is.
    pub buffer: IoBuf,
    /// Bytes of it, or a negative errno; `None`: it is on the way.
    pub moved: Option<i32>,
    /// It was answered for: nothing is to be done.
    pub is_cut: bool,
}

/// Data on the way.
#[derive(Default)]
pub struct Copying {
    /// Of requests, in the order in which they arrived, which is that in which they are begun.
    fetching: VecDeque<Copied>,
    /// Copies with answers.
    sending: usize,
}

impl Copying {
    /// Has the data of a request fetched.
    pub fn fetch(&mut self, ring: &mut dyn Ring, task: Task, mut buffer: IoBuf) {
        ring.fetch_data(task.tag, buffer.as_mut_ptr().expose_provenance() as u64, task.len);
        self.fetching.push_back(Copied { task, buffer, moved: None, is_cut: false });
    }

    /// Sends the data of an answer, which is committed next.
    pub fn send(&mut self, ring: &mut dyn Ring, tag: u16, from: u64, len: usize) {
        ring.send_data(tag, from, len);
        self.sending += 1;
    }

    /// Data of a request has come, or not.
    pub fn fetched(&mut self, tag: u16, result: i32) {
        let on_the_way = |copied: &&mut Copied| copied.task.tag == tag && copied.moved.is_none();
        if let Some(copied) = self.fetching.iter_mut().find(on_the_way) {
            copied.moved = Some(result);
        }
    }

    /// Data of an answer was sent, or not: then its commit says so.
    pub fn sent(&mut self) {
        self.sending = self.sending.saturating_sub(1);
    }

    /// The next request, once its data is here; while they are held, only one that is cut.
    pub fn next(&mut self, held: bool) -> Option<Copied> {
        let first = self.fetching.front()?;
        let is_next = first.moved.is_some() && (first.is_cut || !held);
        if is_next { self.fetching.pop_front() } else { None }
    }

    /// None of these is to be begun.
    pub fn cut(&mut self) {
        for copied in &mut self.fetching {
            copied.is_cut = true;
        }
    }

    /// Nothing is on the way.
    pub fn is_empty(&self) -> bool {
        self.fetching.is_empty() && self.sending == 0
    }

    /// Leaks the buffers: the kernel may still write to them.
    pub fn leak(self) {
        std::mem::forget(self.fetching);
    }
}
