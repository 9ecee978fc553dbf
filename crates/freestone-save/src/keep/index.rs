//! Index of the pages that are stored in the files of a chain.

use crate::save::format::{PageRecord, form};
use crate::save::reader::{BlockPlace, Page};

/// Index entry of a page, or of a run of pages without data, with its place in a file: 24 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Page number in the low bits; the file's number in its chain from bit [`FILE_SHIFT`] on.
    page_and_file: u64,
    /// Number of the block in the file, counted from 0.
    pub block: u32,
    /// Offset of the data behind the block's records; for runs, the fill pattern.
    place: u32,
    len: u16,
    form: u8,
    algorithm: u8,
}

const _: () = assert!(size_of::<Entry>() == 24);
const FILE_SHIFT: u32 = 48;
const _: () = assert!(freestone_core::slot::MAX_SLOTS < 1 << FILE_SHIFT);

impl Entry {
    /// Creates the entry of a verified page record whose data begins at `place`.
    pub fn new(record: &PageRecord, file: usize, block: u32, place: u32) -> Self {
        let place = if form::is_run(record.form) { u32::from_ne_bytes(record.pattern) } else { place };
        Self {
            page_and_file: record.page.get() | (file as u64) << FILE_SHIFT,
            block,
            place,
            len: record.len.get(),
            form: record.form,
            algorithm: record.algorithm,
        }
    }

    pub fn page(&self) -> u64 {
        self.page_and_file & ((1 << FILE_SHIFT) - 1)
    }

    pub fn file(&self) -> usize {
        (self.page_and_file >> FILE_SHIFT) as usize
    }

    pub fn is_run(&self) -> bool {
        form::is_run(self.form)
    }

    pub fn is_below(&self) -> bool {
        self.form == form::BELOW
    }

    /// Returns true if the page could not be read when it was saved.
    pub fn is_lost(&self) -> bool {
        self.form == form::LOST
    }

    pub fn end(&self) -> u64 {
        self.page() + if self.is_run() { u64::from(self.len) } else { 1 }
    }

    /// Returns the offset of the data in the file and its length in bytes; the length is 0 for
    /// runs.
    pub fn data(&self, block: BlockPlace) -> (u64, usize) {
        let bytes = if self.is_run() { 0 } else { usize::from(self.len) };
        (block.at + u64::from(block.data) + if self.is_run() { 0 } else { u64::from(self.place) }, bytes)
    }

    /// Returns the page record for a file in which the algorithm has number `algorithm`.
    pub fn record(&self, algorithm: u8) -> PageRecord {
        PageRecord {
            page: self.page().into(),
            form: self.form,
            algorithm,
            len: self.len.into(),
            pattern: if self.is_run() { self.place.to_ne_bytes() } else { [0; 4] },
        }
    }

    /// Returns the algorithm's number in the entry's file; `None` for forms without an algorithm.
    pub fn algorithm(&self) -> Option<u8> {
        matches!(self.form, form::COMPRESSED | form::HUGE).then_some(self.algorithm)
    }

    /// Combines the entry with its data; returns `None` if they do not form a valid page.
    pub fn page_of<'a>(&self, data: &'a [u8]) -> Option<Page<'a>> {
        Page::of(&self.record(self.algorithm), data)
    }

    /// Returns the part of the entry in the page range `[from, to)`; `None` if it is empty.
    fn cut(&self, from: u64, to: u64) -> Option<Self> {
        let (from, to) = (from.max(self.page()), to.min(self.end()));
        let file = self.page_and_file >> FILE_SHIFT << FILE_SHIFT;
        let len = if self.is_run() { (to.saturating_sub(from)) as u16 } else { self.len };
        (from < to).then_some(Self { page_and_file: from | file, len, ..*self })
    }
}

/// Splits `entries` into the pages that `by` contains and the others. All lists are sorted, and
/// none contains a page twice.
pub fn divide(entries: &[Entry], by: &[Entry]) -> (Vec<Entry>, Vec<Entry>) {
    let (mut inside, mut outside) = (Vec::new(), Vec::new());
    let mut by = by.iter().peekable();
    for entry in entries {
        let mut at = entry.page();
        while at < entry.end() {
            while by.next_if(|other| other.end() <= at).is_some() {}
            let (from, to) = by.peek().map_or((u64::MAX, u64::MAX), |other| (other.page(), other.end()));
            outside.extend(entry.cut(at, from));
            inside.extend(entry.cut(from.max(at), to));
            at = to.min(entry.end()).max(at + 1);
        }
    }
    (inside, outside)
}

/// Merges two sorted lists that have no page in common.
pub fn join(mut entries: Vec<Entry>, more: Vec<Entry>) -> Vec<Entry> {
    if !more.is_empty() {
        entries.extend(more);
        // The stable sort merges two sorted runs in linear time.
        entries.sort_by_key(Entry::page);
    }
    entries
}

/// Returns the pages of both lists; `newer` replaces pages of `older`.
pub fn overlay(older: Vec<Entry>, newer: Vec<Entry>) -> Vec<Entry> {
    if older.is_empty() || newer.is_empty() {
        return join(older, newer);
    }
    join(divide(&older, &newer).1, newer)
}

/// Returns the entry of a page. The error is the first page of the next entry, or `None` without
/// one.
pub fn find(entries: &[Entry], page: u64) -> Result<&Entry, Option<u64>> {
    let behind = entries.partition_point(|entry| entry.page() <= page);
    match behind.checked_sub(1).map(|at| &entries[at]) {
        Some(entry) if page < entry.end() => Ok(entry),
        _ => Err(entries.get(behind).map(Entry::page)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn entry(page: u64, pages: u16, tag: u32) -> Entry {
        let (form, len) = if pages > 1 { (form::SAME, pages) } else { (form::COMPRESSED, 100) };
        let pattern = tag.to_ne_bytes();
        let record = PageRecord { page: page.into(), form, algorithm: 0, len: len.into(), pattern };
        Entry::new(&record, 3, tag, tag)
    }

    fn map(entries: &[Entry]) -> BTreeMap<u64, u32> {
        let mut map = BTreeMap::new();
        for entry in entries {
            for page in entry.page()..entry.end() {
                assert_eq!(map.insert(page, entry.block), None, "page {page} is there twice");
                assert_eq!(find(entries, page), Ok(entry));
            }
        }
        map
    }

    /// Compares the results with those of a `BTreeMap`.
    #[test]
    fn overlay_and_divide_match_maps() {
        let mut state = 1_u64;
        let mut next = move |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for tag in 0..500 {
            let mut list = |tag: u32| {
                let (mut entries, mut at) = (Vec::new(), 0);
                for _ in 0..next(8) {
                    at += next(6);
                    let pages = if next(2) == 0 { 1 } else { 2 + next(9) };
                    entries.push(entry(at, pages as u16, tag));
                    at += pages;
                }
                entries
            };
            let (older, newer) = (list(tag * 2), list(tag * 2 + 1));
            let (inside, outside) = divide(&older, &newer);
            let (old, new) = (map(&older), map(&newer));
            let mut expected = old.clone();
            expected.extend(&new);
            assert_eq!(map(&overlay(older.clone(), newer)), expected);
            let part = |is: bool| -> BTreeMap<u64, u32> {
                old.iter()
                    .filter(|(page, _)| new.contains_key(page) == is)
                    .map(|(&page, &tag)| (page, tag))
                    .collect()
            };
            assert_eq!((map(&inside), map(&outside)), (part(true), part(false)));
        }
        assert_eq!(find(&[entry(5, 1, 0)], 4), Err(Some(5)));
        assert_eq!(find(&[entry(5, 1, 0)], 6), Err(None));
    }
}
