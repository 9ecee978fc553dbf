//! Many threads submit at once: nothing is lost, torn or out of order, whoever leaves first.

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
/// Blocks that all submitters use, and behind them some that one has for itself.
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

/// Every eight bytes hold the mark.
fn filled(mark: u64, blocks: u64) -> IoBuf {
    let mut data = IoBuf::zeroed((blocks * BLOCK) as usize).unwrap();
    data.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&mark.to_le_bytes()));
    data
}

/// The mark that a whole block holds.
fn mark(block: &[u8]) -> u64 {
    let first = &block[..8];
    assert!(block.chunks_exact(8).all(|word| word == first), "a block is torn");
    u64::from_le_bytes(first.try_into().unwrap())
}

/// What a read must find.
#[derive(Debug)]
enum Expected {
    Nothing,
    /// Some mark of some submitter.
    Whole,
    Exactly(u64),
}

struct Answer {
    request: Request,
    expected: Expected,
    outcome: Result<()>,
    data: IoBuf,
}

impl Answer {
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
    answers: Sender<Answer>,
    count: Arc<AtomicU64>,
}

impl Submitter {
    fn submit(&self, request: Request, data: IoBuf, expected: Expected) {
        self.count.fetch_add(1, SeqCst);
        let answers = self.answers.clone();
        let done = Completion::new(move |outcome, data| {
            answers.send(Answer { request, expected, outcome, data }).unwrap();
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

    /// Leaves without waiting for a single answer.
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
                    // In the order of submission, though nobody waits.
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
fn many_submitters_and_the_last_one_drops_the_device() {
    let dir = tempfile::tempdir().unwrap();
    for mode in MODES {
        let path = dir.path().join(format!("{mode:?}"));
        let file = open(&path, mode);
        let (answers, arrived) = mpsc::channel();
        let total = Arc::new(AtomicU64::new(0));
        let together = Arc::new(Barrier::new(SUBMITTERS as usize));
        let threads: Vec<_> = (0..SUBMITTERS)
            .map(|index| {
                let submitter = Submitter {
                    file: Arc::clone(&file),
                    answers: answers.clone(),
                    count: Arc::clone(&total),
                };
                let together = Arc::clone(&together);
                thread::spawn(move || {
                    together.wait();
                    submitter.run(index);
                })
            })
            .collect();
        drop((file, answers));
        // Ends when every completion is gone: called or dropped.
        let mut count = 0;
        for answer in arrived {
            answer.check();
            count += 1;
        }
        assert_eq!(count, total.load(SeqCst), "{mode:?}");
        for thread in threads {
            thread.join().unwrap();
        }
        // Nothing is under way any more: the content is one mark a block, and stays.
        for block in fs::read(&path).unwrap().chunks(BLOCK as usize) {
            assert!(mark(block) <= SUBMITTERS * ROUNDS);
        }
    }
}

/// The kernel cancels what a thread leaves behind when it ends.
#[test]
fn a_thread_that_ends_takes_no_request_with_it() {
    const BATCH: u64 = 40;
    let dir = tempfile::tempdir().unwrap();
    for mode in MODES {
        let path = dir.path().join(format!("{mode:?}"));
        let file = open(&path, mode);
        let (answers, arrived) = mpsc::channel();
        let total = Arc::new(AtomicU64::new(0));
        for round in 1..=20 {
            let submitter =
                Submitter { file: Arc::clone(&file), answers: answers.clone(), count: Arc::clone(&total) };
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
        drop((file, answers));
        let count = arrived.into_iter().inspect(Answer::check).count();
        assert_eq!(count as u64, total.load(SeqCst), "{mode:?}");
    }
}

/// A buffered read of what is not in the page cache goes on in the name of the thread that
/// submitted it.
#[test]
fn a_thread_that_ends_leaves_its_cold_reads() {
    const ROUNDS: u64 = 200;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cold");
    fs::write(&path, vec![0; SIZE as usize]).unwrap();
    let plain = fs::File::open(&path).unwrap();
    plain.sync_all().unwrap();
    let file = open(&path, (Direct::Off, Engine::IoUring));
    let (answers, arrived) = mpsc::channel();
    let total = Arc::new(AtomicU64::new(0));
    for _ in 0..ROUNDS {
        rustix::fs::fadvise(&plain, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let submitter =
            Submitter { file: Arc::clone(&file), answers: answers.clone(), count: Arc::clone(&total) };
        let submits = thread::spawn(move || {
            for block in (0..SIZE / BLOCK).step_by(8) {
                submitter.read(block, 1, Expected::Exactly(0));
            }
        });
        submits.join().unwrap();
    }
    drop((file, answers));
    let count = arrived.into_iter().inspect(Answer::check).count();
    assert_eq!(count as u64, total.load(SeqCst));
}
