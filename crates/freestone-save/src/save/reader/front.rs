//! The parts of a saved file that are read first: header, commit record and list of devices.

use std::collections::HashSet;

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};
use zerocopy::FromBytes as _;

use super::{END_BYTES, End, Reader};
use crate::save::format::{
    BaseRecord, BlockHeader, EndRecord, Header, KeptRecord, MAGIC, NodeParent, NodeRecord, SIZE_UNIT_BYTES,
    VERSION, VERSION_KEPT, VERSION_WHOLE_PAGES, algorithm_of, block_sum, kind,
};
use crate::save::{BaseCheck, BaseIdentity, DEPTH_MAX, DEVICES_MAX, NAME_BYTES_MAX, RestoreError};
use freestone_core::PAGE_BYTES;
use freestone_core::device::Error;
use freestone_ram::codec::Algorithm;
use freestone_ram::ram::{DISKSIZE_BYTES_MAX, SetupError};

/// Maximum size in bytes of the contents: bases, nodes and names.
const CONTENTS_BYTES_MAX: u64 = size_of::<KeptRecord>() as u64
    + (DEVICES_MAX * (size_of::<BaseRecord>() + size_of::<NodeRecord>() + NAME_BYTES_MAX)) as u64;

/// A node (device or snapshot) of the file.
pub struct Node {
    pub size: u64,
    pub over: NodeParent,
    pub snapshot: bool,
    pub name: Option<String>,
    pub algorithm: Algorithm,
    pub level: i32,
    /// Memory limit of a fork's own pages in bytes; 0: no limit.
    pub mem_limit: u64,
    /// True if the node is a disk: neither the node nor an earlier node of its chain has a parent.
    /// A disk has whole pages.
    pub is_disk: bool,
}

impl Node {
    /// Returns the name of the device for error messages.
    pub fn label(&self) -> String {
        self.name.clone().unwrap_or_else(|| "a snapshot below others".to_owned())
    }

    pub fn setup_error(&self, error: SetupError) -> RestoreError {
        RestoreError::Setup { device: self.label(), error }
    }

    pub fn store_error(&self, page: u64, error: Error) -> RestoreError {
        RestoreError::Store { device: self.label(), page, error }
    }
}

impl Reader {
    pub(super) fn header(&mut self, len: u64) -> Result<Header, RestoreError> {
        let mut start = [0; size_of::<Header>()];
        let there = start.len().min(len as usize);
        self.read(&mut start[..there], 0)?;
        let Ok(header) = Header::read_from_bytes(&start) else { return Err(self.damaged("no header")) };
        if header.magic[..there.min(MAGIC.len())] != MAGIC[..there.min(MAGIC.len())] || there == 0 {
            return Err(RestoreError::Foreign(self.path.clone()));
        }
        if there < start.len() {
            return Err(RestoreError::Incomplete(self.path.clone()));
        }
        let version = header.version.get();
        if version > VERSION {
            return Err(RestoreError::Newer { path: self.path.clone(), version });
        }
        if header.checksum.get() != header.sum() {
            return Err(self.damaged("the header's checksum is wrong"));
        }
        if version == 0 || header.reserved.get() != 0 || header.reserved2.get() != 0 {
            return Err(self.damaged("the header has invalid fields"));
        }
        (self.salt, self.version) = (header.salt.get(), version);
        self.digest = Xxh3::with_seed(self.salt);
        Ok(header)
    }

    pub(super) fn commit_record(&self, len: u64) -> Result<End, RestoreError> {
        let incomplete = || RestoreError::Incomplete(self.path.clone());
        let at = len.checked_sub(END_BYTES as u64).ok_or_else(incomplete)?;
        let mut end = [0; END_BYTES];
        self.read(&mut end, at)?;
        let (header, payload) = BlockHeader::read_from_prefix(&end).map_err(|_| incomplete())?;
        let record = EndRecord::read_from_bytes(payload).map_err(|_| incomplete())?;
        let sound = header.checksum.get() == block_sum(&end, self.salt)
            && header.kind.get() == kind::END
            && header.number.get() == record.blocks.get()
            && record.file_bytes.get() == len;
        if !sound {
            return Err(incomplete());
        }
        Ok(End {
            file_bytes: len,
            pages: record.pages.get(),
            blocks: record.blocks.get(),
            digest: record.digest.get(),
        })
    }

    pub(super) fn contents(&mut self, header: &Header, len: u64) -> Result<(), RestoreError> {
        self.at = size_of::<Header>() as u64;
        let bytes = u64::from(header.contents_bytes.get());
        let (bases, nodes) = (header.bases.get() as usize, header.nodes.get() as usize);
        if bytes > CONTENTS_BYTES_MAX.min(len - self.at) || bases > DEVICES_MAX || nodes > DEVICES_MAX {
            return Err(self.damaged("the list of devices is too long"));
        }
        let mut contents = vec![0; bytes as usize];
        self.read(&mut contents, self.at)?;
        if xxh3_64_with_seed(&contents, self.salt) != header.contents_checksum.get() {
            return Err(self.damaged("the checksum of the list of devices is wrong"));
        }
        let mut listed = &contents[..];
        if self.version >= VERSION_KEPT {
            let Ok((kept, rest)) = KeptRecord::read_from_prefix(listed) else {
                return Err(self.damaged("the list of devices is too short"));
            };
            (self.kept, listed) = (Some(kept), rest);
        }
        let Ok((base_records, rest)) = <[BaseRecord]>::ref_from_prefix_with_elems(listed, bases) else {
            return Err(self.damaged("the list of devices is too short"));
        };
        let Ok((node_records, mut names)) = <[NodeRecord]>::ref_from_prefix_with_elems(rest, nodes) else {
            return Err(self.damaged("the list of devices is too short"));
        };
        for record in base_records {
            let check = match record.check {
                1 => BaseCheck::Sampled,
                2 => BaseCheck::Whole,
                _ => return Err(self.damaged("a base has an unknown kind of identity")),
            };
            let hash = u128::from_le_bytes(record.hash);
            self.bases.push(BaseIdentity { size: record.size.get(), check, hash });
        }
        let (mut depths, mut known, mut followed) = (Vec::new(), HashSet::new(), HashSet::new());
        let mut nodes = Vec::new();
        for record in node_records {
            let (name, rest) = names
                .split_at_checked(record.name_bytes.get().into())
                .ok_or_else(|| self.damaged("a name is truncated"))?;
            names = rest;
            let (node, depth) = self.node(record, name, (&nodes, &depths))?;
            if let NodeParent::After(before) = node.over
                && !followed.insert(before)
            {
                return Err(self.damaged("two devices follow the same snapshot"));
            }
            if node.name.as_ref().is_some_and(|name| !known.insert(name.clone())) {
                return Err(self.damaged("a name occurs twice"));
            }
            depths.push(depth);
            nodes.push(node);
        }
        if !names.is_empty() {
            return Err(self.damaged("there are more names than devices"));
        }
        self.nodes = nodes.into();
        self.at += bytes;
        Ok(())
    }

    fn node(
        &self,
        record: &NodeRecord,
        name: &[u8],
        (nodes, depths): (&[Node], &[u32]),
    ) -> Result<(Node, u32), RestoreError> {
        let (below, size) = (record.below.get(), record.size.get());
        let (over, depth) = match record.over {
            0 => (NodeParent::Nothing, 1),
            1 if (below as usize) < self.bases.len() => (NodeParent::Base(below), 1),
            // Only a snapshot can be the parent of another node.
            2 if nodes.get(below as usize).is_some_and(|node| node.snapshot) => {
                (NodeParent::Node(below), depths[below as usize] + 1)
            }
            3 if nodes.get(below as usize).is_some_and(|node| node.snapshot && node.size <= size) => {
                (NodeParent::After(below), depths[below as usize])
            }
            _ => return Err(self.damaged("a device has an invalid parent")),
        };
        let is_disk = match over {
            NodeParent::Nothing => true,
            NodeParent::After(before) => nodes[before as usize].is_disk,
            NodeParent::Base(_) | NodeParent::Node(_) => false,
        };
        let whole_pages = is_disk || self.version == VERSION_WHOLE_PAGES;
        let unit = if whole_pages { PAGE_BYTES as u64 } else { SIZE_UNIT_BYTES };
        let sound = depth <= DEPTH_MAX
            && record.snapshot <= 1
            && (1..=DISKSIZE_BYTES_MAX).contains(&size)
            && size.is_multiple_of(unit);
        let algorithm = algorithm_of(record.algorithm);
        let (true, Some(algorithm)) = (sound, algorithm) else {
            return Err(self.damaged("a device has invalid properties"));
        };
        let name = match name {
            // Only snapshots may be saved without a name.
            [] if record.snapshot == 1 => None,
            [] => return Err(self.damaged("a device has no name")),
            _ if name.len() > NAME_BYTES_MAX => return Err(self.damaged("a name is too long")),
            _ => match String::from_utf8(name.to_vec()) {
                Ok(name) => Some(name),
                Err(_) => return Err(self.damaged("a name is not valid UTF-8")),
            },
        };
        let (snapshot, level) = (record.snapshot == 1, record.level.get());
        let mem_limit = record.mem_limit.get();
        Ok((Node { size, over, snapshot, name, algorithm, level, mem_limit, is_disk }, depth))
    }
}
