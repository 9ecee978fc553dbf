//! A device and the content that it must have.

use std::collections::BTreeMap;
use std::sync::Arc;

use freestone::device::Blocking;
use freestone::ram::Ram;
use freestone_testkit::first_difference;

use super::{HOT, PAGE};

pub(super) type Page = [u8; PAGE];
/// Content of a device by page number. A missing page reads as zeroes.
pub(super) type Pages = BTreeMap<u64, Arc<Page>>;

/// A device, its expected content, and its size in pages.
pub(super) struct ExpectedDevice {
    pub ram: Ram,
    pub pages: Pages,
    pub size: u64,
}

fn read_all(ram: &Ram, size: u64, mut show: impl FnMut(u64, &[u8])) {
    for (first, pages) in HOT {
        let end = (first + pages).min(size);
        if first < end {
            let mut bytes = vec![0; (end - first) as usize * PAGE];
            ram.read_at(first * PAGE as u64, &mut bytes).unwrap();
            for (slot, page) in (first..).zip(bytes.chunks(PAGE)) {
                show(slot, page);
            }
        }
    }
}

impl ExpectedDevice {
    pub fn check(&self, who: &str) {
        read_all(&self.ram, self.size, |slot, page| {
            let wanted = self.pages.get(&slot).map_or(&[0; PAGE], |page| &**page);
            if let Some(at) = first_difference(page, wanted) {
                panic!("{who}: page {slot} is wrong from byte {at} on: {} for {}", page[at], wanted[at]);
            }
        });
    }

    pub fn patch(&mut self, offset: u64, data: &[u8]) {
        let mut done = 0;
        while done < data.len() {
            let at = offset as usize + done;
            let (slot, from) = ((at / PAGE) as u64, at % PAGE);
            let len = (PAGE - from).min(data.len() - done);
            let mut page = self.pages.get(&slot).map_or([0; PAGE], |page| **page);
            page[from..from + len].copy_from_slice(&data[done..done + len]);
            self.pages.insert(slot, Arc::new(page));
            done += len;
        }
    }

    /// Records the result of a change that failed half-way. Each page has its old or its new content.
    pub fn settle(&mut self, offset: u64, before: &Self) {
        let last =
            HOT.iter().find(|(first, pages)| (*first..first + pages).contains(&(offset / PAGE as u64)));
        let Some((first, pages)) = last else { return };
        for slot in *first..(first + pages).min(self.size) {
            let mut page = [0; PAGE];
            self.ram.read_at(slot * PAGE as u64, &mut page).unwrap();
            let is = |pages: &Pages| pages.get(&slot).map_or(page == [0; PAGE], |wanted| **wanted == page);
            assert!(
                is(&self.pages) || is(&before.pages),
                "page {slot} is neither new nor old after a refusal"
            );
            self.pages.insert(slot, Arc::new(page));
        }
    }

    pub fn copy(&self) -> Self {
        Self { ram: self.ram.clone(), pages: self.pages.clone(), size: self.size }
    }
}
