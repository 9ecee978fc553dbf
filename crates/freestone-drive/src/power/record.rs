//! Recorder of a device's writes. A thread writes the entries to the log in the order of their
//! effect.
//!
//! Flushes and writes that bypass the cache reserve a slot in the queue when they are submitted.
//! Entries after the slot are written to the log once that request has completed or failed. So the
//! entries before a flush include all writes completed before the flush was submitted. Writes
//! submitted after the flush completed follow it. Replaying the whole log results in the device's
//! content.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use super::events::EventCounter;
use super::log::{self, Writer, format};
use super::{RecordError, RecordingStat};
use freestone_core::pin::wait;
use freestone_core::sync::{
    Condvar, Mutex, mpsc,
    thread::{self, JoinHandle},
};

/// Maximum size in bytes of the entries queued for the log. Beyond it, the device delays new
/// writes.
const HELD_MAX_BYTES: u64 = 32 << 20;
/// Approximate memory in bytes that a queued entry uses in addition to its data.
const ENTRY_BYTES: u64 = 128;
/// Approximate number of bytes that the thread removes from the queue and commits at once.
const BATCH_BYTES: u64 = 4 << 20;

#[derive(Debug)]
pub enum EntryKind {
    Data(Box<[u8]>),
    Zeroes,
    Discard,
    Flush,
    Mark(Box<[u8]>, Option<mpsc::SyncSender<u64>>),
}

#[derive(Debug)]
struct Entry {
    offset: u64,
    len: u64,
    what: EntryKind,
    fua: bool,
}

#[derive(Debug)]
enum Slot {
    /// Slot reserved for a request in flight.
    Open(Entry),
    Ready(Entry),
    Void,
}

impl Slot {
    const fn cost(&self) -> u64 {
        match self {
            Self::Open(Entry { what: EntryKind::Data(data), .. })
            | Self::Ready(Entry { what: EntryKind::Data(data), .. }) => ENTRY_BYTES + data.len() as u64,
            _ => ENTRY_BYTES,
        }
    }
}

/// Recorder of the writes of a device. Dropping it writes the completed entries and ends the log.
#[derive(Debug)]
pub struct Recorder {
    shared: Arc<RecordShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct RecordShared {
    /// Lock order: innermost.
    state: Mutex<RecordState>,
    changed: Condvar,
    held: AtomicU64,
    /// True if `state.stopped` is `Some`; readable without the lock.
    stopped: AtomicBool,
    block_bytes: u32,
    events: Arc<EventCounter>,
    path: std::path::PathBuf,
}

#[derive(Debug, Default)]
struct RecordState {
    slots: VecDeque<Slot>,
    /// Number of the first slot in `slots`.
    first: u64,
    entries: u64,
    bytes: u64,
    stopped: Option<String>,
    /// True while the thread writes a batch of entries.
    writing: bool,
    /// True if the recorder is closing: queued entries are still written, but new ones are not
    /// accepted.
    closing: bool,
    /// True if the thread has exited. Slots closed after that are not written.
    ended: bool,
}

impl Recorder {
    /// Writes the header of the log and starts the thread. `events` is notified when the queue has
    /// room again.
    pub fn start(mut writer: Writer, block_bytes: u32, events: Arc<EventCounter>) -> io::Result<Self> {
        writer.begin(block_bytes).map_err(io::Error::other)?;
        let shared = Arc::new(RecordShared {
            state: Mutex::new(RecordState { bytes: writer.bytes(), ..RecordState::default() }),
            changed: Condvar::new(),
            held: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            block_bytes,
            events,
            path: writer.path().into(),
        });
        let run = {
            let shared = Arc::clone(&shared);
            move || shared.run(writer)
        };
        let thread = thread::Builder::new().name("freestone-log".into()).spawn(run)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Returns true if the queue is full, so that clients must wait for the log.
    pub fn is_full(&self) -> bool {
        self.shared.held.load(SeqCst) > HELD_MAX_BYTES
    }

    /// Returns true unless the recording has stopped.
    pub fn is_running(&self) -> bool {
        !self.shared.stopped.load(SeqCst)
    }

    pub fn push(&self, offset: u64, len: u64, what: EntryKind) {
        self.add(Slot::Ready(Entry { offset, len, what, fua: false }));
    }

    /// Reserves a slot for a request in flight and returns the number of the slot.
    /// [`close`](Self::close) or [`close_flush`](Self::close_flush) must end it.
    pub fn open(&self, offset: u64, len: u64, what: EntryKind, fua: bool) -> u64 {
        self.add(Slot::Open(Entry { offset, len, what, fua }))
    }

    fn add(&self, slot: Slot) -> u64 {
        let mut state = self.shared.state.lock();
        let number = state.first + state.slots.len() as u64;
        if state.stopped.is_none() && !state.closing {
            self.shared.held.fetch_add(slot.cost(), SeqCst);
            state.slots.push_back(slot);
            self.shared.changed.notify_all();
        }
        number
    }

    /// Ends the slot of a request, of which the first `done` bytes were written. If `done` is 0,
    /// the slot is not recorded.
    pub fn close(&self, slot: u64, done: u64) {
        self.close_slot(slot, |mut entry| {
            entry.len = entry.len.min(done);
            if let EntryKind::Data(data) = &mut entry.what
                && data.len() as u64 > entry.len
            {
                *data = data[..entry.len as usize].into();
            }
            if entry.len == 0 { Slot::Void } else { Slot::Ready(entry) }
        });
    }

    pub fn close_flush(&self, slot: u64, done: bool) {
        self.close_slot(slot, |entry| if done { Slot::Ready(entry) } else { Slot::Void });
    }

    fn close_slot(&self, slot: u64, closed: impl FnOnce(Entry) -> Slot) {
        let mut state = self.shared.state.lock();
        let Some(at) = slot.checked_sub(state.first) else { return };
        if let Some(place) = state.slots.get_mut(at as usize)
            && let Slot::Open(_) = place
            && let before = place.cost()
            && let Slot::Open(entry) = mem::replace(place, Slot::Void)
        {
            *place = closed(entry);
            self.shared.held.fetch_sub(before - place.cost(), SeqCst);
            self.shared.changed.notify_all();
        }
    }

    /// Adds a mark after all completed requests, and waits until the mark is durable. Returns the
    /// number of log entries up to and including the mark.
    pub fn mark(&self, text: &str) -> Result<u64, RecordError> {
        let max = format::mark_max_bytes(self.shared.block_bytes);
        if text.is_empty() || text.len() > max || text.contains('\0') || text == log::RESET_MARK {
            return Err(RecordError::BadMark { max });
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        self.push(0, 0, EntryKind::Mark(text.as_bytes().into(), Some(sender)));
        // Receiving fails only if the recording stopped and dropped the sender.
        receiver.recv().map_err(|_| self.stop_error())
    }

    /// Adds a mark that Freestone itself generates (reset or power cut), without waiting.
    pub fn note(&self, text: &str) {
        self.push(0, 0, EntryKind::Mark(text.as_bytes().into(), None));
    }

    pub fn wait_for_space(&self) {
        let mut state = self.shared.state.lock();
        while self.is_full() && state.stopped.is_none() {
            state = wait(&self.shared.changed, state);
        }
    }

    fn stop_error(&self) -> RecordError {
        let state = self.shared.state.lock();
        RecordError::Stopped(state.stopped.clone().unwrap_or_else(|| "the device is going away".into()))
    }

    /// Writes all queued entries, then stops the recording for the reason `why`. The power must be
    /// off, so that no slot is open.
    pub fn stop(&self, why: &str) {
        let mut state = self.shared.state.lock();
        while state.stopped.is_none() && (state.writing || !state.slots.is_empty()) {
            state = wait(&self.shared.changed, state);
        }
        self.shared.stop(&mut state, why);
    }

    /// Writes the completed entries and accepts no new ones. Slots that are still open, and entries
    /// after them, are dropped.
    pub fn finish(&self) {
        let mut state = self.shared.state.lock();
        state.closing = true;
        self.shared.changed.notify_all();
        while state.stopped.is_none()
            && !state.ended
            && (state.writing || !matches!(state.slots.front(), None | Some(Slot::Open(_))))
        {
            state = wait(&self.shared.changed, state);
        }
    }

    pub fn path(&self) -> &std::path::Path {
        &self.shared.path
    }

    pub fn status(&self) -> RecordingStat {
        let state = self.shared.state.lock();
        RecordingStat { entries: state.entries, bytes: state.bytes, stopped: state.stopped.clone() }
    }
}

impl RecordShared {
    fn stop(&self, state: &mut RecordState, why: &str) {
        state.stopped.get_or_insert_with(|| why.into());
        self.stopped.store(true, SeqCst);
        state.first += state.slots.len() as u64;
        // Dropping the slots also drops the senders of marks, which wakes the threads that wait for
        // marks.
        state.slots.clear();
        self.held.store(0, SeqCst);
        self.changed.notify_all();
        self.events.notify();
    }

    /// Main loop of the thread: removes completed entries from the front of the queue and writes
    /// them to the log.
    fn run(&self, mut writer: Writer) {
        loop {
            let mut state = self.state.lock();
            while state.stopped.is_none()
                && !state.closing
                && matches!(state.slots.front(), None | Some(Slot::Open(_)))
            {
                state = wait(&self.changed, state);
            }
            let mut batch = Vec::new();
            let mut cost = 0;
            while cost < BATCH_BYTES && !matches!(state.slots.front(), None | Some(Slot::Open(_))) {
                let Some(slot) = state.slots.pop_front() else { break };
                state.first += 1;
                cost += slot.cost();
                if let Slot::Ready(entry) = slot {
                    batch.push(entry);
                }
            }
            if batch.is_empty() && (state.stopped.is_some() || (state.closing && cost == 0)) {
                state.ended = true;
                self.changed.notify_all();
                return;
            }
            state.writing = true;
            drop(state);
            let written = write(&mut writer, batch, self.block_bytes);
            let mut state = self.state.lock();
            state.writing = false;
            state.entries = writer.entries();
            state.bytes = writer.bytes();
            let marks = match written {
                Ok(marks) => marks,
                Err(error) => {
                    tracing::warn!(log = %self.path.display(), %error, "the recording of writes has stopped");
                    self.stop(&mut state, &error.to_string());
                    return;
                }
            };
            self.held.fetch_sub(cost, SeqCst);
            self.changed.notify_all();
            drop(state);
            for (sender, entry) in marks {
                // Sending does not block, because the channel has room for one message. The
                // receiver may be gone.
                let _ = sender.send(entry);
            }
            self.events.notify();
        }
    }
}

/// Channels to threads that wait for marks, with the number of log entries up to each mark.
type Marks = Vec<(mpsc::SyncSender<u64>, u64)>;

fn write(writer: &mut Writer, batch: Vec<Entry>, block_bytes: u32) -> Result<Marks, log::Error> {
    let block = u64::from(block_bytes);
    let mut marks = Vec::new();
    let mut marked = false;
    for Entry { offset, len, what, fua } in batch {
        let fua = if fua { format::FUA } else { 0 };
        let (sector, sectors) = (offset / block, len / block);
        match what {
            EntryKind::Data(data) => writer.data(sector, fua, &data),
            EntryKind::Zeroes => writer.zeroes(sector, sectors, fua)?,
            EntryKind::Discard => writer.discard(sector, sectors, fua)?,
            EntryKind::Flush => writer.flush(),
            EntryKind::Mark(text, sender) => {
                marked = true;
                writer.mark(&text);
                marks.extend(sender.map(|sender| (sender, writer.next_entry())));
            }
        }
    }
    writer.commit(marked)?;
    Ok(marks)
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.shared.state.lock().closing = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was already reported by the panic hook.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use super::*;
    use crate::power::{Config, Point, Power};
    use freestone_core::device::{Blocking, Flags};
    use freestone_ram::ram::{self, Family};

    /// A completion may close its slot after the device was dropped.
    #[test]
    fn slot_closed_after_the_end_does_not_block_finish() {
        let file = File::from(memfd_create("log", MemfdFlags::empty()).unwrap());
        let writer = Writer::on(file, Path::new("the log"));
        let recorder = Arc::new(Recorder::start(writer, 512, Arc::default()).unwrap());
        let slot = recorder.open(0, 512, EntryKind::Data(vec![1; 512].into()), false);
        recorder.finish();
        while !recorder.shared.state.lock().ended {
            thread::yield_now();
        }
        recorder.close(slot, 512);
        let (sender, receiver) = mpsc::sync_channel(1);
        let finishes = Arc::clone(&recorder);
        thread::spawn(move || {
            finishes.finish();
            sender.send(()).unwrap();
        });
        assert_eq!(receiver.recv_timeout(std::time::Duration::from_secs(10)), Ok(()));
    }

    #[test]
    fn full_disk_stops_recording_but_not_device() {
        let file = File::from(memfd_create("log", MemfdFlags::ALLOW_SEALING).unwrap());
        let disk = file.try_clone().unwrap();
        let below = Family::new(ram::Config::default()).unwrap().ram(1 << 20).unwrap();
        let record = Some(Writer::on(file, Path::new("the log")));
        let device = Power::new(Arc::new(below), Config { record, ..Config::default() }).unwrap();
        device.write_at(0, &[1; 4096], Flags::empty()).unwrap();
        assert_eq!(device.mark("before").unwrap(), 2);
        let good = device.recording().unwrap();
        assert_eq!(good.stopped, None);
        // From now on the file cannot grow.
        fcntl_add_seals(&disk, SealFlags::GROW).unwrap();
        // Writes more data than the queue of the log holds. No write may block for ever.
        for round in 0..80_u64 {
            device.write_at(round % 2 * 4096, &vec![2; 512 << 10], Flags::empty()).unwrap();
        }
        device.flush().unwrap();
        let error = device.mark("after").unwrap_err().to_string();
        assert!(error.starts_with("the recording has stopped: the log: "), "{error}");
        let after = device.recording().unwrap();
        assert!(after.stopped.is_some());
        assert_eq!((after.entries, after.bytes), (good.entries, good.bytes), "earlier entries changed");
        assert!(device.visit(&Point::Entry(0), None, &|| Ok(())).is_err());
        device.cut(1).unwrap();
        let mut data = [0; 4096];
        device.read_at(4096, &mut data).unwrap();
        assert_eq!(data, [2; 4096]);
    }
}
