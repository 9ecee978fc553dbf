//! The recording: entries in the order in which the writes took effect, written to the log by a
//! thread.
//!
//! A flush takes its place when it is issued, and so does a write past the cache; what comes behind
//! such an entry is written when that is answered, or is known to have failed. So before a flush in
//! the log stand the writes that were answered before it was issued, and none that were issued
//! after its answer; and replaying the whole log gives the device's content.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use super::bell::Bell;
use super::log::{self, Writer, format};
use super::{RecordError, Recording};
use freestone_core::pin::wait;
use freestone_core::sync::{
    Condvar, Mutex, mpsc,
    thread::{self, JoinHandle},
};

/// Data that waits to be written to the log; with more, the device lets its clients wait.
const HELD_MAX_BYTES: u64 = 32 << 20;
/// What an entry costs beside its data.
const ENTRY_BYTES: u64 = 128;
/// How much the thread takes from the queue at a time.
const BATCH_BYTES: u64 = 4 << 20;

/// What was done.
#[derive(Debug)]
pub enum What {
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
    what: What,
    fua: bool,
}

#[derive(Debug)]
enum Slot {
    /// Taken by a request that is not answered.
    Open(Entry),
    Ready(Entry),
    /// Its request failed.
    Void,
}

impl Slot {
    const fn cost(&self) -> u64 {
        match self {
            Self::Open(Entry { what: What::Data(data), .. })
            | Self::Ready(Entry { what: What::Data(data), .. }) => ENTRY_BYTES + data.len() as u64,
            _ => ENTRY_BYTES,
        }
    }
}

/// Takes entries; dropped, it writes what is ready and ends the log.
#[derive(Debug)]
pub struct Recorder {
    shared: Arc<RecordShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct RecordShared {
    /// Lock order: last.
    state: Mutex<RecordState>,
    changed: Condvar,
    held: AtomicU64,
    /// `state.stopped` is set.
    stopped: AtomicBool,
    block_bytes: u32,
    bell: Arc<Bell>,
    path: std::path::PathBuf,
}

#[derive(Debug, Default)]
struct RecordState {
    slots: VecDeque<Slot>,
    /// Number of the first slot.
    first: u64,
    entries: u64,
    bytes: u64,
    stopped: Option<String>,
    /// The thread is writing what it took.
    writing: bool,
    /// What is there is written, and nothing after that.
    closing: bool,
    /// The thread writes no more: what is closed after that stays.
    ended: bool,
}

impl Recorder {
    /// Writes the head of the log and starts the thread. `bell` rings when there is room again.
    pub fn start(mut writer: Writer, block_bytes: u32, bell: Arc<Bell>) -> io::Result<Self> {
        writer.begin(block_bytes).map_err(io::Error::other)?;
        let shared = Arc::new(RecordShared {
            state: Mutex::new(RecordState { bytes: writer.bytes(), ..RecordState::default() }),
            changed: Condvar::new(),
            held: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            block_bytes,
            bell,
            path: writer.path().into(),
        });
        let run = {
            let shared = Arc::clone(&shared);
            move || shared.run(writer)
        };
        let thread = thread::Builder::new().name("freestone-log".into()).spawn(run)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Whether clients have to wait until more of the log is written.
    pub fn is_full(&self) -> bool {
        self.shared.held.load(SeqCst) > HELD_MAX_BYTES
    }

    /// Whether anything is still recorded.
    pub fn is_running(&self) -> bool {
        !self.shared.stopped.load(SeqCst)
    }

    /// Adds what has been done.
    pub fn push(&self, offset: u64, len: u64, what: What) {
        self.add(Slot::Ready(Entry { offset, len, what, fua: false }));
    }

    /// Takes a place for what is being done; [`close`](Self::close) says what became of it.
    pub fn open(&self, offset: u64, len: u64, what: What, fua: bool) -> u64 {
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

    /// The first `done` bytes of the request at `slot` were done.
    pub fn close(&self, slot: u64, done: u64) {
        self.settle(slot, |mut entry| {
            entry.len = entry.len.min(done);
            if let What::Data(data) = &mut entry.what
                && data.len() as u64 > entry.len
            {
                *data = data[..entry.len as usize].into();
            }
            if entry.len == 0 { Slot::Void } else { Slot::Ready(entry) }
        });
    }

    /// The flush at `slot` was answered.
    pub fn close_flush(&self, slot: u64, done: bool) {
        self.settle(slot, |entry| if done { Slot::Ready(entry) } else { Slot::Void });
    }

    fn settle(&self, slot: u64, become_: impl FnOnce(Entry) -> Slot) {
        let mut state = self.shared.state.lock();
        let Some(at) = slot.checked_sub(state.first) else { return };
        if let Some(place) = state.slots.get_mut(at as usize)
            && let Slot::Open(_) = place
            && let before = place.cost()
            && let Slot::Open(entry) = mem::replace(place, Slot::Void)
        {
            *place = become_(entry);
            self.shared.held.fetch_sub(before - place.cost(), SeqCst);
            self.shared.changed.notify_all();
        }
    }

    /// Puts a mark behind all that was answered, and returns its number when it is in the file for
    /// good.
    pub fn mark(&self, text: &str) -> Result<u64, RecordError> {
        let max = format::mark_max_bytes(self.shared.block_bytes);
        if text.is_empty() || text.len() > max || text.contains('\0') || text == log::BEGINNING {
            return Err(RecordError::BadMark { max });
        }
        let (tell, told) = mpsc::sync_channel(1);
        self.push(0, 0, What::Mark(text.as_bytes().into(), Some(tell)));
        // The sender is dropped where the recording stops.
        told.recv().map_err(|_| self.why_stopped())
    }

    /// A mark of our own; nobody waits for it.
    pub fn note(&self, text: &str) {
        self.push(0, 0, What::Mark(text.as_bytes().into(), None));
    }

    /// Waits until there is room.
    pub fn wait_for_room(&self) {
        let mut state = self.shared.state.lock();
        while self.is_full() && state.stopped.is_none() {
            state = wait(&self.shared.changed, state);
        }
    }

    fn why_stopped(&self) -> RecordError {
        let state = self.shared.state.lock();
        RecordError::Stopped(state.stopped.clone().unwrap_or_else(|| "the device is going away".into()))
    }

    /// Writes all that is ready and records nothing more, for this reason. The device's power is
    /// off, so nothing is open.
    pub fn stop(&self, why: &str) {
        let mut state = self.shared.state.lock();
        while state.stopped.is_none() && (state.writing || !state.slots.is_empty()) {
            state = wait(&self.shared.changed, state);
        }
        self.shared.stop(&mut state, why);
    }

    /// Writes all that is ready; nothing more is taken. What is still open belongs to nobody.
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

    pub fn status(&self) -> Recording {
        let state = self.shared.state.lock();
        Recording { entries: state.entries, bytes: state.bytes, stopped: state.stopped.clone() }
    }
}

impl RecordShared {
    fn stop(&self, state: &mut RecordState, why: &str) {
        state.stopped.get_or_insert_with(|| why.into());
        self.stopped.store(true, SeqCst);
        state.first += state.slots.len() as u64;
        // Drops the senders of marks as well: those who wait for them are told.
        state.slots.clear();
        self.held.store(0, SeqCst);
        self.changed.notify_all();
        self.bell.ring();
    }

    /// The thread: takes what is ready from the front of the queue, writes it, counts it.
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
            for (tell, entry) in marks {
                // Who asked waits for it; the channel has room for one.
                let _ = tell.send(entry);
            }
            self.bell.ring();
        }
    }
}

/// Who waits for a mark, and its number.
type Marks = Vec<(mpsc::SyncSender<u64>, u64)>;

fn write(writer: &mut Writer, batch: Vec<Entry>, block_bytes: u32) -> Result<Marks, log::Error> {
    let block = u64::from(block_bytes);
    let mut told = Vec::new();
    let mut marked = false;
    for Entry { offset, len, what, fua } in batch {
        let fua = if fua { format::FUA } else { 0 };
        let (sector, sectors) = (offset / block, len / block);
        match what {
            What::Data(data) => writer.data(sector, fua, &data),
            What::Zeroes => writer.zeroes(sector, sectors, fua)?,
            What::Discard => writer.discard(sector, sectors, fua)?,
            What::Flush => writer.flush(),
            What::Mark(text, tell) => {
                marked = true;
                told.extend(tell.map(|tell| (tell, writer.next_entry())));
                writer.mark(&text);
            }
        }
    }
    writer.commit(marked)?;
    Ok(told)
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.shared.state.lock().closing = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic there was reported by its own hook.
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

    /// A completion that is still on its way when the device ends.
    #[test]
    fn what_is_closed_after_the_end_is_not_waited_for() {
        let file = File::from(memfd_create("log", MemfdFlags::empty()).unwrap());
        let writer = Writer::on(file, Path::new("the log"));
        let recorder = Arc::new(Recorder::start(writer, 512, Arc::default()).unwrap());
        let slot = recorder.open(0, 512, What::Data(vec![1; 512].into()), false);
        recorder.finish();
        while !recorder.shared.state.lock().ended {
            thread::yield_now();
        }
        recorder.close(slot, 512);
        let (tell, told) = mpsc::sync_channel(1);
        let finishes = Arc::clone(&recorder);
        thread::spawn(move || {
            finishes.finish();
            tell.send(()).unwrap();
        });
        assert_eq!(told.recv_timeout(std::time::Duration::from_secs(10)), Ok(()));
    }

    #[test]
    fn a_full_disk_ends_the_recording_and_not_the_device() {
        let file = File::from(memfd_create("log", MemfdFlags::ALLOW_SEALING).unwrap());
        let disk = file.try_clone().unwrap();
        let below = Family::new(ram::Config::default()).unwrap().ram(1 << 20).unwrap();
        let record = Some(Writer::on(file, Path::new("the log")));
        let device = Power::new(Arc::new(below), Config { record, ..Config::default() }).unwrap();
        device.write_at(0, &[1; 4096], Flags::empty()).unwrap();
        assert_eq!(device.mark("before").unwrap(), 1);
        let good = device.recording().unwrap();
        assert_eq!(good.stopped, None);
        // From now on the file cannot grow.
        fcntl_add_seals(&disk, SealFlags::GROW).unwrap();
        // More than may wait to be written: nobody waits for ever.
        for round in 0..80_u64 {
            device.write_at(round % 2 * 4096, &vec![2; 512 << 10], Flags::empty()).unwrap();
        }
        device.flush().unwrap();
        let error = device.mark("after").unwrap_err().to_string();
        assert!(error.starts_with("the recording has stopped: the log: "), "{error}");
        let after = device.recording().unwrap();
        assert!(after.stopped.is_some());
        assert_eq!((after.entries, after.bytes), (good.entries, good.bytes), "what was recorded stays good");
        assert!(device.visit(&Point::Entry(0), None, &|| Ok(())).is_err());
        device.cut(1).unwrap();
        let mut data = [0; 4096];
        device.read_at(4096, &mut data).unwrap();
        assert_eq!(data, [2; 4096]);
    }
}
