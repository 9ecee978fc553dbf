//! Reads through a backing chain, as far as possible without blocking.

use std::sync::Arc;

use freestone_core::device::{Error, Result};

use super::chain::Chain;
use super::error::Damage;
use super::inflate::inflate;
use super::source::Source;
use super::table::{Entry, SliceAt};

/// Position of a read in its range. The cursor also keeps the slice and cluster for which the read
/// waited, as another request may evict them from the caches at once.
#[derive(Default)]
pub(super) struct Cursor {
    /// Next byte to read, and end of the range.
    pub at: u64,
    pub end: u64,
    /// Layer that is searched for the next byte, and length of the current run in bytes.
    layer: usize,
    run: u64,
    slice: Option<(usize, SliceAt, Arc<[u64]>)>,
    cluster: Option<(usize, u64, Arc<[u8]>)>,
}

/// Data that must be read from a disk before a cursor can advance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fetch {
    /// A slice of an L2 table of a layer.
    Slice { layer: usize, slice: SliceAt },
    /// Data of the next `len` bytes of the range, at byte `host` of the layer's file.
    Data { layer: usize, host: u64, len: u64 },
    /// A compressed cluster: `len` bytes from byte `host` on. `number` is its index on the virtual
    /// disk.
    Cluster { layer: usize, number: u64, host: u64, len: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Location {
    /// The run is not allocated in any layer, and reads as zeroes.
    Nowhere,
    /// The run reads as zeroes. `allocated` is true if the zero cluster has space in the file.
    Zero { allocated: bool },
    /// The run is at byte `host` of the layer's file.
    Data { layer: usize, host: u64 },
    /// The run is a part of a compressed cluster.
    Cluster { layer: usize, number: u64, host: u64, len: u64 },
    /// The location is unknown until this metadata is read.
    Fetch(Fetch),
}

impl Cursor {
    pub fn new(offset: u64, len: u64) -> Self {
        let end = offset + len;
        Self { at: offset, end, run: len, ..Self::default() }
    }

    /// Returns the length in bytes of the run that was located last.
    pub fn run(&self) -> u64 {
        self.run
    }

    pub fn pass(&mut self, len: u64) {
        self.at += len;
        self.layer = 0;
        self.run = self.end - self.at;
    }
}

impl Chain {
    /// Locates the run (bytes in one place of a file) at the cursor, and sets [`Cursor::run`].
    /// Reads metadata only if that does not block.
    pub fn locate(&self, cursor: &mut Cursor) -> Result<Location> {
        while let Some(layer) = self.layers.get(cursor.layer) {
            // Beyond the end of a backing image that is smaller than its overlay, the disk reads as
            // zeroes. The backing file of that image is not used there.
            let Some(rest) = layer.size.checked_sub(cursor.at).filter(|&rest| rest > 0) else { break };
            cursor.run = cursor.run.min(rest);
            let Some(table) = &layer.table else {
                return Ok(Location::Data { layer: cursor.layer, host: cursor.at });
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
                    None => return Ok(Location::Fetch(Fetch::Slice { layer: cursor.layer, slice })),
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
                Entry::Zero { allocated } => Location::Zero { allocated },
                Entry::Data { host } => {
                    // A data file may be short, and so may the last cluster of an image. A whole
                    // missing cluster is damage.
                    if layer.data.is_none() {
                        let cluster = table.header.cluster_bytes();
                        let end = layer.source.len().next_multiple_of(cluster);
                        let there = end.checked_sub(host).filter(|&there| there > 0 && host >= cluster);
                        cursor.run = cursor.run.min(there.ok_or_else(|| damaged(Damage::Place(host)))?);
                    }
                    Location::Data { layer: cursor.layer, host }
                }
                Entry::Compressed { host, len } => {
                    // The length is a number of sectors, and the file may end within the last one.
                    // The decompressor must not receive zeroes in place of missing bytes.
                    let len = len.min(layer.source.len().saturating_sub(host));
                    if len == 0 {
                        return Err(damaged(Damage::Place(host)));
                    }
                    let number = cursor.at / table.header.cluster_bytes();
                    Location::Cluster { layer: cursor.layer, number, host, len }
                }
            });
        }
        Ok(Location::Nowhere)
    }

    /// Returns the entries of a slice of an L2 table; `None` if they are not cached and a read
    /// would block.
    fn slice(&self, number: usize, at: u64, slice: SliceAt) -> Result<Option<Arc<[u64]>>> {
        let layer = &self.layers[number];
        let Some(table) = &layer.table else { return Err(Error::Media) };
        if let Some(entries) = table.cached_slice(slice) {
            return Ok(Some(entries));
        }
        let mut bytes = vec![0; table.slice_bytes()];
        if slice.host + bytes.len() as u64 > layer.source.len() {
            return Err(self.damaged(number, at, Damage::TableBehindEnd(slice.host)));
        }
        let read = layer.source.try_read(slice.host, &mut bytes);
        let found = read.map_err(|error| self.unreadable(number, &layer.source, slice.host, error))?;
        Ok((found == bytes.len()).then(|| table.cache_slice(slice, &bytes)))
    }

    /// Reads as much of the cursor's range as possible without blocking. `out` is the buffer for
    /// the range that starts at byte `base`. Returns the disk read that is needed before the next
    /// call, or `None` at the end of the range.
    pub fn advance(&self, cursor: &mut Cursor, base: u64, out: &mut [u8]) -> Result<Option<Fetch>> {
        while cursor.at < cursor.end {
            let found = self.locate(cursor)?;
            let from = (cursor.at - base) as usize;
            let to = from + cursor.run as usize;
            let Some(part) = out.get_mut(from..to) else { return Err(Error::Media) };
            let done = match found {
                Location::Nowhere | Location::Zero { .. } => {
                    part.fill(0);
                    cursor.run
                }
                Location::Data { layer, host } => {
                    let source = self.layers[layer].clusters();
                    let read = source.try_read(host, part);
                    match read.map_err(|error| self.unreadable(layer, source, host, error))? as u64 {
                        0 => return Ok(Some(Fetch::Data { layer, host, len: cursor.run })),
                        done => done,
                    }
                }
                Location::Cluster { layer, number, host, len } => {
                    let Some(cluster) = self.unpacked(cursor, layer, number) else {
                        return Ok(Some(Fetch::Cluster { layer, number, host, len }));
                    };
                    // A run never crosses the end of its cluster.
                    let start_in_cluster = cursor.at as usize % cluster.len();
                    part.copy_from_slice(&cluster[start_in_cluster..start_in_cluster + part.len()]);
                    cursor.run
                }
                Location::Fetch(need) => return Ok(Some(need)),
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

    /// Caches a slice of an L2 table that was read for the cursor.
    pub fn store_slice(&self, cursor: &mut Cursor, layer: usize, slice: SliceAt, bytes: &[u8]) {
        if let Some(table) = &self.layers[layer].table {
            cursor.slice = Some((layer, slice, table.cache_slice(slice, bytes)));
        }
    }

    /// Decompresses and caches a cluster that was read for the cursor.
    pub fn store_cluster(&self, cursor: &mut Cursor, layer: usize, number: u64, packed: &[u8]) -> Result<()> {
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

    fn read_blocking(&self, layer: usize, source: &Source, host: u64, out: &mut [u8]) -> Result<()> {
        source.read(host, out).map_err(|error| self.unreadable(layer, source, host, error))
    }

    /// Performs the disk read `need` and blocks. `base` and `out` are as in
    /// [`advance`](Self::advance).
    pub fn perform(&self, cursor: &mut Cursor, need: Fetch, base: u64, out: &mut [u8]) -> Result<()> {
        match need {
            Fetch::Slice { layer, slice } => {
                let Some(table) = &self.layers[layer].table else { return Err(Error::Media) };
                let mut bytes = vec![0; table.slice_bytes()];
                self.read_blocking(layer, &self.layers[layer].source, slice.host, &mut bytes)?;
                self.store_slice(cursor, layer, slice, &bytes);
            }
            Fetch::Data { layer, host, len } => {
                let from = (cursor.at - base) as usize;
                let Some(part) = out.get_mut(from..from + len as usize) else { return Err(Error::Media) };
                self.read_blocking(layer, self.layers[layer].clusters(), host, part)?;
                cursor.pass(len);
            }
            Fetch::Cluster { layer, number, host, len } => {
                let mut packed = vec![0; len as usize];
                self.read_blocking(layer, &self.layers[layer].source, host, &mut packed)?;
                self.store_cluster(cursor, layer, number, &packed)?;
            }
        }
        Ok(())
    }

    /// Reads a range of the disk from byte `offset` on. Blocks on disk reads.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut cursor = Cursor::new(offset, out.len() as u64);
        while let Some(need) = self.advance(&mut cursor, offset, out)? {
            self.perform(&mut cursor, need, offset, out)?;
        }
        Ok(())
    }

    /// Locates the run at the cursor like [`locate`](Self::locate), but blocks to read metadata.
    pub fn locate_blocking(&self, cursor: &mut Cursor) -> Result<Location> {
        loop {
            match self.locate(cursor)? {
                Location::Fetch(need) => self.perform(cursor, need, cursor.at, &mut [])?,
                found => return Ok(found),
            }
        }
    }
}
