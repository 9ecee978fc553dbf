//! Statistics of writeback, and limits on the amount that is written.

use freestone::device::{Blocking, Error, Op};
use freestone::ram::{IdleSelection, RecompressOptions, Writeback, WritebackError, WritebackReport};
use freestone_testkit::{FaultEffect, FaultSchedule};

use crate::writeback::disk::{Disk, LAYOUTS, MIB, NONE, PAGE, content, noise};

/// The same steps as the kernel's test of its writeback limit, with the same results.
#[test]
fn writeback_limit_as_in_the_kernels_test() {
    let disk = Disk::manual(16 * MIB, 4096, false);
    disk.ram.set_writeback_limit_enable(true);
    disk.ram.set_writeback_limit(1002);
    let data = noise(1, 10 * MIB / PAGE);
    disk.write(0, &data);
    assert_eq!(disk.ram.mark_idle(IdleSelection::All), 2560);
    let (written, error) = disk.ram.writeback(&Writeback::Idle).unwrap_err();
    assert_eq!((written, error), (WritebackReport { pages: 1002, blocks: 1002 }, WritebackError::Limit));
    assert_eq!(disk.bd_stat(), (1002, 0, 1002));
    assert_eq!(disk.ram.writeback_limit(), 0);

    disk.ram.set_writeback_limit(500);
    assert_eq!(disk.ram.writeback(&Writeback::Idle).unwrap_err().1, WritebackError::Limit);
    assert_eq!(disk.bd_stat(), (1502, 0, 1502));
    disk.ram.set_writeback_limit(2000);
    assert_eq!(disk.ram.writeback(&Writeback::Idle), Ok(WritebackReport { pages: 1058, blocks: 1058 }));
    assert_eq!((disk.bd_stat(), disk.ram.writeback_limit()), ((2560, 0, 2560), 2000 - 1058));

    assert!(disk.read(0, 2560).unwrap() == data);
    assert_eq!(disk.bd_stat(), (2560, 2560, 2560));
    assert_eq!(disk.backing.counts().bytes_written, 10 * MIB);
    disk.check_clean_end();
}

/// In the packed layout, the limit counts written blocks, however many pages each block contains.
#[test]
fn limit_counts_written_blocks_in_packed_layout() {
    let disk = Disk::manual(16 * MIB, 4096, true);
    disk.ram.set_writeback_limit_enable(true);
    disk.ram.set_writeback_limit(200);
    let data = content(4, 1, 8 << 20);
    disk.write(0, &data);
    disk.ram.mark_idle(IdleSelection::All);
    let (written, error) = disk.ram.writeback(&Writeback::Idle).unwrap_err();
    assert_eq!(error, WritebackError::Limit);
    // Each page compresses to about half, because half of it is noise. So most blocks hold nearly
    // two pages.
    assert!(written.blocks <= 200 && written.pages > 300, "{written:?}");
    assert_eq!(disk.bd_stat(), (written.blocks, 0, written.blocks));
    assert_eq!(disk.ram.writeback_limit(), 200 - written.blocks);
    assert_eq!(disk.backing.counts().bytes_written, written.blocks * PAGE);
    assert_eq!(disk.spilled_pages(), written.pages);
    assert!(disk.read(0, 2048).unwrap() == data);
    disk.check_clean_end();
}

#[test]
fn failed_writeback_is_not_charged() {
    for packed in LAYOUTS {
        let disk = Disk::manual(4 * MIB, 1024, packed);
        disk.ram.set_writeback_limit_enable(true);
        disk.ram.set_writeback_limit(300);
        disk.write(0, &noise(3, 100));
        disk.ram.mark_idle(IdleSelection::All);
        disk.backing.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
        let (written, error) = disk.ram.writeback(&Writeback::Idle).unwrap_err();
        assert_eq!((written, error), (WritebackReport::default(), WritebackError::Device(Error::Media)));
        assert_eq!((disk.ram.writeback_limit(), disk.bd_stat()), (300, (0, 0, 0)));
        assert!(disk.ram.backing().unwrap().failed_writes > 0);
        assert_eq!(disk.ram.mm_stat().huge_pages, 100);
        disk.backing.heal();
        // After the failed writeback the pages are still marked idle and readable, so a retry
        // writes them.
        let written = disk.ram.writeback(&Writeback::Idle).unwrap();
        assert_eq!((written.pages, disk.ram.writeback_limit()), (100, 300 - written.blocks));
        assert!(disk.read(0, 100).unwrap() == noise(3, 100));
        disk.check_clean_end();
    }
}

#[test]
fn disabled_limit_is_not_counted_down() {
    let disk = Disk::manual(4 * MIB, 1024, false);
    disk.ram.set_writeback_limit(10);
    disk.write(0, &noise(4, 64));
    assert_eq!(disk.ram.writeback(&Writeback::Huge), Ok(WritebackReport { pages: 64, blocks: 64 }));
    assert_eq!((disk.ram.writeback_limit(), disk.bd_stat()), (10, (64, 0, 64)));
    disk.ram.set_writeback_limit_enable(true);
    disk.ram.set_writeback_limit(0);
    disk.write(0, &noise(5, 1));
    assert_eq!(disk.ram.writeback(&Writeback::Huge).unwrap_err().1, WritebackError::Limit);
    // If no page of the range has content, writeback succeeds although the limit is used up.
    assert_eq!(disk.ram.writeback(&Writeback::Pages(vec![500..=600])), Ok(WritebackReport::default()));
    disk.check_clean_end();
}

#[test]
fn full_backing_stops_writeback_without_loss() {
    for packed in LAYOUTS {
        let disk = Disk::manual(4 * MIB, 64, packed);
        let data = noise(6, 200);
        disk.write(0, &data);
        let (written, error) = disk.ram.writeback(&Writeback::Huge).unwrap_err();
        assert_eq!(error, WritebackError::NoSpace);
        // In the packed layout, some blocks are reserved for moving pages.
        assert!((56..=64).contains(&written.pages), "{written:?}");
        assert_eq!(disk.ram.mm_stat().huge_pages, 200 - written.pages);
        assert!(disk.read(0, 200).unwrap() == data);
        disk.check_clean_end();
        // After the discard, all blocks of the backing device can be used again.
        disk.write(0, &data);
        let (again, error) = disk.ram.writeback(&Writeback::Huge).unwrap_err();
        assert_eq!((again, error), (written, WritebackError::NoSpace));
        disk.check_clean_end();
    }
}

/// Like the kernel, writeback starts with the largest compressed pages, which frees the most
/// memory.
#[test]
fn largest_objects_are_written_first() {
    for packed in LAYOUTS {
        let disk = Disk::manual(4 * MIB, 1024, packed);
        for page in 0..100 {
            // Every fourth page is incompressible, the others are compressible.
            disk.write(page, &content(if page % 4 == 0 { 5 } else { 4 }, page, PAGE as usize));
        }
        disk.ram.set_writeback_limit_enable(true);
        disk.ram.set_writeback_limit(26);
        disk.ram.mark_idle(IdleSelection::All);
        assert_eq!(disk.ram.writeback(&Writeback::Idle).unwrap_err().1, WritebackError::Limit);
        assert_eq!(disk.ram.mm_stat().huge_pages, 0);
        assert!((25..30).contains(&disk.spilled_pages()), "{}", disk.spilled_pages());
        disk.check_clean_end();
    }
}

#[test]
fn pages_beyond_the_end_are_refused_before_writing() {
    for packed in LAYOUTS {
        let disk = Disk::manual(4 * MIB, 1024, packed);
        disk.write(0, &noise(7, 1024));
        for pages in [vec![1024..=1024], vec![0..=5, 1000..=1024], vec![7..=7, u64::MAX..=u64::MAX]] {
            let (written, error) = disk.ram.writeback(&Writeback::Pages(pages)).unwrap_err();
            assert_eq!(written, WritebackReport::default());
            assert!(matches!(error, WritebackError::Range { .. }), "{error:?}");
        }
        #[expect(clippy::reversed_empty_ranges, reason = "what is refused")]
        let backwards = vec![9..=8];
        let (_, error) = disk.ram.writeback(&Writeback::Pages(backwards)).unwrap_err();
        assert!(matches!(error, WritebackError::Range { .. }), "{error:?}");
        assert_eq!((disk.bd_stat(), disk.backing.counts().total()), ((0, 0, 0), 0));
        let written = disk.ram.writeback(&Writeback::Pages(vec![3..=5, 4..=4, 1023..=1023])).unwrap();
        assert_eq!((written.pages, disk.spilled_pages()), (4, 4));
        disk.check_clean_end();
    }
}

#[test]
fn used_page_is_not_idle() {
    let disk = Disk::manual(4 * MIB, 1024, false);
    disk.write(0, &noise(8, 10));
    disk.write(10, &content(4, 8, 10 * PAGE as usize));
    disk.ram.mark_idle(IdleSelection::All);
    disk.read(0, 2).unwrap();
    disk.ram.write_at(10 * PAGE, &[1; 512], NONE).unwrap();
    assert_eq!(disk.ram.writeback(&Writeback::HugeIdle), Ok(WritebackReport { pages: 8, blocks: 8 }));
    assert_eq!(disk.ram.writeback(&Writeback::Idle), Ok(WritebackReport { pages: 9, blocks: 9 }));
    assert_eq!(disk.ram.writeback(&Writeback::Huge), Ok(WritebackReport { pages: 2, blocks: 2 }));
    assert_eq!(disk.ram.writeback(&Writeback::Incompressible), Ok(WritebackReport::default()));
    assert!(disk.ram.recompress(&RecompressOptions::default()).is_err());
    disk.check_clean_end();
}

#[test]
fn disk_without_backing_refuses_writeback() {
    let config = freestone::ram::Config { disksize: MIB, ..Default::default() };
    let ram = freestone::ram::Ram::new(config).unwrap();
    ram.write_at(0, &[1; 512], NONE).unwrap();
    let refused = Err((WritebackReport::default(), WritebackError::NoBacking));
    assert_eq!(ram.writeback(&Writeback::Idle), refused);
    assert_eq!(ram.writeback(&Writeback::Pages(vec![0..=0])), refused);
    assert_eq!((ram.bd_stat(), ram.backing()), (freestone::ram::BdStat::default(), None));
}
