//! Experiment 3: writeback of idle pages, one at a time or in batches.

use std::path::Path;
use std::sync::{Arc, mpsc};

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone::device::{self, Buffer, Completion, Device, Extent, Geometry, IoBuf, Request, TryResult};
use freestone_benches::data::Data;
use freestone_benches::options::{Options, Set};
use freestone_benches::writeback::backing::{self, BackingFile, Layout, WritebackResult};
use freestone_report::{Summary, Unit};

use super::slices;
use crate::results::published::writeback as published;
use crate::results::{Better, Experiment, Table, turns};

/// Default data size, in bytes.
const BYTES: u64 = 1 << 30;
/// Bytes of data for the old way, one page at a time. The old way is slow, so it writes every n-th
/// page only and is compared per page.
const OLD_WAY_BYTES: u64 = 64 << 20;
const ROUNDS: u32 = 5;
/// Number of disks that are written back in a slice, by column. CPU time is counted in ticks, and a
/// disk of the fast columns uses few ticks.
const DISKS: [u32; 4] = [1, 2, 2, 5];
/// Number of pages that the source wrote back. Results are scaled to this number.
const SOURCE_PAGES: f64 = ((4_u64 << 30) / PAGE_BYTES as u64) as f64;
/// Batch size in pages, which the engine splits into four requests of 128 KiB.
const BATCH_PAGES: u32 = 4 * 32;

/// Indexes of the columns.
const OLD: usize = 0;
const BATCHES: usize = 1;
const TOGETHER: usize = 2;
const OURS: usize = 3;
const COLUMNS: [&str; 4] =
    [published::COLUMNS[0], published::COLUMNS[1], "four of 128 KiB at a time", "packed (ours)"];

#[derive(Debug, Clone, Copy, Default)]
struct Slice {
    pages: u64,
    bytes: u64,
    /// Wall-clock, system and user time in seconds.
    wall: f64,
    system: f64,
    user: f64,
}

/// Runs the experiment with a backing file in `dir`, or in the directory of the data sets.
pub fn run(dir: Option<&Path>, options: &Options) -> Result<Experiment> {
    let data = Data::open(Set::Fio, options.bytes(BYTES), options)?;
    let file = BackingFile::new(dir.unwrap_or(&options.data_dir), data.bytes())?;
    let step = (data.bytes() / OLD_WAY_BYTES).max(1);
    let mut rounds: [Vec<Slice>; 4] = Default::default();
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
                "{} MiB of pages ({}) are marked idle and written back to a file with O_DIRECT whose blocks \
                 were all written before; each time from a new RAM disk, the columns in turn. Seconds are for \
                 4 GiB, scaled by page. System time is that of all threads of the process, including kernel \
                 threads that work for its io_uring.",
                data.bytes() >> 20,
                data.description
            ),
            format!(
                "\"{}\": one request of a page in flight, completed before the next page is processed, as in \
                 the source; for one page in {step} of the data. \"{}\": one request of 128 KiB in flight, \
                 completed in the same way, like the source's batches. \"{}\": up to four such requests in \
                 flight, which the source does not have; the next one is filled meanwhile. In these three a \
                 page takes a block. \"{}\": our default: up to four requests of up to 1 MiB in flight, with \
                 compressed objects stored without gaps.",
                COLUMNS[OLD], COLUMNS[BATCHES], COLUMNS[TOGETHER], COLUMNS[OURS]
            ),
            "One thread writes back, in the source and here, so there is no model for more cores.".into(),
        ],
        tables: vec![table],
        words: words(&rounds),
        model: Vec::new(),
    })
}

impl Slice {
    fn add(&mut self, spilled: &WritebackResult) {
        self.pages += spilled.pages;
        self.bytes += spilled.bytes;
        self.wall += spilled.spent.wall.as_secs_f64();
        self.system += spilled.spent.cpu.system.as_secs_f64();
        self.user += spilled.spent.cpu.user.as_secs_f64();
    }
}

fn spill(file: &BackingFile, data: &Data, column: usize, step: u64) -> Result<WritebackResult> {
    let (step, layout) = match column {
        OLD => (step, Layout::Plain),
        BATCHES | TOGETHER => (1, Layout::Plain),
        _ => (1, Layout::Packed),
    };
    let ram = file.disk_over(data.pages / step, layout, 0, |file| match column {
        BATCHES => Arc::new(OneAtATime(file)),
        _ => file,
    })?;
    match column {
        OLD => ram.set_writeback_batch_size(1),
        BATCHES | TOGETHER => ram.set_writeback_batch_size(BATCH_PAGES),
        _ => {}
    }
    backing::fill(&ram, data, step)?;
    backing::spill(&ram)
}

/// Describes the speed of the disk with each way.
fn words(rounds: &[Vec<Slice>; 4]) -> Vec<String> {
    let median =
        |column: usize, number: fn(&Slice) -> f64| Summary::of(rounds[column].iter().map(number)).median;
    let micros = |column| median(column, |s| s.wall * 1e6 / s.pages as f64);
    let speed = |column| median(column, |s| s.bytes as f64 / 1e6 / s.wall);
    let size = |column| median(column, |s| s.bytes as f64 / (s.pages * PAGE_BYTES as u64) as f64);
    vec![format!(
        "A page alone takes {:.1} us here, which is this disk's answer to one write (there {:.1} us); of 128 KiB at a time the disk takes {:.0} MB/s (there \
         {:.0}), of four times 128 KiB {:.0} MB/s, and packed {:.0} MB/s of {:.2} bytes for each byte of a page. What batches gain is the answer time \
         against the disk's speed: it is the disk's own figure, and no number of CPUs changes it.",
        micros(OLD),
        published::SECONDS[0].by_column[0] * 1e6 / SOURCE_PAGES,
        speed(BATCHES),
        SOURCE_PAGES * PAGE_BYTES as f64 / 1e6 / published::SECONDS[0].by_column[1],
        speed(TOGETHER),
        speed(OURS),
        size(OURS)
    )]
}

/// Device wrapper that waits for each request in `submit`, so that never two are in flight.
struct OneAtATime(Arc<dyn Device>);

impl Device for OneAtATime {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> device::Result<TryResult> {
        self.0.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let (sender, receiver) = mpsc::sync_channel(1);
        let forward = Completion::new(move |outcome, buffer| {
            // Cannot fail: the receiver waits below.
            let _ = sender.send((outcome, buffer));
        });
        self.0.submit(request, buffer, forward);
        // A dropped completion sends an error, so this always receives something.
        if let Ok((outcome, buffer)) = receiver.recv() {
            done.complete(outcome, buffer);
        }
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> device::Result<u64> {
        self.0.extents(offset, len, row)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::thread::JoinHandle;
    use std::time::Duration;

    use freestone::device::{Blocking as _, Flags};
    use freestone::ram::{Config, IdleSelection, Ram, Writeback};
    use freestone_benches::setup::new_ram;

    use super::*;

    /// A RAM disk that delays completions, and records the length of each write and the number of
    /// writes in flight.
    struct SlowDisk {
        ram: Arc<Ram>,
        log: Arc<Mutex<WriteLog>>,
    }

    #[derive(Default)]
    struct WriteLog {
        in_flight: usize,
        max_in_flight: usize,
        lengths: Vec<u64>,
        threads: Vec<JoinHandle<()>>,
    }

    impl Device for SlowDisk {
        fn geometry(&self) -> Geometry {
            self.ram.geometry()
        }

        fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> device::Result<TryResult> {
            self.ram.try_io(request, buffer)
        }

        fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
            let (ram, log) = (self.ram.clone(), self.log.clone());
            let mut now = self.log.lock().unwrap();
            now.in_flight += 1;
            now.max_in_flight = now.max_in_flight.max(now.in_flight);
            now.lengths.push(request.len);
            now.threads.push(std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(2));
                let outcome = ram.write_at(request.offset, &buffer, Flags::empty());
                log.lock().unwrap().in_flight -= 1;
                done.complete(outcome, buffer);
            }));
        }

        fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> device::Result<u64> {
            self.ram.extents(offset, len, row)
        }
    }

    /// Returns the maximum number of writes in flight, and the lengths of all writes, for a batch
    /// size.
    fn in_flight(batch: u32, one_at_a_time: bool) -> (usize, Vec<u64>) {
        let log = Arc::new(Mutex::new(WriteLog::default()));
        let slow: Arc<dyn Device> =
            Arc::new(SlowDisk { ram: Arc::new(new_ram(16 << 20).unwrap()), log: log.clone() });
        let device = if one_at_a_time { Arc::new(OneAtATime(slow)) } else { slow };
        let config = Config { disksize: 2 << 20, ..Config::default() };
        let ram = Ram::new(config.backed_by(device, false)).unwrap();
        ram.set_writeback_batch_size(batch);
        for page in 0..256_u64 {
            let mut content = [0; PAGE_BYTES];
            freestone_benches::data::fio_page(page, &mut content);
            ram.write_at(page * PAGE_BYTES as u64, &content, Flags::empty()).unwrap();
        }
        ram.mark_idle(IdleSelection::All);
        assert_eq!(ram.writeback(&Writeback::Idle).map_err(|(_, error)| error).unwrap().pages, 256);
        drop(ram);
        let threads = std::mem::take(&mut log.lock().unwrap().threads);
        for thread in threads {
            thread.join().unwrap();
        }
        let log = log.lock().unwrap();
        (log.max_in_flight, log.lengths.clone())
    }

    #[test]
    fn each_way_has_expected_writes_in_flight() {
        let page = PAGE_BYTES as u64;
        assert_eq!(in_flight(1, false), (1, vec![page; 256]));
        assert_eq!(in_flight(BATCH_PAGES, true), (1, vec![32 * page; 8]));
        assert_eq!(in_flight(BATCH_PAGES, false), (4, vec![32 * page; 8]));
    }
}
