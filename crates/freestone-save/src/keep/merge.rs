//! Merging of a chain into one whole file. The merge reads the files only, not the devices.
//!
//! The newest record of each page is copied unchanged. Memory use: an index of 24 bytes per record
//! (twice that temporarily), and one block of each file.

use std::collections::HashMap;
use std::sync::Arc;

use zerocopy::byteorder::little_endian::{I32, U16, U32, U64};

use super::KeepError;
use super::file::{FileMetadata, LoadedBlock, scan};
use super::restore::MergedChain;
use crate::save::format::{KeptRecord, NodeParent, NodeRecord, algorithm_id};
use crate::save::reader::Node;
use crate::save::writer::{Contents, Writer};
use crate::save::{SaveError, SaveReport};

/// Number of entries copied between two polls of `cancelled`.
const TURN_ENTRIES: usize = 256;

/// Writes the merged content of a chain as the whole file of a new generation.
pub fn merge(
    paths: impl Iterator<Item = std::path::PathBuf>,
    mut writer: Writer<'_>,
    generation: u64,
    cancelled: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<SaveReport, KeepError> {
    let files: Result<Vec<FileMetadata>, _> =
        paths.enumerate().map(|(number, path)| scan(&path, number)).collect();
    let files = files?;
    let all: u64 = files.iter().map(|file| file.blocks.bytes).sum();
    let Some(newest) = files.last().map(|file| file.kept) else {
        return Err(SaveError::NoDevices.into());
    };
    let Some(whole) = MergedChain::new(files) else { return Err(SaveError::NoDevices.into()) };
    let kept =
        KeptRecord { generation: U64::new(generation), number: U32::ZERO, continues: U64::ZERO, ..newest };
    let nodes: Arc<[Node]> = Arc::clone(&whole.nodes);
    writer.contents(&Contents {
        kept: Some(kept),
        bases: &whole.bases,
        nodes: nodes.iter().map(node_record).collect(),
        names: nodes.iter().filter_map(|node| node.name.as_deref()).collect(),
    })?;
    let mut numbers: HashMap<(usize, u8), u8> = HashMap::new();
    for (number, file) in whole.files.iter().enumerate() {
        for (algorithm, learned) in (0_u8..).zip(&file.algorithms) {
            numbers.insert((number, algorithm), writer.algorithm(learned.clone())?);
        }
    }
    let mut loaded: Vec<LoadedBlock> = whole.files.iter().map(|_| LoadedBlock::default()).collect();
    let mut done = 0;
    for (node, entries) in whole.entries.iter().enumerate() {
        let may_be_below = matches!(nodes[node].over, NodeParent::After(_));
        for (at, entry) in entries.iter().enumerate() {
            if at % TURN_ENTRIES == 0 {
                if cancelled() {
                    return Err(SaveError::Cancelled.into());
                }
                progress(done, all);
            }
            if entry.is_below() && !may_be_below {
                continue;
            }
            let file = entry.file();
            let what = "a block is damaged, so its pages cannot be merged";
            let blocks = &whole.files[file].blocks;
            let data = if entry.is_run() { &[][..] } else { loaded[file].data(blocks, entry, what)? };
            let algorithm = entry.algorithm().and_then(|own| numbers.get(&(file, own)).copied());
            writer.record(node as u32, entry.record(algorithm.unwrap_or_default()), data)?;
            done += data.len() as u64 + 16;
        }
        writer.end_of_node()?;
    }
    Ok(writer.finish()?)
}

fn node_record(node: &Node) -> NodeRecord {
    let (over, below) = node.over.fields();
    NodeRecord {
        size: U64::new(node.size),
        below: U32::new(below),
        over,
        snapshot: node.snapshot.into(),
        name_bytes: U16::new(node.name.as_ref().map_or(0, String::len) as u16),
        algorithm: algorithm_id(node.algorithm),
        reserved: [0; 3],
        level: I32::new(node.level),
        mem_limit: U64::new(node.mem_limit),
    }
}
