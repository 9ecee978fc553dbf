//! `spill` part: writeback of a whole idle disk: speed, CPU time, and how busy the disk is.

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone::device::IoBuf;
use freestone_report::{Row, Summary, Target, Unit, mib};

use super::backing::{self, BackingFile, Layout, WritebackResult};
use super::fio::{self, Job, Speed};
use super::{Bench, Part};
use crate::engine::bare::{Census, LibraryCodec, Store};
use crate::engine::codec::bare_reads;
use crate::measure::thread_clock;

const ROUNDS: u32 = 5;
/// Bytes of data for the old way, one page at a time. The old way is slow, so it writes every n-th
/// page only and is compared per page.
const OLD_WAY_BYTES: u64 = 256 << 20;
/// Bytes of data with which the codec's time per page is measured.
const CODEC_BYTES: u64 = 256 << 20;
/// A thread that uses this share of a core counts as saturated.
const SATURATED: f64 = 0.95;

/// A way of writing that is measured once per round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    /// The default layout, over blocks that were written before.
    Packed,
    /// Uncompressed, a page at a time.
    Old,
    /// The kernel's layout with default batches.
    Plain,
    /// fio, over the same blocks.
    Fio,
    /// The default layout, into a file without blocks.
    PackedSparse,
    /// fio, the same number of bytes into a file without blocks.
    FioSparse,
}

const SIDES: [Side; 6] =
    [Side::Packed, Side::Fio, Side::Old, Side::Plain, Side::PackedSparse, Side::FioSparse];

#[derive(Default)]
struct Rounds {
    packed: Vec<WritebackResult>,
    old: Vec<WritebackResult>,
    plain: Vec<WritebackResult>,
    fio: Vec<Speed>,
    packed_sparse: Vec<WritebackResult>,
    fio_sparse: Vec<Speed>,
}

pub(super) fn run(bench: &Bench) -> Result<Part> {
    let file = BackingFile::new(&bench.dir, bench.data.bytes())?;
    let step = (bench.data.bytes() / OLD_WAY_BYTES).max(1);
    let mut rounds = Rounds::default();
    // Bytes that the packed layout wrote. The number differs between rounds only by the packing.
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

fn spill(bench: &Bench, file: &BackingFile, layout: Layout) -> Result<WritebackResult> {
    let ram = file.disk(bench.data.pages, layout, 0)?;
    backing::fill(&ram, &bench.data, 1)?;
    backing::spill(&ram)
}

impl WritebackResult {
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

fn values<T>(of: &[T], number: impl Fn(&T) -> f64) -> Vec<f64> {
    of.iter().map(number).collect()
}

fn median<T>(of: &[T], number: impl Fn(&T) -> f64) -> f64 {
    Summary::of(of.iter().map(number)).median
}

fn rows(bench: &Bench, step: u64, rounds: &Rounds, codec: f64) -> Vec<Row> {
    let Rounds { packed, old, plain, fio, packed_sparse, fio_sparse } = rounds;
    let speedup =
        Summary::ratio(&values(old, WritebackResult::micros), &values(packed, WritebackResult::micros));
    let plain_speedup =
        Summary::ratio(&values(old, WritebackResult::micros), &values(plain, WritebackResult::micros));
    let cpu_saved = Summary::ratio(
        &values(old, WritebackResult::cpu_micros),
        &values(packed, WritebackResult::cpu_micros),
    );
    let mut rows = vec![
        Row::ratio("spill: speed, packed / old way, a page", speedup)
            .target(Target::AtLeast(4.0))
            .part("us", median(packed, WritebackResult::micros))
            .part("old us", median(old, WritebackResult::micros)),
        Row::ratio("spill: CPU time, old way / packed, a page", cpu_saved)
            .part("us", median(packed, WritebackResult::cpu_micros))
            .part("old us", median(old, WritebackResult::cpu_micros)),
        Row::ratio("spill: speed, plain / old way, a page", plain_speedup)
            .part("us", median(plain, WritebackResult::micros)),
        disk_row("spill: packed, the whole disk", bench, packed),
        disk_row("spill: plain, the whole disk", bench, plain),
        disk_row(&format!("spill: old way, 1/{step} of the disk"), bench, old),
    ];
    let cpu = |spilled: &[WritebackResult], less: f64| {
        Summary::of(spilled.iter().map(|spilled| spilled.cpu_micros() - less))
    };
    rows.push(
        Row::new("spill: CPU a page, packed", Unit::Micros, cpu(packed, 0.0))
            .target(Target::AtMost(1.5))
            .part("user", median(packed, WritebackResult::user_micros))
            .part("system", median(packed, WritebackResult::system_micros)),
    );
    rows.push(
        Row::new("spill: CPU a page beyond the codec, plain", Unit::Micros, cpu(plain, codec))
            .part("user", median(plain, WritebackResult::user_micros))
            .part("system", median(plain, WritebackResult::system_micros))
            .part("codec", codec),
    );
    rows.push(disk_share("spill: bytes / s, packed / fio, written blocks", packed, fio));
    rows.push(disk_share("spill: bytes / s, packed / fio, sparse file", packed_sparse, fio_sparse));
    rows
}

fn disk_row(what: &str, bench: &Bench, spilled: &[WritebackResult]) -> Row {
    let first = &spilled[0];
    let seconds = values(spilled, |spilled| spilled.spent.wall.as_secs_f64());
    Row::new(what, Unit::Seconds, Summary::of(seconds))
        .part("pages", first.pages as f64)
        .part("of", bench.data.pages as f64)
        .part("MB/s", median(spilled, WritebackResult::mb_per_second))
        .part("CPU user s", median(spilled, |spilled| spilled.spent.cpu.user.as_secs_f64()))
        .part("system s", median(spilled, |spilled| spilled.spent.cpu.system.as_secs_f64()))
        .part("written MiB", mib(first.bytes))
        .part("by the kernel's count", mib(first.spent.disk_bytes))
        .part("written / page", first.bytes as f64 / (first.pages * PAGE_BYTES as u64) as f64)
}

/// Returns the row that compares the speed of writeback with fio's. The target is also met if a
/// core is saturated.
fn disk_share(what: &str, ours: &[WritebackResult], fio: &[Speed]) -> Row {
    let mb = |speed: &Speed| speed.bytes_per_second / 1e6;
    let share = Summary::ratio(&values(ours, WritebackResult::mb_per_second), &values(fio, mb));
    let busiest = median(ours, |spilled| spilled.spent.busiest);
    let mut row = Row::ratio(what, share)
        .target(Target::AtLeast(0.85))
        .part("MB/s", median(ours, WritebackResult::mb_per_second))
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
            "Spill: all pages are marked idle and written back, {batch} times in turn with the other sides, \
             each time from a new disk. Packed: the default. Plain: compressed_writeback=0, default batches. \
             Old way: plain with batches of 1, one page in {step} of the data ({} MiB), compared per page. \
             CPU: of all threads of the process.",
            (bench.data.bytes() / step) >> 20
        ),
        format!(
            "Disk: bytes per second that the RAM disk wrote, over those of fio's sequential 1 MiB writes to \
             the same file, O_DIRECT, 4 at a time, the same number of bytes from its start. Written blocks: \
             the whole file was written before. Sparse: it had no blocks. The target is 0.85, or a thread that \
             uses a core ({SATURATED} of the time); the busiest was \"{busiest}\"."
        ),
    ]
}

/// Returns the bare codec's microseconds per decompressed page, without same-filled pages.
fn codec_micros(bench: &Bench) -> Result<f64> {
    let count = bench.data.pages.min(CODEC_BYTES / PAGE_BYTES as u64);
    let step = bench.data.pages / count;
    let mut pages = IoBuf::zeroed(count as usize * PAGE_BYTES)?;
    for (number, page) in (0..).zip(pages.chunks_exact_mut(PAGE_BYTES)) {
        bench.data.read(number * step, page)?;
    }
    let (store, Census { huge, compressed, .. }) = Store::build(&pages)?;
    let codec = LibraryCodec::new()?;
    let started = thread_clock();
    bare_reads(&store, &codec, 0..count as u32);
    let took = thread_clock().saturating_sub(started);
    Ok(took.as_secs_f64() * 1e6 / (huge + compressed).max(1) as f64)
}
