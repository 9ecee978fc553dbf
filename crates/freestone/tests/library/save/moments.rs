//! A save shows the device at a single moment, while writers continue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use freestone::device::{Blocking, Device, Flags};
use freestone::file::File;
use freestone::ram::{Config, Ram};
use freestone_testkit::{Rng, effort};

use crate::save::support::*;

const PAGES: u64 = 2000;

/// Returns the page that write `n` changes. Each write of a round changes another page, in a
/// different order in each round.
fn slot(n: u64) -> u64 {
    let (round, at) = (n / PAGES, n % PAGES);
    (at * 7 + round * 13) % PAGES
}

fn numbered(n: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE as usize];
    match n % 3 {
        0 => Rng::new(n).fill(&mut page),
        1 => text(&mut Rng::new(n), &mut page),
        _ => {}
    }
    page[..8].copy_from_slice(&n.to_le_bytes());
    page
}

fn number(page: &[u8]) -> u64 {
    u64::from_le_bytes(page[..8].try_into().unwrap())
}

/// Returns the number of the newest write. Panics if a page is older or newer than the moment after
/// that write.
#[track_caller]
fn check_moment(device: &dyn Device) -> u64 {
    let image = image(device);
    let pages: Vec<&[u8]> = image.chunks(PAGE as usize).take(PAGES as usize).collect();
    let newest = pages.iter().map(|page| number(page)).max().unwrap();
    let mut wanted = vec![0; PAGES as usize];
    for n in newest.saturating_sub(2 * PAGES)..=newest {
        wanted[slot(n) as usize] = n;
    }
    for (page, wanted) in pages.iter().zip(wanted) {
        assert_eq!(number(page), wanted, "at {newest}");
        assert!(wanted == 0 || **page == numbered(wanted), "page {wanted}, at {newest}");
    }
    newest
}

#[test]
fn saves_under_writes_are_of_one_moment() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("both");
    // Two families: the first has all pages in memory, the second one evicts pages all the time.
    let first = disk(Config::default(), PAGES * PAGE);
    let backing = File::open_for_writeback(dir.path().join("spill"), Some(64 * MIB)).unwrap();
    let tight = Config { mem_limit: 3 * MIB, ..Config::default() }.backed_by(Arc::new(backing), true);
    let second = disk(tight, PAGES * PAGE);
    let stop = AtomicBool::new(false);
    let write = |ram: &Ram, n| ram.write_at(slot(n) * PAGE, &numbered(n), Flags::empty()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0.. {
                if stop.load(SeqCst) {
                    break;
                }
                // At no moment is the second disk ahead of the first one, or more than one write
                // behind.
                write(&first, n);
                write(&second, n);
            }
        });
        scope.spawn(|| {
            // These reads bring evicted pages back into memory during a save.
            let mut page = vec![0; PAGE as usize];
            let mut rng = Rng::new(1);
            while !stop.load(SeqCst) {
                second.read_at(rng.below(PAGES) * PAGE, &mut page).unwrap();
            }
        });
        let (mut last, mut saves, mut has_evicted) = (0, 0, false);
        let began = std::time::Instant::now();
        // On a loaded machine, more saves give the writer time to make progress.
        while saves < effort(4, 12) || last <= 100 || !has_evicted {
            assert!(began.elapsed() < std::time::Duration::from_secs(60), "the writer got on");
            saves += 1;
            save(&[("first", &first), ("second", &second)], &file);
            let restored = restore(&file, &family(), &[]).unwrap();
            let (of_first, of_second) = (check_moment(&restored[0].1), check_moment(&restored[1].1));
            assert!(of_first == of_second || of_first == of_second + 1, "{of_first} {of_second}");
            assert!(of_first >= last);
            last = of_first;
            has_evicted |= second.backing().unwrap().spilled_pages > 0;
        }
        stop.store(true, SeqCst);
    });
    eventually("the snapshots are gone", || {
        first.family().stat().layers == 1 && second.family().stat().layers == 1
    });
}
