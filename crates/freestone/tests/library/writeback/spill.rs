//! Pages are evicted to a file and read back.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone::device::{Blocking, Buffer, Device, Flags, Request, TryResult};
use freestone::file::File;
use freestone::ram::{Config, IdleSelection, Ram, Writeback};

const PAGE: u64 = 4096;

/// Returns a page that compresses to about a third. The content differs for each index and round.
fn content(index: u64, round: u64) -> Vec<u8> {
    let mut state = index.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ round.wrapping_mul(0xD134_2543_DE82_EF95) | 1;
    let mut page = vec![0; PAGE as usize];
    for word in page.chunks_exact_mut(12) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word[..4].copy_from_slice(&(state as u32).to_le_bytes());
    }
    page
}

fn disk(dir: &Path, pages: u64, mem_limit: u64, compressed_writeback: bool) -> Ram {
    let backing = File::open_for_writeback(dir.join("spill"), Some(2 * pages * PAGE)).unwrap();
    let config = Config { disksize: pages * PAGE, mem_limit, ..Config::default() };
    Ram::new(config.backed_by(Arc::new(backing), compressed_writeback)).unwrap()
}

fn fill(ram: &Ram, pages: u64, round: u64) {
    for page in 0..pages {
        ram.write_at(page * PAGE, &content(page, round), Flags::empty()).unwrap();
    }
}

fn check(ram: &Ram, pages: u64, round: u64) {
    let mut back = vec![0; PAGE as usize];
    for page in 0..pages {
        ram.read_at(page * PAGE, &mut back).unwrap();
        assert!(back == content(page, round), "page {page}");
    }
}

#[test]
fn written_back_pages_are_read_back() {
    for packed in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let pages = 4096;
        let ram = disk(dir.path(), pages, 0, packed);
        fill(&ram, pages, 1);
        assert_eq!(ram.mark_idle(IdleSelection::All), pages);
        let before = ram.mm_stat();
        let written = ram.writeback(&Writeback::Idle).unwrap();
        assert_eq!(written.pages, pages);
        let (mm, bd, backing) = (ram.mm_stat(), ram.bd_stat(), ram.backing().unwrap());
        assert_eq!((mm.orig_data_size, mm.compr_data_size), (pages * PAGE, 0));
        assert_eq!((bd.bd_reads, bd.bd_writes, bd.bd_count), (0, written.blocks, written.blocks));
        assert_eq!(backing.spilled_pages, pages);
        if packed {
            let bytes = before.compr_data_size + pages * (16 + 8);
            assert!(bd.bd_count * PAGE < bytes * 102 / 100, "{} blocks for {bytes} bytes", bd.bd_count);
        } else {
            assert_eq!(bd.bd_count, pages);
        }
        check(&ram, pages, 1);
        if packed {
            let back = ram.mm_stat();
            assert_eq!(back.compr_data_size, before.compr_data_size);
            assert_eq!(ram.bd_stat().bd_count, 0, "all have come back");
        } else {
            assert_eq!(ram.bd_stat().bd_reads, pages);
            assert_eq!(ram.bd_stat().bd_count, pages, "they stay there, as in the kernel");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the file has no name");
    }
}

#[test]
fn disk_larger_than_its_memory() {
    let dir = tempfile::tempdir().unwrap();
    let pages = 6144;
    let ram = disk(dir.path(), pages, 4 << 20, true);
    for round in 0..2 {
        fill(&ram, pages, round);
        check(&ram, pages, round);
        let mm = ram.mm_stat();
        assert!(mm.mem_used_total <= 4 << 20, "{mm:?}");
        assert_eq!(ram.io_stat().failed_writes, 0);
    }
    ram.discard(0, pages * PAGE).unwrap();
    assert_eq!(ram.mm_stat().orig_data_size, 0);
    // The blocks of a batch in flight are freed when the write of the batch completes.
    let began = std::time::Instant::now();
    while ram.bd_stat().bd_count > 0 {
        assert!(began.elapsed().as_secs() < 20, "{:?}", ram.bd_stat());
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn writes_to_parts_of_evicted_pages() {
    for packed in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let pages = 512;
        let ram = disk(dir.path(), pages, 0, packed);
        fill(&ram, pages, 1);
        ram.mark_idle(IdleSelection::All);
        ram.writeback(&Writeback::Idle).unwrap();
        let mut back = vec![0; PAGE as usize];
        for page in 0..pages {
            ram.write_at(page * PAGE + 512, &[7; 512], Flags::empty()).unwrap();
            ram.read_at(page * PAGE, &mut back).unwrap();
            let mut wanted = content(page, 1);
            wanted[512..1024].fill(7);
            assert!(back == wanted, "page {page}");
        }
        // Overwrites and discards of evicted pages need no read of the backing device.
        ram.mark_idle(IdleSelection::All);
        ram.writeback(&Writeback::Idle).unwrap();
        let reads = ram.bd_stat().bd_reads;
        let page = content(0, 2);
        assert_eq!(ram.try_io(&Request::write(0, PAGE), Buffer::Write(&page)), Ok(TryResult::Done));
        ram.discard(PAGE, (pages - 1) * PAGE).unwrap();
        assert_eq!(ram.bd_stat().bd_reads, reads);
        assert_eq!(ram.bd_stat().bd_count, 0);
    }
}

#[test]
fn reset_frees_evicted_pages() {
    let dir = tempfile::tempdir().unwrap();
    let ram = disk(dir.path(), 1024, 0, true);
    fill(&ram, 1024, 1);
    ram.mark_idle(IdleSelection::All);
    ram.writeback(&Writeback::Idle).unwrap();
    ram.reset().unwrap();
    assert_eq!(ram.bd_stat(), freestone::ram::BdStat::default());
    let mut back = vec![1; PAGE as usize];
    ram.read_at(5 * PAGE, &mut back).unwrap();
    assert!(back.iter().all(|&b| b == 0));
}

#[test]
fn ages_separate_idle_from_busy_pages() {
    let dir = tempfile::tempdir().unwrap();
    let ram = disk(dir.path(), 64, 0, true);
    fill(&ram, 64, 1);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(2500) {
        check(&ram, 32, 1);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(ram.mark_idle(IdleSelection::OlderThan(Duration::from_secs(1))), 32);
    assert_eq!(ram.writeback(&Writeback::Idle).unwrap().pages, 32);
    assert_eq!(ram.mark_idle(IdleSelection::OlderThan(Duration::from_secs(3600))), 0);
}

#[test]
fn holes_on_the_device_are_reclaimed() {
    let dir = tempfile::tempdir().unwrap();
    let pages = 8192;
    let ram = disk(dir.path(), pages, 0, true);
    fill(&ram, pages, 1);
    ram.mark_idle(IdleSelection::All);
    ram.writeback(&Writeback::Idle).unwrap();
    let full = ram.bd_stat().bd_count;
    // Two of three pages are discarded, so most blocks have unused space.
    for page in (0..pages).filter(|page| page % 3 != 0) {
        ram.discard(page * PAGE, PAGE).unwrap();
    }
    let sparse = ram.bd_stat().bd_count;
    assert!(sparse > full * 6 / 10, "{sparse} of {full} blocks are still in use");
    ram.compact();
    let tight = ram.bd_stat().bd_count;
    assert!(tight < full * 4 / 10, "{tight} of {full} blocks for a third of the pages");
    assert_eq!(ram.backing().unwrap().spilled_pages, pages.div_ceil(3));
    let mut back = vec![0; PAGE as usize];
    for page in (0..pages).step_by(3) {
        ram.read_at(page * PAGE, &mut back).unwrap();
        assert!(back == content(page, 1), "page {page}");
    }
    assert_eq!(ram.bd_stat().bd_count, 0);
}

#[test]
fn device_full_of_holes_is_reclaimed() {
    let dir = tempfile::tempdir().unwrap();
    let pages = 8192;
    let ram = disk(dir.path(), pages, 0, true);
    fill(&ram, pages, 0);
    let stored = ram.mm_stat().compr_data_size;
    // Memory and backing device together have space for all pages and a fifth more.
    let mem_limit = 3 << 20;
    let size = (stored + stored / 5 - mem_limit).next_multiple_of(PAGE);
    let backing = File::open_for_writeback(dir.path().join("small"), Some(size)).unwrap();
    let config = Config { disksize: pages * PAGE, mem_limit, ..Config::default() };
    let ram = Ram::new(config.backed_by(Arc::new(backing), true)).unwrap();
    // Each round replaces every third page of the previous round, so the backing device rarely has
    // a free block.
    for round in 0..12 {
        for page in (round % 3..pages).step_by(3) {
            ram.write_at(page * PAGE, &content(page, round / 3), Flags::empty()).unwrap();
        }
    }
    check(&ram, pages, 3);
}
