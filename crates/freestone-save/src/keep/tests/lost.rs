//! Pages that could not be read when they were saved.

use freestone_core::fail_points::{Call, Fault, inject};
use rustix::io::Errno;
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::damage::{blocks, shown};
use super::*;
use crate::save::format::{BlockHeader, EndRecord, Header, PageRecord, VERSION_KEPT, VERSION_LOST};
use crate::save::format::{block_sum, form, head_sum, kind};

fn version(path: &Path) -> u32 {
    Header::read_from_prefix(&fs::read(path).unwrap()).unwrap().0.version.get()
}

fn only_file(dir: &Path) -> std::path::PathBuf {
    let names: Vec<_> = files(dir).into_keys().collect();
    assert_eq!(names.len(), 1, "{names:?}");
    dir.join(&names[0])
}

fn numbered(path: &Path, pages: u64) -> Ram {
    let ram = family().ram(pages * PAGE).unwrap();
    let mut random = Random(7);
    for page in 0..pages {
        ram.write_at(page * PAGE, &random.page(), Flags::empty()).unwrap();
    }
    save(&mut Keep::open(path).unwrap(), &[("a", &ram)]);
    ram
}

/// Flips a bit in the middle of a file.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(path, &bytes).unwrap();
}

/// A damaged block must not fail a save. The pages of the block are saved as lost, once.
#[test]
fn save_damaged_block_saves_pages_as_lost() {
    let dir = tempfile::tempdir().unwrap();
    let ram = numbered(dir.path(), 2000);
    damage(&only_file(dir.path()));
    let (mut keep, devices, mut loading) = restored(dir.path(), &family(), &[]);
    let LoadOutcome::Incomplete(lost) = loading.run(&never, &mut |_, _| {}) else {
        panic!("a block is damaged")
    };
    let restored_ram = named(&devices, "a");
    restored_ram.write_at(0, &[3; 512], Flags::empty()).unwrap();
    assert_eq!(save(&mut keep, &borrowed(&devices)).kind, SaveKind::Increment);
    // The merge cannot read the damaged block. But a save may still find its pages in memory.
    assert!(matches!(keep.merge(&never, &mut |_, _| {}), Err(KeepError::Read(_))));
    let now = save(&mut keep, &borrowed(&devices));
    assert_eq!((now.kind, now.lost), (SaveKind::Whole, lost));
    assert_eq!(version(&only_file(dir.path())), VERSION_LOST);
    assert_eq!(save(&mut keep, &borrowed(&devices)).kind, SaveKind::Unchanged, "no other try would help");
    restored_ram.write_at(512, &[4; 512], Flags::empty()).unwrap();
    assert_eq!(save(&mut keep, &borrowed(&devices)).kind, SaveKind::Increment);
    keep.merge(&never, &mut |_, _| {}).unwrap();
    drop((keep, devices, loading));

    ram.write_at(0, &[[3_u8; 512], [4; 512]].concat(), Flags::empty()).unwrap();
    let pages = shown(dir.path(), DamagePolicy::Refuse).unwrap();
    assert_eq!(pages.iter().filter(|page| page.is_none()).count() as u64, lost);
    let is_right =
        |(page, content): (&Option<Vec<u8>>, &[u8])| page.as_ref().is_none_or(|page| page == content);
    assert!(pages.iter().zip(content(&ram).chunks(PAGE_BYTES)).all(is_right));
    let plain = crate::save::restore(&only_file(dir.path()), &family(), &[], &mut |_, _| {});
    assert!(matches!(plain, Err(RestoreError::Damaged { .. })), "a plain restore has no page to give");

    // Writing the lost pages repairs the disk.
    let (mut keep, devices, _loading) = restored(dir.path(), &family(), &[]);
    named(&devices, "a").write_at(0, &content(&ram), Flags::empty()).unwrap();
    save(&mut keep, &borrowed(&devices));
    keep.merge(&never, &mut |_, _| {}).unwrap();
    assert_eq!(version(&only_file(dir.path())), VERSION_KEPT);
    drop((keep, devices));
    assert!(shown(dir.path(), DamagePolicy::Refuse).unwrap().iter().all(Option::is_some));
}

/// Reads are retried after one or two successive errors. If all tries fail, the pages are saved as lost,
/// and the next save reads them again.
#[test]
fn save_passing_read_error_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let ram = numbered(dir.path(), 600);
    let fault = |times| Fault { call: Call::ReadData, after: 0, times, errno: Errno::IO, is_done: false };
    for times in [1, 2, u32::MAX] {
        let (mut keep, devices, loading) = restored(dir.path(), &family(), &[]);
        let disk = named(&devices, "a");
        // Adding a new device forces a whole save.
        let other = disk.family().ram(PAGE).unwrap();
        let all: [(&str, &Ram); 2] = [("a", disk), ("b", &other)];
        inject(Some(fault(times)));
        let now = keep.save(&all, &never, &mut |_, _| {});
        inject(None);
        let now = now.unwrap();
        assert_eq!((now.kind, now.lost > 500), (SaveKind::Whole, times > 2), "{times}: {now:?}");
        if now.lost > 0 {
            assert_eq!(now.lost, now.pages);
            // Wait for more than a second, in which unreadable blocks are not read again.
            std::thread::sleep(std::time::Duration::from_millis(1100));
            let again = save(&mut keep, &all);
            assert_eq!((again.kind, again.pages, again.lost), (SaveKind::Increment, now.lost, 0));
            assert_eq!(save(&mut keep, &all).kind, SaveKind::Unchanged);
        }
        drop((keep, devices, loading, other));
        let (mut keep, devices, _loading) = restored(dir.path(), &family(), &[]);
        assert!(content(named(&devices, "a")) == content(&ram), "{times}");
        save(&mut keep, &[("a", named(&devices, "a"))]);
    }
}

const HEAD: usize = size_of::<BlockHeader>();

/// Changes the records of the pages selected by `is_lost` to lost pages, and corrects all
/// checksums.
fn lose(path: &Path, is_lost: impl Fn(u32, u64) -> bool) {
    let starts = blocks(path);
    let mut bytes = fs::read(path).unwrap();
    let mut header = Header::read_from_prefix(&bytes).unwrap().0;
    let salt = header.salt.get();
    let mut digest = xxhash_rust::xxh3::Xxh3::with_seed(salt);
    for start in starts {
        let block = &mut bytes[start as usize..];
        let mut head = BlockHeader::read_from_prefix(block).unwrap().0;
        let block = &mut block[..HEAD + head.payload_bytes.get() as usize];
        let records = head.records.get() as usize * size_of::<PageRecord>();
        if head.kind.get() == kind::PAGES {
            for at in block[HEAD..][..records].chunks_mut(size_of::<PageRecord>()) {
                let mut record = PageRecord::read_from_bytes(at).unwrap();
                if is_lost(head.node.get(), record.page.get()) {
                    assert_eq!((record.form, record.len.get()), (form::SAME, 1));
                    (record.form, record.pattern) = (form::LOST, [0; 4]);
                    at.copy_from_slice(record.as_bytes());
                }
            }
            head.head_checksum = head_sum(&head, &block[HEAD..][..records], salt).into();
            block[..HEAD].copy_from_slice(head.as_bytes());
        }
        if head.kind.get() == kind::END {
            let mut end = EndRecord::read_from_bytes(&block[HEAD..]).unwrap();
            end.digest = digest.digest().into();
            block[HEAD..].copy_from_slice(end.as_bytes());
        }
        let sum = block_sum(block, salt).to_le_bytes();
        block[..sum.len()].copy_from_slice(&sum);
        digest.update(&sum);
    }
    header.version = VERSION_LOST.into();
    header.checksum = header.sum().into();
    bytes[..size_of::<Header>()].copy_from_slice(header.as_bytes());
    fs::write(path, &bytes).unwrap();
}

/// Operations of two snapshots and their origin on a page in turn, and the node whose record is
/// lost (plus one; 0: none).
struct Case {
    did: [u64; 3],
    lost: u64,
}

const KEPT: u64 = 0;
const WROTE: u64 = 1;
const DISCARDED: u64 = 2;
/// Number of pages: one for each case.
const PAGES: u64 = 18 * 4;

impl Case {
    fn of(page: u64) -> Self {
        Self { did: [page % 2, page / 2 % 3, page / 6 % 3], lost: page / 18 }
    }

    fn is_lost(&self, node: usize) -> bool {
        self.did[node] == WROTE && self.lost == node as u64 + 1
    }

    /// Returns the byte that fills the page in a node; `None` if the page is lost.
    fn expected(&self, node: usize) -> Option<u8> {
        let changed = (0..=node).rev().find(|&node| self.did[node] != KEPT);
        match changed {
            Some(node) if self.is_lost(node) => None,
            Some(node) if self.did[node] == WROTE => Some(node as u8 + 1),
            _ => Some(0),
        }
    }
}

/// Reads of a page that is lost in one node of a chain fail in that node, and succeed in the
/// others. (Reads of unwritten pages may fail, too, if another node of the chain has lost the
/// page.)
#[test]
fn restore_snapshot_chain_lost_pages_fail_alone() {
    let dir = tempfile::tempdir().unwrap();
    let ram = family().ram(PAGES * PAGE).unwrap();
    let write = |node: usize| {
        for page in 0..PAGES {
            match Case::of(page).did[node] {
                // Make the pages differ, as pages of equal content would share a record.
                WROTE => {
                    let mut bytes = [node as u8 + 1, page as u8, 1, 1].repeat(PAGE_BYTES / 4);
                    bytes.truncate(PAGE_BYTES);
                    ram.write_at(page * PAGE, &bytes, Flags::empty()).unwrap();
                }
                DISCARDED => ram.discard(page * PAGE, PAGE).unwrap(),
                _ => {}
            }
        }
    };
    write(0);
    let first = ram.snapshot().unwrap();
    write(1);
    let second = ram.snapshot().unwrap();
    write(2);
    save(&mut Keep::open(dir.path()).unwrap(), &[("s0", &first), ("s1", &second), ("o", &ram)]);
    lose(&only_file(dir.path()), |node, page| Case::of(page).is_lost(node as usize));

    let check = |devices: &[(String, Ram)], when: &str| {
        let mut lost = 0;
        for (node, name) in ["s0", "s1", "o"].into_iter().enumerate() {
            for page in 0..PAGES {
                let case = Case::of(page);
                let mut bytes = [0; PAGE_BYTES];
                let read = named(devices, name).read_at(page * PAGE, &mut bytes);
                let shown = format!("{when}: {name}, page {page}");
                match case.expected(node) {
                    None => {
                        assert_eq!(read, Err(Error::Media), "{shown}");
                        lost += 1;
                    }
                    Some(0) if read.is_err() => assert!((0..3).any(|node| case.is_lost(node)), "{shown}"),
                    Some(byte) => {
                        assert_eq!(read, Ok(()), "{shown}");
                        assert_eq!(bytes[0], byte, "{shown}");
                    }
                }
            }
        }
        assert!(lost > 10, "{lost}");
    };
    let (mut keep, devices, mut loading) = restored(dir.path(), &family(), &[]);
    check(&devices, "before loading");
    assert!(matches!(loading.run(&never, &mut |_, _| {}), LoadOutcome::Incomplete(_)));
    check(&devices, "after loading");
    let other = devices[0].1.family().ram(PAGE).unwrap();
    let mut all = borrowed(&devices);
    all.push(("other", &other));
    assert_eq!(save(&mut keep, &all).kind, SaveKind::Whole);
    drop((keep, devices, loading));
    let (_keep, devices, _loading) = restored(dir.path(), &family(), &[]);
    check(&devices, "after another save");
}
