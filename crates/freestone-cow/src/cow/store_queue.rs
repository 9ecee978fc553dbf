//! What was handed out and handed in, and the thread that makes it durable in groups.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::Usage;
use super::format::{self, Entry, Layout, Mark};
use super::notes::Stamp;
use super::status::SECTOR_BYTES;
use super::store_answers::{Invalid, MergeError, NoPlace, Run, Stats};
use super::store_area::{Area, Block};
use freestone_core::device::{self, Blocking, Device, Flags};
use freestone_core::sync::{Condvar, Instant, Mutex};

/// Called once with an outcome.
type Answer<E> = Box<dyn FnOnce(Result<(), E>) + Send>;

/// How long after a failure the header of an invalid store is written again.
const HEADER_AGAIN: Duration = Duration::from_millis(500);
/// How long after the first failure who waits for that header goes on without it: a COW device that
/// is dead for good must not take the origin with it.
const HEADER_HOLD_MAX: Duration = Duration::from_secs(2);
const _: () = assert!(HEADER_AGAIN.as_millis() < HEADER_HOLD_MAX.as_millis(), "it is tried again meanwhile");

/// Called with the outcome of a commit.
pub type Done = Answer<Invalid>;
/// Called when the exceptions were written back, or that failed.
pub type PutBack = Answer<device::Error>;

/// How a place, a chunk of the COW device that was handed out, is handed back.
pub enum Finished {
    /// With its copy.
    Entry(Ready),
    /// The copy failed.
    Failed(Done),
    /// Nobody needed it.
    Unused,
}

/// An exception that is not durable.
pub struct Ready {
    entry: Entry,
    done: Done,
}

impl Finished {
    pub fn entry(old: u64, new: u64, copied: device::Result<()>, done: Done) -> Self {
        match copied {
            Ok(()) => Self::Entry(Ready { entry: Entry::new(old, new), done }),
            Err(_) => Self::Failed(done),
        }
    }
}

/// What came of writing the header that says "invalid".
#[derive(Default)]
struct Unmarked {
    /// The first failure, and when to try again.
    failed: Option<(Instant, Instant)>,
    /// It took too long: nobody waits for it any more.
    let_go: bool,
}

/// Places and groups. All in memory, every call is short.
#[expect(clippy::struct_excessive_bools, reason = "four independent facts, each with a name")]
pub struct Queue {
    layout: Layout,
    pub valid: bool,
    /// The first chunk that was never handed out.
    next_free: u64,
    /// Where the durable record ends: the area, and the entries in it.
    area: u64,
    committed: u64,
    /// Entries were taken from the record and none were added since.
    merging: bool,
    /// Places that were handed out, and that are not in the durable record.
    claimed: u64,
    /// Sequence number of the next place that is handed out.
    allocated: u64,
    /// Sequence number of the place that is waited for: all before it were handed back.
    passed: u64,
    /// Places that were handed back before an earlier one was.
    early: BTreeMap<u64, Finished>,
    /// The next group: copies whose turn has come.
    gathered: VecDeque<Ready>,
    /// Who is to be told that the snapshot is invalid.
    lost: Vec<Done>,
    /// The snapshot is invalid, and the header on disk does not say so yet.
    unmarked: Option<Unmarked>,
    /// Nobody needs to wait for that header: the origin is written without the snapshot.
    released: bool,
    /// Who waits for exceptions to be written back whose removal failed.
    undo: Vec<PutBack>,
    stop: bool,
    /// The origin's content when the store is closed, and the mark of a merge that is under way
    /// then.
    pub closing: Option<(Stamp, Option<Mark>)>,
    pub stats: Stats,
}

impl Queue {
    /// Of a store whose first free chunk is `next_free` and whose record ends at `position`: the
    /// area, and the entries in it.
    pub fn new(layout: Layout, valid: bool, next_free: u64, position: (u64, u64)) -> Self {
        Self {
            layout,
            valid,
            next_free,
            area: position.0,
            committed: position.1,
            merging: false,
            claimed: 0,
            allocated: 0,
            passed: 0,
            early: BTreeMap::new(),
            gathered: VecDeque::new(),
            lost: Vec::new(),
            unmarked: None,
            released: false,
            undo: Vec::new(),
            stop: false,
            closing: None,
            stats: Stats::default(),
        }
    }

    /// Hands out a chunk and its sequence number: one order for both.
    pub fn allocate(&mut self, size: u64) -> Result<(u64, u64), NoPlace> {
        if !self.valid {
            return Err(NoPlace::Invalid);
        }
        let chunks = self.layout.chunks(size);
        // The entry that fills an area needs a next area.
        let entries = self.area * self.layout.entries() + self.committed + self.claimed + 1;
        let fills = entries.is_multiple_of(self.layout.entries());
        let next_area = self.layout.area_chunk(entries / self.layout.entries());
        if self.next_free >= chunks || fills && next_area >= chunks {
            return Err(NoPlace::Full);
        }
        let chunk = self.next_free;
        self.next_free = self.layout.skip_metadata(chunk + 1);
        self.claimed += 1;
        self.merging = false;
        self.allocated += 1;
        Ok((chunk, self.allocated - 1))
    }

    /// A place is handed back.
    fn finish(&mut self, sequence: u64, finished: Finished) {
        let finished = match finished {
            Finished::Failed(done) => {
                self.lose();
                self.lost.push(done);
                return;
            }
            Finished::Entry(ready) if !self.valid => return self.lost.push(ready.done),
            other => other,
        };
        if sequence != self.passed {
            self.early.insert(sequence, finished);
            return;
        }
        let mut next = Some(finished);
        while let Some(finished) = next {
            self.passed += 1;
            match finished {
                Finished::Entry(ready) => self.gathered.push_back(ready),
                Finished::Failed(_) | Finished::Unused => self.claimed -= 1,
            }
            next = self.early.remove(&self.passed);
        }
    }

    /// Whether the group that was gathered is to be written: no copy is pending that could join it,
    /// or it fills an area.
    fn is_due(&self) -> bool {
        let pending = self.allocated != self.passed;
        let fills = self.committed + self.gathered.len() as u64 >= self.layout.entries();
        self.valid && !self.gathered.is_empty() && (!pending || fills)
    }

    /// The snapshot is invalid from now on.
    fn lose(&mut self) {
        if self.valid {
            self.valid = false;
            self.unmarked = Some(Unmarked::default());
        }
        self.lost.extend(self.gathered.drain(..).map(|ready| ready.done));
        for finished in std::mem::take(&mut self.early).into_values() {
            if let Finished::Entry(ready) = finished {
                self.lost.push(ready.done);
            }
        }
    }

    /// When the header is to be written: at once, after a failure later, at the end once more.
    fn header_due(&self) -> Option<Instant> {
        let now = Instant::now();
        let again = self.unmarked.as_ref()?.failed.map_or(now, |(_, again)| again);
        Some(if self.stop { now } else { again })
    }

    /// Writing the header failed. It stays due, else the snapshot would be opened again as a good
    /// one; at the end that cannot be helped.
    fn header_failed(&mut self, error: device::Error) {
        let (now, stop) = (Instant::now(), self.stop);
        let Some(unmarked) = &mut self.unmarked else { return };
        let first = unmarked.failed.map_or(now, |(first, _)| first);
        if unmarked.failed.is_none() || stop {
            tracing::warn!(%error, "an invalid snapshot could not be marked on its COW device");
        }
        unmarked.failed = Some((first, now + HEADER_AGAIN));
        if !unmarked.let_go && now.saturating_duration_since(first) >= HEADER_HOLD_MAX {
            unmarked.let_go = true;
            tracing::error!(
                %error,
                "the origin of an invalid snapshot is written on although the COW device does not say that it is invalid: \
                 opened again after a crash, the snapshot must not be trusted"
            );
        }
        if stop {
            self.unmarked = None;
        }
    }

    /// Who is to be told now that the snapshot is invalid.
    fn take_lost(&mut self) -> Vec<Done> {
        let held = self.unmarked.as_ref().is_some_and(|unmarked| !unmarked.let_go);
        if held && !self.released { Vec::new() } else { std::mem::take(&mut self.lost) }
    }

    /// Whether the snapshot is invalid, the disk does not say so, and nobody waits for that any
    /// more.
    pub fn is_unmarked(&self) -> bool {
        self.unmarked.as_ref().is_some_and(|unmarked| unmarked.let_go)
    }

    pub fn usage(&self, size: u64) -> Usage {
        let sectors = self.layout.chunk() / SECTOR_BYTES;
        // As the kernel: while a merge goes on, as if all places had been handed out in the order
        // of the entries.
        let end = self.layout.area_chunk(self.area) + self.committed + 1;
        let allocated = if self.merging { end } else { self.next_free };
        // The header, and the areas up to this one.
        let metadata = self.area + 2;
        Usage { allocated: allocated * sectors, total: size / SECTOR_BYTES, metadata: metadata * sectors }
    }
}

/// A persistent store's part that its thread shares.
///
/// Lock order:
/// 1. `area`, held while metadata is read and written: by the store's thread and by a merge only.
/// 2. `queue`, held for a few instructions.
///
/// Callbacks run without either.
pub struct Committer {
    pub layout: Layout,
    pub device: Arc<dyn Device>,
    /// The first block, as it was found.
    pub header: Box<Block>,
    pub area: Mutex<Area>,
    pub queue: Mutex<Queue>,
    /// The thread has something to do.
    pub wake: Condvar,
}

enum Work {
    Header,
    Lost(Vec<Done>),
    Group,
    Undo(Vec<PutBack>),
}

impl Committer {
    /// A place is handed back.
    pub fn finish(&self, sequence: u64, finished: Finished) {
        let mut queue = self.queue.lock();
        queue.finish(sequence, finished);
        let wake = queue.is_due() || !queue.lost.is_empty();
        drop(queue);
        if wake {
            self.wake.notify_one();
        }
    }

    /// The snapshot is invalid from now on; `then` is called when the disk says so, or does not let
    /// itself be written.
    pub fn invalidate(&self, then: Done) {
        let mut queue = self.queue.lock();
        queue.lose();
        queue.lost.push(then);
        drop(queue);
        self.wake.notify_one();
    }

    /// The origin has no need of the snapshot any more: who waits for the header goes on.
    pub fn release(&self) {
        self.queue.lock().released = true;
        self.wake.notify_one();
    }

    /// Has entries written again that a removal that failed may have taken from the disk.
    pub fn put_back(&self, then: PutBack) {
        self.queue.lock().undo.push(then);
        self.wake.notify_one();
    }

    /// Lets the thread end when everything is done.
    pub fn stop(&self) {
        self.queue.lock().stop = true;
        self.wake.notify_one();
    }

    // ---- the store's thread ---------------------------------------------------------------------

    /// Makes groups durable and answers, until the store is dropped; says then that it was closed
    /// in order, if it was.
    pub fn run(&self) {
        while let Some(work) = self.next() {
            match work {
                Work::Header => match self.write_invalid() {
                    Ok(()) => self.queue.lock().unmarked = None,
                    Err(error) => self.queue.lock().header_failed(error),
                },
                Work::Lost(dones) => answer(dones, Err(Invalid)),
                Work::Group => self.commit_group(),
                Work::Undo(thens) => {
                    let outcome = self.area.lock().put_back();
                    answer(thens, outcome);
                }
            }
        }
        self.close();
    }

    fn close(&self) {
        let _area = self.area.lock();
        let closing = {
            let mut queue = self.queue.lock();
            queue.closing.take().filter(|_| queue.valid)
        };
        let Some((content, mark)) = closing else { return };
        let mut block = *self.header;
        format::set_mark(&mut block, mark);
        format::set_closed(&mut block, Some(content));
        if let Err(error) = self.device.write_at(0, &block, Flags::FUA) {
            tracing::warn!(%error, "an exception store could not be told that it was closed in order");
        }
    }

    fn next(&self) -> Option<Work> {
        let mut queue = self.queue.lock();
        loop {
            let header_due = queue.header_due();
            if header_due.is_some_and(|at| at <= Instant::now()) {
                return Some(Work::Header);
            }
            let lost = queue.take_lost();
            if !lost.is_empty() {
                return Some(Work::Lost(lost));
            }
            if queue.is_due() {
                return Some(Work::Group);
            }
            if !queue.undo.is_empty() {
                return Some(Work::Undo(std::mem::take(&mut queue.undo)));
            }
            if queue.stop {
                return None;
            }
            queue = match header_due {
                None => freestone_core::pin::wait(&self.wake, queue),
                Some(at) => {
                    let left = at.saturating_duration_since(Instant::now());
                    self.wake.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    fn commit_group(&self) {
        let mut area = self.area.lock();
        let group: Vec<Ready> = {
            let mut queue = self.queue.lock();
            let count = area.room().min(queue.gathered.len());
            queue.gathered.drain(..count).collect()
        };
        if group.is_empty() {
            // The snapshot was lost meanwhile.
            return;
        }
        let (entries, dones): (Vec<Entry>, Vec<Done>) =
            group.into_iter().map(|ready| (ready.entry, ready.done)).unzip();
        let outcome = area.append(&entries);
        let mut queue = self.queue.lock();
        if let Err(error) = outcome {
            tracing::warn!(%error, "the snapshot is lost: device failed: writing its exceptions");
            queue.lose();
        } else {
            let count = entries.len() as u64;
            (queue.area, queue.committed) = area.position();
            queue.claimed -= count;
            queue.stats.exceptions += count;
            queue.stats.groups += 1;
            queue.stats.largest_group = queue.stats.largest_group.max(count);
        }
        if !queue.valid {
            // Answered when the header says so.
            queue.lost.extend(dones);
            return;
        }
        drop(queue);
        drop(area);
        answer(dones, Ok(()));
    }

    /// Writes a header that says "invalid". Needs no flush before: nothing else on the device
    /// counts any more.
    fn write_invalid(&self) -> device::Result<()> {
        // A merge may be reading the header to mark it.
        let _area = self.area.lock();
        self.device.write_at(0, &format::header(self.layout.chunk(), false), Flags::FUA)
    }

    // ---- a merge's thread -----------------------------------------------------------------------

    /// Marks the store durably, where there is anything to merge. All that was begun is committed.
    /// Under the lock of the area, as all that writes the header. Where it is not known what the
    /// disk says, the answer is [`MergeError::Invalid`].
    pub fn mark(&self, id: u64) -> Result<Option<Mark>, MergeError> {
        let mut area = self.area.lock();
        if !self.queue.lock().valid {
            return Err(MergeError::Invalid);
        }
        let Some((entries, first)) = area.first()? else { return Ok(None) };
        let mark = Mark { id, entries, first };
        if let Err(error) = self.write_mark(Some(mark)) {
            // It may be there all the same, and the next start would go on with a merge that never
            // began.
            let restored = self.write_mark(None);
            return Err(restored.map_or(MergeError::Invalid, |()| MergeError::Device(error)));
        }
        Ok(Some(mark))
    }

    /// Takes the mark away durably.
    pub fn unmark(&self) -> Result<(), MergeError> {
        let _area = self.area.lock();
        if !self.queue.lock().valid {
            return Err(MergeError::Invalid);
        }
        Ok(self.write_mark(None)?)
    }

    fn write_mark(&self, mark: Option<Mark>) -> device::Result<()> {
        let mut block = *self.header;
        format::set_mark(&mut block, mark);
        self.device.write_at(0, &block, Flags::FUA)
    }

    pub fn last_run(&self) -> Result<Option<Run>, MergeError> {
        let mut area = self.area.lock();
        if !self.queue.lock().valid {
            return Err(MergeError::Invalid);
        }
        area.last_run()
    }

    /// Whether it is not known which exceptions of the last run are on disk.
    pub fn is_torn(&self) -> bool {
        self.area.lock().is_torn()
    }

    pub fn commit_merge(&self, run: &Run, count: u64) -> Result<(), MergeError> {
        let mut area = self.area.lock();
        if !self.queue.lock().valid {
            return Err(MergeError::Invalid);
        }
        if let Err(error) = area.remove(run, count) {
            // They may be removed on disk all the same: write them back, so that memory and disk
            // agree.
            if let Err(error) = area.put_back() {
                tracing::warn!(%error, "what is on disk of a step of a merge that failed is not known");
            }
            return Err(error);
        }
        let mut queue = self.queue.lock();
        (queue.area, queue.committed) = area.position();
        queue.merging = queue.claimed == 0;
        if queue.merging && area.position() == (0, 0) {
            queue.next_free = format::FIRST_COPY;
        }
        Ok(())
    }
}

/// Calls them all. A panic, which the panic hook reports, ends that call only.
fn answer<E: Copy>(dones: Vec<Answer<E>>, outcome: Result<(), E>) {
    for done in dones {
        let _ = catch_unwind(AssertUnwindSafe(|| done(outcome)));
    }
}
