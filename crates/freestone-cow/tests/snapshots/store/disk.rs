//! A disk that records the order of its requests, and the images of the disk that a power cut may
//! leave.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Op, Request, Result,
    TryResult,
};
use freestone_core::sync::{Mutex, MutexGuard};
use freestone_testkit::Rng;

pub const SECTOR: usize = 512;

/// An event in the log of a disk. Writes and flushes are numbered separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The write with this number was submitted to the disk.
    Begin(usize),
    /// The write with this number completed.
    End(usize),
    /// The flush with this number was submitted to the disk.
    FlushBegin(usize),
    /// The flush with this number completed.
    FlushEnd(usize),
    /// A note that the test added to the log.
    Note(Note),
}

/// A note of a test in the log. The number is the origin chunk of an exception; the other notes are
/// about the whole snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Note {
    /// The copy of the chunk was committed: from here on, an image may contain the exception.
    Handed(u64),
    /// The exception was reported durable: from here on, an image must contain the exception.
    Durable(u64),
    /// The chunk is durable in the origin: from here on, an image may lack the exception.
    Merged(u64),
    /// The exception was reported removed: from here on, an image must not contain the exception.
    Removed(u64),
    /// The snapshot is about to become invalid: from here on, an image may be invalid.
    Lost,
    /// The snapshot was reported invalid: from here on, an image must be invalid.
    Invalid,
}

#[derive(Debug, Clone)]
struct RecordedWrite {
    offset: usize,
    data: Vec<u8>,
    fua: bool,
}

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    log: Vec<Event>,
    writes: Vec<RecordedWrite>,
    flushes: usize,
    in_flight: Vec<Range<usize>>,
}

/// A disk in memory that logs its requests. If `slow` is set, flushes and FUA writes take time.
pub struct Disk {
    state: Mutex<State>,
    slow: Option<(Range<u64>, Mutex<Rng>)>,
}

/// The writes and events of a disk since it held `base`.
#[derive(Debug)]
pub struct Recording {
    base: Vec<u8>,
    writes: Vec<RecordedWrite>,
    pub log: Vec<Event>,
}

impl Disk {
    pub fn new(bytes: Vec<u8>) -> Arc<Self> {
        assert!(bytes.len().is_multiple_of(SECTOR));
        Arc::new(Self { state: Mutex::new(State { bytes, ..State::default() }), slow: None })
    }

    /// Returns a disk whose flushes and FUA writes take a random time, in microseconds, from the
    /// range `micros`.
    pub fn slow(bytes: Vec<u8>, micros: Range<u64>, seed: u64) -> Arc<Self> {
        let state = Mutex::new(State { bytes, ..State::default() });
        Arc::new(Self { state, slow: Some((micros, Mutex::new(Rng::new(seed)))) })
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.state.lock().bytes.clone()
    }

    /// Returns true if the disk holds `bytes` at this offset.
    pub fn holds(&self, offset: u64, bytes: &[u8]) -> bool {
        self.state.lock().bytes[offset as usize..].starts_with(bytes)
    }

    pub fn note(&self, note: Note) {
        self.state.lock().log.push(Event::Note(note));
    }

    /// Clears the log and the recorded writes. Returns the content of the disk.
    pub fn start(&self) -> Vec<u8> {
        let mut state = self.state.lock();
        assert!(state.in_flight.is_empty());
        state.log.clear();
        state.writes.clear();
        state.flushes = 0;
        state.bytes.clone()
    }

    /// Returns the events since `start`, which returned `base`.
    pub fn recording(&self, base: Vec<u8>) -> Recording {
        let state = self.state.lock();
        Recording { base, writes: state.writes.clone(), log: state.log.clone() }
    }

    /// Returns the completed requests and the notes as text, with offset, length and FUA of each
    /// write.
    pub fn history(&self) -> Vec<String> {
        let state = self.state.lock();
        let written = |at: &usize| {
            let RecordedWrite { offset, data, fua } = &state.writes[*at];
            let zero = if data.iter().all(|&byte| byte == 0) { " zero" } else { "" };
            let fua = if *fua { " fua" } else { "" };
            format!("{offset}+{}{zero}{fua}", data.len())
        };
        let row = |event: &Event| match event {
            Event::End(at) => Some(written(at)),
            Event::FlushEnd(_) => Some("flush".to_owned()),
            Event::Note(note) => Some(format!("{note:?}")),
            Event::Begin(_) | Event::FlushBegin(_) => None,
        };
        state.log.iter().filter_map(row).collect()
    }

    /// Returns how long a request takes. None if the request completes at once.
    fn time(&self, request: &Request) -> Option<Duration> {
        let (micros, rng) = self.slow.as_ref()?;
        if request.op != Op::Flush && !request.flags.contains(Flags::FUA) {
            return None;
        }
        let more = rng.lock().below(micros.end - micros.start);
        Some(Duration::from_micros(micros.start + more))
    }

    fn perform(&self, request: &Request, data: &mut Option<&mut [u8]>, time: Option<Duration>) {
        let range = request.offset as usize..(request.offset + request.len) as usize;
        let mut state = self.state.lock();
        match (request.op, data) {
            (Op::Read, Some(out)) => out.copy_from_slice(&state.bytes[range]),
            (Op::Write, Some(data)) => self.write(state, range, data, request, time),
            (Op::WriteZeroes, _) => {
                let zeroes = vec![0; range.len()];
                self.write(state, range, &zeroes, request, time);
            }
            (Op::Flush, _) => {
                let flush = state.flushes;
                state.flushes += 1;
                state.log.push(Event::FlushBegin(flush));
                drop(state);
                if let Some(time) = time {
                    thread::sleep(time);
                }
                self.state.lock().log.push(Event::FlushEnd(flush));
            }
            _ => {}
        }
    }

    fn write(
        &self,
        mut state: MutexGuard<'_, State>,
        range: Range<usize>,
        data: &[u8],
        request: &Request,
        time: Option<Duration>,
    ) {
        let other = state.in_flight.iter().find(|other| other.start < range.end && range.start < other.end);
        assert!(other.is_none(), "{range:?} is written while {other:?} is");
        let write = state.writes.len();
        state.log.push(Event::Begin(write));
        state.in_flight.push(range.clone());
        state.writes.push(RecordedWrite {
            offset: range.start,
            data: data.to_owned(),
            fua: request.flags.contains(Flags::FUA),
        });
        drop(state);
        if let Some(time) = time {
            thread::sleep(time);
        }
        let mut state = self.state.lock();
        state.bytes[range.clone()].copy_from_slice(data);
        state.in_flight.retain(|other| *other != range);
        state.log.push(Event::End(write));
    }
}

/// A device over a disk. Each slow request runs on a thread of its own.
pub struct Slow(pub Arc<Disk>);

impl Device for Slow {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let slow = request.op == Op::Flush || request.flags.contains(Flags::FUA);
        if slow { Ok(TryResult::WouldBlock) } else { self.0.try_io(request, buffer) }
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let disk = Arc::clone(&self.0);
        thread::spawn(move || {
            let time = disk.time(&request);
            disk.perform(&request, &mut Some(&mut buffer), time);
            done.complete(Ok(()), buffer);
        });
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.0.extents(offset, len, row)
    }
}

impl Device for Disk {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.state.lock().bytes.len() as u64,
            logical_block: SECTOR as u32,
            physical_block: 4096,
            io_min: 4096,
            io_opt: 4096,
            discard_granularity: 0,
            fast_zeroes: false,
            volatile_cache: true,
            padding: 0,
            volatile_media: false,
            rotational: false,
            max_request: 0,
            read_only: false,
            ignores_data: false,
            zones: None,
        }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        match buffer {
            Buffer::Read(out) => self.perform(request, &mut Some(out), None),
            Buffer::Write(data) => self.perform(request, &mut Some(&mut data.to_vec()), None),
            Buffer::None => self.perform(request, &mut None, None),
        }
        Ok(TryResult::Done)
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let outcome = request.check(&self.geometry());
        if outcome.is_ok() {
            self.perform(&request, &mut Some(&mut buffer), None);
        }
        done.complete(outcome, buffer);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        if len == 0 {
            return Err(Error::OutOfRange);
        }
        row(Extent { offset, len, kind: ExtentKind::Data });
        Ok(len)
    }
}

// ---- power cuts ---------------------------------------------------------------------------------

/// Steps through a recording. Knows at every point what the disk may hold after a power cut.
pub struct Cut<'a> {
    recording: &'a Recording,
    /// Number of events that are processed.
    at: usize,
    /// Durable content of the disk, in bytes.
    durable: Vec<u8>,
    /// Sectors that may hold other content, with the numbers of the writes that may have reached
    /// them.
    uncertain: BTreeMap<usize, Vec<usize>>,
    ended: HashSet<usize>,
    /// By flush in flight, the completed writes that the flush makes durable.
    covers: HashMap<usize, Vec<usize>>,
    /// Numbers of the writes that are not durable.
    open: Vec<usize>,
    pub notes: HashSet<Note>,
}

impl<'a> Cut<'a> {
    pub fn new(recording: &'a Recording) -> Self {
        Self {
            recording,
            at: 0,
            durable: recording.base.clone(),
            uncertain: BTreeMap::new(),
            ended: HashSet::new(),
            covers: HashMap::new(),
            open: Vec::new(),
            notes: HashSet::new(),
        }
    }

    /// Processes the next event and returns it. Returns None at the end of the recording.
    pub fn step(&mut self) -> Option<Event> {
        let event = *self.recording.log.get(self.at)?;
        self.at += 1;
        match event {
            Event::Begin(write) => {
                self.open.push(write);
                for sector in self.sectors(write) {
                    self.uncertain.entry(sector).or_default().push(write);
                }
            }
            Event::End(write) => {
                self.ended.insert(write);
                if self.recording.writes[write].fua {
                    self.settle(write);
                }
            }
            Event::FlushBegin(flush) => {
                let covered = self.open.iter().copied().filter(|write| self.ended.contains(write)).collect();
                self.covers.insert(flush, covered);
            }
            Event::FlushEnd(flush) => {
                for write in self.covers.remove(&flush).expect("a flush ends that was not begun") {
                    self.settle(write);
                }
            }
            Event::Note(note) => {
                self.notes.insert(note);
            }
        }
        Some(event)
    }

    fn sectors(&self, write: usize) -> Range<usize> {
        let RecordedWrite { offset, data, .. } = &self.recording.writes[write];
        offset / SECTOR..(offset + data.len()) / SECTOR
    }

    fn content(&self, write: usize, sector: usize) -> &'a [u8] {
        let RecordedWrite { offset, data, .. } = &self.recording.writes[write];
        &data[sector * SECTOR - offset..][..SECTOR]
    }

    /// Marks a write as durable. In its sectors, earlier writes can no longer survive.
    fn settle(&mut self, write: usize) {
        self.open.retain(|&open| open != write);
        for sector in self.sectors(write) {
            let Some(uncertain) = self.uncertain.get_mut(&sector) else { continue };
            if !uncertain.contains(&write) {
                // A later write to this sector is already durable.
                continue;
            }
            uncertain.retain(|&other| other > write);
            if uncertain.is_empty() {
                self.uncertain.remove(&sector);
            }
            let content = self.content(write, sector);
            self.durable[sector * SECTOR..][..SECTOR].copy_from_slice(content);
        }
    }

    /// Returns images that the cut may leave: all of them if there are at most `most`. Otherwise
    /// the two extremes and a random selection.
    pub fn images(&self, most: usize, rng: &mut Rng) -> Vec<Vec<u8>> {
        let differs = |sector: usize, write: usize| {
            self.content(write, sector) != &self.durable[sector * SECTOR..][..SECTOR]
        };
        let choices: Vec<(usize, Vec<usize>)> = self
            .uncertain
            .iter()
            .map(|(&sector, writes)| {
                (sector, writes.iter().copied().filter(|&write| differs(sector, write)).collect::<Vec<_>>())
            })
            .filter(|(_, writes)| !writes.is_empty())
            .collect();
        let count = choices.iter().try_fold(1usize, |all, (_, writes)| all.checked_mul(writes.len() + 1));
        match count.filter(|&count| count <= most) {
            Some(count) => (0..count)
                .map(|mut code| {
                    self.image(&choices, |options| {
                        let choice = code % options;
                        code /= options;
                        choice
                    })
                })
                .collect(),
            None => (0..most)
                .map(|round| {
                    self.image(&choices, |options| match round {
                        0 => 0,
                        1 => options - 1,
                        _ => rng.below(options as u64) as usize,
                    })
                })
                .collect(),
        }
    }

    /// Builds an image. For each sector, choice 0 is the durable content, and choice n is the n-th
    /// uncertain write.
    fn image(&self, choices: &[(usize, Vec<usize>)], mut choose: impl FnMut(usize) -> usize) -> Vec<u8> {
        let mut image = self.durable.clone();
        for (sector, writes) in choices {
            if let Some(at) = choose(writes.len() + 1).checked_sub(1) {
                image[sector * SECTOR..][..SECTOR].copy_from_slice(self.content(writes[at], *sector));
            }
        }
        image
    }
}
