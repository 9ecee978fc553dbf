//! Tests of RAM disks as a whole: zram's rules here, others in the modules.

mod concurrent;
mod contents;
mod file_disk;
mod full_policy;
mod models;
mod parent_zeroes;

pub(in crate::ram) use self::file_disk::file_backing;
use crate::codec::{Algorithm, Params};
use crate::ram::geometry::PAGE;
use crate::ram::*;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Blocking, Device, Error, Flags};
use freestone_core::device::{Buffer, Extent, ExtentKind, Request};
use freestone_core::slot::Word;

pub(in crate::ram) const MIB: u64 = 1 << 20;

pub(in crate::ram) fn config(disksize: u64) -> Config {
    Config { disksize, ..Config::default() }
}

pub(in crate::ram) fn ram(disksize: u64) -> Ram {
    Ram::new(config(disksize)).unwrap()
}

/// Returns the word of a slot of the disk's own layer.
pub(in crate::ram) fn word(ram: &Ram, slot: u64) -> Word {
    ram.0.layer().table().leaf(slot).map_or(Word::EMPTY, |leaf| leaf.peek(slot))
}

/// Changes the word of a slot of the disk's own layer.
pub(in crate::ram) fn change(ram: &Ram, slot: u64, change: impl Fn(Word) -> Word) {
    let layer = ram.0.layer();
    let guard = layer.table().leaf(slot).unwrap().lock(slot);
    let word = guard.word();
    guard.publish(change(word));
}

/// Returns `len` bytes of one of six kinds: zeroes (0), a 32-bit (1) or 64-bit pattern (2), text
/// (3), half noise (4), noise (5).
pub(in crate::ram) fn content(kind: u8, seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let word = next();
    let mut bytes = Vec::with_capacity(len + 8);
    // Fill word by word: a sanitizer makes each memory access expensive.
    while bytes.len() < len {
        let eight = match kind % 6 {
            0 => [0; 8],
            1 => (u64::from(word as u32) << 32 | u64::from(word as u32)).to_ne_bytes(),
            2 => word.to_ne_bytes(),
            3 => next().to_be_bytes().map(|byte| b"etaoin shrdlu"[usize::from(byte) % 13]),
            4 if bytes.len() % 4096 < 2000 => *b"the same",
            _ => next().to_ne_bytes(),
        };
        bytes.extend_from_slice(&eight);
    }
    bytes.truncate(len);
    bytes
}

#[test]
fn almost_same_filled_page_is_stored_whole() {
    let ram = ram(MIB);
    for at in [0, 3, 4, 7, 8, 2048, 4087, 4088, 4095] {
        let mut page = [0xA5; PAGE_BYTES];
        page[at] ^= 1;
        ram.write_at(0, &page, Flags::empty()).unwrap();
        let mut back = [0; PAGE_BYTES];
        ram.read_at(0, &mut back).unwrap();
        assert!(back == page, "byte {at}");
        assert_eq!(ram.mm_stat().same_pages, 0, "byte {at}");
    }
}

#[test]
fn pages_of_all_kinds_round_trip() {
    for algorithm in Algorithm::ALL {
        let ram = Ram::new(Config { comp_algorithm: algorithm, ..config(8 * MIB) }).unwrap();
        for round in 0..3 {
            for page in 0..2048_u64 {
                let data = content((page + round) as u8, page * 7 + round, PAGE_BYTES);
                ram.write_at(page * PAGE, &data, Flags::empty()).unwrap();
            }
            for page in 0..2048_u64 {
                let mut back = vec![1; PAGE_BYTES];
                ram.read_at(page * PAGE, &mut back).unwrap();
                assert!(
                    back == content((page + round) as u8, page * 7 + round, PAGE_BYTES),
                    "{algorithm} page {page}"
                );
            }
        }
        let stat = ram.mm_stat();
        assert_eq!(stat.orig_data_size, 8 * MIB);
        // Three of the six kinds of content are patterns: about half of the pages.
        assert!((1020..=1034).contains(&stat.same_pages), "{stat:?}");
        assert!(stat.huge_pages > 0 && stat.huge_pages_since >= 3 * stat.huge_pages - 20, "{stat:?}");
        assert!(stat.mem_used_total >= stat.compr_data_size, "{stat:?}");
        ram.discard(0, 8 * MIB).unwrap();
        let stat = ram.mm_stat();
        assert_eq!(
            (stat.orig_data_size, stat.compr_data_size, stat.same_pages, stat.huge_pages),
            (0, 0, 0, 0)
        );
        assert_eq!(ram.io_stat().notify_free, 2048);
    }
}

#[test]
fn same_filled_page_takes_word_or_eight_bytes() {
    let ram = ram(MIB);
    let page = |pattern: u64| pattern.to_ne_bytes().repeat(PAGE_BYTES / 8);
    ram.write_at(0, &page(0), Flags::empty()).unwrap();
    ram.write_at(PAGE, &page(0xDEADBEEF_DEADBEEF), Flags::empty()).unwrap();
    assert_eq!(ram.mm_stat().mem_used_total, 0);
    ram.write_at(2 * PAGE, &page(0x0123_4567_89AB_CDEF), Flags::empty()).unwrap();
    let stat = ram.mm_stat();
    assert_eq!((stat.same_pages, stat.compr_data_size, stat.mem_used_total), (3, 8, PAGE));
    let mut back = vec![0; 3 * PAGE_BYTES];
    ram.read_at(0, &mut back).unwrap();
    assert!(back == [page(0), page(0xDEADBEEF_DEADBEEF), page(0x0123_4567_89AB_CDEF)].concat());
}

#[test]
fn page_above_huge_threshold_is_stored_whole() {
    let ram = ram(MIB);
    // A page that compresses slightly, but not enough to be stored compressed.
    let mut data = content(5, 3, PAGE_BYTES);
    data[..60].fill(0);
    ram.write_at(0, &data, Flags::empty()).unwrap();
    let stat = ram.mm_stat();
    assert_eq!((stat.huge_pages, stat.compr_data_size), (1, PAGE));
    data[..1000].fill(0);
    ram.write_at(0, &data, Flags::empty()).unwrap();
    let stat = ram.mm_stat();
    assert_eq!((stat.huge_pages, stat.huge_pages_since), (0, 1));
    assert!(stat.compr_data_size < 3300);
}

#[test]
fn mem_limit_fails_only_writes_needing_memory() {
    let ram = Ram::new(Config { mem_limit: 64 * PAGE - 5, ..config(4 * MIB) }).unwrap();
    assert_eq!(ram.mm_stat().mem_limit, 64 * PAGE, "rounded up to a page");
    let huge = |seed| content(5, seed, PAGE_BYTES);
    for page in 0..64 {
        ram.write_at(page * PAGE, &huge(page), Flags::empty()).unwrap();
    }
    assert_eq!(ram.mm_stat().mem_used_total, 64 * PAGE, "equal is allowed");
    // The limit is reached in the middle of a large write: the write fails, and the old content
    // stays.
    let large: Vec<u8> = (100..110).flat_map(huge).collect();
    assert_eq!(ram.write_at(60 * PAGE, &large, Flags::empty()), Err(Error::NoSpace));
    assert!(ram.mm_stat().mem_used_max > ram.mm_stat().mem_limit, "raised before the verdict");
    assert_eq!(ram.io_stat().failed_writes, 1);
    let mut back = vec![0; PAGE_BYTES];
    for page in 0..60 {
        ram.read_at(page * PAGE, &mut back).unwrap();
        assert!(back == huge(page), "page {page}");
    }
    for page in 60..64 {
        ram.read_at(page * PAGE, &mut back).unwrap();
        assert!(back == huge(page) || back == huge(page + 40), "page {page} is neither old nor new");
    }
    // Pages that need no memory can be written, and freeing makes space.
    ram.write_at(70 * PAGE, &[0x11; PAGE_BYTES], Flags::empty()).unwrap();
    ram.discard(0, 40 * PAGE).unwrap();
    ram.write_at(80 * PAGE, &huge(80), Flags::empty()).unwrap();
    // A limit below the present use evicts nothing. Even a write that would fit a free object of
    // the pool fails.
    ram.set_mem_limit(PAGE);
    assert_eq!(ram.write_at(81 * PAGE, &huge(81), Flags::empty()), Err(Error::NoSpace));
    ram.read_at(80 * PAGE, &mut back).unwrap();
    assert!(back == huge(80));
    ram.set_mem_limit(0);
    ram.write_at(81 * PAGE, &huge(81), Flags::empty()).unwrap();
    ram.reset_mem_used_max();
    assert_eq!(ram.mm_stat().mem_used_max, ram.mm_stat().mem_used_total);
}

#[test]
fn failed_partial_write_keeps_page() {
    let ram = ram(MIB);
    let old = content(4, 1, PAGE_BYTES);
    ram.write_at(0, &old, Flags::empty()).unwrap();
    ram.set_mem_limit(1);
    let first = ram.mm_stat().mem_used_total;
    assert!(first >= PAGE);
    // Fill the only page that the limit allows, then patch with noise.
    ram.set_mem_limit(first);
    let mut wanted = old;
    let mut refused = 0;
    for block in 0..8_usize {
        let part = content(5, block as u64 + 9, 512);
        match ram.write_at(block as u64 * 512, &part, Flags::empty()) {
            Ok(()) => wanted[block * 512..][..512].copy_from_slice(&part),
            Err(error) => {
                assert_eq!(error, Error::NoSpace);
                refused += 1;
            }
        }
    }
    assert!(refused > 0);
    let mut back = vec![0; PAGE_BYTES];
    ram.read_at(0, &mut back).unwrap();
    assert!(back == wanted, "a part that was refused was written, or the other way round");
}

#[test]
fn reset_wipes_content_and_disk_stays_usable() {
    let ram = ram(64 * MIB);
    ram.write_at(0, &content(3, 1, 4 << 20), Flags::empty()).unwrap();
    ram.write_at(40 * MIB, &content(5, 1, 1 << 20), Flags::empty()).unwrap();
    let _ = ram.try_io(&Request::read(1, 1), Buffer::Read(&mut [0]));
    assert!(ram.mm_stat().huge_pages_since > 0 && ram.io_stat().invalid_io == 1);
    let empty = self::ram(64 * MIB);
    ram.reset().unwrap();
    assert_eq!((ram.mm_stat(), ram.io_stat()), (empty.mm_stat(), empty.io_stat()));
    assert_eq!(ram.memory_overhead().leaves_bytes, 0);
    assert_eq!(ram.config().disksize, 64 * MIB);
    let mut back = vec![1; 4 << 20];
    ram.read_at(0, &mut back).unwrap();
    assert!(back.iter().all(|&b| b == 0));
    ram.write_at(4096, &content(3, 2, 8192), Flags::empty()).unwrap();
    assert_eq!(ram.mm_stat().orig_data_size, 8192);
}

#[test]
fn grow_online_and_shrink_fails() {
    let ram = ram(MIB - 5);
    assert_eq!(ram.geometry().size, MIB, "rounded up to a page");
    assert_eq!(ram.write_at(MIB, &[1; 512], Flags::empty()), Err(Error::OutOfRange));
    ram.grow(3 << 40).unwrap();
    ram.write_at((3 << 40) - 512, &[1; 512], Flags::empty()).unwrap();
    let mut back = [0; 1024];
    ram.read_at((3 << 40) - 1024, &mut back).unwrap();
    assert!(back[..512] == [0; 512] && back[512..] == [1; 512]);
    assert!(matches!(ram.grow(MIB), Err(SetupError::Shrinks { .. })));
    assert!(matches!(ram.grow(u64::MAX), Err(SetupError::TooLarge(_))));
    assert!(matches!(Ram::new(config(0)), Err(SetupError::Empty)));
    assert!(matches!(Ram::new(config(DISKSIZE_BYTES_MAX + 1)), Err(SetupError::TooLarge(_))));
}

#[test]
fn empty_large_disk_needs_no_memory() {
    let ram = ram(16 << 40);
    let mut at = 0;
    let mut rows = 0;
    while at < 16 << 40 {
        at += ram
            .extents(at, (16 << 40) - at, &mut |extent| {
                assert_eq!(extent.kind, ExtentKind::Hole);
                rows += 1;
                true
            })
            .unwrap();
    }
    assert!(rows < 10_000);
    let mut buffer = vec![1; 1 << 20];
    for at in (0..16 << 40).step_by(1 << 34) {
        ram.read_at(at, &mut buffer).unwrap();
    }
    ram.discard(0, 16 << 40).unwrap();
    ram.write_zeroes(0, 16 << 40, Flags::MAY_FREE).unwrap();
    assert_eq!((ram.memory_overhead().leaves_bytes, ram.mm_stat().mem_used_total), (0, 0));
}

/// Zeroes written without `MAY_FREE` are same-filled pages; with `MAY_FREE` they are holes.
#[test]
fn write_zeroes_makes_hole_only_if_allowed() {
    let ram = Ram::new(config(4 << 20)).unwrap();
    let kinds = |offset, len| {
        let mut kinds = Vec::new();
        ram.extents(offset, len, &mut |row| {
            kinds.push((row.len, row.kind));
            true
        })
        .unwrap();
        kinds
    };
    ram.write_at(0, &vec![1; 3 << 20], Flags::empty()).unwrap();
    ram.write_zeroes(4096, 8192, Flags::empty()).unwrap();
    ram.write_zeroes(12288, 8192, Flags::MAY_FREE).unwrap();
    assert_eq!(kinds(4096, 16384), [(8192, ExtentKind::Zero), (8192, ExtentKind::Hole)]);
    // Write zeroes also over holes, in several `try_io` calls, with partial pages at both ends.
    ram.write_zeroes(512, (4 << 20) - 1024, Flags::empty()).unwrap();
    assert_eq!(ram.mm_stat().same_pages, 1023);
    let mut back = vec![9; 4 << 20];
    ram.read_at(0, &mut back).unwrap();
    assert!(back[..512] == [1; 512] && back[512..].iter().all(|byte| *byte == 0));
}

#[test]
fn extents_cover_end_of_largest_disk() {
    let ram = ram(DISKSIZE_BYTES_MAX);
    let mut rows = Vec::new();
    let from = DISKSIZE_BYTES_MAX - (3 << 30);
    ram.extents(from, 3 << 30, &mut |row| {
        rows.push(row);
        true
    })
    .unwrap();
    assert_eq!(rows, [Extent { offset: from, len: 3 << 30, kind: ExtentKind::Hole }]);
    ram.write_at(DISKSIZE_BYTES_MAX - 512, &[1; 512], Flags::empty()).unwrap();
    rows.clear();
    ram.extents(from, 3 << 30, &mut |row| {
        rows.push(row);
        true
    })
    .unwrap();
    assert_eq!(
        rows.last().unwrap(),
        &Extent { offset: DISKSIZE_BYTES_MAX - PAGE, len: PAGE, kind: ExtentKind::Data }
    );
}

#[test]
fn write_of_same_class_overwrites_in_place() {
    let ram = ram(MIB);
    let page = |n: u64| {
        // Half noise, half zeroes: objects of about 2077 bytes, all in one class.
        let mut page = content(5, n, PAGE_BYTES);
        page[2052..].fill(0);
        page
    };
    for slot in 0..256 {
        ram.write_at(slot * PAGE, &page(slot), Flags::empty()).unwrap();
    }
    let location = |slot: u64| ram.0.layer().table().leaf(slot).unwrap().peek(slot).location();
    let places: Vec<u64> = (0..256).map(location).collect();
    let before = ram.mm_stat();
    for slot in 0..256 {
        ram.write_at(slot * PAGE, &page(slot + 1000), Flags::empty()).unwrap();
        // A partial write overwrites the object in place, too.
        ram.write_at(slot * PAGE + 512, &content(5, slot, 512), Flags::empty()).unwrap();
    }
    assert_eq!((0..256).map(location).collect::<Vec<_>>(), places);
    assert_eq!(ram.mm_stat().mem_used_total, before.mem_used_total);
    for slot in 0..256 {
        let mut wanted = page(slot + 1000);
        wanted[512..1024].copy_from_slice(&content(5, slot, 512));
        let mut back = vec![0; PAGE_BYTES];
        ram.read_at(slot * PAGE, &mut back).unwrap();
        assert!(back == wanted, "page {slot}");
    }
    // A pool above its limit stores nothing, as in the kernel, although the object could overwrite
    // the old one.
    ram.set_mem_limit(PAGE);
    assert_eq!(ram.write_at(0, &page(5000), Flags::empty()), Err(Error::NoSpace));
}

#[test]
fn disks_with_equal_parameters_share_streams() {
    let (a, b) = (ram(MIB), ram(MIB));
    assert!(std::ptr::eq(a.0.pages.codecs.primary(), b.0.pages.codecs.primary()));
    let params = Params::parse("level=2").unwrap();
    let other = Ram::new(Config { algorithm_params: params, ..config(MIB) }).unwrap();
    assert!(!std::ptr::eq(a.0.pages.codecs.primary(), other.0.pages.codecs.primary()));
}
