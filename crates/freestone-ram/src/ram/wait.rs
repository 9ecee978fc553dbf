//! What a request that changes content waits for, and how it goes on or ends then.

use super::job::Job;
use super::removals::Hope;
use super::stats::counter;
use super::{Ram, piece};
use crate::codec::Page;
use freestone_core::PAGE_BYTES;
use freestone_core::client_log;
use freestone_core::device::Error;

impl Ram {
    /// Has a request wait for something after which the work queue carries on with it.
    fn wait_for_work_queue(&self, job: Job, wait: impl FnOnce(Job) -> Option<Job>) -> Option<Job> {
        match self.0.pages.keeper.start() {
            Ok(()) => wait(job),
            Err(error) => {
                client_log!(error, %error, "no thread for requests that wait");
                self.fail_write(job, Error::NoMemory);
                None
            }
        }
    }

    /// A request that changes content goes on when no snapshot is just beginning.
    pub(super) fn wait_for_thaw(&self, job: Job) -> Option<Job> {
        self.wait_for_work_queue(job, |job| self.0.chain.get().hold((self.clone(), job)).map(|(_, job)| job))
    }

    /// A request that found no memory goes on when a removed device has given back its own.
    pub(super) fn wait_for_removal(&self, job: Job) -> Option<Job> {
        self.wait_for_work_queue(job, |job| self.0.pages.removals.wait(self, job))
    }

    /// A request that found no room, and no hope for any, goes on when others have made some.
    pub(super) fn wait_for_room(&self, mut job: Job) -> Option<Job> {
        let full = &self.0.pages.full;
        job.waits.get_or_insert_with(|| self.0.limits.room.begin(full.when().timeout));
        self.wait_for_work_queue(job, |job| {
            let again = full.waiters.wait((self.clone(), job), |(_, job)| &mut job.room);
            // Who ended all waiting meanwhile may not have seen it.
            if again.is_none() && self.0.limits.room.is_closed() {
                self.0.pages.end_waiting(self);
            }
            again.map(|(_, job)| job)
        })
    }

    /// A request without room waits for some, or fails.
    fn without_room(&self, job: Job) -> Option<Job> {
        match self.0.no_room() {
            Ok(()) => self.wait_for_room(job),
            Err(error) => {
                self.fail_write(job, error);
                None
            }
        }
    }

    pub(super) fn wait_for_memory(&self, mut job: Job) {
        let pages = &self.0.pages;
        if !job.last_try {
            self.0.counters.add(counter::WRITESTALL, 1);
            return pages.keeper.wait_for_memory(self.clone(), job);
        }
        // What a removed device has, in memory and on the backing device, is no room for one that
        // is at its own cap.
        let has_room = self.0.layer().has_room(PAGE_BYTES);
        let hope = if has_room { self.0.hope(&mut job.ended) } else { Hope::None };
        let job = Job { last_try: false, ..job };
        let job = match hope {
            Hope::Later => self.wait_for_removal(job),
            Hope::Again => Some(job),
            // Of what is being freed something is on its way from the backing device.
            Hope::None if has_room && pages.is_freeing() => {
                return pages.keeper.wait_for_tick(self.clone(), job);
            }
            Hope::None => self.without_room(job),
        };
        if let Some(job) = job {
            pages.keeper.resume(self.clone(), job);
        }
    }

    /// Does a request's change of a part of a page, of which `parent` is the content below the
    /// device. Where the device has the page itself by now, or writers are held up, the request
    /// tries again.
    pub(super) fn put_over(&self, mut job: Job, parent: &mut Page) {
        let slot = job.slot();
        let (_, from, len) = piece(job.request.offset, job.request.len);
        job.part(len).put(from, parent);
        let error = match self.0.put_over(slot, parent) {
            Some(Ok(Ok(()))) => return self.done_with_page(job, len),
            Some(Ok(Err(error))) => error,
            Some(Err(_)) => return self.wait_for_memory(job),
            None => return self.0.pages.keeper.resume(self.clone(), job),
        };
        let hope = if error == Error::NoSpace { self.0.hope(&mut job.ended) } else { Hope::None };
        let job = match hope {
            Hope::None if error == Error::NoSpace => self.without_room(job),
            Hope::None => return self.fail_write(job, error),
            Hope::Again => Some(job),
            Hope::Later => self.wait_for_removal(job),
        };
        if let Some(job) = job {
            self.0.pages.keeper.resume(self.clone(), job);
        }
    }

    pub(super) fn fail_write(&self, job: Job, error: Error) {
        self.0.counters.add(counter::FAILED_WRITES, 1);
        job.done.complete(Err(error), job.buffer);
    }

    /// A request has changed `len` bytes of the page at which it stood.
    pub(super) fn done_with_page(&self, mut job: Job, len: usize) {
        if job.request.len == len as u64 {
            return job.done.complete(Ok(()), job.buffer);
        }
        job.advance(len as u64);
        self.0.pages.keeper.resume(self.clone(), job);
    }
}
