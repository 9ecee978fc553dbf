//! Repeated power loss of an origin and a snapshot while threads write to both. Flushed data
//! survives, and neither device shows writes of the other.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use freestone_core::device::{Blocking, Completion, Device, Error, IoBuf, Request};
use freestone_cow::cow::{Origin, Snapshot, Status, StoreKind};
use freestone_drive::power::{Config, Power};
use freestone_drive::quiesce::Quiesce;
use freestone_testkit::{DeferPolicy, DeferringDevice, Model, Rng, effort};

use crate::support::{CHUNK, config};

const CHUNKS: u64 = 96;
/// Size in bytes of the unit that a power cut does not tear: the logical block of the disks.
const SECTOR: u64 = 512;
const SECTORS: u64 = CHUNK / SECTOR;
/// Number of writers of the origin, and of the snapshot. Each writer owns a share of the chunks.
const WRITERS: u64 = 2;
/// Maximum number of writes in flight of one writer.
const IN_FLIGHT: usize = 8;
const CUTS: u64 = 12;
const LONG: Duration = Duration::from_secs(60);

/// Numbers of the writes to a sector. After a cut, the sector holds the last flushed write or a
/// later one.
#[derive(Clone, Copy, Default)]
struct Sector {
    flushed: u64,
    answered: u64,
    begun: u64,
}

/// A thread's writer of one device, with the sectors that it owns.
struct Writer {
    /// Number of the first chunk that this writer owns. The others follow at a distance of
    /// `WRITERS`, in the same half of the device.
    first: u64,
    rng: Rng,
    number: u64,
    state: Arc<(Mutex<State>, Condvar)>,
}

struct State {
    sectors: Vec<Sector>,
    /// Chunks with a write in flight.
    busy: Vec<u64>,
    flushes: usize,
}

impl Writer {
    fn chunks(&self) -> impl Iterator<Item = u64> + use<> {
        (self.first..CHUNKS / 2).step_by(WRITERS as usize)
    }

    /// Submits writes to sectors of a random chunk, and sometimes a flush, until `off` is set.
    fn run(&mut self, device: &dyn Device, half: u64, off: &AtomicBool) {
        let chunks: Vec<u64> = self.chunks().collect();
        while !off.load(Ordering::SeqCst) {
            if self.rng.chance(10) {
                self.flush(device);
            }
            let chunk = chunks[self.rng.below(chunks.len() as u64) as usize];
            let from = self.rng.below(SECTORS);
            let count = if self.rng.chance(40) { SECTORS - from } else { 1 };
            self.write(device, half, chunk, from..from + count);
        }
    }

    fn write(&mut self, device: &dyn Device, half: u64, chunk: u64, sectors: Range<u64>) {
        let (lock, changed) = &*self.state;
        let mut state = lock.lock().unwrap();
        // Waits for the previous write to this chunk, and until fewer than IN_FLIGHT writes are in
        // flight.
        while state.busy.contains(&chunk) || state.busy.len() >= IN_FLIGHT {
            let (after, timeout) = changed.wait_timeout(state, Duration::from_millis(1)).unwrap();
            state = after;
            if timeout.timed_out() {
                return;
            }
        }
        self.number += 1;
        let number = self.number;
        let written = (chunk * SECTORS + sectors.start) as usize..(chunk * SECTORS + sectors.end) as usize;
        state.sectors[written.clone()].iter_mut().for_each(|sector| sector.begun = number);
        state.busy.push(chunk);
        drop(state);
        let data = number.to_le_bytes().repeat(written.len() * SECTOR as usize / 8);
        let request = Request::write((half + chunk) * CHUNK + sectors.start * SECTOR, data.len() as u64);
        let shared = Arc::clone(&self.state);
        let done = move |outcome: Result<(), Error>, _| {
            let (lock, changed) = &*shared;
            let mut state = lock.lock().unwrap();
            if outcome.is_ok() {
                state.sectors[written].iter_mut().for_each(|sector| sector.answered = number);
            }
            state.busy.retain(|other| *other != chunk);
            changed.notify_all();
        };
        device.submit(request, IoBuf::copy_of(&data).unwrap(), Completion::new(done));
    }

    fn flush(&mut self, device: &dyn Device) {
        let mut state = self.state.0.lock().unwrap();
        let covered: Vec<u64> = state.sectors.iter().map(|sector| sector.answered).collect();
        state.flushes += 1;
        drop(state);
        let shared = Arc::clone(&self.state);
        let done = move |outcome: Result<(), Error>, _| {
            let (lock, changed) = &*shared;
            let mut state = lock.lock().unwrap();
            if outcome.is_ok() {
                for (sector, covered) in state.sectors.iter_mut().zip(&covered) {
                    sector.flushed = sector.flushed.max(*covered);
                }
            }
            state.flushes -= 1;
            changed.notify_all();
        };
        device.submit(Request::flush(), IoBuf::empty(), Completion::new(done));
    }

    /// Waits for the completions of all requests of this writer.
    fn wait(&self) {
        let (lock, changed) = &*self.state;
        let in_flight = |state: &mut State| !state.busy.is_empty() || state.flushes > 0;
        let (_state, timeout) = changed.wait_timeout_while(lock.lock().unwrap(), LONG, in_flight).unwrap();
        assert!(!timeout.timed_out(), "a request is never answered");
    }

    /// Checks after a cut that each sector holds an allowed number, and records that number as
    /// durable.
    fn settle(&self, device: &dyn Device, half: u64, context: &str) {
        let mut state = self.state.0.lock().unwrap();
        for chunk in self.chunks() {
            let found = sectors(device, half + chunk, context);
            for (number, found) in found.into_iter().enumerate() {
                let sector = &mut state.sectors[chunk as usize * SECTORS as usize + number];
                let Sector { flushed, begun, .. } = *sector;
                assert!(
                    (flushed..=begun).contains(&found),
                    "{context}: sector {number} of chunk {} has {found}, not from {flushed} to {begun}",
                    half + chunk
                );
                *sector = Sector { flushed: found, answered: found, begun: found };
            }
        }
    }
}

/// Returns the number that each sector of a chunk holds. Panics if a sector is torn.
fn sectors(device: &dyn Device, chunk: u64, context: &str) -> Vec<u64> {
    let mut bytes = vec![0; CHUNK as usize];
    device.read_at(chunk * CHUNK, &mut bytes).unwrap();
    let number = |sector: &[u8]| {
        let (words, _) = sector.as_chunks::<8>();
        assert!(words.iter().all(|word| word == &words[0]), "{context}: a sector of chunk {chunk} is torn");
        u64::from_le_bytes(words[0])
    };
    bytes.chunks(SECTOR as usize).map(number).collect()
}

struct Machine {
    below: Arc<Power>,
    cow: Arc<Power>,
    origin: Origin,
}

impl Machine {
    fn new(seed: u64) -> Self {
        let drive = |size: u64, seed| {
            let model = Arc::new(Model::new(size as usize, SECTOR as u32));
            let model = Arc::new(DeferringDevice::new(model, DeferPolicy::Sometimes(30), seed));
            let unit = SECTOR as u32;
            Arc::new(Power::new(model, Config { unit, ..Config::default() }).unwrap())
        };
        let (below, cow) = (drive(CHUNKS * CHUNK, seed), drive(4 * CHUNKS * CHUNK, seed + 1));
        Self { origin: Origin::new(below.clone()), below, cow }
    }

    fn open(&self) -> (Snapshot, Arc<Quiesce>) {
        let lead = Arc::new(Quiesce::new(self.cow.clone() as Arc<dyn Device>));
        let snapshot = self.origin.snapshot(lead.clone(), &config(StoreKind::Persistent, CHUNK)).unwrap();
        (snapshot, lead)
    }

    fn lose_power(&self, lead: &Quiesce, seed: u64) {
        let off = self.origin.power_off(LONG, || {
            lead.close(LONG).unwrap().keep_closed();
            true
        });
        for drive in [&self.below, &self.cow] {
            drive.cut(seed).unwrap();
        }
        off.unwrap().invalidate_snapshots();
    }
}

/// The writers of the origin use the first half of the device, and those of the snapshot the second
/// half. On both devices, the other half keeps its content.
#[test]
fn power_loss_keeps_flushed_data_and_snapshot() {
    for seed in 0..effort(2, 6) {
        let machine = Machine::new(seed);
        let writer = |number: u64| {
            let sectors = vec![Sector::default(); (CHUNKS / 2 * SECTORS) as usize];
            let state = State { sectors, busy: Vec::new(), flushes: 0 };
            Writer {
                first: number % WRITERS,
                rng: Rng::new(seed << 8 | number),
                number: 0,
                state: Arc::new((Mutex::new(state), Condvar::new())),
            }
        };
        let mut writers: Vec<Writer> = (0..2 * WRITERS).map(writer).collect();
        let halves = [0, CHUNKS / 2];
        for cut in 0..CUTS {
            let context = format!("seed {seed}, cut {cut}");
            let (snapshot, lead) = machine.open();
            let devices: [&dyn Device; 2] = [&machine.origin, &snapshot];
            for (number, writer) in writers.iter().enumerate() {
                let which = number / WRITERS as usize;
                writer.settle(devices[which], halves[which], &context);
            }
            for chunk in 0..CHUNKS / 2 {
                assert!(sectors(&snapshot, chunk, &context).iter().all(|found| *found == 0), "{context}");
                let other = CHUNKS / 2 + chunk;
                assert!(
                    sectors(&machine.origin, other, &context).iter().all(|found| *found == 0),
                    "{context}"
                );
            }
            assert_ne!(snapshot.status(), Status::Invalid, "{context}");
            let off = AtomicBool::new(false);
            // As in a server, no new requests start, and requests in flight continue.
            thread::scope(|scope| {
                for (number, writer) in writers.iter_mut().enumerate() {
                    let which = number / WRITERS as usize;
                    let (device, half, off) = (devices[which], halves[which], &off);
                    scope.spawn(move || writer.run(device, half, off));
                }
                thread::sleep(Duration::from_micros(500 + Rng::new(seed << 8 | cut).below(8000)));
                off.store(true, Ordering::SeqCst);
            });
            machine.lose_power(&lead, seed << 8 | cut);
            writers.iter().for_each(Writer::wait);
        }
    }
}
