//! Reading through a chain of images, as far as it goes without waiting.

use std::sync::Arc;

use freestone_core::device::{Error, Result};

use super::chain::Chain;
use super::error::Damage;
use super::inflate::inflate;
use super::source::Source;
use super::table::{Entry, SliceAt};

/// How far a range has been read, and what was found out on the way. What had to be waited for is
/// kept here and not only in the caches: another request may push it out of those at once.
#[derive(Default)]
pub(super) struct Cursor {
    /// The next byte, and the end of the range.
    pub at: u64,
    pub end: u64,
    /// The image that the next byte is looked for in, and how many bytes are looked for.
    layer: usize,
    run: u64,
    slice: Option<(usize, SliceAt, Arc<[u64]>)>,
    cluster: Option<(usize, u64, Arc<[u8]>)>,
}

/// What must be read from a disk before a cursor can go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// Metadata.
    Slice { layer: usize, slice: SliceAt },
    /// Data for the next `len` bytes, at this byte of the file.
    Data { layer: usize, host: u64, len: u64 },
    /// A compressed cluster, by its number on the disk.
    Cluster { layer: usize, number: u64, host: u64, len: u64 },
}

/// What the next bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// No image has them.
    Nowhere,
    /// Zeroes in an image, with or without a place.
    Zero { kept: bool },
    /// Data of an image.
    Data { layer: usize, host: u64 },
    /// A part of a compressed cluster.
    Cluster { layer: usize, number: u64, host: u64, len: u64 },
    /// Unknown yet.
    Need(Need),
}

impl Cursor {
    pub fn new(offset: u64, len: u64) -> Self {
        let end = offset + len;
        Self { at: offset, end, run: len, ..Self::default() }
    }

    /// How many of the next bytes are of one kind, once they have been located.
    pub fn run(&self) -> u64 {
        self.run
    }

    /// `len` bytes are done.
    pub fn pass(&mut self, len: u64) {
        self.at += len;
        self.layer = 0;
        self.run = self.end - self.at;
    }
}

impl Chain {
    /// Finds out what the next bytes are; [`Cursor::run`] then says how many. Metadata is read
    /// where that needs no waiting.
    pub fn locate(&self, cursor: &mut Cursor) -> Result<Found> {
        while let Some(layer) = self.layers.get(cursor.layer) {
            // A smaller image under a larger one is followed by zeroes, whatever it stands on.
            let Some(rest) = layer.size.checked_sub(cursor.at).filter(|&rest| rest > 0) else { break };
            cursor.run = cursor.run.min(rest);
            let Some(table) = &layer.table else {
                return Ok(Found::Data { layer: cursor.layer, host: cursor.at });
            };
            let (at, number) = (cursor.at, cursor.layer);
            let damaged = |damage| self.damaged(number, at, damage);
            let (slice, until) = table.slice_at(at).map_err(damaged)?;
            cursor.run = cursor.run.min(until - cursor.at);
            let Some(slice) = slice else {
                cursor.layer += 1;
                continue;
            };
            let entries = match &cursor.slice {
                Some((of, held, entries)) if (*of, *held) == (cursor.layer, slice) => Arc::clone(entries),
                _ => match self.slice(number, at, slice)? {
                    Some(entries) => entries,
                    None => return Ok(Found::Need(Need::Slice { layer: cursor.layer, slice })),
                },
            };
            let (entry, run) = table.entry(&entries, at, cursor.run).map_err(damaged)?;
            cursor.slice = Some((cursor.layer, slice, entries));
            cursor.run = run;
            return Ok(match entry {
                Entry::Absent => {
                    cursor.layer += 1;
                    continue;
                }
                Entry::Zero { kept } => Found::Zero { kept },
                Entry::Data { host } => {
                    // The end of a data file may be missing, and so may the end of the last
                    // cluster; whole ones may not.
                    if layer.data.is_none() {
                        let cluster = table.header.cluster_bytes();
                        let end = layer.source.len().next_multiple_of(cluster);
                        let there = end.checked_sub(host).filter(|&there| there > 0 && host >= cluster);
                        cursor.run = cursor.run.min(there.ok_or_else(|| damaged(Damage::Place(host)))?);
                    }
                    Found::Data { layer: cursor.layer, host }
                }
                Entry::Compressed { host, len } => {
                    // Counted in sectors, of which the file may have the beginning. Zeroes in the
                    // place of what it does not have might be unpacked into something.
                    let len = len.min(layer.source.len().saturating_sub(host));
                    if len == 0 {
                        return Err(damaged(Damage::Place(host)));
                    }
                    let number = cursor.at / table.header.cluster_bytes();
                    Found::Cluster { layer: cursor.layer, number, host, len }
                }
            });
        }
        Ok(Found::Nowhere)
    }

    /// Entries that are kept, or can be read without waiting.
    fn slice(&self, number: usize, at: u64, slice: SliceAt) -> Result<Option<Arc<[u64]>>> {
        let layer = &self.layers[number];
        let Some(table) = &layer.table else { return Err(Error::Media) };
        if let Some(entries) = table.kept(slice) {
            return Ok(Some(entries));
        }
        let mut bytes = vec![0; table.slice_bytes()];
        if slice.host + bytes.len() as u64 > layer.source.len() {
            return Err(self.damaged(number, at, Damage::TableBehindEnd(slice.host)));
        }
        let read = layer.source.try_read(slice.host, &mut bytes);
        let found = read.map_err(|error| self.unreadable(number, &layer.source, slice.host, error))?;
        Ok((found == bytes.len()).then(|| table.keep(slice, &bytes)))
    }

    /// Reads as much of a cursor's range as needs no waiting. `out` is the memory of the range from
    /// byte `base` on. Says what must be read first; `None` at the end of the range.
    pub fn advance(&self, cursor: &mut Cursor, base: u64, out: &mut [u8]) -> Result<Option<Need>> {
        while cursor.at < cursor.end {
            let found = self.locate(cursor)?;
            let from = (cursor.at - base) as usize;
            let to = from + cursor.run as usize;
            let Some(part) = out.get_mut(from..to) else { return Err(Error::Media) };
            let done = match found {
                Found::Nowhere | Found::Zero { .. } => {
                    part.fill(0);
                    cursor.run
                }
                Found::Data { layer, host } => {
                    let source = self.layers[layer].clusters();
                    let read = source.try_read(host, part);
                    match read.map_err(|error| self.unreadable(layer, source, host, error))? as u64 {
                        0 => return Ok(Some(Need::Data { layer, host, len: cursor.run })),
                        done => done,
                    }
                }
                Found::Cluster { layer, number, host, len } => {
                    let Some(cluster) = self.unpacked(cursor, layer, number) else {
                        return Ok(Some(Need::Cluster { layer, number, host, len }));
                    };
                    // A cluster is at least as long as what is located in it.
                    let within = cursor.at as usize % cluster.len();
                    part.copy_from_slice(&cluster[within..within + part.len()]);
                    cursor.run
                }
                Found::Need(need) => return Ok(Some(need)),
            };
            cursor.pass(done);
        }
        Ok(None)
    }

    fn unpacked(&self, cursor: &Cursor, layer: usize, number: u64) -> Option<Arc<[u8]>> {
        match &cursor.cluster {
            Some((of, held, cluster)) if (*of, *held) == (layer, number) => Some(Arc::clone(cluster)),
            _ => self.layers.get(layer)?.table.as_ref()?.unpacked.get(number),
        }
    }

    /// Takes the bytes of a slice that was needed.
    pub fn take_slice(&self, cursor: &mut Cursor, layer: usize, slice: SliceAt, bytes: &[u8]) {
        if let Some(table) = &self.layers[layer].table {
            cursor.slice = Some((layer, slice, table.keep(slice, bytes)));
        }
    }

    /// Takes the bytes of a compressed cluster that was needed.
    pub fn take_cluster(&self, cursor: &mut Cursor, layer: usize, number: u64, packed: &[u8]) -> Result<()> {
        let Some(table) = &self.layers[layer].table else { return Err(Error::Media) };
        let mut cluster = vec![0; table.header.cluster_bytes() as usize];
        inflate(table.header.compression, packed, &mut cluster).map_err(|error| match error {
            Error::Media => self.damaged(layer, number * table.header.cluster_bytes(), Damage::Compressed),
            other => other,
        })?;
        let cluster: Arc<[u8]> = cluster.into();
        table.unpacked.put(number, Arc::clone(&cluster));
        cursor.cluster = Some((layer, number, cluster));
        Ok(())
    }

    fn read_waiting(&self, layer: usize, source: &Source, host: u64, out: &mut [u8]) -> Result<()> {
        source.read(host, out).map_err(|error| self.unreadable(layer, source, host, error))
    }

    /// Reads what is needed, and waits for it. `out` as in [`advance`](Self::advance).
    pub fn wait(&self, cursor: &mut Cursor, need: Need, base: u64, out: &mut [u8]) -> Result<()> {
        match need {
            Need::Slice { layer, slice } => {
                let Some(table) = &self.layers[layer].table else { return Err(Error::Media) };
                let mut bytes = vec![0; table.slice_bytes()];
                self.read_waiting(layer, &self.layers[layer].source, slice.host, &mut bytes)?;
                self.take_slice(cursor, layer, slice, &bytes);
            }
            Need::Data { layer, host, len } => {
                let from = (cursor.at - base) as usize;
                let Some(part) = out.get_mut(from..from + len as usize) else { return Err(Error::Media) };
                self.read_waiting(layer, self.layers[layer].clusters(), host, part)?;
                cursor.pass(len);
            }
            Need::Cluster { layer, number, host, len } => {
                let mut packed = vec![0; len as usize];
                self.read_waiting(layer, &self.layers[layer].source, host, &mut packed)?;
                self.take_cluster(cursor, layer, number, &packed)?;
            }
        }
        Ok(())
    }

    /// Reads a range and waits for it.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut cursor = Cursor::new(offset, out.len() as u64);
        while let Some(need) = self.advance(&mut cursor, offset, out)? {
            self.wait(&mut cursor, need, offset, out)?;
        }
        Ok(())
    }

    /// [`locate`](Self::locate), waiting for metadata.
    pub fn locate_waiting(&self, cursor: &mut Cursor) -> Result<Found> {
        loop {
            match self.locate(cursor)? {
                Found::Need(need) => self.wait(cursor, need, cursor.at, &mut [])?,
                found => return Ok(found),
            }
        }
    }
}
