//! A qcow2 image and its backing chain, opened once; layer 0 is the image itself.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::{Damage, Fault, SetupError};
use super::header::{self, Header};
use super::source::Source;
use super::table::Table;
use freestone_core::device;
use freestone_core::log_limit::LogLimit;
use freestone_core::sync::Mutex;
use freestone_core::work_queue::Task;

/// Maximum number of layers in a chain. Each layer uses a descriptor, metadata caches and a thread.
pub(super) const MAX_LAYERS: usize = 64;

/// Format of a backing file or base image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Raw disk content, without metadata.
    Raw,
    /// A qcow2 image.
    Qcow2,
}

impl Format {
    /// Returns the name of the format, as in qcow2 headers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// One image of a backing chain.
pub(super) struct Layer {
    /// Size of the layer's disk in bytes, a multiple of 512.
    pub size: u64,
    pub source: Source,
    /// The external data file, if the image has one.
    pub data: Option<Source>,
    /// Cluster mapping of a qcow2 image; `None` for a raw file.
    pub table: Option<Table>,
}

/// The images of a backing chain; each is backed by the next one.
pub(super) struct Chain {
    pub layers: Vec<Layer>,
    /// Compressed clusters that are being decompressed, by layer and cluster number, with the
    /// requests that wait for each. Leaf lock, held for a few instructions.
    pub unpacking: Mutex<HashMap<(usize, u64), Vec<Task>>>,
    /// Rate limit, per layer, of log lines about damage and read errors.
    lines: LogLimit<usize>,
}

type Setup<T> = Result<T, SetupError>;

impl Chain {
    /// Opens an image and its backing chain. Blocks during the reads of headers and tables.
    pub fn open(path: &Path, standalone: bool) -> Setup<Arc<Self>> {
        let mut layers = Vec::new();
        let mut next = Some((path.to_owned(), Some(Format::Qcow2)));
        while let Some((path, format)) = next.take() {
            if layers.len() == MAX_LAYERS {
                return Err(refuse(&path, Fault::TooDeep(MAX_LAYERS)));
            }
            let source = Source::open(&path)?;
            let format = match format {
                Some(format) => format,
                None => probe(&source, &path)?,
            };
            let layer = match format {
                // The length is rounded up to whole sectors, as qemu does.
                Format::Raw => {
                    Layer { size: source.len().next_multiple_of(512), source, data: None, table: None }
                }
                Format::Qcow2 => Layer::qcow2(source, &path, standalone)?,
            };
            if let Some(table) = &layer.table {
                next = backing(&path, &table.header, standalone)?;
            }
            layers.push(layer);
        }
        Ok(Self::of(layers))
    }

    pub fn open_top(path: &Path) -> Setup<Arc<Self>> {
        let source = Source::open(path)?;
        Ok(Self::of(vec![Layer::qcow2(source, path, true)?]))
    }

    fn of(layers: Vec<Layer>) -> Arc<Self> {
        Arc::new(Self { layers, unpacking: Mutex::default(), lines: LogLimit::default() })
    }

    /// Logs damage of a layer at metadata on which byte `at` of the disk depends. Returns the error
    /// for reads of that byte.
    pub fn damaged(&self, layer: usize, at: u64, damage: Damage) -> device::Error {
        if let Some(suppressed) = self.lines.admit(layer) {
            let file = self.layers[layer].source.path();
            tracing::warn!(file = %file.display(), disk_byte = at, "the image is damaged: {damage}{suppressed}");
        }
        device::Error::Media
    }

    /// Logs that `source`, a file of a layer, cannot be read at byte `host`, and returns `error`.
    pub fn unreadable(
        &self,
        layer: usize,
        source: &Source,
        host: u64,
        error: device::Error,
    ) -> device::Error {
        if error == device::Error::Media
            && let Some(suppressed) = self.lines.admit(layer)
        {
            let file = source.path();
            tracing::warn!(file = %file.display(), byte = host, "the file cannot be read: {error}{suppressed}");
        }
        error
    }

    pub fn size(&self) -> u64 {
        self.layers.first().map_or(0, |top| top.size)
    }

    /// Returns the sources (files) of all layers, that of the image itself first.
    pub fn sources(&self) -> impl Iterator<Item = &Source> {
        self.layers.iter().flat_map(|layer| [Some(&layer.source), layer.data.as_ref()]).flatten()
    }

    pub fn paths(&self) -> impl Iterator<Item = PathBuf> {
        self.sources().map(Source::path)
    }
}

impl Layer {
    fn qcow2(source: Source, path: &Path, standalone: bool) -> Setup<Self> {
        let header = read_header(&source, path)?;
        if header.is_corrupt {
            tracing::warn!(path = %path.display(), "the image is marked corrupt; it is read as far as possible");
        }
        let data = if header.has_data_file {
            let Some(name) = &header.data_file else {
                let what = "it needs a data file but does not name one".to_owned();
                return Err(refuse(path, Fault::Corrupt(what)));
            };
            if standalone {
                return Err(not_standalone(path, "data file", name));
            }
            Some(Source::open(&resolve_relative(path, name))?)
        } else {
            None
        };
        let size = header.size;
        let loaded = Table::load(header, &source).map_err(|error| SetupError::Read {
            path: path.to_owned(),
            what: "L1 table",
            error,
        })?;
        let table = loaded.ok_or_else(|| {
            refuse(path, Fault::Corrupt("its L1 table lies beyond the end of the file".to_owned()))
        })?;
        Ok(Self { size, source, data, table: Some(table) })
    }

    /// Returns the file that contains the clusters: the external data file or the image.
    pub fn clusters(&self) -> &Source {
        self.data.as_ref().unwrap_or(&self.source)
    }
}

fn read_header(source: &Source, path: &Path) -> Setup<Header> {
    let mut head = head(source, header::V3_BYTES as usize + 8, path)?;
    let cluster = header::cluster_bytes(&head).map_err(|fault| refuse(path, fault))?;
    head = self::head(source, cluster as usize, path)?;
    Header::parse(&head).map_err(|fault| refuse(path, fault))
}

/// Returns the first `len` bytes of a file, or the whole file if it is shorter.
fn head(source: &Source, len: usize, path: &Path) -> Setup<Vec<u8>> {
    let mut head = vec![0; source.len().min(len as u64) as usize];
    source.read(0, &mut head).map_err(|error| SetupError::Read {
        path: path.to_owned(),
        what: "header",
        error,
    })?;
    Ok(head)
}

/// Probes the format of a backing file if the image does not name it, as qemu does. A guest may
/// have written a qcow2 header into a raw disk; because of that risk, qemu-img requires the format.
fn probe(source: &Source, path: &Path) -> Setup<Format> {
    let head = head(source, 4, path)?;
    Ok(if head == header::MAGIC.to_be_bytes() { Format::Qcow2 } else { Format::Raw })
}

/// Returns the path and the format (if named) of the backing file; `None` without a backing file.
fn backing(path: &Path, header: &Header, standalone: bool) -> Setup<Option<(PathBuf, Option<Format>)>> {
    let Some(name) = &header.backing else { return Ok(None) };
    if standalone {
        return Err(not_standalone(path, "backing file", name));
    }
    let format = match header.backing_format.as_deref() {
        None => None,
        Some("raw" | "file" | "host_device") => Some(Format::Raw),
        Some("qcow2") => Some(Format::Qcow2),
        Some(other) => return Err(refuse(path, Fault::BackingFormat(other.to_owned()))),
    };
    Ok(Some((resolve_relative(path, name), format)))
}

/// Resolves a file name in an image; a relative name is relative to the directory of the image.
pub(super) fn resolve_relative(image: &Path, name: &Path) -> PathBuf {
    match image.parent() {
        Some(dir) => dir.join(name),
        None => name.to_owned(),
    }
}

fn refuse(path: &Path, fault: Fault) -> SetupError {
    SetupError::Image { path: path.to_owned(), fault }
}

fn not_standalone(path: &Path, what: &'static str, name: &Path) -> SetupError {
    refuse(path, Fault::NotStandalone { what, name: name.to_string_lossy().into_owned() })
}
