//! A family (a RAM disk, its snapshots and forks, which share memory) under load. Writers,
//! snapshots, forks, rewinds, removals, compaction and writeback run at the same time.
//!
//! Each reader makes these checks without knowledge of the other threads:
//! * A block of 512 bytes contains its writer, the number of the write and its position, which
//!   determine all other bytes. Torn or misplaced blocks are therefore detected.
//! * A writer reads from its own pages what it wrote last, unless the device was rewound.
//! * A writer writes its pages in a cycle, so a snapshot shows a state between two writes. The age
//!   of each page follows from its distance to the newest page. After a rewind, all pages older
//!   than the oldest written one are zeroes.
//! * A snapshot never changes. A new fork of a snapshot has the snapshot's content, and a rewind of
//!   the fork restores that content.
//!
//! `FREESTONE_MODEL_SECONDS` sets the run time of each test.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use freestone::device::{Blocking, Device, Flags};
use freestone::ram::{Config, Family, ForkConfig, IdleSelection, Ram, Writeback};
use freestone_testkit::{DeferPolicy, DeferringDevice, FaultyDisk, Model, Rng, effort, first_difference};

const PAGE: usize = 4096;
const BLOCK: usize = 512;
/// Number of pages that each writer owns and writes whole, in a cycle. Behind them are pages of
/// which all writers write parts.
const OWN: u64 = 12;
const WRITERS: u64 = 3;
const SHARED: u64 = 8;
const PAGES: u64 = WRITERS * OWN + SHARED;
const SNAPSHOTS_MAX: usize = 6;

/// Returns the block that `writer` writes at position `place` in its write `number`.
fn block(writer: u64, number: u64, place: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    block[..8].copy_from_slice(&(writer + 1).to_le_bytes());
    block[8..16].copy_from_slice(&number.to_le_bytes());
    block[16..24].copy_from_slice(&place.to_le_bytes());
    let mut rng = Rng::new(writer << 56 ^ number << 16 ^ place);
    // Every third block compresses well, the others do not.
    if number.is_multiple_of(3) {
        block[24..].fill(number as u8);
    } else {
        rng.fill(&mut block[24..]);
    }
    block
}

fn page(writer: u64, number: u64, slot: u64) -> Vec<u8> {
    (0..8).flat_map(|at| block(writer, number, slot * 8 + at)).collect()
}

/// Returns the number of the write that wrote the block, or 0 if the block was never written.
/// Panics if the block is torn or belongs to another position.
fn number(bytes: &[u8], place: u64, what: &str) -> u64 {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    if word(0) == 0 {
        assert!(bytes.iter().all(|&b| b == 0), "{what}: block {place} is a part of something");
        return 0;
    }
    let wanted = block(word(0) - 1, word(8), place);
    assert!(
        bytes == wanted,
        "{what}: block {place} is torn or not of its place, {} {}",
        word(0) - 1,
        word(8)
    );
    word(8)
}

fn read_all(ram: &Ram) -> Vec<u8> {
    let mut bytes = vec![0; PAGES as usize * PAGE];
    ram.read_at(0, &mut bytes).unwrap();
    bytes
}

/// Checks that the bytes show the device between two writes of each writer (see the module
/// documentation).
fn check_moment(bytes: &[u8], what: &str) {
    for (at, block) in bytes.chunks(BLOCK).enumerate() {
        number(block, at as u64, what);
    }
    for writer in 0..WRITERS {
        let numbers: Vec<u64> = (0..OWN)
            .map(|page| {
                let slot = writer * OWN + page;
                let page = &bytes[slot as usize * PAGE..][..PAGE];
                let of = |at: usize| number(&page[at * BLOCK..][..BLOCK], slot * 8 + at as u64, what);
                let first = of(0);
                assert!((1..8).all(|at| of(at) == first), "{what}: page {slot} is of two writes");
                first
            })
            .collect();
        let newest = numbers.iter().copied().max().unwrap_or_default();
        let mut wiped = false;
        for behind in 0..OWN.min(newest) {
            let wanted = newest - behind;
            let is = numbers[(wanted % OWN) as usize];
            wiped |= is == 0;
            let wanted = if wiped { 0 } else { wanted };
            assert_eq!(is, wanted, "{what}: writer {writer} was at {newest}: {numbers:?}");
        }
    }
}

struct Frozen {
    ram: Ram,
    bytes: Vec<u8>,
}

struct Stage {
    origin: Ram,
    /// Number of begun and ended rewinds; odd during a rewind.
    rewinds: AtomicU64,
    frozen: Mutex<Vec<Arc<Frozen>>>,
    stop: AtomicBool,
    /// Numbers of finished rounds of writing, snapshots, reading, forks and background work.
    done: [AtomicU64; 5],
}

impl Stage {
    fn count_round(&self, what: usize) -> bool {
        // Relaxed: no other data depends on this counter.
        self.done[what].fetch_add(1, Ordering::Relaxed);
        !self.stop.load(Ordering::SeqCst)
    }

    fn write(&self, writer: u64, seed: u64) {
        let mut rng = Rng::new(seed);
        for n in 1_u64.. {
            if !self.count_round(0) {
                return;
            }
            let slot = writer * OWN + n % OWN;
            let epoch = self.rewinds.load(Ordering::SeqCst);
            self.origin.write_at(slot * PAGE as u64, &page(writer, n, slot), Flags::empty()).unwrap();
            let mut back = vec![0; PAGE];
            self.origin.read_at(slot * PAGE as u64, &mut back).unwrap();
            if epoch.is_multiple_of(2) && self.rewinds.load(Ordering::SeqCst) == epoch {
                assert!(
                    back == page(writer, n, slot),
                    "writer {writer} does not read what it wrote: page {slot}"
                );
            }
            // Changes a part of the pages that all writers share.
            let first = WRITERS * OWN * 8 + rng.below(SHARED * 8);
            let blocks = 1 + rng.below(4.min(PAGES * 8 - first));
            match rng.below(8) {
                0 => self.origin.write_zeroes(first * 512, blocks * 512, Flags::empty()).unwrap(),
                1 => self.origin.discard(first / 8 * PAGE as u64, PAGE as u64).unwrap(),
                _ => {
                    let data: Vec<u8> =
                        (first..first + blocks).flat_map(|place| block(writer, n, place)).collect();
                    self.origin.write_at(first * 512, &data, Flags::empty()).unwrap();
                }
            }
        }
    }

    /// Takes snapshots, and removes old ones.
    fn freeze(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        while self.count_round(1) {
            let ram = self.origin.snapshot().unwrap();
            let bytes = read_all(&ram);
            check_moment(&bytes, "a snapshot");
            let mut frozen = self.frozen.lock().unwrap();
            frozen.push(Arc::new(Frozen { ram, bytes }));
            let gone = (frozen.len() > SNAPSHOTS_MAX || rng.chance(20)).then(|| {
                let at = rng.below(frozen.len() as u64) as usize;
                frozen.swap_remove(at)
            });
            drop(frozen);
            drop(gone);
            if rng.chance(20) {
                std::thread::sleep(Duration::from_millis(rng.below(5)));
            }
        }
    }

    fn any(&self, rng: &mut Rng) -> Option<Arc<Frozen>> {
        let frozen = self.frozen.lock().unwrap();
        let at = rng.below(frozen.len() as u64) as usize;
        frozen.get(at).cloned()
    }

    /// Reads the origin and existing snapshots, and checks their content.
    fn look(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        while self.count_round(2) {
            // The read may be done in parts, so its blocks may be from different moments.
            for (at, block) in read_all(&self.origin).chunks(BLOCK).enumerate() {
                number(block, at as u64, "the origin");
            }
            let Some(frozen) = self.any(&mut rng) else {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            };
            assert_same(&read_all(&frozen.ram), &frozen.bytes, "a snapshot");
            let slot = rng.below(PAGES) as usize;
            let mut back = vec![0; PAGE];
            frozen.ram.read_at((slot * PAGE) as u64, &mut back).unwrap();
            assert_same(&back, &frozen.bytes[slot * PAGE..][..PAGE], "a page of a snapshot");
        }
    }

    /// Forks snapshots, and takes snapshots and forks of the forks.
    fn fork(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        while self.count_round(3) {
            let Some(frozen) = self.any(&mut rng) else {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            };
            let fork = frozen.ram.fork(&ForkConfig::default()).unwrap();
            let mut bytes = frozen.bytes.clone();
            // Another thread may remove the snapshot from the list meanwhile.
            drop(frozen.clone());
            for n in 0..10 {
                let first = rng.below(PAGES * 8 - 8);
                let data: Vec<u8> =
                    (first..first + 1 + rng.below(8)).flat_map(|place| block(9, n, place)).collect();
                fork.write_at(first * 512, &data, Flags::empty()).unwrap();
                bytes[first as usize * 512..][..data.len()].copy_from_slice(&data);
            }
            assert_same(&read_all(&fork), &bytes, "a fork");
            let second = fork.snapshot().unwrap();
            fork.write_at(0, &page(9, 77, 0), Flags::empty()).unwrap();
            let third = second.fork(&ForkConfig::default()).unwrap();
            fork.rewind().unwrap();
            assert_same(&read_all(&fork), &frozen.bytes, "a fork after its rewind");
            drop(fork);
            assert_same(&read_all(&third), &bytes, "a fork of a fork's snapshot");
            drop(second);
            third.discard(0, PAGE as u64).unwrap();
            bytes[..PAGE].fill(0);
            assert_same(&read_all(&third), &bytes, "a fork whose snapshot is only its own");
        }
    }

    fn background(&self, backing: bool, rewinds: bool, seed: u64) {
        let mut rng = Rng::new(seed);
        while self.count_round(4) {
            match rng.below(4) {
                0 => {
                    self.origin.compact();
                }
                1 if rewinds => {
                    self.rewinds.fetch_add(1, Ordering::SeqCst);
                    self.origin.rewind().unwrap();
                    self.rewinds.fetch_add(1, Ordering::SeqCst);
                }
                _ if backing => {
                    let frozen = self.any(&mut rng);
                    let ram = frozen.as_ref().map_or(&self.origin, |frozen| &frozen.ram);
                    let ram = if rng.chance(50) { &self.origin } else { ram };
                    ram.mark_idle(IdleSelection::All);
                    ram.writeback(&Writeback::Idle).unwrap();
                }
                _ => {}
            }
            std::thread::sleep(Duration::from_micros(rng.below(3000)));
        }
    }
}

fn assert_same(is: &[u8], wanted: &[u8], what: &str) {
    if let Some(at) = first_difference(is, wanted) {
        let word = |bytes: &[u8], word: usize| {
            let at = at / BLOCK * BLOCK + word * 8;
            u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
        };
        panic!(
            "{what}: page {} changed: writer {} number {} for writer {} number {}",
            at / PAGE,
            word(is, 0).wrapping_sub(1),
            word(is, 1),
            word(wanted, 0).wrapping_sub(1),
            word(wanted, 1)
        );
    }
}

/// Returns how long each setup runs.
fn run_time() -> Duration {
    let given = std::env::var("FREESTONE_MODEL_SECONDS").ok().and_then(|text| text.parse().ok());
    given.map_or(effort(Duration::from_millis(400), Duration::from_secs(5)), Duration::from_secs)
}

struct Setup {
    backing: Option<bool>,
    mem_limit: u64,
    fork: bool,
    rewinds: bool,
}

fn run(name: &str, setup: &Setup) {
    let config = Config { mem_limit: setup.mem_limit, ..Config::default() };
    let family = match setup.backing {
        None => Family::new(config).unwrap(),
        Some(packed) => {
            let disk = Arc::new(FaultyDisk::new(32 << 20, 4096).shuffled(5));
            Family::new(config.backed_by(disk, packed)).unwrap()
        }
    };
    let origin = if setup.fork {
        let zeroes: Arc<dyn Device> = Arc::new(Model::read_only(vec![0; PAGES as usize * PAGE], 512));
        let base: Arc<dyn Device> = Arc::new(DeferringDevice::new(zeroes, DeferPolicy::Sometimes(30), 7));
        family.fork(base, &ForkConfig::default()).unwrap()
    } else {
        family.ram(PAGES * PAGE as u64).unwrap()
    };
    let probe = family.ram(PAGE as u64).unwrap();
    let stage = Stage {
        origin,
        rewinds: AtomicU64::new(0),
        frozen: Mutex::default(),
        stop: AtomicBool::new(false),
        done: Default::default(),
    };
    // A thread that panics stops all other threads.
    let stop = |work: &(dyn Fn() + Sync)| {
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        stage.stop.store(true, Ordering::SeqCst);
        if let Err(panic) = ended {
            std::panic::resume_unwind(panic);
        }
    };
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (stop, stage) = (&stop, &stage);
            scope.spawn(move || stop(&|| stage.write(writer, 10 + writer)));
        }
        scope.spawn(|| stop(&|| stage.freeze(1)));
        scope.spawn(|| stop(&|| stage.look(2)));
        scope.spawn(|| stop(&|| stage.fork(3)));
        scope.spawn(|| stop(&|| stage.background(setup.backing.is_some(), setup.rewinds, 4)));
        // A thread that makes no progress is a failure as well.
        let began = Instant::now();
        let mut seen = [0; 5];
        let mut since = Instant::now();
        let mut hangs = None;
        // On a loaded machine, the run continues until every thread has finished a round.
        let mut all_ran = false;
        while !(all_ran && began.elapsed() >= run_time() || stage.stop.load(Ordering::SeqCst)) {
            std::thread::sleep(Duration::from_millis(20));
            // Relaxed: no other data depends on the counters.
            let now: [u64; 5] = std::array::from_fn(|at| stage.done[at].load(Ordering::Relaxed));
            if now.iter().zip(seen).all(|(now, seen)| *now > seen) {
                (seen, since, all_ran) = (now, Instant::now(), true);
            }
            if since.elapsed() > Duration::from_secs(60) {
                hangs = Some((seen, now));
                break;
            }
        }
        stage.stop.store(true, Ordering::SeqCst);
        if let Some((seen, now)) = hangs {
            // Without an abort, the scope would wait forever for the thread that hangs.
            eprintln!("{name}: somebody does not get on: {seen:?}, 20 s later {now:?}");
            std::process::abort();
        }
    });
    eprintln!("{name}: {:?}", stage.done);
    for frozen in stage.frozen.lock().unwrap().iter() {
        assert_same(&read_all(&frozen.ram), &frozen.bytes, "a snapshot in the end");
    }
    drop(stage);
    let began = Instant::now();
    loop {
        let (stat, memory, backing) =
            (family.stat(), probe.memory_overhead(), probe.backing().unwrap_or_default());
        let left = [
            stat.mem_used_total,
            stat.charged,
            stat.retiring,
            stat.layers - 1,
            memory.leaves_bytes,
            backing.used_bytes,
            backing.spilled_pages,
        ];
        if left == [0; 7] {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{name}: left {stat:?} {memory:?} {backing:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

const PLAIN: Setup = Setup { backing: None, mem_limit: 0, fork: false, rewinds: false };

#[test]
fn plain_disk() {
    run("disk", &PLAIN);
}

#[test]
fn disk_with_rewinds() {
    run("rewinds", &Setup { rewinds: true, ..PLAIN });
}

#[test]
fn fork_with_rewinds() {
    run("fork", &Setup { rewinds: true, fork: true, ..PLAIN });
}

#[test]
fn disk_with_eviction_packed() {
    run("packed", &Setup { backing: Some(true), ..PLAIN });
    run("packed, limited", &Setup { backing: Some(true), mem_limit: 600 << 10, ..PLAIN });
}

#[test]
fn disk_with_eviction_in_kernel_layout() {
    run("plain", &Setup { backing: Some(false), ..PLAIN });
    run("plain, limited", &Setup { backing: Some(false), mem_limit: 600 << 10, ..PLAIN });
}

#[test]
fn fork_with_eviction_and_rewinds() {
    run("packed fork", &Setup { backing: Some(true), fork: true, rewinds: true, ..PLAIN });
}
