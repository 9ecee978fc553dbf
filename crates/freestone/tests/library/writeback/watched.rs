//! Passes with a progress callback report their progress, end if the callback cancels them, and
//! keep what they have done.

use std::thread;

use freestone::codec::{Algorithm, Params};
use freestone::device::Blocking as _;
use freestone::ram::{
    Config, IdleSelection, Ram, RecompressError, RecompressOptions, RecompressReport, Secondary, Writeback,
    WritebackError, WritebackReport,
};

use crate::writeback::disk::{Disk, LAYOUTS, MIB, NONE, PAGE, content, noise};

#[test]
fn cancelled_writeback_keeps_written_pages() {
    for packed in LAYOUTS {
        let disk = Disk::manual(16 * MIB, 4096, packed);
        let data = noise(1, 2048);
        disk.write(0, &data);
        disk.ram.mark_idle(IdleSelection::All);
        let mut progress = Vec::new();
        let ended = disk.ram.writeback_with_progress(&Writeback::Idle, &mut |done, all| {
            progress.push((done, all));
            done < 4 * MIB
        });
        let (written, error) = ended.unwrap_err();
        assert_eq!(error, WritebackError::Cancelled);
        // The pass finishes the batch that it has begun, so exactly the reported 1024 pages are
        // written.
        assert_eq!((written.pages, disk.spilled_pages()), (1024, 1024));
        // The first report has no total, because the pass selects its pages only after waiting for
        // other passes.
        assert_eq!(
            (progress[0], progress[1], *progress.last().unwrap()),
            ((0, 0), (0, 8 * MIB), (4 * MIB, 8 * MIB))
        );
        assert!(progress.is_sorted());
        let rest = disk.ram.writeback_with_progress(&Writeback::Huge, &mut |_, _| true).unwrap();
        assert_eq!((rest.pages, disk.spilled_pages()), (1024, 2048));
        assert!(disk.read(0, 2048).unwrap() == data);
        disk.check_clean_end();
    }
}

/// If a pass is running, the next pass waits for its end, and can be cancelled meanwhile.
#[test]
fn waiting_pass_can_be_cancelled() {
    let disk = Disk::manual(16 * MIB, 4096, true);
    disk.write(0, &noise(1, 256));
    let none = (WritebackReport::default(), WritebackError::Cancelled);
    let mut waited = 0;
    let first = disk.ram.writeback_with_progress(&Writeback::Huge, &mut |_, all| {
        if all > 0 && waited == 0 {
            thread::scope(|scope| {
                let second = || {
                    disk.ram.writeback_with_progress(&Writeback::Huge, &mut |done, all| {
                        assert_eq!((done, all), (0, 0), "it has its turn");
                        waited += 1;
                        waited < 5
                    })
                };
                assert_eq!(scope.spawn(second).join().unwrap(), Err(none));
            });
        }
        true
    });
    assert_eq!((waited, first.unwrap().pages), (5, 256));
    disk.check_clean_end();
}

#[test]
fn cancelled_recompression_keeps_smaller_pages() {
    let zstd = Secondary { algorithm: Algorithm::Zstd, params: Params::default() };
    let config =
        Config { disksize: 16 * MIB, recomp_algorithms: [Some(zstd), None, None], ..Config::default() };
    let ram = Ram::new(config).unwrap();
    let data = content(4, 1, 4 << 20);
    ram.write_at(0, &data, NONE).unwrap();
    let mut last = (0, 0);
    let ended = ram.recompress_with_progress(&RecompressOptions::default(), &mut |done, all| {
        last = (done, all);
        done < MIB
    });
    let (some, error) = ended.unwrap_err();
    assert_eq!(error, RecompressError::Cancelled);
    assert_eq!((some.tried, last), (256, (MIB, 4 * MIB)));
    let mut back = vec![0; data.len()];
    ram.read_at(0, &mut back).unwrap();
    assert!(back == data);
    let rest = ram.recompress_with_progress(&RecompressOptions::default(), &mut |_, _| true).unwrap();
    assert_eq!(rest.tried, 1024 - some.tried);
    let none = ram.recompress_with_progress(&RecompressOptions::default(), &mut |_, _| false);
    assert_eq!(none, Err((RecompressReport::default(), RecompressError::Cancelled)));
}

/// Compaction first compacts the memory pool, and then the blocks of the backing device.
#[test]
fn compaction_reports_progress_of_both_parts() {
    let disk = Disk::manual(16 * MIB, 4096, true);
    let data = content(4, 1, 8 << 20);
    disk.write(0, &data);
    disk.ram.writeback(&Writeback::Pages(vec![0..=1023])).unwrap();
    for page in (0..2048_u64).filter(|page| page % 4 > 0) {
        disk.ram.discard(page * PAGE, PAGE).unwrap();
    }
    let used = || disk.ram.backing().unwrap().used_bytes;
    let before = used();
    let mut progress = Vec::new();
    // The callback cancels the pass when only the part of the backing device remains.
    disk.ram.compact_with_progress(&mut |done, all| {
        progress.push((done, all));
        all - done > 16 * MIB
    });
    let (done, all) = *progress.last().unwrap();
    assert_eq!((all - done, used()), (16 * MIB, before));
    disk.ram.compact_with_progress(&mut |_, _| true);
    assert!(used() < before / 2, "{} of {before}", used());
    for page in (0..2048).step_by(4) {
        let at = page as usize * PAGE as usize;
        assert!(disk.read(page, 1).unwrap() == data[at..at + PAGE as usize], "page {page}");
    }
    disk.check_clean_end();
}
