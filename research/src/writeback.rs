//! Experiment 3: idle pages go to a disk, one at a time or in batches.

use std::path::Path;

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone_benches::data::Data;
use freestone_benches::options::{Options, Set};
use freestone_benches::writeback::backing::{self, BackingFile, Layout, Spilled};
use freestone_report::{Summary, Unit};

use crate::experiment::{Better, Experiment, Table, turns};
use crate::published::writeback as published;
use crate::slices;

/// Data where `--size` does not say.
const BYTES: u64 = 1 << 30;
/// The old way is slow: it gets every n-th page, about so many bytes of them, and is compared by
/// page.
const OLD_WAY_BYTES: u64 = 64 << 20;
const ROUNDS: u32 = 5;
/// So many disks are written back in a slice, by column: CPU time is counted in ticks, and who is
/// fast has few of them.
const DISKS: [u32; 3] = [1, 2, 5];
/// What the source wrote back; ours is scaled to it by page.
const SOURCE_PAGES: f64 = ((4_u64 << 30) / PAGE_BYTES as u64) as f64;
/// Four requests of 128 KiB are in flight then.
const SOURCE_BATCH_PAGES: u32 = 4 * 32;

/// Places of the columns.
const OLD: usize = 0;
const BATCHES: usize = 1;
const OURS: usize = 2;
const COLUMNS: [&str; 3] = [published::COLUMNS[0], published::COLUMNS[1], "packed (ours)"];

/// What a slice wrote back, and took for it.
#[derive(Debug, Clone, Copy, Default)]
struct Slice {
    pages: u64,
    bytes: u64,
    /// Seconds.
    wall: f64,
    system: f64,
    user: f64,
}

/// Writes and measures in `dir`, or where data sets are kept.
pub fn run(dir: Option<&Path>, options: &Options) -> Result<Experiment> {
    let data = Data::open(Set::Fio, options.bytes(BYTES), options)?;
    let file = BackingFile::new(dir.unwrap_or(&options.data_dir), data.bytes())?;
    let step = (data.bytes() / OLD_WAY_BYTES).max(1);
    let mut rounds: [Vec<Slice>; 3] = Default::default();
    for round in 0..slices(options, ROUNDS, 1).pairs {
        for column in turns(COLUMNS.len(), round) {
            let mut slice = Slice::default();
            for _ in 0..DISKS[column] {
                if !file.is_written()? {
                    file.fill()?;
                }
                slice.add(&spill(&file, &data, column, step)?);
            }
            rounds[column].push(slice);
        }
    }
    let scaled = |seconds: fn(&Slice) -> f64| -> Vec<Vec<f64>> {
        let one = |slice: &Slice| seconds(slice) / slice.pages as f64 * SOURCE_PAGES;
        rounds.iter().map(|column| column.iter().map(one).collect()).collect()
    };
    let mut table = Table::new("4 GiB written back", Unit::Seconds, Better::Less, &COLUMNS);
    table.new = BATCHES;
    let [elapsed, system] = published::SECONDS;
    table.add(elapsed.what, 1, &elapsed.published(), &scaled(|slice| slice.wall));
    table.add(system.what, 1, &system.published(), &scaled(|slice| slice.system));
    table.add("user time", 1, &[], &scaled(|slice| slice.user));
    Ok(Experiment {
        number: 3,
        title: "Batched writeback",
        source: published::SOURCE.into(),
        here: vec![
            format!(
                "{} MiB of pages ({}) are marked idle and written back to a file with O_DIRECT, whose blocks were all written before; each \
                 time by a new RAM disk, the columns in turn. Seconds are those of 4 GiB, scaled by page. System time is of all threads of the \
                 process, those of the kernel that work for its io_uring included.",
                data.bytes() >> 20,
                data.description
            ),
            format!(
                "\"{}\": batches of 1, a page a block, on one page in {step} of the data. \"{}\": requests of 128 KiB, up to four of them at \
                 once, a page a block. \"{}\": what we do by default, larger batches of objects that lie tightly.",
                COLUMNS[OLD], COLUMNS[BATCHES], COLUMNS[OURS]
            ),
            "One thread writes back, there as here: nothing is modelled beyond it.".into(),
        ],
        tables: vec![table],
        words: words(&rounds),
        model: Vec::new(),
    })
}

impl Slice {
    fn add(&mut self, spilled: &Spilled) {
        self.pages += spilled.pages;
        self.bytes += spilled.bytes;
        self.wall += spilled.spent.wall.as_secs_f64();
        self.system += spilled.spent.cpu.system.as_secs_f64();
        self.user += spilled.spent.cpu.user.as_secs_f64();
    }
}

fn spill(file: &BackingFile, data: &Data, column: usize, step: u64) -> Result<Spilled> {
    let (step, layout) = match column {
        OLD => (step, Layout::Plain),
        BATCHES => (1, Layout::Plain),
        _ => (1, Layout::Packed),
    };
    let ram = file.disk(data.pages / step, layout, 0)?;
    match column {
        OLD => ram.set_writeback_batch_size(1),
        BATCHES => ram.set_writeback_batch_size(SOURCE_BATCH_PAGES),
        _ => {}
    }
    backing::fill(&ram, data, step)?;
    backing::spill(&ram)
}

/// What each way makes of the disk.
fn words(rounds: &[Vec<Slice>; 3]) -> Vec<String> {
    let median =
        |column: usize, number: fn(&Slice) -> f64| Summary::of(rounds[column].iter().map(number)).median;
    let micros = |column| median(column, |s| s.wall * 1e6 / s.pages as f64);
    let speed = |column| median(column, |s| s.bytes as f64 / 1e6 / s.wall);
    let size = |column| median(column, |s| s.bytes as f64 / (s.pages * PAGE_BYTES as u64) as f64);
    vec![format!(
        "A page alone takes {:.1} us here, which is this disk's answer to one write (there {:.1} us); in batches of 128 KiB the disk takes {:.0} MB/s, and \
         packed {:.0} MB/s of {:.2} bytes for each byte of a page. What batches gain is the answer time against the disk's speed: it is the disk's \
         own figure, and no number of CPUs changes it.",
        micros(OLD),
        published::SECONDS[0].by_column[0] * 1e6 / SOURCE_PAGES,
        speed(BATCHES),
        speed(OURS),
        size(OURS)
    )]
}
