//! `push NAME URL[:TAG]`: writes the content of a device to an image store, and sets a tag to the new image.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use freestone::device::Device;
use freestone::ram::{ParentDevice, Ram};
use freestone::store::objects::CallLimits;
use freestone::store::push::{self, BaseImage, Layer, PushReport, Source};
use freestone::store::store::{CreateOptions, Error, Store};
use freestone::store::url::ImageUrl;
use freestone_control::protocol::RpcError;
use freestone_spec::entries::with_article;
use freestone_spec::kinds::{Entry, OpenImage, of_store};
use freestone_spec::refusal::{Errno, Refusal};
use freestone_spec::size::human;
use freestone_spec::stores::PushSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::jobs::{JobKind, ProgressSink};
use crate::service::Service;
use crate::usage::Usage;
use crate::verbs::text::keys;
use crate::verbs::{TIME_MAX, Verb, check_bare};

pub struct Push;

/// Command line of the verb `push`.
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
    pub words: Vec<String>,
    /// Do not build on the previous image; send all missing chunks
    #[arg(long)]
    full: bool,
    /// Push NAME from this file, which `freestone save` wrote, without a server
    #[arg(long, value_name = "FILE")]
    pub restore: Option<PathBuf>,
    /// With --restore: a base of the saved forks, as for serve; repeat it for bases of bases
    #[arg(long = "device", value_name = "NAME=KIND,KEY=VALUE...", requires = "restore")]
    #[arg(value_parser = keys::words_parser())]
    pub devices: Vec<String>,
}

/// Parameters of the verb `push` in a JSON request.
#[derive(Debug, Serialize, Deserialize)]
pub struct Params {
    pub name: String,
    url: String,
    #[serde(default)]
    pub full: bool,
    /// All other members of the request are keys of the image store. The store's specification refuses unknown keys.
    #[serde(flatten)]
    pub keys: Map<String, Value>,
}

/// Result of the verb `push`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// URL of the image, including its hash.
    url: String,
    /// Generation of the tag: the number of times that it was set.
    generation: u64,
    /// False if the tag referred to this image already, so that it was not set.
    changed: bool,
    /// Number of bytes in pages that differ from the previous image.
    changed_bytes: u64,
    /// Number of chunks that were sent to the image store, and their size in bytes.
    sent_chunks: u64,
    sent_bytes: u64,
    /// Number of chunks that were not sent because the image store contained them already.
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
    /// Returns true if the program pushes the device itself, without a server.
    pub fn is_local(&self) -> bool {
        self.name.contains('=') || self.restore.is_some()
    }
}

/// Returns the name of a device from a text that may continue with `=KIND,KEY=VALUE...`.
fn label(name: &str) -> &str {
    name.split('=').next().unwrap_or_default()
}

impl Params {
    pub fn parse(&self) -> Result<(ImageUrl, PushSpec), RpcError> {
        let name = self.label();
        let url: ImageUrl =
            self.url.parse().map_err(|why| refusal!(invalid, "{name}: push: the URL {why}"))?;
        let entries = keys::entries_of(name, Push::METHOD, &self.keys)?;
        let spec = PushSpec::from_entries(entries, &url.store)?;
        let ImageUrl { image: None, .. } = &url else {
            refuse!(invalid, "{name}: push: a tag is set, so the URL has no image behind @");
        };
        Ok((url, spec))
    }

    /// Returns true if the name contains a specification of a device, which is opened only for this push.
    pub fn has_device_spec(&self) -> bool {
        self.name.contains('=')
    }

    /// Returns the name of the device, without a specification.
    pub fn label(&self) -> &str {
        label(&self.name)
    }
}

impl Verb for Push {
    const METHOD: &'static str = "push";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Params) -> String> = Some(|params| params.name.clone());
    type Params = Params;
    type Reply = Reply;

    // The device is not claimed (locked against other verbs), because a slow network would block these verbs.
    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
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
            _ => RpcError::from(refusal.of(&format!("{name}: push"))),
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
    pub fn new(name: &str, url: &ImageUrl, pushed: &PushReport) -> Self {
        Self {
            name: name.to_owned(),
            url: url.with_image(pushed.manifest).to_string(),
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
pub struct Content {
    device: Arc<dyn Device>,
    /// The changes of the device over its parent, and those of each snapshot between the device and its base,
    /// newest first.
    changes: Vec<Arc<dyn Device>>,
    /// The entry of the image that the device is based on; None if the base is not an image.
    base: Option<Arc<Entry>>,
}

impl Content {
    /// Captures the content of a device. A device in memory is captured by a temporary snapshot. Other devices
    /// must be read-only.
    pub fn of(entry: &Entry) -> Result<Self, RpcError> {
        let name = entry.name();
        let failed = |why: &dyn std::fmt::Display| rpc_error!(EIO, "{name}: push: {why}");
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
                    refuse!(EBUSY, "{name}: push: {why}: freestone snapshot {name} NAME")
                }
                _ => {
                    let kind = with_article(entry.kind.name());
                    let why =
                        "of that sort is not pushed; what is read-only, snapshots, ram devices and forks are";
                    refuse!(EOPNOTSUPP, "{name}: push: {kind} device {why}")
                }
            };
        };
        // A snapshot between the device and its base may have no entry, if it was saved only because a fork
        // depends on it.
        let over_base = |ram: &Ram| match ram.over_base() {
            Ok(over) => Ok(Arc::new(over) as Arc<dyn Device>),
            Err(e) => Err(failed(&e)),
        };
        let mut changes = vec![over_base(&ram)?];
        let mut below = ram.parent_device();
        let base = loop {
            match below {
                ParentDevice::Nothing => break None,
                ParentDevice::Device(device) => break image_of(entry, &device),
                ParentDevice::Snapshot(snapshot) => {
                    changes.push(over_base(&snapshot)?);
                    below = snapshot.parent_device();
                }
            }
        };
        Ok(Self { device: Arc::new(ram), changes, base })
    }

    /// Returns the changes and the base image. Returns None if the device has no base image in this image store.
    fn over(&self, store: &Store) -> Option<(Vec<Layer<'_>>, &OpenImage)> {
        let pulled = self.base.as_ref()?.kind.stored_image()?;
        let is_in_store = pulled.image.store().domain().id == store.domain().id;
        let layers: Option<Vec<_>> = self.changes.iter().map(|device| Layer::of(&**device)).collect();
        layers.filter(|_| is_in_store).map(|layers| (layers, pulled))
    }

    /// Uses the settings of the base image's store, if the image is pushed to the same store and the request
    /// contains no keys.
    pub fn inherit_store(&self, url: &ImageUrl, spec: PushSpec, keys: &Map<String, Value>) -> PushSpec {
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

/// Returns the entry of the image whose device is `device`, among the direct and indirect dependencies of `entry`.
fn image_of(entry: &Entry, device: &Arc<dyn Device>) -> Option<Arc<Entry>> {
    let matches = |base: &Arc<Entry>| {
        base.kind.stored_image().is_some()
            && base.device().is_some_and(|of_base| Arc::ptr_eq(of_base, device))
    };
    let needs = entry.dependencies();
    needs
        .iter()
        .find(|base| matches(base))
        .cloned()
        .or_else(|| needs.iter().find_map(|base| image_of(base, device)))
}

/// Opens or creates the image store, and pushes the content. `watched` receives the progress and can cancel the push.
pub fn send(
    content: &Content,
    label: &str,
    url: &ImageUrl,
    spec: &PushSpec,
    full: bool,
    watched: &dyn ProgressSink,
) -> Result<PushReport, Refusal> {
    let is_over = || watched.should_stop();
    let until = CallLimits { deadline: Instant::now() + TIME_MAX, is_cancelled: &is_over };
    let store_until = until.at_most(spec.store.timeout());
    let objects = spec.store.objects(&url.store)?;
    let secret = spec.store.secret()?;
    let begin = CreateOptions { encrypted: spec.encrypt, grace: spec.grace };
    let failed = |error: Error| of_store(&error);
    let (store, is_new) =
        Store::open_or_create(objects, secret.as_ref(), begin, store_until).map_err(failed)?;
    let over = content.over(&store);
    let over = over.as_ref().map(|(layers, pulled)| BaseImage {
        layers,
        name: pulled.image.name(),
        tag: Some(&pulled.url.tag),
    });
    let source = Source { device: &*content.device, label, base_image: over };
    let options = push::Options { tag: &url.tag, full, threads: push::THREADS, is_new };
    push::push(&store, source, options, &|done, total| watched.report(done, total), until).map_err(failed)
}
