//! Random operations on a RAM disk, compared with an array of bytes, on one thread and on several.

use proptest::prelude::*;

use super::{MIB, config, content, ram};
use crate::codec::Algorithm;
use crate::effort::effort;
use crate::ram::geometry::PAGE;
use crate::ram::*;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Blocking, Flags};

/// Returns the number of test cases: from the environment if set there, else `usual`.
fn cases(usual: u32) -> u32 {
    if std::env::var_os("PROPTEST_CASES").is_some() {
        ProptestConfig::default().cases
    } else {
        effort(usual.div_ceil(4), usual)
    }
}

#[derive(Debug, Clone)]
enum Step {
    Write { kind: u8, seed: u64 },
    Read,
    Discard,
    WriteZeroes,
    Reset,
    Compact,
    Grow,
}

fn steps() -> impl Strategy<Value = Vec<(Step, u64, u64)>> {
    let step = prop_oneof![
        6 => (any::<u8>(), any::<u64>()).prop_map(|(kind, seed)| Step::Write { kind, seed }),
        4 => Just(Step::Read),
        2 => Just(Step::Discard),
        2 => Just(Step::WriteZeroes),
        1 => Just(Step::Compact),
        1 => Just(Step::Grow),
        1 => Just(Step::Reset),
    ];
    // Offsets and lengths in bytes: mostly multiples of 512, and some unaligned ones, for which
    // requests must fail.
    let place = prop_oneof![8 => (0..6000_u64).prop_map(|b| b * 512), 1 => 0..3_000_000_u64];
    let len = prop_oneof![4 => Just(4096_u64), 4 => (1..200_u64).prop_map(|b| b * 512), 1 => 0..40_000_u64];
    prop::collection::vec((step, place, len), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(64), ..ProptestConfig::default() })]

    #[test]
    fn ram_matches_plain_bytes(steps in steps(), algorithm in prop::sample::select(Algorithm::ALL.to_vec())) {
        let ram = Ram::new(Config { comp_algorithm: algorithm, ..config(2 * MIB) }).unwrap();
        let mut model = vec![0_u8; 2 << 20];
        for (step, offset, len) in steps {
            let end = offset + len;
            let valid = len > 0 && (offset | len) % 512 == 0 && end <= model.len() as u64;
            let range = offset as usize..(end as usize).min(model.len()).max(offset as usize);
            match step {
                Step::Write { kind, seed } => {
                    let data = content(kind, seed, len as usize);
                    prop_assert_eq!(ram.write_at(offset, &data, Flags::empty()).is_ok(), valid);
                    if valid {
                        model[range].copy_from_slice(&data);
                    }
                }
                Step::Read => {
                    let mut back = vec![0xAA; len as usize];
                    prop_assert_eq!(ram.read_at(offset, &mut back).is_ok(), valid);
                    if valid {
                        prop_assert!(back == model[range]);
                    }
                }
                Step::Discard => {
                    prop_assert_eq!(ram.discard(offset, len).is_ok(), valid);
                    if valid {
                        let whole = offset.div_ceil(PAGE) * PAGE..end / PAGE * PAGE;
                        if !whole.is_empty() {
                            model[whole.start as usize..whole.end as usize].fill(0);
                        }
                    }
                }
                Step::WriteZeroes => {
                    prop_assert_eq!(ram.write_zeroes(offset, len, Flags::MAY_FREE).is_ok(), valid);
                    if valid {
                        model[range].fill(0);
                    }
                }
                Step::Reset => {
                    ram.reset().unwrap();
                    model.fill(0);
                }
                Step::Compact => {
                    ram.compact();
                }
                Step::Grow => {
                    let size = model.len() + 8192;
                    ram.grow(size as u64).unwrap();
                    model.resize(size, 0);
                }
            }
        }
        let mut back = vec![0xAA; model.len()];
        ram.read_at(0, &mut back).unwrap();
        prop_assert!(back == model);
        let stored = model.chunks(PAGE_BYTES).filter(|page| page.iter().any(|&b| b != 0)).count() as u64;
        prop_assert!(ram.mm_stat().orig_data_size >= stored * PAGE);
    }
}

/// A step of one thread: on the thread's own MiB, or if `shared` on a block of shared pages. Each
/// of the three threads uses every third block.
#[derive(Debug, Clone)]
struct SharedStep {
    step: Step,
    shared: bool,
    block: u64,
    blocks: u64,
}

fn shared_steps() -> impl Strategy<Value = Vec<SharedStep>> {
    let step = prop_oneof![
        4 => (any::<u8>(), any::<u64>()).prop_map(|(kind, seed)| Step::Write { kind, seed }),
        3 => Just(Step::Read),
        1 => Just(Step::Discard),
        2 => Just(Step::WriteZeroes),
    ];
    let step = (step, any::<bool>(), 0..2048_u64, 1..64_u64);
    prop::collection::vec(
        step.prop_map(|(step, shared, block, blocks)| SharedStep { step, shared, block, blocks }),
        1..150,
    )
}

const SHARERS: u64 = 3;

fn run_shared(ram: &Ram, thread: u64, steps: Vec<SharedStep>) {
    // Expected content: the MiB shared by the threads, and the thread's own MiB.
    let mut model = vec![0_u8; 2 << 20];
    for SharedStep { step, shared, block, blocks } in steps {
        let (offset, len) = if shared {
            ((block.min(2044) / SHARERS * SHARERS + thread) * 512, 512)
        } else {
            let blocks = blocks.min(2048 - block);
            (block * 512, blocks * 512)
        };
        let (disk, in_model) =
            if shared { (offset, MIB + offset) } else { ((1 + thread) * MIB + offset, offset) };
        let range = in_model as usize..(in_model + len) as usize;
        match step {
            Step::Write { kind, seed } => {
                let data = content(kind, seed, len as usize);
                ram.write_at(disk, &data, Flags::empty()).unwrap();
                model[range].copy_from_slice(&data);
            }
            Step::WriteZeroes => {
                ram.write_zeroes(disk, len, Flags::empty()).unwrap();
                model[range].fill(0);
            }
            Step::Discard if !shared => {
                ram.discard(disk, len).unwrap();
                let whole = offset.div_ceil(PAGE) * PAGE..(offset + len) / PAGE * PAGE;
                if !whole.is_empty() {
                    model[whole.start as usize..whole.end as usize].fill(0);
                }
            }
            _ => {
                let mut back = vec![0xAA; len as usize];
                ram.read_at(disk, &mut back).unwrap();
                assert!(back == model[range], "thread {thread} at {disk}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(48), ..ProptestConfig::default() })]

    /// Threads that share pages, but not 512-byte blocks, read what they wrote while the pool is
    /// compacted.
    #[test]
    fn threads_sharing_pages_keep_their_blocks(steps in prop::collection::vec(shared_steps(), SHARERS as usize)) {
        let ram = ram(8 * MIB);
        std::thread::scope(|scope| {
            let threads: Vec<_> = steps
                .into_iter()
                .zip(0..)
                .map(|(steps, thread)| {
                    let ram = &ram;
                    scope.spawn(move || run_shared(ram, thread, steps))
                })
                .collect();
            while threads.iter().any(|t| !t.is_finished()) {
                ram.compact();
            }
        });
    }
}
