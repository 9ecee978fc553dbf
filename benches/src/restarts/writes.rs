//! `writes` part: write speed of a client during saves and between them, in one run. The server
//! saves every second.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone_report::{Report, Row, Summary, Unit};

use super::Bench;
use super::saved_disk::SavedDisk;
use crate::data::{Order, Random};
use crate::measure::median;
use crate::transport::nbd_client::Client;

const SAVES: u32 = 21;
const SAVES_QUICK: u32 = 3;
/// Time limit of the run, which ends even if fewer saves than planned ran.
const TIME_MAX: Duration = Duration::from_secs(90);
const TIME_MAX_QUICK: Duration = Duration::from_secs(8);
/// Interval of the checks whether a save is running.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);
/// Minimum number of writes in a stretch. Shorter stretches are ignored.
const WRITES_MIN: u64 = 20;
/// Number of different pages that are written.
const CONTENTS: u64 = 1024;

/// Consecutive writes, all during a save or all without one.
struct Stretch {
    saving: bool,
    writes: u64,
    took: Duration,
}

impl Stretch {
    fn per_second(&self) -> f64 {
        self.writes as f64 / self.took.as_secs_f64()
    }
}

pub(super) fn run(bench: &Bench<'_>, saved_disk: &SavedDisk) -> Result<Report> {
    let (server, _control) = saved_disk.start_loaded(&["--save-every", "1s"])?;
    let (saves, time_max) =
        if bench.options.quick { (SAVES_QUICK, TIME_MAX_QUICK) } else { (SAVES, TIME_MAX) };
    let (saving, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let content = saved_disk.content()?;
    let stretches = thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                saving.store(is_saving(server.pid(), &content), Ordering::SeqCst);
                thread::sleep(CHECK_INTERVAL);
            }
        });
        let stretches = write(saved_disk, &saving, bench.options.rounds(saves, saves), time_max);
        done.store(true, Ordering::SeqCst);
        stretches
    })?;
    SavedDisk::end(server)?;
    Ok(report(saved_disk, &stretches))
}

fn report(saved_disk: &SavedDisk, stretches: &[Stretch]) -> Report {
    let (mut with, mut without, mut millis) = (Vec::new(), Vec::new(), Vec::new());
    for pair in stretches.windows(2) {
        let [before, during] = pair else { continue };
        if during.saving && before.writes >= WRITES_MIN && during.writes >= WRITES_MIN {
            without.push(before.per_second());
            with.push(during.per_second());
            millis.push(during.took.as_secs_f64() * 1e3);
        }
    }
    let name = "writes while a save runs / before it";
    let rows = if with.is_empty() {
        vec![Row::absent(name, Unit::Ratio)]
    } else {
        let kiops = |what: &str, of: &[f64]| {
            Row::new(what, Unit::Kiops, Summary::of(of.iter().map(|speed| speed / 1e3)))
        };
        vec![
            kiops("writes while no save runs", &without),
            kiops("writes while a save runs", &with).part("ms a save", median(&millis)),
            Row::ratio_of(name, &with, &without).withhold_if_unsteady(),
        ]
    };
    Report::new("restarts: writes beside saves", saved_disk.data.description.clone(), saved_disk.bytes(), "lz4")
        .note(
            "Random 4 KiB writes by one NBD client, one at a time, to a disk whose server has --save-every 1s: \
             each save writes the changes since the previous one as an increment. A save is running while the \
             server has an unfinished file open in the disk's directory, which is checked every 2 ms; this \
             includes merges of files. For each save, the ratio is the speed during it over the speed since \
             the previous one.",
        )
        .rows(rows)
}

/// Writes random pages until `saves` saves have run, for at most `time_max`.
fn write(
    saved_disk: &SavedDisk,
    saving: &AtomicBool,
    saves: u32,
    time_max: Duration,
) -> Result<Vec<Stretch>> {
    let mut pages = vec![0; CONTENTS as usize * PAGE_BYTES];
    let first = Random::new(1).next_u64() % (saved_disk.pages - CONTENTS.min(saved_disk.pages) + 1);
    let contents = CONTENTS.min(saved_disk.pages) as usize;
    saved_disk.data.read(first, &mut pages[..contents * PAGE_BYTES])?;
    let slots = Order::new(2, 0, saved_disk.pages as u32).choices(0, u64::MAX);
    let mut client = Client::connect(&saved_disk.home.nbd_socket())?;
    let mut stretches: Vec<Stretch> = Vec::new();
    let started = Instant::now();
    let mut save_count = 0;
    for (number, slot) in slots.enumerate() {
        let is_saving = saving.load(Ordering::SeqCst);
        if started.elapsed() > time_max {
            break;
        }
        if stretches.last().is_none_or(|stretch| stretch.saving != is_saving) {
            save_count += u32::from(is_saving);
            if save_count > saves {
                break;
            }
            stretches.push(Stretch { saving: is_saving, writes: 0, took: Duration::ZERO });
        }
        let page = number % contents * PAGE_BYTES;
        let one = Instant::now();
        client.write(u64::from(slot) * PAGE_BYTES as u64, &pages[page..page + PAGE_BYTES])?;
        if let Some(stretch) = stretches.last_mut() {
            stretch.writes += 1;
            stretch.took += one.elapsed();
        }
    }
    client.end()?;
    Ok(stretches)
}

/// Returns true if a server has an unfinished file open in a directory: a file without a name, or, if
/// the file system does not support that, a file with a temporary name.
fn is_saving(pid: u32, dir: &Path) -> bool {
    let Ok(open) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let links = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    links.into_iter().any(|link| {
        let name = link.file_name().unwrap_or_default().to_string_lossy();
        link.starts_with(dir) && (name.starts_with('#') || name.starts_with(".freestone-save-"))
    })
}
