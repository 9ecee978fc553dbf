//! Pages of a device that are still in the files of a chain.

use std::cell::RefCell;
use std::sync::Arc;

use super::file::Blocks;
use super::index::{Entry, find};
use crate::save::file_codec::{self, ContentError, FileCodec};
use freestone_core::PAGE_BYTES;
use freestone_core::client_log;
use freestone_core::device::{Error, Result};
use freestone_ram::codec;
use freestone_ram::transfer::{Incoming, Source};

/// A file of a chain, and the algorithms that compressed its pages.
pub struct Part {
    pub blocks: Blocks,
    pub algorithms: Vec<FileCodec>,
}

/// The index of the pages of a device that are still in files.
pub struct Index {
    pub entries: Vec<Entry>,
    pub parts: Arc<[Part]>,
    pub size: u64,
}

thread_local! {
    /// Buffer for reading the stored form of one page.
    static OBJECT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Index {
    /// Passes the page `page` to `take` in stored form. `data` is the entry's data in the file.
    pub fn unpack<R>(
        &self,
        page: u64,
        entry: &Entry,
        data: &[u8],
        take: impl FnOnce(Incoming<'_>) -> Result<R>,
    ) -> Result<R> {
        if entry.is_lost() {
            // Lost pages are not logged again: the save has logged their number.
            return Err(Error::Media);
        }
        let form = entry.page_of(data).ok_or(Error::Media)?;
        let bytes = self.size.saturating_sub(page * PAGE_BYTES as u64).min(PAGE_BYTES as u64) as usize;
        let algorithms = &self.parts[entry.file()].algorithms;
        if bytes == PAGE_BYTES
            && let Some(incoming) = file_codec::stored_form(algorithms, &form)
        {
            return take(incoming);
        }
        let mut content: codec::Page = [0; PAGE_BYTES];
        match file_codec::incoming(algorithms, &form, bytes, &mut content) {
            Ok(incoming) => take(incoming),
            Err(ContentError::Damaged(what)) => {
                let path = self.parts[entry.file()].blocks.path().display();
                client_log!(error, "{path}: page {page}: {what}");
                Err(Error::Media)
            }
            Err(ContentError::Other(_)) => Err(Error::NoMemory),
        }
    }
}

impl Source for Index {
    fn run(&self, page: u64, end: u64) -> (u64, bool) {
        match find(&self.entries, page) {
            Ok(entry) => {
                // Count neighbouring entries as one run, so that they are read together.
                let behind = self.entries.partition_point(|other| other.page() <= entry.page());
                let mut to = entry.end();
                for next in &self.entries[behind..] {
                    if to >= end || next.page() != to {
                        break;
                    }
                    to = next.end();
                }
                (to.min(end) - page, true)
            }
            Err(next) => (next.unwrap_or(u64::MAX).min(end) - page, false),
        }
    }

    fn fetch(&self, page: u64, take: &mut dyn FnMut(Incoming<'_>) -> Result<()>) -> Result<()> {
        let entry = find(&self.entries, page).map_err(|_| Error::Media)?;
        // Take the buffer out of the thread-local, as `take` may call this function again.
        let mut object = OBJECT.take();
        let read = self.parts[entry.file()].blocks.read(entry, &mut object);
        let taken = read.and_then(|()| self.unpack(page, entry, &object, take));
        OBJECT.set(object);
        taken
    }

    fn is_lost(&self, page: u64) -> bool {
        find(&self.entries, page)
            .map_or(true, |entry| entry.is_lost() || self.parts[entry.file()].blocks.is_damaged(entry.block))
    }
}
