//! Many threads submit requests at once: no request is lost, torn or reordered, even if the
//! submitting threads end first.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Barrier};
use std::thread;

use freestone::device::{Completion, Device, Flags, IoBuf, Op, Request, Result};
use freestone::file::{Config, Direct, Engine, File};
use freestone_testkit::Rng;

const BLOCK: u64 = 4096;
const SUBMITTERS: u64 = 4;
/// Number of blocks that all submitters share. Each submitter's own blocks follow them.
const COMMON_BLOCKS: u64 = 64;
const OWN_BLOCKS: u64 = 8;
const SIZE: u64 = (COMMON_BLOCKS + SUBMITTERS * OWN_BLOCKS) * BLOCK;
const MAX_BLOCKS: u64 = 8;
const ROUNDS: u64 = 400;
const MODES: [(Direct, Engine); 3] =
    [(Direct::Off, Engine::IoUring), (Direct::On, Engine::IoUring), (Direct::On, Engine::Threads)];

fn open(path: &Path, (direct, engine): (Direct, Engine)) -> Arc<File> {
    let config = Config { size: Some(SIZE), direct, engine, ..Config::new(path) };
    Arc::new(File::open(&config).unwrap())
}

/// Returns a buffer of `blocks` blocks, filled with the mark.
fn filled(mark: u64, blocks: u64) -> IoBuf {
    let mut data = IoBuf::zeroed((blocks * BLOCK) as usize).unwrap();
    data.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&mark.to_le_bytes()));
    data
}

/// Returns the mark that fills a block. Panics if the block is torn.
fn mark(block: &[u8]) -> u64 {
    let first = &block[..8];
    assert!(block.chunks_exact(8).all(|word| word == first), "a block is torn");
    u64::from_le_bytes(first.try_into().unwrap())
}

/// Expected content of a completed read.
#[derive(Debug)]
enum Expected {
    Nothing,
    /// Each block has one mark, of any submitter.
    Whole,
    Exactly(u64),
}

struct CompletedRequest {
    request: Request,
    expected: Expected,
    outcome: Result<()>,
    data: IoBuf,
}

impl CompletedRequest {
    fn check(&self) {
        assert_eq!(self.outcome, Ok(()), "{:?}", self.request);
        for block in self.data.chunks(BLOCK as usize) {
            match self.expected {
                Expected::Nothing => {}
                Expected::Whole => assert!(mark(block) <= SUBMITTERS * ROUNDS, "{:?}", self.request),
                Expected::Exactly(wanted) => assert_eq!(mark(block), wanted, "{:?}", self.request),
            }
        }
    }
}

struct Submitter {
    file: Arc<File>,
    completions: Sender<CompletedRequest>,
    count: Arc<AtomicU64>,
}

impl Submitter {
    fn submit(&self, request: Request, data: IoBuf, expected: Expected) {
        self.count.fetch_add(1, SeqCst);
        let completions = self.completions.clone();
        let done = Completion::new(move |outcome, data| {
            completions.send(CompletedRequest { request, expected, outcome, data }).unwrap();
        });
        self.file.submit(request, data, done);
    }

    fn read(&self, block: u64, blocks: u64, expected: Expected) {
        let data = IoBuf::zeroed((blocks * BLOCK) as usize).unwrap();
        self.submit(Request::read(block * BLOCK, blocks * BLOCK), data, expected);
    }

    fn write(&self, block: u64, blocks: u64, mark: u64) {
        let request = Request::write(block * BLOCK, blocks * BLOCK);
        self.submit(request, filled(mark, blocks), Expected::Nothing);
    }

    /// Submits random requests. Returns without waiting for their completions.
    fn run(self, index: u64) {
        let mut rng = Rng::new(index + 1);
        for round in 0..ROUNDS {
            let blocks = 1 + rng.below(MAX_BLOCKS);
            let block = rng.below(COMMON_BLOCKS - blocks + 1);
            let mark = index * ROUNDS + round + 1;
            match rng.below(16) {
                0 => self.submit(Request::flush(), IoBuf::empty(), Expected::Nothing),
                1 => {
                    let zeroes = Request::new(Op::WriteZeroes, block * BLOCK, blocks * BLOCK);
                    self.submit(zeroes.with(Flags::MAY_FREE), IoBuf::empty(), Expected::Nothing);
                }
                2..6 => self.write(block, blocks, mark),
                6..10 => {
                    // The read is submitted right after the write of the same block, so it must
                    // return the written mark.
                    let own = COMMON_BLOCKS + index * OWN_BLOCKS + rng.below(OWN_BLOCKS);
                    self.write(own, 1, mark);
                    self.read(own, 1, Expected::Exactly(mark));
                }
                _ => self.read(block, blocks, Expected::Whole),
            }
        }
    }
}

#[test]
fn last_of_many_submitters_drops_the_device() {
    let dir = tempfile::tempdir().unwrap();
    for mode in MODES {
        let path = dir.path().join(format!("{mode:?}"));
        let file = open(&path, mode);
        let (completions, arrived) = mpsc::channel();
        let total = Arc::new(AtomicU64::new(0));
        let together = Arc::new(Barrier::new(SUBMITTERS as usize));
        let threads: Vec<_> = (0..SUBMITTERS)
            .map(|index| {
                let submitter = Submitter {
                    file: Arc::clone(&file),
                    completions: completions.clone(),
                    count: Arc::clone(&total),
                };
                let together = Arc::clone(&together);
                thread::spawn(move || {
                    together.wait();
                    submitter.run(index);
                })
            })
            .collect();
        drop((file, completions));
        // The channel closes when every completion was called or dropped, which ends this loop.
        let mut count = 0;
        for completion in arrived {
            completion.check();
            count += 1;
        }
        assert_eq!(count, total.load(SeqCst), "{mode:?}");
        for thread in threads {
            thread.join().unwrap();
        }
        // No request is in flight any more, so each block of the file has one mark.
        for block in fs::read(&path).unwrap().chunks(BLOCK as usize) {
            assert!(mark(block) <= SUBMITTERS * ROUNDS);
        }
    }
}

/// The kernel cancels pending `io_uring` requests of a thread that ends. The device must still
/// complete them.
#[test]
fn requests_of_an_ended_thread_complete() {
    const BATCH: u64 = 40;
    let dir = tempfile::tempdir().unwrap();
    for mode in MODES {
        let path = dir.path().join(format!("{mode:?}"));
        let file = open(&path, mode);
        let (completions, arrived) = mpsc::channel();
        let total = Arc::new(AtomicU64::new(0));
        for round in 1..=20 {
            let submitter = Submitter {
                file: Arc::clone(&file),
                completions: completions.clone(),
                count: Arc::clone(&total),
            };
            thread::spawn(move || {
                for block in 0..BATCH {
                    match block % 4 {
                        0 => submitter.submit(Request::flush(), IoBuf::empty(), Expected::Nothing),
                        1 => {
                            let hole = Request::new(Op::Discard, block * BLOCK, BLOCK);
                            submitter.submit(hole, IoBuf::empty(), Expected::Nothing);
                        }
                        2 => {
                            let request = Request::write(block * BLOCK, BLOCK).with(Flags::FUA);
                            submitter.submit(request, filled(round, 1), Expected::Nothing);
                        }
                        _ => {
                            submitter.write(block, 1, round);
                            submitter.read(block, 1, Expected::Exactly(round));
                        }
                    }
                }
            })
            .join()
            .unwrap();
        }
        drop((file, completions));
        let count = arrived.into_iter().inspect(CompletedRequest::check).count();
        assert_eq!(count as u64, total.load(SeqCst), "{mode:?}");
    }
}

/// The kernel binds a buffered read of uncached data to its submitting thread. The read must
/// complete even if that thread ends.
#[test]
fn cold_reads_of_an_ended_thread_complete() {
    const ROUNDS: u64 = 200;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cold");
    fs::write(&path, vec![0; SIZE as usize]).unwrap();
    let plain = fs::File::open(&path).unwrap();
    plain.sync_all().unwrap();
    let file = open(&path, (Direct::Off, Engine::IoUring));
    let (completions, arrived) = mpsc::channel();
    let total = Arc::new(AtomicU64::new(0));
    for _ in 0..ROUNDS {
        rustix::fs::fadvise(&plain, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let submitter = Submitter {
            file: Arc::clone(&file),
            completions: completions.clone(),
            count: Arc::clone(&total),
        };
        let submits = thread::spawn(move || {
            for block in (0..SIZE / BLOCK).step_by(8) {
                submitter.read(block, 1, Expected::Exactly(0));
            }
        });
        submits.join().unwrap();
    }
    drop((file, completions));
    let count = arrived.into_iter().inspect(CompletedRequest::check).count();
    assert_eq!(count as u64, total.load(SeqCst));
}
