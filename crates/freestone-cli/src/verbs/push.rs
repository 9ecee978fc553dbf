//! `push NAME URL[:TAG]`: writes the content of a device to object storage, and sets a tag.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use freestone::device::Device;
use freestone::ram::{Lower, Ram};
use freestone::store::objects::Until;
use freestone::store::push::{self, Layer, Over, Pushed, Source};
use freestone::store::store::{Begin, Error, Store};
use freestone::store::url::ImageUrl;
use freestone_spec::entries::a_kind;
use freestone_spec::kinds::{Entry, Pulled, of_store};
use freestone_spec::refusal::{Errno, Refusal};
use freestone_spec::size::human;
use freestone_spec::stores::PushSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::long::TIME_MAX;
use super::{Verb, check_bare, keys};
use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::job::{JobKind, Watched};
use crate::service::Service;

pub struct Push;

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// The device; NAME=KIND,KEY=VALUE... as for serve opens it for this push, without a server
    #[arg(value_parser = keys::words_parser())]
    name: String,
    /// The store and the tag of the image [default tag: latest]
    #[arg(value_name = "URL[:TAG]", value_parser = keys::words_parser())]
    url: String,
    #[arg(value_name = "KEY=VALUE", value_parser = keys::words_parser())]
    #[arg(
        help = "endpoint=URL, region=NAME, credentials=FILE; key=FILE (key of the object names); for a new \
                store also encrypt=yes and grace=TIME; with --restore also mem_limit=SIZE, backing_dev=PATH \
                and the other keys of a family, as for restore"
    )]
    pub(super) words: Vec<String>,
    /// Do not build on the previous image; send all missing chunks
    #[arg(long)]
    full: bool,
    /// Push NAME from this file, which `freestone save` wrote, without a server
    #[arg(long, value_name = "FILE")]
    pub(super) restore: Option<PathBuf>,
    /// With --restore: a base of the saved forks, as for serve; repeat it for bases of bases
    #[arg(long = "device", value_name = "NAME=KIND,KEY=VALUE...", requires = "restore")]
    #[arg(value_parser = keys::words_parser())]
    pub(super) devices: Vec<String>,
}

/// Parameters of the request.
#[derive(Debug, Serialize, Deserialize)]
pub struct Params {
    pub(super) name: String,
    url: String,
    #[serde(default)]
    pub(super) full: bool,
    /// All other members are keys of the store, which refuses unknown ones.
    #[serde(flatten)]
    pub(super) keys: Map<String, Value>,
}

/// Result of the verb.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// URL of the image, with its hash.
    url: String,
    /// Number of times that the tag was set.
    generation: u64,
    /// False if the tag already referred to this image.
    changed: bool,
    /// Bytes of pages that differ from the previous image.
    changed_bytes: u64,
    /// Number and bytes of the chunks that were sent.
    sent_chunks: u64,
    sent_bytes: u64,
    /// Number of chunks that the store had already.
    reused_chunks: u64,
}

impl TryFrom<Line> for Params {
    type Error = Usage;

    fn try_from(line: Line) -> Result<Self, Usage> {
        let Line { name, url, words, full, .. } = line;
        let keys = keys::parse_words(label(&name), Push::METHOD, &words)?;
        let params = Self { name, url, full, keys };
        params.parse().map_err(|fault| Usage(fault.message))?;
        Ok(params)
    }
}

impl Line {
    /// Returns true if the program pushes itself, without a server.
    pub fn is_local(&self) -> bool {
        self.name.contains('=') || self.restore.is_some()
    }
}

/// Returns the name of a device from a text that may have `=KIND,KEY=VALUE...` after it.
fn label(name: &str) -> &str {
    name.split('=').next().unwrap_or_default()
}

impl Params {
    pub(super) fn parse(&self) -> Result<(ImageUrl, PushSpec), Fault> {
        let name = self.label();
        let url: ImageUrl =
            self.url.parse().map_err(|why| Fault::invalid(format!("{name}: push: the URL {why}")))?;
        let entries = keys::entries_of(name, Push::METHOD, &self.keys)?;
        let spec = PushSpec::from_entries(entries, &url.store).map_err(|e| Fault::invalid(e.to_string()))?;
        let ImageUrl { image: None, .. } = &url else {
            return Err(Fault::invalid(format!(
                "{name}: push: a tag is set, so the URL has no image behind @"
            )));
        };
        Ok((url, spec))
    }

    /// Returns true if the name describes a device that is opened only for this push.
    pub(super) fn has_device_spec(&self) -> bool {
        self.name.contains('=')
    }

    /// Returns the name of the device.
    pub(super) fn label(&self) -> &str {
        label(&self.name)
    }
}

impl Verb for Push {
    const METHOD: &'static str = "push";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Params) -> String> = Some(|params| params.name.clone());
    type Params = Params;
    type Reply = Reply;

    // Claims nothing: the verb takes as long as the network does.
    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let (url, spec) = params.parse()?;
        let name = &params.name;
        let entry = service.find(name)?;
        check_bare(&entry, "pushed")?;
        let job = service.jobs.begin(name, Self::METHOD, JobKind::EXCLUSIVE)?;
        let content = Content::of(&entry)?;
        let spec = content.inherit_store(&url, spec, &params.keys);
        let pushed = send(&content, name, &url, &spec, params.full, &job);
        let pushed = pushed.map_err(|refusal| match refusal.errno {
            Errno::ECANCELED => job.cancelled("the tag is unchanged; the next push reuses the sent chunks"),
            _ => Fault::from(refusal.of(&format!("{name}: push"))),
        })?;
        Ok(Reply::new(name, &url, &pushed))
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply { name, url, generation, changed_bytes, sent_chunks, sent_bytes, reused_chunks, .. } =
            reply;
        if !reply.changed {
            return writeln!(out, "{name}: {url} is the same already");
        }
        let (changed, sent) = (human(*changed_bytes), human(*sent_bytes));
        write!(out, "{name}: pushed to {url}, generation {generation}; {changed} differed, {sent} sent")?;
        match (sent_chunks, reused_chunks) {
            (0, 0) => writeln!(out, ": all that differed are zeroes now"),
            (0, _) => writeln!(out, ": the store had all {reused_chunks} chunks already"),
            _ => writeln!(out, " in {sent_chunks} chunks"),
        }
    }
}

impl Reply {
    pub(super) fn new(name: &str, url: &ImageUrl, pushed: &Pushed) -> Self {
        Self {
            name: name.to_owned(),
            url: url.of(pushed.manifest).to_string(),
            generation: pushed.generation,
            changed: pushed.is_new,
            changed_bytes: pushed.changed_pages * freestone::PAGE_BYTES as u64,
            sent_chunks: pushed.sent.0,
            sent_bytes: pushed.sent.1,
            reused_chunks: pushed.reused,
        }
    }
}

/// The content of a device at one moment.
pub(super) struct Content {
    device: Arc<dyn Device>,
    /// The changes of the device, and of each snapshot between it and its base, newest first.
    changes: Vec<Arc<dyn Device>>,
    /// The image that the device is based on.
    base: Option<Arc<Entry>>,
}

impl Content {
    /// Captures the content: takes a temporary snapshot of a device in memory, and fails for other writable
    /// devices.
    pub(super) fn of(entry: &Entry) -> Result<Self, Fault> {
        let name = entry.name();
        let failed = |why: &dyn std::fmt::Display| Fault::failed(Errno::EIO, format!("{name}: push: {why}"));
        let (live, snapshot) = (entry.kind.ram(), entry.kind.memory_snapshot());
        let ram = match (live, snapshot) {
            (_, Some(snapshot)) => Some((**snapshot).clone()),
            (Some(live), None) => Some(live.snapshot().map_err(|e| failed(&e))?),
            (None, None) => None,
        };
        let Some(ram) = ram else {
            return match entry.device() {
                Some(device) if device.geometry().read_only => {
                    Ok(Self { device: Arc::clone(device), changes: Vec::new(), base: None })
                }
                Some(_) if entry.kind.check_origin().is_ok() => {
                    let why = "changes while it is read; push a snapshot of it";
                    Err(Fault::failed(
                        Errno::EBUSY,
                        format!("{name}: push: {why}: freestone snapshot {name} NAME"),
                    ))
                }
                _ => {
                    let kind = a_kind(entry.kind.name());
                    let why = format!(
                        "{name}: push: {kind} device of that sort is not pushed; what is read-only, snapshots, ram devices and forks are"
                    );
                    Err(Fault::failed(Errno::EOPNOTSUPP, why))
                }
            };
        };
        // A snapshot below may have no entry: it was in a saved file only for its fork.
        let over_base = |ram: &Ram| match ram.over_base() {
            Ok(over) => Ok(Arc::new(over) as Arc<dyn Device>),
            Err(e) => Err(failed(&e)),
        };
        let mut changes = vec![over_base(&ram)?];
        let mut below = ram.lower();
        let base = loop {
            match below {
                Lower::Nothing => break None,
                Lower::Device(device) => break image_of(entry, &device),
                Lower::Snapshot(snapshot) => {
                    changes.push(over_base(&snapshot)?);
                    below = snapshot.lower();
                }
            }
        };
        Ok(Self { device: Arc::new(ram), changes, base })
    }

    /// Returns the changes and the base image, if that is in the store.
    fn over(&self, store: &Store) -> Option<(Vec<Layer<'_>>, &Pulled)> {
        let pulled = self.base.as_ref()?.kind.stored()?;
        let is_in_store = pulled.image.store().domain().id == store.domain().id;
        let layers: Option<Vec<_>> = self.changes.iter().map(|device| Layer::of(&**device)).collect();
        layers.filter(|_| is_in_store).map(|layers| (layers, pulled))
    }

    /// Uses the store settings of the base image, if it is in the same store and the request has no keys.
    pub(super) fn inherit_store(
        &self,
        url: &ImageUrl,
        spec: PushSpec,
        keys: &Map<String, Value>,
    ) -> PushSpec {
        let base = self.base.as_ref().and_then(|base| match &base.spec.kind {
            freestone_spec::kinds::KindSpec::Image(image) if image.url.store == url.store => Some(image),
            _ => None,
        });
        match base {
            Some(image) if keys.is_empty() => PushSpec { store: image.store.clone(), ..spec },
            _ => spec,
        }
    }
}

/// Returns the entry of the image that is `device`, among the devices below `entry`.
fn image_of(entry: &Entry, device: &Arc<dyn Device>) -> Option<Arc<Entry>> {
    let matches = |base: &Arc<Entry>| {
        base.kind.stored().is_some() && base.device().is_some_and(|of_base| Arc::ptr_eq(of_base, device))
    };
    let needs = entry.needs();
    needs
        .iter()
        .find(|base| matches(base))
        .cloned()
        .or_else(|| needs.iter().find_map(|base| image_of(base, device)))
}

/// Opens or creates the store, and pushes the content.
pub(super) fn send(
    content: &Content,
    label: &str,
    url: &ImageUrl,
    spec: &PushSpec,
    full: bool,
    watched: &dyn Watched,
) -> Result<Pushed, Refusal> {
    let is_over = || watched.is_over();
    let until = Until { deadline: Instant::now() + TIME_MAX, is_over: &is_over };
    let store_until = until.at_most(spec.store.timeout());
    let objects = spec.store.objects(&url.store)?;
    let secret = spec.store.secret()?;
    let begin = Begin { encrypted: spec.encrypt, grace: spec.grace };
    let failed = |error: Error| of_store(&error);
    let (store, is_new) =
        Store::open_or_begin(objects, secret.as_ref(), begin, store_until).map_err(failed)?;
    let over = content.over(&store);
    let over = over.as_ref().map(|(layers, pulled)| Over {
        layers,
        base: pulled.image.name(),
        tag: Some(&pulled.url.tag),
    });
    let source = Source { device: &*content.device, label, over };
    let options = push::Options { tag: &url.tag, full, threads: push::THREADS, is_new };
    push::push(&store, source, options, &|done, total| watched.note(done, total), until).map_err(failed)
}
