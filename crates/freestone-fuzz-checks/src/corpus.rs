//! Runs a check over a corpus and over seeded mutations of its inputs.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;

use freestone_testkit::{Rng, scaled};

/// Maximum length of a mutated input, in bytes.
const INPUT_MAX_BYTES: usize = 16 << 10;

/// Numbers of inputs that a check accepted and refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InputCounts {
    /// Number of inputs for which the check returned true.
    pub accepted: usize,
    /// Number of inputs for which the check returned false.
    pub refused: usize,
}

/// Runs `check` on every file of the corpus `name`, and then on [`scaled`]`(rounds)` mutations of these
/// files. Returns the numbers of accepted and refused inputs.
///
/// # Panics
/// Panics if the corpus is missing or the check panics. The failing input is saved in the directory for
/// temporary files.
pub fn run(name: &str, rounds: usize, check: impl Fn(&[u8]) -> bool) -> InputCounts {
    let inputs = inputs(name);
    let mut counts = InputCounts::default();
    let mut run_check = |input: &[u8], what: &dyn Fn() -> String| {
        let accepted = catch_unwind(AssertUnwindSafe(|| check(input))).unwrap_or_else(|panic| {
            let failed_input = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
            fs::write(&failed_input, input).expect("the input is kept");
            println!("{name}: {} does not hold; see {}", what(), failed_input.display());
            resume_unwind(panic)
        });
        counts.accepted += usize::from(accepted);
        counts.refused += usize::from(!accepted);
    };
    for (file, input) in &inputs {
        run_check(input, &|| file.clone());
    }
    let mut rng = Rng::new(name.bytes().fold(1, |seed, byte| seed.wrapping_mul(31) + u64::from(byte)));
    for round in 0..scaled(rounds) {
        let mut input = pick_input(&inputs, &mut rng).to_vec();
        for _ in 0..=rng.below(4) {
            mutate(&mut input, pick_input(&inputs, &mut rng), &mut rng);
        }
        input.truncate(INPUT_MAX_BYTES);
        run_check(&input, &|| format!("mutation {round}"));
    }
    counts
}

/// Returns the name and the content of each file of a corpus, sorted by name.
fn inputs(name: &str) -> Vec<(String, Vec<u8>)> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let entries = fs::read_dir(&corpus).expect("the corpus is in the repository");
    let mut inputs: Vec<_> = entries
        .map(|entry| {
            let entry = entry.expect("the corpus can be read");
            let input = fs::read(entry.path()).expect("the corpus can be read");
            (entry.file_name().to_string_lossy().into_owned(), input)
        })
        .collect();
    inputs.sort();
    assert!(inputs.len() >= 4, "{name} has {} inputs", inputs.len());
    inputs
}

fn pick_input<'a>(inputs: &'a [(String, Vec<u8>)], rng: &mut Rng) -> &'a [u8] {
    &inputs[rng.below(inputs.len() as u64) as usize].1
}

fn random_offset(len: usize, rng: &mut Rng) -> usize {
    // Lengths and counts are mostly at the beginning of an input, so mutations often change that part.
    let bound = if rng.chance(40) { len.min(80) } else { len };
    rng.below(bound as u64) as usize
}

fn mutate(input: &mut Vec<u8>, other: &[u8], rng: &mut Rng) {
    const NUMBERS: [u64; 12] =
        [0, 1, 2, 511, 512, 4096, 0x7fff, 0xffff, 1 << 25, 0x7fff_ffff, u32::MAX as u64, u64::MAX];
    if input.is_empty() {
        input.extend_from_slice(other);
        return;
    }
    let (at, to) = (random_offset(input.len(), rng), random_offset(input.len(), rng));
    let span = (1 << rng.below(9)).min(input.len() - at.max(to));
    match rng.below(9) {
        0 | 1 => input[at] ^= 1 << rng.below(8),
        2 => input[at] = rng.word() as u8,
        3 => {
            let number = NUMBERS[rng.below(12) as usize].wrapping_add(rng.below(3)).wrapping_sub(1);
            let width = 1 << rng.below(4);
            let bytes = if rng.chance(50) { number.to_le_bytes() } else { number.swap_bytes().to_le_bytes() };
            let bytes = if rng.chance(50) { &bytes[..width] } else { &bytes[8 - width..] };
            let end = input.len().min(at + width);
            input[at..end].copy_from_slice(&bytes[..end - at]);
        }
        4 => input.copy_within(at..at + span, to),
        5 => {
            let from = random_offset(other.len(), rng);
            let part = &other[from..other.len().min(from + span)];
            drop(input.splice(at..at, part.iter().copied()));
        }
        6 => drop(input.drain(at..at + span)),
        7 => input[at..at + span].fill(0),
        _ => input.truncate(at + 1),
    }
}
