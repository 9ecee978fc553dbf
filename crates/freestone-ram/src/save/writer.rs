//! Writes the file from its beginning to its end, in blocks of about a MiB.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, Write as _};
use std::path::Path;

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};
use zerocopy::IntoBytes as _;
use zerocopy::byteorder::little_endian::{I32, U16, U32, U64};

use super::format::{
    ALGORITHMS_MAX, AlgorithmRecord, BLOCK_MAGIC, BLOCK_TARGET_BYTES, BaseRecord, BlockHeader, EndRecord,
    Header, MAGIC, NodeRecord, Over, PageRecord, RUN_PAGES_MAX, VERSION, VERSION_WHOLE_PAGES, algorithm_id,
    block_sum, form, kind,
};
use super::plan::Plan;
use super::{BaseCheck, BaseIdentity, SaveError, Saved};
use crate::codec::{Dictionary, PRIORITIES, Streams};
use crate::ram::{Ram, Stored};
use freestone_core::PAGE_BYTES;
use freestone_core::device::Device as _;

/// A file that is being written, from front to back.
pub struct Writer<'a> {
    file: &'a File,
    path: &'a Path,
    salt: u64,
    at: u64,
    blocks: u64,
    pages: u64,
    digest: Xxh3,
    algorithms: Vec<Known>,
    /// The nodes' devices.
    rams: Vec<Ram>,
    /// Numbers of algorithms by node and priority.
    numbers: HashMap<(u32, u8), u8>,
    /// The block of pages that is being filled.
    node: u32,
    records: Vec<PageRecord>,
    data: Vec<u8>,
    /// A block as it is written.
    block: Vec<u8>,
}

/// An algorithm that the file has already.
#[derive(PartialEq, Eq)]
struct Known {
    id: u8,
    level: i32,
    trained: bool,
    dictionary: Option<Dictionary>,
}

impl Known {
    fn new(streams: &Streams, trained: bool) -> Self {
        let (id, level) = (algorithm_id(streams.algorithm()), streams.level());
        Self { id, level, trained, dictionary: streams.dictionary().cloned() }
    }
}

impl<'a> Writer<'a> {
    pub fn new(file: &'a File, path: &'a Path) -> Self {
        let salt = RandomState::new().build_hasher().finish();
        Self {
            file,
            path,
            salt,
            at: 0,
            blocks: 0,
            pages: 0,
            digest: Xxh3::with_seed(salt),
            algorithms: Vec::new(),
            rams: Vec::new(),
            numbers: HashMap::new(),
            node: 0,
            records: Vec::new(),
            data: Vec::new(),
            block: Vec::new(),
        }
    }

    /// Header, bases, nodes, names; and the algorithms that are there now.
    pub fn contents(&mut self, plan: &Plan, bases: &[BaseIdentity]) -> Result<(), SaveError> {
        let mut contents = Vec::new();
        for base in bases {
            let check = match base.check {
                BaseCheck::Sampled => 1,
                BaseCheck::Whole => 2,
            };
            let hash = base.hash.to_le_bytes();
            let record = BaseRecord { size: U64::new(base.size), check, reserved: [0; 7], hash };
            contents.extend_from_slice(record.as_bytes());
        }
        for node in &plan.nodes {
            contents.extend_from_slice(node_record(node).as_bytes());
        }
        for name in plan.nodes.iter().filter_map(|node| node.name.as_ref()) {
            contents.extend_from_slice(name.as_bytes());
        }
        let whole_pages =
            |node: &super::plan::Node| node.ram.geometry().size.is_multiple_of(PAGE_BYTES as u64);
        let version = if plan.nodes.iter().all(whole_pages) { VERSION_WHOLE_PAGES } else { VERSION };
        let mut header = Header {
            magic: MAGIC,
            version: U32::new(version),
            reserved: U32::ZERO,
            salt: U64::new(self.salt),
            contents_bytes: U32::new(contents.len() as u32),
            bases: U32::new(bases.len() as u32),
            nodes: U32::new(plan.nodes.len() as u32),
            reserved2: U32::ZERO,
            contents_checksum: U64::new(xxh3_64_with_seed(&contents, self.salt)),
            checksum: U64::ZERO,
        };
        header.checksum = U64::new(header.sum());
        self.write(header.as_bytes())?;
        self.write(&contents)?;
        self.rams = plan.nodes.iter().map(|node| node.ram.clone()).collect();
        for (node, priority) in
            (0..self.rams.len() as u32).flat_map(|node| (0..=PRIORITIES as u8).map(move |p| (node, p)))
        {
            self.number(node, priority)?;
        }
        Ok(())
    }

    /// The number of a node's algorithm, which is written before anything refers to it. `None`:
    /// there is none.
    fn number(&mut self, node: u32, priority: u8) -> Result<Option<u8>, SaveError> {
        if let Some(&number) = self.numbers.get(&(node, priority)) {
            return Ok(Some(number));
        }
        let Some(known) = self.rams[node as usize].streams(priority, Known::new) else { return Ok(None) };
        let number = match self.algorithms.iter().position(|other| *other == known) {
            Some(number) => number as u8,
            None => self.algorithm(known)?,
        };
        self.numbers.insert((node, priority), number);
        Ok(Some(number))
    }

    fn algorithm(&mut self, known: Known) -> Result<u8, SaveError> {
        let number = self.algorithms.len();
        if number >= ALGORITHMS_MAX {
            return Err(self.failed(io::Error::other("too many algorithms and dictionaries for one file")));
        }
        let record = AlgorithmRecord {
            algorithm: known.id,
            trained: known.trained.into(),
            reserved: [0; 2],
            level: I32::new(known.level),
        };
        let dictionary = known.dictionary.as_ref().map_or(&[][..], Dictionary::bytes);
        self.put_block(kind::ALGORITHM, number as u32, 1, &[record.as_bytes(), dictionary])?;
        self.algorithms.push(known);
        Ok(number as u8)
    }

    /// Adds a page. Those of a node come in their order, the nodes in theirs.
    pub fn page(&mut self, node: u32, page: u64, stored: Stored, bytes: &[u8]) -> Result<(), SaveError> {
        debug_assert!(self.records.is_empty() || self.node == node);
        self.node = node;
        self.pages += 1;
        let record = |form, algorithm, pattern| PageRecord {
            page: U64::new(page),
            form,
            algorithm,
            len: U16::new(bytes.len() as u16),
            pattern,
        };
        let run = match stored {
            Stored::Same(pattern) => Some((form::SAME, pattern.to_ne_bytes())),
            Stored::Parent => Some((form::BELOW, [0; 4])),
            _ => None,
        };
        if let (Some(run), Some(last)) = (run, self.records.last_mut()) {
            let len = u64::from(last.len.get());
            if (last.form, last.pattern) == run && last.page.get() + len == page && len < RUN_PAGES_MAX {
                last.len += 1;
                return Ok(());
            }
        }
        let record = match stored {
            Stored::Same(pattern) => {
                PageRecord { len: U16::new(1), ..record(form::SAME, 0, pattern.to_ne_bytes()) }
            }
            Stored::Parent => PageRecord { len: U16::new(1), ..record(form::BELOW, 0, [0; 4]) },
            Stored::Pattern => record(form::PATTERN, 0, [0; 4]),
            Stored::Compressed(priority) => {
                let Some(number) = self.number(node, priority)? else {
                    return Err(self.failed(io::Error::other("a page's algorithm is not known")));
                };
                record(form::COMPRESSED, number, [0; 4])
            }
            Stored::Huge => {
                let number = self.number(node, 0)?.unwrap_or_default();
                record(form::HUGE, number, [0; 4])
            }
        };
        self.records.push(record);
        self.data.extend_from_slice(bytes);
        if self.data.len() + size_of_val(&*self.records) >= BLOCK_TARGET_BYTES {
            self.end_of_node()?;
        }
        Ok(())
    }

    /// Writes the pages that are gathered.
    pub fn end_of_node(&mut self) -> Result<(), SaveError> {
        if self.records.is_empty() {
            return Ok(());
        }
        let (records, data) = (std::mem::take(&mut self.records), std::mem::take(&mut self.data));
        let count = records.len() as u32;
        self.put_block(kind::PAGES, self.node, count, &[records.as_bytes(), &data])?;
        (self.records, self.data) = (records, data);
        self.records.clear();
        self.data.clear();
        Ok(())
    }

    /// Writes the commit record.
    pub fn finish(mut self) -> Result<Saved, SaveError> {
        let file_bytes = self.at + (size_of::<BlockHeader>() + size_of::<EndRecord>()) as u64;
        let end = EndRecord {
            blocks: U64::new(self.blocks),
            pages: U64::new(self.pages),
            file_bytes: U64::new(file_bytes),
            digest: U64::new(self.digest.digest()),
        };
        self.put_block(kind::END, 0, 1, &[end.as_bytes()])?;
        debug_assert_eq!(self.at, file_bytes);
        Ok(Saved { pages: self.pages, file_bytes })
    }

    fn put_block(&mut self, kind: u32, node: u32, records: u32, payload: &[&[u8]]) -> Result<(), SaveError> {
        let header = BlockHeader {
            checksum: U64::ZERO,
            magic: BLOCK_MAGIC,
            kind: U32::new(kind),
            number: U64::new(self.blocks),
            node: U32::new(node),
            records: U32::new(records),
            payload_bytes: U32::new(payload.iter().map(|part| part.len()).sum::<usize>() as u32),
            reserved: U32::ZERO,
        };
        let mut block = std::mem::take(&mut self.block);
        block.clear();
        block.extend_from_slice(header.as_bytes());
        for part in payload {
            block.extend_from_slice(part);
        }
        let sum = block_sum(&block, self.salt).to_le_bytes();
        block[..sum.len()].copy_from_slice(&sum);
        self.digest.update(&sum);
        self.blocks += 1;
        self.write(&block)?;
        self.block = block;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), SaveError> {
        self.file.write_all(bytes).map_err(|source| self.failed(source))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn failed(&self, source: io::Error) -> SaveError {
        SaveError::Write { path: self.path.to_owned(), source }
    }
}

fn node_record(node: &super::plan::Node) -> NodeRecord {
    let (over, below) = match node.over {
        Over::Nothing => (0, 0),
        Over::Base(base) => (1, base),
        Over::Node(below) => (2, below),
        Over::After(before) => (3, before),
    };
    let primary = node.ram.streams(0, |streams, _| (algorithm_id(streams.algorithm()), streams.level()));
    let (algorithm, level) = primary.unwrap_or_default();
    NodeRecord {
        size: U64::new(node.ram.geometry().size),
        below: U32::new(below),
        over,
        snapshot: node.snapshot.into(),
        name_bytes: U16::new(node.name.as_ref().map_or(0, String::len) as u16),
        algorithm,
        reserved: [0; 3],
        level: I32::new(level),
        reserved2: U64::ZERO,
    }
}
