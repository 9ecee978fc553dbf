//! Writing of a saved file from front to back, in blocks of about 1 MiB.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};
use zerocopy::IntoBytes as _;
use zerocopy::byteorder::little_endian::{I32, U16, U32, U64};

use super::format::{
    ALGORITHMS_MAX, AlgorithmRecord, BLOCK_MAGIC, BLOCK_TARGET_BYTES, BaseRecord, BlockHeader, EndRecord,
    FileAlgorithm, Header, KeptRecord, MAGIC, NodeRecord, PageRecord, RUN_PAGES_MAX, VERSION_KEPT,
    VERSION_LOST, VERSION_PARTS, VERSION_WHOLE_PAGES, algorithm_id, block_sum, form, head_sum, kind,
};
use super::plan::Plan;
use super::{BaseCheck, BaseIdentity, SaveError, SaveReport};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Device as _, Error};
use freestone_ram::codec::{Dictionary, PRIORITIES};
use freestone_ram::transfer::{ReadStored as _, StoredForm};

/// A saved file that is being written.
pub struct Writer<'a> {
    file: &'a File,
    path: &'a Path,
    salt: u64,
    is_kept: bool,
    header: Option<Header>,
    at: u64,
    blocks: u64,
    pages: u64,
    lost: u64,
    digest: Xxh3,
    algorithms: Vec<FileAlgorithm>,
    /// Node of the block that is being filled, with the records and data of that block.
    node: u32,
    records: Vec<PageRecord>,
    data: Vec<u8>,
    /// Reused buffer for the block that is being written.
    block: Vec<u8>,
}

/// Contents of a file: everything between the header and the blocks.
pub struct Contents<'a> {
    /// Place among the files of kept devices; `None` in other files.
    pub kept: Option<KeptRecord>,
    pub bases: &'a [BaseIdentity],
    pub nodes: Vec<NodeRecord>,
    /// Names of the named nodes, in the order of `nodes`.
    pub names: Vec<&'a str>,
}

impl<'a> Contents<'a> {
    /// Creates the contents for the nodes and bases of a plan.
    pub fn new(kept: Option<KeptRecord>, plan: &'a Plan, bases: &'a [BaseIdentity]) -> Self {
        let nodes = plan.nodes.iter().map(node_record).collect();
        let names = plan.nodes.iter().filter_map(|node| node.name.as_deref()).collect();
        Self { kept, bases, nodes, names }
    }

    fn version(&self) -> u32 {
        let whole_pages = |node: &NodeRecord| node.size.get().is_multiple_of(PAGE_BYTES as u64);
        match self.kept {
            Some(_) => VERSION_KEPT,
            None if self.nodes.iter().all(whole_pages) => VERSION_WHOLE_PAGES,
            None => VERSION_PARTS,
        }
    }
}

impl<'a> Writer<'a> {
    pub fn new(file: &'a File, path: &'a Path) -> Self {
        let salt = RandomState::new().build_hasher().finish();
        Self {
            file,
            path,
            salt,
            is_kept: false,
            header: None,
            at: 0,
            blocks: 0,
            pages: 0,
            lost: 0,
            digest: Xxh3::with_seed(salt),
            algorithms: Vec::new(),
            node: 0,
            records: Vec::new(),
            data: Vec::new(),
            block: Vec::new(),
        }
    }

    /// Returns the file's random number, by which another file can refer to this one.
    pub fn salt(&self) -> u64 {
        self.salt
    }

    /// Writes the header and the contents: bases, nodes and names.
    pub fn contents(&mut self, of: &Contents<'_>) -> Result<(), SaveError> {
        self.is_kept = of.kept.is_some();
        let mut contents = Vec::new();
        if let Some(kept) = &of.kept {
            contents.extend_from_slice(kept.as_bytes());
        }
        for base in of.bases {
            let check = match base.check {
                BaseCheck::Sampled => 1,
                BaseCheck::Whole => 2,
            };
            let hash = base.hash.to_le_bytes();
            let record = BaseRecord { size: U64::new(base.size), check, reserved: [0; 7], hash };
            contents.extend_from_slice(record.as_bytes());
        }
        contents.extend_from_slice(of.nodes.as_bytes());
        for name in &of.names {
            contents.extend_from_slice(name.as_bytes());
        }
        let mut header = Header {
            magic: MAGIC,
            version: U32::new(of.version()),
            reserved: U32::ZERO,
            salt: U64::new(self.salt),
            contents_bytes: U32::new(contents.len() as u32),
            bases: U32::new(of.bases.len() as u32),
            nodes: U32::new(of.nodes.len() as u32),
            reserved2: U32::ZERO,
            contents_checksum: U64::new(xxh3_64_with_seed(&contents, self.salt)),
            checksum: U64::ZERO,
        };
        header.checksum = U64::new(header.sum());
        self.header = Some(header);
        self.write(header.as_bytes())?;
        self.write(&contents)
    }

    /// Returns the number of an algorithm in the file, and writes the algorithm first if it is new.
    pub fn algorithm(&mut self, known: FileAlgorithm) -> Result<u8, SaveError> {
        if let Some(number) = self.algorithms.iter().position(|other| *other == known) {
            return Ok(number as u8);
        }
        let number = self.algorithms.len();
        if number >= ALGORITHMS_MAX {
            return Err(self.wrong("too many algorithms and dictionaries for one file"));
        }
        let record = AlgorithmRecord {
            algorithm: algorithm_id(known.algorithm),
            trained: known.trained.into(),
            reserved: [0; 2],
            level: I32::new(known.level),
        };
        let dictionary = known.dictionary.as_ref().map_or(&[][..], Dictionary::bytes);
        self.put_block(kind::ALGORITHM, number as u32, 1, &[record.as_bytes(), dictionary])?;
        self.algorithms.push(known);
        Ok(number as u8)
    }

    /// Adds the record of a page or run with its data. The caller must add nodes, and the pages of
    /// a node, in ascending order.
    pub fn record(&mut self, node: u32, record: PageRecord, data: &[u8]) -> Result<(), SaveError> {
        debug_assert!(self.records.is_empty() || self.node == node);
        self.node = node;
        let len = u64::from(record.len.get());
        let is_run = form::is_run(record.form);
        self.pages += if is_run { len } else { 1 };
        self.lost += if record.form == form::LOST { len } else { 0 };
        if let Some(last) = self.records.last_mut().filter(|_| is_run) {
            let before = u64::from(last.len.get());
            let same = (last.form, last.pattern) == (record.form, record.pattern);
            if same && last.page.get() + before == record.page.get() && before + len <= RUN_PAGES_MAX {
                last.len = U16::new((before + len) as u16);
                return Ok(());
            }
        }
        self.records.push(record);
        self.data.extend_from_slice(data);
        if self.data.len() + size_of_val(&*self.records) >= BLOCK_TARGET_BYTES {
            self.end_of_node()?;
        }
        Ok(())
    }

    /// Writes the collected pages as a block, if there are any.
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

    /// Writes the commit record and returns the result of the save.
    pub fn finish(mut self) -> Result<SaveReport, SaveError> {
        let file_bytes = self.at + (size_of::<BlockHeader>() + size_of::<EndRecord>()) as u64;
        let end = EndRecord {
            blocks: U64::new(self.blocks),
            pages: U64::new(self.pages),
            file_bytes: U64::new(file_bytes),
            digest: U64::new(self.digest.digest()),
        };
        self.put_block(kind::END, 0, 1, &[end.as_bytes()])?;
        debug_assert_eq!(self.at, file_bytes);
        if let Some(mut header) = self.header.filter(|_| self.lost > 0) {
            // The version depends on whether pages are lost, which is known only now: rewrite the
            // header.
            header.version = U32::new(VERSION_LOST);
            header.checksum = U64::new(header.sum());
            self.file.write_all_at(header.as_bytes(), 0).map_err(|source| self.failed(source))?;
        }
        Ok(SaveReport { pages: self.pages, lost: self.lost, file_bytes })
    }

    fn put_block(&mut self, kind: u32, node: u32, records: u32, payload: &[&[u8]]) -> Result<(), SaveError> {
        let mut header = BlockHeader {
            checksum: U64::ZERO,
            magic: BLOCK_MAGIC,
            kind: U32::new(kind),
            number: U64::new(self.blocks),
            node: U32::new(node),
            records: U32::new(records),
            payload_bytes: U32::new(payload.iter().map(|part| part.len()).sum::<usize>() as u32),
            head_checksum: U32::ZERO,
        };
        if self.is_kept && kind == kind::PAGES {
            header.head_checksum = U32::new(head_sum(&header, payload[0], self.salt));
        }
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

    fn wrong(&self, what: &'static str) -> SaveError {
        self.failed(io::Error::other(what))
    }

    fn failed(&self, source: io::Error) -> SaveError {
        SaveError::Write { path: self.path.to_owned(), source }
    }
}

/// A writer of the pages of a plan's nodes.
pub struct PageWriter<'a> {
    pub to: Writer<'a>,
    /// Nodes and numbers of pages that were saved as lost, but that another save may be able to
    /// read.
    pub unread: Vec<(u32, u64)>,
    plan: &'a Plan,
    /// Numbers of algorithms in the file, by node and priority.
    numbers: HashMap<(u32, u8), u8>,
}

impl<'a> PageWriter<'a> {
    /// Creates a writer of pages for a file whose contents are already written.
    pub fn new(to: Writer<'a>, plan: &'a Plan) -> Self {
        Self { to, unread: Vec::new(), plan, numbers: HashMap::new() }
    }

    /// Writes all algorithms of the nodes, even if no page refers to them, so that trained
    /// dictionaries are saved.
    pub fn all_algorithms(mut self) -> Result<Self, SaveError> {
        for node in 0..self.plan.nodes.len() as u32 {
            for priority in 0..=PRIORITIES as u8 {
                self.number(node, priority)?;
            }
        }
        Ok(self)
    }

    /// Returns the number in the file of a node's algorithm, and writes the algorithm first if
    /// necessary. Returns `None` if the priority has no algorithm.
    fn number(&mut self, node: u32, priority: u8) -> Result<Option<u8>, SaveError> {
        if let Some(&number) = self.numbers.get(&(node, priority)) {
            return Ok(Some(number));
        }
        let ram = &self.plan.nodes[node as usize].ram;
        let known = ram.streams(priority, |streams, trained| FileAlgorithm {
            algorithm: streams.algorithm(),
            level: streams.level(),
            trained,
            dictionary: streams.dictionary().cloned(),
        });
        let Some(known) = known else { return Ok(None) };
        let number = self.to.algorithm(known)?;
        self.numbers.insert((node, priority), number);
        Ok(Some(number))
    }

    /// Adds a page in its stored form; see [`Writer::record`].
    pub fn page(&mut self, node: u32, page: u64, stored: StoredForm, bytes: &[u8]) -> Result<(), SaveError> {
        let len = if bytes.is_empty() { 1 } else { bytes.len() };
        let record = |form, algorithm, pattern| PageRecord {
            page: U64::new(page),
            form,
            algorithm,
            len: U16::new(len as u16),
            pattern,
        };
        let record = match stored {
            StoredForm::Same(pattern) => record(form::SAME, 0, pattern.to_ne_bytes()),
            StoredForm::Parent => record(form::BELOW, 0, [0; 4]),
            StoredForm::Lost { .. } if !self.to.is_kept => {
                let device = self.plan.nodes[node as usize].label.clone();
                return Err(SaveError::Page { device, page, error: Error::Media });
            }
            StoredForm::Lost { permanent } => {
                if !permanent {
                    self.unread.push((node, page));
                }
                record(form::LOST, 0, [0; 4])
            }
            StoredForm::Pattern => record(form::PATTERN, 0, [0; 4]),
            StoredForm::Compressed(priority) => {
                let Some(number) = self.number(node, priority)? else {
                    return Err(self.to.wrong("a page's algorithm is not known"));
                };
                record(form::COMPRESSED, number, [0; 4])
            }
            StoredForm::Huge => {
                let number = self.number(node, 0)?.unwrap_or_default();
                record(form::HUGE, number, [0; 4])
            }
        };
        self.to.record(node, record, bytes)
    }
}

fn node_record(node: &super::plan::Node) -> NodeRecord {
    let (over, below) = node.over.fields();
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
        mem_limit: U64::new(node.mem_limit),
    }
}
