//! Experiment 3: idle pages go to a disk, one at a time or in batches.

use std::path::Path;
use std::sync::{Arc, mpsc};

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone::device::{self, Buffer, Completion, Device, Extent, Geometry, IoBuf, Request, Tried};
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
const DISKS: [u32; 4] = [1, 2, 2, 5];
/// What the source wrote back; ours is scaled to it by page.
const SOURCE_PAGES: f64 = ((4_u64 << 30) / PAGE_BYTES as u64) as f64;
/// The engine makes four requests of it, of 128 KiB each.
const BATCH_PAGES: u32 = 4 * 32;

/// Places of the columns.
const OLD: usize = 0;
const BATCHES: usize = 1;
const TOGETHER: usize = 2;
const OURS: usize = 3;
const COLUMNS: [&str; 4] =
    [published::COLUMNS[0], published::COLUMNS[1], "four of 128 KiB at a time", "packed (ours)"];

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
                "{} MiB of pages ({}) are marked idle and written back to a file with O_DIRECT, whose blocks were all written before; each \
                 time by a new RAM disk, the columns in turn. Seconds are those of 4 GiB, scaled by page. System time is of all threads of the \
                 process, those of the kernel that work for its io_uring included.",
                data.bytes() >> 20,
                data.description
            ),
            format!(
                "\"{}\": one request of a page in flight, waited for before the next page is looked at, as in the source; on one page in {step} of \
                 the data. \"{}\": one request of 128 KiB in flight, waited for in the same way, as the source's batches are. \"{}\": up to four such \
                 requests in flight, which the source has not; the next one is filled meanwhile. In these three a page takes a block. \"{}\": what \
                 we do by default: up to four requests of up to 1 MiB in flight, of objects that lie tightly.",
                COLUMNS[OLD], COLUMNS[BATCHES], COLUMNS[TOGETHER], COLUMNS[OURS]
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

/// What each way makes of the disk.
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

/// A device whose requests are waited for while they are given to it: never are two in flight.
struct OneAtATime(Arc<dyn Device>);

impl Device for OneAtATime {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> device::Result<Tried> {
        self.0.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let (answer, answered) = mpsc::sync_channel(1);
        let waited = Completion::new(move |outcome, buffer| {
            // The receiver waits below; it cannot be gone.
            let _ = answer.send((outcome, buffer));
        });
        self.0.submit(request, buffer, waited);
        // A completion that is dropped answers as well: there is always something to receive.
        if let Ok((outcome, buffer)) = answered.recv() {
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
    use freestone::ram::{Config, Idle, Ram, Writeback};
    use freestone_benches::setup::new_ram;

    use super::*;

    /// A RAM disk that answers a little later, and notes the length of each write and how many
    /// were in flight with it.
    struct Slow {
        ram: Arc<Ram>,
        seen: Arc<Mutex<Seen>>,
    }

    #[derive(Default)]
    struct Seen {
        flying: usize,
        most: usize,
        lengths: Vec<u64>,
        threads: Vec<JoinHandle<()>>,
    }

    impl Device for Slow {
        fn geometry(&self) -> Geometry {
            self.ram.geometry()
        }

        fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> device::Result<Tried> {
            self.ram.try_io(request, buffer)
        }

        fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
            let (ram, seen) = (self.ram.clone(), self.seen.clone());
            let mut now = self.seen.lock().unwrap();
            now.flying += 1;
            now.most = now.most.max(now.flying);
            now.lengths.push(request.len);
            now.threads.push(std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(2));
                let outcome = ram.write_at(request.offset, &buffer, Flags::empty());
                seen.lock().unwrap().flying -= 1;
                done.complete(outcome, buffer);
            }));
        }

        fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> device::Result<u64> {
            self.ram.extents(offset, len, row)
        }
    }

    /// The most that were in flight, and the lengths of all writes, with this batch size.
    fn in_flight(batch: u32, one_at_a_time: bool) -> (usize, Vec<u64>) {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let slow: Arc<dyn Device> =
            Arc::new(Slow { ram: Arc::new(new_ram(16 << 20).unwrap()), seen: seen.clone() });
        let device = if one_at_a_time { Arc::new(OneAtATime(slow)) } else { slow };
        let config = Config { disksize: 2 << 20, ..Config::default() };
        let ram = Ram::new(config.backed_by(device, false)).unwrap();
        ram.set_writeback_batch_size(batch);
        for page in 0..256_u64 {
            let mut content = [0; PAGE_BYTES];
            freestone_benches::data::fio_page(page, &mut content);
            ram.write_at(page * PAGE_BYTES as u64, &content, Flags::empty()).unwrap();
        }
        ram.idle(Idle::All);
        assert_eq!(ram.writeback(&Writeback::Idle).map_err(|(_, error)| error).unwrap().pages, 256);
        drop(ram);
        let threads = std::mem::take(&mut seen.lock().unwrap().threads);
        for thread in threads {
            thread.join().unwrap();
        }
        let seen = seen.lock().unwrap();
        (seen.most, seen.lengths.clone())
    }

    #[test]
    fn every_way_has_in_flight_what_is_said_of_it() {
        let page = PAGE_BYTES as u64;
        assert_eq!(in_flight(1, false), (1, vec![page; 256]));
        assert_eq!(in_flight(BATCH_PAGES, true), (1, vec![32 * page; 8]));
        assert_eq!(in_flight(BATCH_PAGES, false), (4, vec![32 * page; 8]));
    }
}
