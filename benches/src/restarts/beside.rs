//! Writes by one client while its disk is saved, and while it is not, in one run: a server that saves
//! every second goes from one to the other by itself.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone_report::{Report, Row, Summary, Unit};

use super::Bench;
use super::kept::Kept;
use crate::data::{Order, Random};
use crate::measure::median;
use crate::nbd_client::Client;

const SAVES: u32 = 21;
const SAVES_QUICK: u32 = 3;
/// It ends after so long, however few saves there were.
const TIME_MAX: Duration = Duration::from_secs(90);
const TIME_MAX_QUICK: Duration = Duration::from_secs(8);
/// How often it is looked whether a save runs.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// A stretch with fewer writes says nothing.
const WRITES_MIN: u64 = 20;
/// Pages that are written, again and again.
const CONTENTS: u64 = 1024;

/// Writes that were made without a save, or while one ran.
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

pub(super) fn run(bench: &Bench<'_>, kept: &Kept) -> Result<Report> {
    let (server, _control) = kept.loaded(&["--save-every", "1s"])?;
    let (saves, most) = if bench.options.quick { (SAVES_QUICK, TIME_MAX_QUICK) } else { (SAVES, TIME_MAX) };
    let (saving, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let content = kept.content()?;
    let stretches = thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                saving.store(is_saving(server.pid(), &content), Ordering::SeqCst);
                thread::sleep(LOOK_EVERY);
            }
        });
        let stretches = write(kept, &saving, bench.options.rounds(saves, saves), most);
        done.store(true, Ordering::SeqCst);
        stretches
    })?;
    Kept::end(server)?;
    Ok(report(kept, &stretches))
}

fn report(kept: &Kept, stretches: &[Stretch]) -> Report {
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
            Row::over(name, &with, &without).steady(),
        ]
    };
    Report::new("restarts: writes beside saves", kept.data.description.clone(), kept.bytes(), "lz4")
        .note(
            "Random 4 KiB writes by one NBD client, one at a time, of a disk whose server has --save-every 1s: what \
             was written since the save before is saved as an increment. A save runs while the server has an \
             unfinished file open in the disk's directory, which is looked for every 2 ms; merges of the files are \
             among them. Of each save the writes during it, over those between the save before and it.",
        )
        .rows(rows)
}

/// Writes until there were so many saves, or for so long.
fn write(kept: &Kept, saving: &AtomicBool, saves: u32, most: Duration) -> Result<Vec<Stretch>> {
    let mut pages = vec![0; CONTENTS as usize * PAGE_BYTES];
    let first = Random::new(1).next_u64() % (kept.pages - CONTENTS.min(kept.pages) + 1);
    let contents = CONTENTS.min(kept.pages) as usize;
    kept.data.read(first, &mut pages[..contents * PAGE_BYTES])?;
    let places = Order::new(2, 0, kept.pages as u32).choices(0, u64::MAX);
    let mut client = Client::connect(&kept.home.nbd())?;
    let mut stretches: Vec<Stretch> = Vec::new();
    let begun = Instant::now();
    let mut seen = 0;
    for (number, place) in places.enumerate() {
        let is_saving = saving.load(Ordering::SeqCst);
        if begun.elapsed() > most {
            break;
        }
        if stretches.last().is_none_or(|stretch| stretch.saving != is_saving) {
            seen += u32::from(is_saving);
            if seen > saves {
                break;
            }
            stretches.push(Stretch { saving: is_saving, writes: 0, took: Duration::ZERO });
        }
        let page = number % contents * PAGE_BYTES;
        let one = Instant::now();
        client.write(u64::from(place) * PAGE_BYTES as u64, &pages[page..page + PAGE_BYTES])?;
        if let Some(stretch) = stretches.last_mut() {
            stretch.writes += 1;
            stretch.took += one.elapsed();
        }
    }
    client.end()?;
    Ok(stretches)
}

/// Whether a server has an unfinished file open in a directory: one without a name, or, where the file
/// system has none such, with a name that says so.
fn is_saving(pid: u32, dir: &Path) -> bool {
    let Ok(open) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let links = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    links.into_iter().any(|link| {
        let name = link.file_name().unwrap_or_default().to_string_lossy();
        link.starts_with(dir) && (name.starts_with('#') || name.starts_with(".freestone-save-"))
    })
}
