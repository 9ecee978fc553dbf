//! Reading of a saved file from front to back, without trusting its content.

mod front;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;
use zerocopy::FromBytes as _;

pub use self::front::Node;
use crate::save::format::{
    ALGORITHMS_MAX, AlgorithmRecord, BLOCK_MAGIC, BlockHeader, EndRecord, FileAlgorithm, KeptRecord,
    NodeParent, PAYLOAD_BYTES_MAX, PageRecord, VERSION_LOST, algorithm_of, block_sum, form, head_sum, kind,
};
use crate::save::{BaseIdentity, RestoreError};
use freestone_core::PAGE_BYTES;
use freestone_core::fail_points::{self, Call};
use freestone_ram::codec::{self, Dictionary, Scratch};

const HEADER_BYTES: usize = size_of::<BlockHeader>();
const END_BYTES: usize = HEADER_BYTES + size_of::<EndRecord>();
/// Bytes of a block that are read at once when its page data is skipped.
const SKIM_BYTES: usize = 16 << 10;
/// A saved file, read from front to back.
pub struct Reader {
    file: File,
    path: PathBuf,
    pub bases: Vec<BaseIdentity>,
    pub nodes: Arc<[Node]>,
    pub end: End,
    /// Place among the files of kept devices; `None` in other files.
    pub kept: Option<KeptRecord>,
    pub salt: u64,
    version: u32,
    /// Position of the next block in bytes.
    at: u64,
    blocks: u64,
    pages: u64,
    digest: Xxh3,
    algorithms: u32,
    /// Lowest valid node and page of the next page record.
    next: (u32, u64),
    block: Vec<u8>,
}

/// The commit record at the end of the file.
#[derive(Clone, Copy)]
pub struct End {
    pub file_bytes: u64,
    pub pages: u64,
    blocks: u64,
    digest: u64,
}

/// Content of a block, verified.
pub enum Block<'a> {
    Algorithm(FileAlgorithm),
    Pages { node: u32, place: BlockPlace, pages: Pages<'a> },
}

/// Position and length of a block of pages in the file.
#[derive(Debug, Clone, Copy)]
pub struct BlockPlace {
    pub at: u64,
    pub bytes: u32,
    /// Offset of the page data in the block.
    pub data: u32,
}

/// The pages of a block, all of one node, in ascending order and already verified.
pub struct Pages<'a> {
    pub records: &'a [PageRecord],
    data: &'a [u8],
}

/// A page, or a run of equal pages, in its stored form.
pub enum Page<'a> {
    Same {
        pattern: u32,
        pages: u64,
    },
    Parent {
        pages: u64,
    },
    /// The page could not be read when it was saved.
    Lost,
    Pattern([u8; 8]),
    Compressed {
        algorithm: u8,
        object: &'a [u8],
    },
    Huge {
        algorithm: u8,
        content: &'a codec::Page,
    },
}

impl Reader {
    /// Opens a file, and reads its header, contents and commit record. Fails for an increment.
    pub fn open(path: &Path) -> Result<Self, RestoreError> {
        let reader = Self::open_any(path)?;
        if reader.is_increment() { Err(RestoreError::Increment(reader.path)) } else { Ok(reader) }
    }

    /// Returns true if the file may contain lost pages.
    pub fn has_lost(&self) -> bool {
        self.version >= VERSION_LOST
    }

    /// Opens a file like [`open`](Self::open), and also accepts increments.
    pub fn open_any(path: &Path) -> Result<Self, RestoreError> {
        let failed = |source| RestoreError::Read { path: path.to_owned(), source };
        // Opening a pipe without a writer would block.
        if !std::fs::metadata(path).map_err(failed)?.is_file() {
            return Err(RestoreError::Foreign(path.to_owned()));
        }
        let file = fail_points::call(Call::Open, || File::open(path)).map_err(failed)?;
        Self::from_file(file, path)
    }

    /// Reads an open file like [`open_any`](Self::open_any); `path` is the file's name for errors.
    pub fn from_file(file: File, path: &Path) -> Result<Self, RestoreError> {
        let len =
            file.metadata().map_err(|source| RestoreError::Read { path: path.to_owned(), source })?.len();
        let mut reader = Self {
            file,
            path: path.to_owned(),
            bases: Vec::new(),
            nodes: Arc::default(),
            end: End { file_bytes: len, pages: 0, blocks: 0, digest: 0 },
            kept: None,
            salt: 0,
            version: 0,
            at: 0,
            blocks: 0,
            pages: 0,
            digest: Xxh3::new(),
            algorithms: 0,
            next: (0, 0),
            block: Vec::new(),
        };
        let header = reader.header(len)?;
        reader.end = reader.commit_record(len)?;
        reader.contents(&header, len)?;
        Ok(reader)
    }

    /// Returns true if the file is an increment of kept devices.
    pub fn is_increment(&self) -> bool {
        self.kept.is_some_and(|kept| kept.number.get() > 0)
    }

    /// Returns the opened file, so that the caller can read blocks again.
    pub fn into_file(self) -> File {
        self.file
    }

    /// Returns the position of the next block in bytes.
    pub fn at(&self) -> u64 {
        self.at
    }

    pub fn damaged(&self, what: &'static str) -> RestoreError {
        RestoreError::Damaged { path: self.path.clone(), at: self.at, what }
    }

    fn failed(&self, source: io::Error) -> RestoreError {
        match source.kind() {
            // The file was truncated after it was opened.
            io::ErrorKind::UnexpectedEof => RestoreError::Incomplete(self.path.clone()),
            _ => RestoreError::Read { path: self.path.clone(), source },
        }
    }

    fn read(&self, into: &mut [u8], at: u64) -> Result<(), RestoreError> {
        let read = fail_points::call(Call::Read, || self.file.read_exact_at(into, at));
        read.map_err(|error| self.failed(error))
    }

    /// Returns the next block; `None` after the last one, when the whole file is verified.
    pub fn next(&mut self) -> Result<Option<Block<'_>>, RestoreError> {
        self.next_block(false)
    }

    /// Returns the next block without page data; `None` after the last one. Page data is verified
    /// only when the whole block is read. Requires version 3, since which records have their own
    /// checksum.
    pub fn skim(&mut self) -> Result<Option<Block<'_>>, RestoreError> {
        self.next_block(true)
    }

    fn next_block(&mut self, skim: bool) -> Result<Option<Block<'_>>, RestoreError> {
        let at = self.at;
        let Some(header) = self.load_next(skim)? else { return Ok(None) };
        if header.kind.get() == kind::ALGORITHM {
            return self.parse_algorithm().map(Block::Algorithm).map(Some);
        }
        let (node, records) = (header.node.get(), header.records.get() as usize);
        let bytes = HEADER_BYTES as u32 + header.payload_bytes.get();
        let data = (HEADER_BYTES + records * size_of::<PageRecord>()) as u32;
        let place = BlockPlace { at, bytes, data };
        match <[PageRecord]>::ref_from_prefix_with_elems(&self.block[HEADER_BYTES..], records) {
            Ok((records, data)) => Ok(Some(Block::Pages { node, place, pages: Pages { records, data } })),
            Err(_) => Err(self.damaged("a block is too short")),
        }
    }

    /// Loads the next block into `self.block` and verifies it; returns `None` at the end block.
    fn load_next(&mut self, skim: bool) -> Result<Option<BlockHeader>, RestoreError> {
        let header = self.load_block(skim)?;
        let len = HEADER_BYTES as u64 + u64::from(header.payload_bytes.get());
        let (kind, node) = (header.kind.get(), header.node.get());
        if kind == kind::END {
            let end = self.end;
            let complete = self.at + len == end.file_bytes
                && self.blocks == end.blocks
                && self.pages == end.pages
                && self.digest.digest() == end.digest;
            self.at += len;
            return if complete {
                Ok(None)
            } else {
                Err(self.damaged("the commit record does not match the blocks"))
            };
        }
        match kind {
            kind::ALGORITHM
                if node == self.algorithms && node < ALGORITHMS_MAX as u32 && header.records.get() == 1 =>
            {
                self.algorithms += 1;
            }
            kind::PAGES => self.check_pages(&header)?,
            _ => return Err(self.damaged("a block is of an unknown kind")),
        }
        self.digest.update(&header.checksum.get().to_le_bytes());
        self.blocks += 1;
        self.at += len;
        Ok(Some(header))
    }

    /// Parses the algorithm record in `self.block`.
    fn parse_algorithm(&self) -> Result<FileAlgorithm, RestoreError> {
        let Ok((record, bytes)) = AlgorithmRecord::read_from_prefix(&self.block[HEADER_BYTES..]) else {
            return Err(self.damaged("a block is too short"));
        };
        let Some(algorithm) = algorithm_of(record.algorithm) else {
            return Err(self.damaged("an algorithm is unknown"));
        };
        let dictionary = Dictionary::trained(bytes);
        if dictionary.is_none() && !bytes.is_empty() {
            return Err(self.damaged("a dictionary is too large"));
        }
        let (level, trained) = (record.level.get(), record.trained == 1);
        Ok(FileAlgorithm { algorithm, level, trained, dictionary })
    }

    /// Reads a block into `self.block`, without page data if `skim` is set. Returns the block's
    /// header.
    fn load_block(&mut self, skim: bool) -> Result<BlockHeader, RestoreError> {
        let there = self.end.file_bytes.saturating_sub(self.at);
        // With `skim`, one read covers the header and the records of most blocks.
        let first = if skim { SKIM_BYTES.min(there as usize).max(HEADER_BYTES) } else { HEADER_BYTES };
        self.read_block(0, first)?;
        let Ok((header, _)) = BlockHeader::read_from_prefix(&self.block) else {
            return Err(self.damaged("a block is too short"));
        };
        let payload = header.payload_bytes.get() as usize;
        let left = there.saturating_sub(HEADER_BYTES as u64);
        if header.magic != BLOCK_MAGIC || payload > PAYLOAD_BYTES_MAX || payload as u64 > left {
            return Err(self.damaged("there is no valid block header"));
        }
        let is_pages = header.kind.get() == kind::PAGES;
        let records = header.records.get() as usize * size_of::<PageRecord>();
        if is_pages && records > payload {
            return Err(self.damaged("a block is too short"));
        }
        let skim = skim && is_pages;
        self.read_block(first, HEADER_BYTES + if skim { records } else { payload })?;
        let sum = |reader: &Self| header.checksum.get() == block_sum(&reader.block, reader.salt);
        if !skim && !sum(self) {
            return Err(self.damaged("a block's checksum is wrong"));
        }
        let head = if is_pages && self.kept.is_some() {
            head_sum(&header, &self.block[HEADER_BYTES..][..records], self.salt)
        } else {
            0
        };
        if header.number.get() != self.blocks || header.head_checksum.get() != head {
            return Err(self.damaged("a block is in the wrong place"));
        }
        Ok(header)
    }

    /// Resizes `self.block` to `to` bytes and reads the bytes from `from` on.
    fn read_block(&mut self, from: usize, to: usize) -> Result<(), RestoreError> {
        self.block.resize(to, 0);
        if from < to {
            let at = self.at + from as u64;
            let read = fail_points::call(Call::Read, || self.file.read_exact_at(&mut self.block[from..], at));
            read.map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    /// Checks that the pages of a block are in order, within their device, and have all of their
    /// data.
    fn check_pages(&mut self, header: &BlockHeader) -> Result<(), RestoreError> {
        let (node, count) = (header.node.get(), header.records.get() as usize);
        let payload = &self.block[HEADER_BYTES..];
        let wrong = |what| Err(self.damaged(what));
        let Some((size, over)) = self.nodes.get(node as usize).map(|node| (node.size, node.over)) else {
            return wrong("pages are of an unknown device");
        };
        let Ok((records, _)) = <[PageRecord]>::ref_from_prefix_with_elems(payload, count) else {
            return wrong("a block is too short");
        };
        let data = header.payload_bytes.get() as usize - count * size_of::<PageRecord>();
        let may_be_below = matches!(over, NodeParent::After(_)) || self.is_increment();
        if node < self.next.0 {
            return wrong("pages are not in order");
        }
        let mut next = if node == self.next.0 { self.next.1 } else { 0 };
        let (mut bytes, mut pages) = (0_usize, 0);
        for record in records {
            let len = usize::from(record.len.get());
            let fits = match record.form {
                form::SAME => len > 0,
                form::BELOW => len > 0 && may_be_below,
                form::LOST => len > 0 && self.version >= VERSION_LOST,
                form::PATTERN => len == 8,
                form::COMPRESSED => (1..=Scratch::BYTES).contains(&len),
                form::HUGE => len == PAGE_BYTES,
                _ => false,
            };
            let has_algorithm = matches!(record.form, form::COMPRESSED | form::HUGE);
            if !fits || has_algorithm && u32::from(record.algorithm) >= self.algorithms {
                return wrong("a page has an invalid form");
            }
            let run = if form::is_run(record.form) { len as u64 } else { 1 };
            let last = size.div_ceil(PAGE_BYTES as u64);
            let end = record.page.get().checked_add(run).filter(|&end| end <= last);
            match end {
                Some(end) if record.page.get() >= next => next = end,
                _ => return wrong("a page is out of order or beyond the end of its device"),
            }
            pages += run;
            bytes += if form::is_run(record.form) { 0 } else { len };
        }
        if bytes != data {
            return wrong("the data of a block does not match its pages");
        }
        self.next = (node, next);
        self.pages += pages;
        Ok(())
    }
}

impl<'a> Iterator for Pages<'a> {
    type Item = (u64, Page<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let (record, rest) = self.records.split_first()?;
        self.records = rest;
        let len = if form::is_run(record.form) { 0 } else { record.len.get() };
        // `check_pages` verified the data length, so the split does not fail.
        let (bytes, rest) = self.data.split_at_checked(len.into())?;
        self.data = rest;
        Some((record.page.get(), Page::of(record, bytes)?))
    }
}

impl<'a> Page<'a> {
    /// Combines a verified record with its data; returns `None` if the length of the data is wrong.
    pub fn of(record: &PageRecord, bytes: &'a [u8]) -> Option<Self> {
        let (algorithm, pages) = (record.algorithm, record.len.get().into());
        Some(match record.form {
            form::SAME => Self::Same { pattern: u32::from_ne_bytes(record.pattern), pages },
            form::BELOW => Self::Parent { pages },
            form::LOST => Self::Lost,
            form::PATTERN => Self::Pattern(bytes.try_into().ok()?),
            form::HUGE => Self::Huge { algorithm, content: bytes.try_into().ok()? },
            _ => Self::Compressed { algorithm, object: bytes },
        })
    }
}
