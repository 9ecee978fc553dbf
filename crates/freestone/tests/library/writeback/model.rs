//! Random operations compared with byte vectors, while pages are evicted and read back. Eviction is
//! explicit or automatic, and one or several threads use the disk.

use std::sync::Arc;
use std::time::Duration;

use freestone::codec::{Algorithm, Params};
use freestone::device::{Blocking, Device};
use freestone::ram::{
    Config, IdleSelection, Ram, RecompressKind, RecompressOptions, Secondary, Writeback, WritebackError,
};
use freestone_testkit::conformance;
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Rng, effort};
use proptest::prelude::*;

use crate::devices::conformance_options;
use crate::writeback::disk::{BLOCK, ByteModel, Disk, LAYOUTS, MIB, NONE, PAGE, content};

const SIZE: u64 = 2 * MIB;
/// Memory limits in bytes: none, and three that are less than the data.
const LIMITS: [u64; 4] = [0, MIB / 2, MIB, 3 * MIB / 2];

/// Returns the configuration of proptest with `PROPTEST_CASES` cases from the environment, else
/// `usual`.
fn cases(usual: u32) -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() {
        default.cases
    } else {
        effort(usual.div_ceil(4), usual)
    };
    ProptestConfig { cases, ..default }
}

#[derive(Debug, Clone)]
enum Step {
    Write {
        kind: u8,
        seed: u64,
    },
    Read,
    Discard,
    WriteZeroes,
    Idle,
    Writeback(Writeback),
    WritePages,
    Recompress(Option<RecompressKind>),
    /// Compresses neighbouring pages together.
    Group,
    /// Stores pages with the same content once.
    Dedup,
    Compact,
    MemLimit(u64),
    BatchSize(u32),
    Reset,
}

fn io() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (any::<u8>(), prop_oneof![any::<u64>(), 0..4_u64]).prop_map(|(kind, seed)| Step::Write { kind, seed }),
        5 => Just(Step::Read),
        2 => Just(Step::Discard),
        1 => Just(Step::WriteZeroes),
    ]
}

fn upkeep() -> impl Strategy<Value = Step> {
    use Writeback::{Huge, HugeIdle, Incompressible};
    prop_oneof![
        3 => Just(Step::Idle),
        3 => prop::sample::select(vec![Writeback::Idle, Huge, HugeIdle, Incompressible]).prop_map(Step::Writeback),
        3 => Just(Step::WritePages),
        1 => prop::sample::select(vec![None, Some(RecompressKind::Idle), Some(RecompressKind::Huge)])
            .prop_map(Step::Recompress),
        2 => Just(Step::Group),
        2 => Just(Step::Dedup),
        1 => Just(Step::Compact),
    ]
}

fn settings() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => prop::sample::select(LIMITS.to_vec()).prop_map(Step::MemLimit),
        1 => prop::sample::select(vec![1, 2, 7, 32, 1024]).prop_map(Step::BatchSize),
        1 => Just(Step::Reset),
    ]
}

/// A step with its first block and number of blocks.
type Placed = (Step, u64, u64);

fn placed(step: impl Strategy<Value = Step>) -> impl Strategy<Value = Placed> {
    // Most steps cover whole pages, because otherwise few pages would be evicted.
    let place = prop_oneof![
        3 => (0..SIZE / PAGE, 1..64_u64).prop_map(|(page, pages)| (page * PAGE / BLOCK, pages * PAGE / BLOCK)),
        2 => (0..SIZE / BLOCK, 1..40_u64),
    ];
    (step, place).prop_map(|(step, (block, blocks))| (step, block, blocks.min(SIZE / BLOCK - block)))
}

fn config(disksize: u64, mem_limit: u64) -> Config {
    let second = Secondary { algorithm: Algorithm::Zstd, params: Params::default() };
    Config { disksize, mem_limit, recomp_algorithms: [Some(second), None, None], ..Config::default() }
}

/// Applies a step to the disk and to the expected bytes, which begin at offset `base` of the disk.
fn take(ram: &Ram, plain: &mut ByteModel, base: u64, (step, block, blocks): Placed) {
    let (offset, len) = (block * BLOCK, blocks * BLOCK);
    let at = base + offset;
    match step {
        Step::Write { kind, seed } => {
            let data = content(kind, seed, len as usize);
            ram.write_at(at, &data, NONE).unwrap();
            plain.write(offset, &data);
        }
        Step::Read => {
            let mut back = vec![0xAA; len as usize];
            ram.read_at(at, &mut back).unwrap();
            assert!(back == plain.0[offset as usize..][..len as usize], "byte {at}, {len} bytes");
        }
        Step::Discard => {
            ram.discard(at, len).unwrap();
            plain.discard(offset, len);
        }
        Step::WriteZeroes => {
            ram.write_zeroes(at, len, NONE).unwrap();
            plain.zero(offset, len);
        }
        Step::WritePages => {
            let (first, last) = (at / PAGE, (at + len - 1) / PAGE);
            ram.writeback(&Writeback::Pages(vec![first..=last])).unwrap();
        }
        Step::Reset => {
            ram.reset().unwrap();
            plain.0.fill(0);
        }
        upkeep => keep(ram, upkeep),
    }
}

/// Applies a step that does not change the content.
fn keep(ram: &Ram, step: Step) {
    match step {
        Step::Idle => {
            ram.mark_idle(IdleSelection::All);
        }
        Step::Writeback(what) => {
            ram.writeback(&what).unwrap();
        }
        Step::Recompress(kind) => {
            // Recompression may fail at the memory limit, because the smaller pages need memory
            // before the larger ones are freed.
            let _ = ram.recompress(&RecompressOptions { kind, ..RecompressOptions::default() });
        }
        Step::Group => {
            // Groups may find no space, too.
            let _ = ram.recompress(&RecompressOptions { group: true, ..RecompressOptions::default() });
        }
        Step::Dedup => {
            ram.recompress(&RecompressOptions { dedup: true, ..RecompressOptions::default() }).unwrap();
        }
        Step::MemLimit(bytes) => ram.set_mem_limit(bytes),
        Step::BatchSize(blocks) => ram.set_writeback_batch_size(blocks),
        _ => {
            ram.compact();
        }
    }
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn disk_with_eviction_matches_byte_vector(
        steps in prop::collection::vec(placed(prop_oneof![5 => io(), 2 => upkeep(), 1 => settings()]), 1..120),
        limit in prop::sample::select(LIMITS.to_vec()),
        packed in any::<bool>(),
        seed in any::<u64>(),
    ) {
        // The backing device has space for twice the data, so no request may fail.
        let backing = FaultyDisk::new(2 * SIZE as usize, if seed % 2 == 0 { 4096 } else { 512 }).shuffled(seed);
        let disk = Disk::new(config(SIZE, limit), backing, packed);
        let mut plain = ByteModel::new(SIZE);
        for step in steps {
            take(&disk.ram, &mut plain, 0, step);
        }
        plain.check(&disk.ram);
        disk.check_clean_end();
    }

    /// If the backing device is smaller than the data, writes may fail, but written data is not
    /// lost.
    #[test]
    fn full_backing_keeps_written_data(
        steps in prop::collection::vec(placed(prop_oneof![6 => io(), 2 => upkeep()]), 1..120),
        packed in any::<bool>(),
        room in 1..64_u64,
    ) {
        let backing = FaultyDisk::new((room * PAGE) as usize, 4096);
        let disk = Disk::new(config(SIZE, MIB / 2), backing, packed);
        let mut plain = ByteModel::new(SIZE);
        for (step, block, blocks) in steps {
            let (offset, len) = (block * BLOCK, blocks * BLOCK);
            match step {
                Step::Write { kind, seed } => {
                    let data = content(kind, seed, len as usize);
                    match disk.ram.write_at(offset, &data, NONE) {
                        Ok(()) => plain.write(offset, &data),
                        Err(error) => {
                            prop_assert_eq!(error, freestone::device::Error::NoSpace);
                            plain.after_failure(&disk.ram, offset, &data);
                        }
                    }
                }
                Step::WriteZeroes => {
                    if disk.ram.write_zeroes(offset, len, NONE).is_ok() {
                        plain.zero(offset, len);
                    } else {
                        plain.after_failure(&disk.ram, offset, &vec![0; len as usize]);
                    }
                }
                Step::WritePages => {
                    let (first, last) = (offset / PAGE, (offset + len - 1) / PAGE);
                    may_be_full(&disk.ram.writeback(&Writeback::Pages(vec![first..=last])));
                }
                Step::Writeback(what) => may_be_full(&disk.ram.writeback(&what)),
                step => take(&disk.ram, &mut plain, 0, (step, block, blocks)),
            }
        }
        plain.check(&disk.ram);
        disk.check_clean_end();
    }
}

#[track_caller]
fn may_be_full<W, D>(outcome: &Result<W, (D, WritebackError)>) {
    if let Err((_, error)) = outcome {
        assert_eq!(*error, WritebackError::NoSpace);
    }
}

/// Number of threads on one disk. Each one owns a megabyte of the disk, and every third block of a
/// shared megabyte.
const SHARERS: u64 = 3;

fn run_sharer(ram: &Ram, thread: u64, steps: Vec<(Placed, bool)>) {
    let mut own = ByteModel::new(MIB);
    let mut shared = ByteModel::new(MIB);
    let half = MIB / BLOCK;
    for ((step, block, blocks), share) in steps {
        let block = block % half;
        if !share {
            let blocks = blocks.min(half - block);
            take(ram, &mut own, (1 + thread) * MIB, (step, block, blocks));
        } else if !matches!(step, Step::Discard) {
            // Discards are omitted here, because they would also free blocks of other threads in
            // the same page.
            let block = block.min(half - SHARERS) / SHARERS * SHARERS + thread;
            take(ram, &mut shared, 0, (step, block, 1));
        }
    }
    let mut back = vec![0xAA; MIB as usize];
    ram.read_at((1 + thread) * MIB, &mut back).unwrap();
    assert!(back == own.0, "thread {thread}");
    for block in (thread..half - SHARERS).step_by(SHARERS as usize) {
        let back = &mut back[..BLOCK as usize];
        ram.read_at(block * BLOCK, back).unwrap();
        assert!(
            *back == shared.0[(block * BLOCK) as usize..][..BLOCK as usize],
            "thread {thread}, block {block}"
        );
    }
}

proptest! {
    #![proptest_config(cases(32))]

    /// Threads that share pages but not blocks read what they wrote. Meanwhile all kinds of page
    /// maintenance run, and the backing device completes late and in any order.
    #[test]
    fn threads_keep_their_own_blocks(
        steps in prop::collection::vec(prop::collection::vec((placed(io()), any::<bool>()), 1..150), SHARERS as usize),
        limit in prop::sample::select(vec![0, MIB, 2 * MIB]),
        packed in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let size = (1 + SHARERS) * MIB;
        let disk = Disk::new(config(size, limit), FaultyDisk::new(2 * size as usize, 4096).shuffled(seed), packed);
        let mut rng = Rng::new(seed);
        for _ in 0..20 {
            let late = Duration::from_micros(rng.below(3000));
            disk.backing.fault(None, FaultSchedule::At(rng.below(200)), FaultEffect::Delay(late));
        }
        let ram = &disk.ram;
        std::thread::scope(|scope| {
            let threads: Vec<_> = steps
                .into_iter()
                .zip(0..)
                .map(|(steps, thread)| scope.spawn(move || run_sharer(ram, thread, steps)))
                .collect();
            while threads.iter().any(|thread| !thread.is_finished()) {
                keep(ram, Step::Idle);
                match rng.below(7) {
                    0 => keep(ram, Step::Writeback(Writeback::Huge)),
                    1 => {
                        let first = rng.below(size / PAGE);
                        let last = (first + rng.below(200)).min(size / PAGE - 1);
                        ram.writeback(&Writeback::Pages(vec![first..=last])).unwrap();
                    }
                    2 => keep(ram, Step::Compact),
                    3 => keep(ram, Step::Recompress(None)),
                    4 => keep(ram, Step::Group),
                    5 => ram.set_writeback_batch_size(1 + rng.below(64) as u32),
                    _ => keep(ram, Step::Writeback(Writeback::Idle)),
                }
            }
        });
        disk.check_clean_end();
    }
}

/// The disk is reset while threads write. Writes after the reset are kept, and other pages are
/// zeroes or still old.
#[test]
fn reset_during_traffic_leaks_nothing() {
    for packed in LAYOUTS {
        let disk = Disk::new(config(8 * MIB, 2 * MIB), FaultyDisk::new(16 << 20, 4096).shuffled(9), packed);
        let ram = &disk.ram;
        std::thread::scope(|scope| {
            let traffic: Vec<_> = (0..3_u64)
                .map(|thread| {
                    scope.spawn(move || {
                        let mut rng = Rng::new(thread);
                        let mut back = vec![0; PAGE as usize];
                        for round in 0..1500_u64 {
                            let page = thread * 512 + rng.below(512);
                            ram.read_at(page * PAGE, &mut back).unwrap();
                            // Every page contains its own number, so a misplaced page is detected,
                            // and a part that changes in each round.
                            let number = u64::from_le_bytes(back[..8].try_into().unwrap());
                            assert!(number == page || back == [0; PAGE as usize], "page {page} has {number}");
                            let mut data = content(3 + (round % 3) as u8, round, PAGE as usize);
                            data[..8].copy_from_slice(&page.to_le_bytes());
                            ram.write_at(page * PAGE, &data, NONE).unwrap();
                        }
                    })
                })
                .collect();
            while traffic.iter().any(|thread| !thread.is_finished()) {
                ram.mark_idle(IdleSelection::All);
                ram.writeback(&Writeback::Idle).unwrap();
                ram.reset().unwrap();
            }
        });
        disk.check_clean_end();
    }
}

#[test]
fn disk_with_eviction_conforms() {
    for packed in LAYOUTS {
        let make = || -> Arc<dyn Device> {
            // The backing device has space for all the content that the conformance suite writes.
            let backing = Arc::new(FaultyDisk::new(64 << 20, 4096).shuffled(11));
            Arc::new(Ram::new(config(24 * MIB, MIB).backed_by(backing, packed)).unwrap())
        };
        conformance::check(&format!("spilling ram, packed {packed}"), &make, conformance_options());
    }
}
