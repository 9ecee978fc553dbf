//! What is written is counted, and no more is written than is allowed.

use freestone::device::{Blocking, Error, Op};
use freestone::ram::{Idle, Recompress, Writeback, WritebackError, Written};
use freestone_testkit::{What, When};

use crate::writeback::disk::{Disk, LAYOUTS, MIB, NONE, PAGE, content, noise};

/// The test of the kernel's own writeback patches.
#[test]
fn source_test_of_the_limit() {
    let disk = Disk::manual(16 * MIB, 4096, false);
    disk.ram.set_writeback_limit_enable(true);
    disk.ram.set_writeback_limit(1002);
    let data = noise(1, 10 * MIB / PAGE);
    disk.write(0, &data);
    assert_eq!(disk.ram.idle(Idle::All), 2560);
    let (written, error) = disk.ram.writeback(&Writeback::Idle).unwrap_err();
    assert_eq!((written, error), (Written { pages: 1002, blocks: 1002 }, WritebackError::Limit));
    assert_eq!(disk.bd_stat(), (1002, 0, 1002));
    assert_eq!(disk.ram.writeback_limit(), 0);

    disk.ram.set_writeback_limit(500);
    assert_eq!(disk.ram.writeback(&Writeback::Idle).unwrap_err().1, WritebackError::Limit);
    assert_eq!(disk.bd_stat(), (1502, 0, 1502));
    disk.ram.set_writeback_limit(2000);
    assert_eq!(disk.ram.writeback(&Writeback::Idle), Ok(Written { pages: 1058, blocks: 1058 }));
    assert_eq!((disk.bd_stat(), disk.ram.writeback_limit()), ((2560, 0, 2560), 2000 - 1058));

    assert!(disk.read(0, 2560).unwrap() == data);
    assert_eq!(disk.bd_stat(), (2560, 2560, 2560));
    assert_eq!(disk.backing.counts().bytes_written, 10 * MIB);
    disk.ends_clean();
}

/// In the packed layout the limit counts the blocks that are written, however many pages are in
/// them.
#[test]
fn packed_blocks_are_counted_as_they_are_written() {
    let disk = Disk::manual(16 * MIB, 4096, true);
    disk.ram.set_writeback_limit_enable(true);
    disk.ram.set_writeback_limit(200);
    let data = content(4, 1, 8 << 20);
    disk.write(0, &data);
    disk.ram.idle(Idle::All);
    let (written, error) = disk.ram.writeback(&Writeback::Idle).unwrap_err();
    assert_eq!(error, WritebackError::Limit);
    // Half of each page is noise.
    assert!(written.blocks <= 200 && written.pages > 300, "{written:?}");
    assert_eq!(disk.bd_stat(), (written.blocks, 0, written.blocks));
    assert_eq!(disk.ram.writeback_limit(), 200 - written.blocks);
    assert_eq!(disk.backing.counts().bytes_written, written.blocks * PAGE);
    assert_eq!(disk.spilled_pages(), written.pages);
    assert!(disk.read(0, 2048).unwrap() == data);
    disk.ends_clean();
}

#[test]
fn what_fails_is_not_charged() {
    for packed in LAYOUTS {
        let disk = Disk::manual(4 * MIB, 1024, packed);
        disk.ram.set_writeback_limit_enable(true);
        disk.ram.set_writeback_limit(300);
        disk.write(0, &noise(3, 100));
        disk.ram.idle(Idle::All);
        disk.backing.fault(Some(Op::Write), When::Always, What::Fail(Error::Media));
        let (written, error) = disk.ram.writeback(&Writeback::Idle).unwrap_err();
        assert_eq!((written, error), (Written::default(), WritebackError::Device(Error::Media)));
        assert_eq!((disk.ram.writeback_limit(), disk.bd_stat()), (300, (0, 0, 0)));
        assert!(disk.ram.backing().unwrap().failed_writes > 0);
        assert_eq!(disk.ram.mm_stat().huge_pages, 100);
        disk.backing.heal();
        // They are still marked, and still there.
        let written = disk.ram.writeback(&Writeback::Idle).unwrap();
        assert_eq!((written.pages, disk.ram.writeback_limit()), (100, 300 - written.blocks));
        assert!(disk.read(0, 100).unwrap() == noise(3, 100));
        disk.ends_clean();
    }
}

#[test]
fn without_the_enable_nothing_is_counted_down() {
    let disk = Disk::manual(4 * MIB, 1024, false);
    disk.ram.set_writeback_limit(10);
    disk.write(0, &noise(4, 64));
    assert_eq!(disk.ram.writeback(&Writeback::Huge), Ok(Written { pages: 64, blocks: 64 }));
    assert_eq!((disk.ram.writeback_limit(), disk.bd_stat()), (10, (64, 0, 64)));
    disk.ram.set_writeback_limit_enable(true);
    disk.ram.set_writeback_limit(0);
    disk.write(0, &noise(5, 1));
    assert_eq!(disk.ram.writeback(&Writeback::Huge).unwrap_err().1, WritebackError::Limit);
    // Nothing to do is no error.
    assert_eq!(disk.ram.writeback(&Writeback::Pages(vec![500..=600])), Ok(Written::default()));
    disk.ends_clean();
}

#[test]
fn a_full_backing_stops_a_writeback_and_loses_nothing() {
    for packed in LAYOUTS {
        let disk = Disk::manual(4 * MIB, 64, packed);
        let data = noise(6, 200);
        disk.write(0, &data);
        let (written, error) = disk.ram.writeback(&Writeback::Huge).unwrap_err();
        assert_eq!(error, WritebackError::NoSpace);
        // Packed, some blocks are kept free to move objects to.
        assert!((56..=64).contains(&written.pages), "{written:?}");
        assert_eq!(disk.ram.mm_stat().huge_pages, 200 - written.pages);
        assert!(disk.read(0, 200).unwrap() == data);
        disk.ends_clean();
        // And all of it can be used again.
        disk.write(0, &data);
        let (again, error) = disk.ram.writeback(&Writeback::Huge).unwrap_err();
        assert_eq!((again, error), (written, WritebackError::NoSpace));
        disk.ends_clean();
    }
}

/// The kernel writes the largest objects first: that frees the most memory.
#[test]
fn the_largest_go_first() {
    for packed in LAYOUTS {
        let disk = Disk::manual(4 * MIB, 1024, packed);
        for page in 0..100 {
            // Noise among what gets smaller.
            disk.write(page, &content(if page % 4 == 0 { 5 } else { 4 }, page, PAGE as usize));
        }
        disk.ram.set_writeback_limit_enable(true);
        disk.ram.set_writeback_limit(26);
        disk.ram.idle(Idle::All);
        assert_eq!(disk.ram.writeback(&Writeback::Idle).unwrap_err().1, WritebackError::Limit);
        assert_eq!(disk.ram.mm_stat().huge_pages, 0);
        assert!((25..30).contains(&disk.spilled_pages()), "{}", disk.spilled_pages());
        disk.ends_clean();
    }
}

#[test]
fn pages_beyond_the_end_are_refused_before_anything_is_written() {
    for packed in LAYOUTS {
        let disk = Disk::manual(4 * MIB, 1024, packed);
        disk.write(0, &noise(7, 1024));
        for pages in [vec![1024..=1024], vec![0..=5, 1000..=1024], vec![7..=7, u64::MAX..=u64::MAX]] {
            let (written, error) = disk.ram.writeback(&Writeback::Pages(pages)).unwrap_err();
            assert_eq!(written, Written::default());
            assert!(matches!(error, WritebackError::Range { .. }), "{error:?}");
        }
        #[expect(clippy::reversed_empty_ranges, reason = "what is refused")]
        let backwards = vec![9..=8];
        let (_, error) = disk.ram.writeback(&Writeback::Pages(backwards)).unwrap_err();
        assert!(matches!(error, WritebackError::Range { .. }), "{error:?}");
        assert_eq!((disk.bd_stat(), disk.backing.counts().total()), ((0, 0, 0), 0));
        let written = disk.ram.writeback(&Writeback::Pages(vec![3..=5, 4..=4, 1023..=1023])).unwrap();
        assert_eq!((written.pages, disk.spilled_pages()), (4, 4));
        disk.ends_clean();
    }
}

#[test]
fn a_page_that_is_used_is_no_longer_idle() {
    let disk = Disk::manual(4 * MIB, 1024, false);
    disk.write(0, &noise(8, 10));
    disk.write(10, &content(4, 8, 10 * PAGE as usize));
    disk.ram.idle(Idle::All);
    disk.read(0, 2).unwrap();
    disk.ram.write_at(10 * PAGE, &[1; 512], NONE).unwrap();
    assert_eq!(disk.ram.writeback(&Writeback::HugeIdle), Ok(Written { pages: 8, blocks: 8 }));
    assert_eq!(disk.ram.writeback(&Writeback::Idle), Ok(Written { pages: 9, blocks: 9 }));
    assert_eq!(disk.ram.writeback(&Writeback::Huge), Ok(Written { pages: 2, blocks: 2 }));
    assert_eq!(disk.ram.writeback(&Writeback::Incompressible), Ok(Written::default()));
    assert!(disk.ram.recompress(&Recompress::default()).is_err());
    disk.ends_clean();
}

#[test]
fn a_disk_without_backing_says_so() {
    let config = freestone::ram::Config { disksize: MIB, ..Default::default() };
    let ram = freestone::ram::Ram::new(config).unwrap();
    ram.write_at(0, &[1; 512], NONE).unwrap();
    let refused = Err((Written::default(), WritebackError::NoBacking));
    assert_eq!(ram.writeback(&Writeback::Idle), refused);
    assert_eq!(ram.writeback(&Writeback::Pages(vec![0..=0])), refused);
    assert_eq!((ram.bd_stat(), ram.backing()), (freestone::ram::BdStat::default(), None));
}
