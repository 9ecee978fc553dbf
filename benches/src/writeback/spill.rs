//! A whole idle disk goes out: how fast, for how much CPU time, and how busy that keeps the disk.

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone::device::IoBuf;
use freestone_report::{Row, Summary, Target, Unit, mib};

use super::backing::{self, BackingFile, Layout, Spilled};
use super::fio::{self, Job, Speed};
use super::{Bench, Part};
use crate::bare::{Census, Ours, Store};
use crate::codec::bare_reads;
use crate::measure::thread_clock;

const ROUNDS: u32 = 5;
/// The old way is slow: it gets every n-th page, about so many bytes of them, and is compared by
/// page.
const OLD_WAY_BYTES: u64 = 256 << 20;
/// So much of the data tells what the codec takes for a page.
const CODEC_BYTES: u64 = 256 << 20;
/// From this share of a core on it counts as saturated.
const SATURATED: f64 = 0.95;

/// Who writes, in one round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    /// Ours by default, over blocks that were written before.
    Packed,
    /// One page at a time, uncompressed.
    Old,
    /// The kernel's layout with our batches.
    Plain,
    /// fio, over the same blocks.
    Fio,
    /// Ours by default, into a file without blocks.
    PackedSparse,
    /// fio, as much into a file without blocks.
    FioSparse,
}

const SIDES: [Side; 6] =
    [Side::Packed, Side::Fio, Side::Old, Side::Plain, Side::PackedSparse, Side::FioSparse];

/// What was measured, by round.
#[derive(Default)]
struct Rounds {
    packed: Vec<Spilled>,
    old: Vec<Spilled>,
    plain: Vec<Spilled>,
    fio: Vec<Speed>,
    packed_sparse: Vec<Spilled>,
    fio_sparse: Vec<Speed>,
}

pub(super) fn run(bench: &Bench) -> Result<Part> {
    let file = BackingFile::new(&bench.dir, bench.data.bytes())?;
    let step = (bench.data.bytes() / OLD_WAY_BYTES).max(1);
    let mut rounds = Rounds::default();
    // Bytes that ours writes, the same in every round but for the packing.
    let mut bytes = 0;
    for round in 0..bench.options.rounds(ROUNDS, 2) {
        let mut order = SIDES;
        if round % 2 == 1 {
            order.reverse();
        }
        for side in order {
            if matches!(side, Side::PackedSparse | Side::FioSparse) {
                file.sparse()?;
            } else if !file.is_written()? {
                file.fill()?;
            }
            match side {
                Side::Packed => {
                    rounds.packed.push(spill(bench, &file, Layout::Packed)?);
                    bytes = rounds.packed[0].bytes;
                }
                Side::PackedSparse => rounds.packed_sparse.push(spill(bench, &file, Layout::Packed)?),
                Side::Plain => rounds.plain.push(spill(bench, &file, Layout::Plain)?),
                Side::Old => {
                    let ram = file.disk(bench.data.pages / step, Layout::Plain, 0)?;
                    ram.set_writeback_batch_size(1);
                    backing::fill(&ram, &bench.data, step)?;
                    rounds.old.push(backing::spill(&ram)?);
                }
                Side::Fio => rounds.fio.push(fio::run(&Job::sequential_writes(file.path(), bytes))?),
                Side::FioSparse => {
                    rounds.fio_sparse.push(fio::run(&Job::sequential_writes(file.path(), bytes))?);
                }
            }
        }
    }
    let codec = codec_micros(bench)?;
    Ok(Part { notes: notes(bench, step, &rounds), rows: rows(bench, step, &rounds, codec) })
}

fn spill(bench: &Bench, file: &BackingFile, layout: Layout) -> Result<Spilled> {
    let ram = file.disk(bench.data.pages, layout, 0)?;
    backing::fill(&ram, &bench.data, 1)?;
    backing::spill(&ram)
}

impl Spilled {
    fn micros(&self) -> f64 {
        self.spent.wall.as_secs_f64() * 1e6 / self.pages as f64
    }

    fn user_micros(&self) -> f64 {
        self.spent.cpu.user.as_secs_f64() * 1e6 / self.pages as f64
    }

    fn system_micros(&self) -> f64 {
        self.spent.cpu.system.as_secs_f64() * 1e6 / self.pages as f64
    }

    fn cpu_micros(&self) -> f64 {
        self.spent.cpu.total().as_secs_f64() * 1e6 / self.pages as f64
    }

    fn mb_per_second(&self) -> f64 {
        self.bytes as f64 / 1e6 / self.spent.wall.as_secs_f64()
    }
}

fn over<T>(of: &[T], number: impl Fn(&T) -> f64) -> Vec<f64> {
    of.iter().map(number).collect()
}

fn median<T>(of: &[T], number: impl Fn(&T) -> f64) -> f64 {
    Summary::of(of.iter().map(number)).median
}

fn rows(bench: &Bench, step: u64, rounds: &Rounds, codec: f64) -> Vec<Row> {
    let Rounds { packed, old, plain, fio, packed_sparse, fio_sparse } = rounds;
    let speedup = Summary::ratio(&over(old, Spilled::micros), &over(packed, Spilled::micros));
    let plain_speedup = Summary::ratio(&over(old, Spilled::micros), &over(plain, Spilled::micros));
    let cpu_saved = Summary::ratio(&over(old, Spilled::cpu_micros), &over(packed, Spilled::cpu_micros));
    let mut rows = vec![
        Row::ratio("spill: speed, packed / old way, a page", speedup)
            .target(Target::AtLeast(4.0))
            .part("us", median(packed, Spilled::micros))
            .part("old us", median(old, Spilled::micros)),
        Row::ratio("spill: CPU time, old way / packed, a page", cpu_saved)
            .part("us", median(packed, Spilled::cpu_micros))
            .part("old us", median(old, Spilled::cpu_micros)),
        Row::ratio("spill: speed, plain / old way, a page", plain_speedup)
            .part("us", median(plain, Spilled::micros)),
        whole("spill: packed, the whole disk", bench, packed),
        whole("spill: plain, the whole disk", bench, plain),
        whole(&format!("spill: old way, 1/{step} of the disk"), bench, old),
    ];
    let cpu = |spilled: &[Spilled], less: f64| {
        Summary::of(spilled.iter().map(|spilled| spilled.cpu_micros() - less))
    };
    rows.push(
        Row::new("spill: CPU a page, packed", Unit::Micros, cpu(packed, 0.0))
            .target(Target::AtMost(1.5))
            .part("user", median(packed, Spilled::user_micros))
            .part("system", median(packed, Spilled::system_micros)),
    );
    rows.push(
        Row::new("spill: CPU a page beyond the codec, plain", Unit::Micros, cpu(plain, codec))
            .part("user", median(plain, Spilled::user_micros))
            .part("system", median(plain, Spilled::system_micros))
            .part("codec", codec),
    );
    rows.push(disk_share("spill: bytes / s, packed / fio, written blocks", packed, fio));
    rows.push(disk_share("spill: bytes / s, packed / fio, sparse file", packed_sparse, fio_sparse));
    rows
}

fn whole(what: &str, bench: &Bench, spilled: &[Spilled]) -> Row {
    let first = &spilled[0];
    let seconds = over(spilled, |spilled| spilled.spent.wall.as_secs_f64());
    Row::new(what, Unit::Seconds, Summary::of(seconds))
        .part("pages", first.pages as f64)
        .part("of", bench.data.pages as f64)
        .part("MB/s", median(spilled, Spilled::mb_per_second))
        .part("CPU user s", median(spilled, |spilled| spilled.spent.cpu.user.as_secs_f64()))
        .part("system s", median(spilled, |spilled| spilled.spent.cpu.system.as_secs_f64()))
        .part("written MiB", mib(first.bytes))
        .part("by the kernel's count", mib(first.spent.disk_bytes))
        .part("written / page", first.bytes as f64 / (first.pages * PAGE_BYTES as u64) as f64)
}

/// Reached where the disk is busy enough, or a core is saturated.
fn disk_share(what: &str, ours: &[Spilled], fio: &[Speed]) -> Row {
    let mb = |speed: &Speed| speed.bytes_per_second / 1e6;
    let share = Summary::ratio(&over(ours, Spilled::mb_per_second), &over(fio, mb));
    let busiest = median(ours, |spilled| spilled.spent.busiest);
    let mut row = Row::ratio(what, share)
        .target(Target::AtLeast(0.85))
        .part("MB/s", median(ours, Spilled::mb_per_second))
        .part("fio MB/s", median(fio, mb))
        .part("busiest thread", busiest);
    row.met = row.met.map(|met| met || busiest >= SATURATED);
    row
}

fn notes(bench: &Bench, step: u64, rounds: &Rounds) -> Vec<String> {
    let busiest = rounds.packed.iter().max_by(|a, b| a.spent.busiest.total_cmp(&b.spent.busiest));
    let busiest = busiest.map_or("", |spilled| &spilled.spent.busiest_name);
    let batch = rounds.packed.len();
    vec![
        format!(
            "Spill: all pages are marked idle and written back, {batch} times in turn with the others, each time by a new disk. Packed: \
             our default. Plain: compressed_writeback=0, default batches. Old way: the same with batches of 1, one page in {step} of \
             the data ({} MiB), compared by page. CPU: of all threads of the process.",
            (bench.data.bytes() / step) >> 20
        ),
        format!(
            "Disk: bytes that ours wrote a second over those of fio's sequential 1 MiB writes to the same file, O_DIRECT, 4 at a time; the same \
             number of bytes from its start. Written blocks: the whole file was written before. Sparse: it had no blocks. The target is 0.85 \
             or a thread that takes a core ({SATURATED} of the time); the busiest was \"{busiest}\"."
        ),
    ]
}

/// What the bare codec takes to decompress a page that is spilled.
fn codec_micros(bench: &Bench) -> Result<f64> {
    let count = bench.data.pages.min(CODEC_BYTES / PAGE_BYTES as u64);
    let step = bench.data.pages / count;
    let mut pages = IoBuf::zeroed(count as usize * PAGE_BYTES)?;
    for (number, page) in (0..).zip(pages.chunks_exact_mut(PAGE_BYTES)) {
        bench.data.read(number * step, page)?;
    }
    let (store, Census { huge, compressed, .. }) = Store::build(&pages)?;
    let codec = Ours::new()?;
    let begun = thread_clock();
    bare_reads(&store, &codec, 0..count as u32);
    let took = thread_clock().saturating_sub(begun);
    Ok(took.as_secs_f64() * 1e6 / (huge + compressed).max(1) as f64)
}
