//! `push NAME URL[:TAG]`: what a device holds, into object storage.

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
use crate::job::{Kind, Watched};
use crate::service::Service;

/// The verb.
pub struct Push;

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// The device. With NAME=KIND,KEY=VALUE... as for serve it is opened for this alone, without a server
    #[arg(value_parser = keys::words_parser())]
    name: String,
    /// The store, and the tag that the image gets [default tag: latest]
    #[arg(value_name = "URL[:TAG]", value_parser = keys::words_parser())]
    url: String,
    /// Of the store.
    #[arg(value_name = "KEY=VALUE", value_parser = keys::words_parser())]
    #[arg(
        help = "endpoint=URL, region=NAME, credentials=FILE: where and how it is reached; key=FILE: the key of its names; \
                  where the push begins the store encrypt=yes and grace=TIME. With --restore also mem_limit=SIZE, \
                  backing_dev=PATH and the other keys of a family, as for restore"
    )]
    pub(super) words: Vec<String>,
    /// Refer to no image that was there before: send all that is not there yet
    #[arg(long)]
    full: bool,
    /// NAME is in this file, which `freestone save` wrote; its devices are made for this alone, without a server
    #[arg(long, value_name = "FILE")]
    pub(super) restore: Option<PathBuf>,
    /// What the forks in that file were made of, opened for this alone as for serve; several where one stands on
    /// another
    #[arg(long = "device", value_name = "NAME=KIND,KEY=VALUE...", requires = "restore")]
    #[arg(value_parser = keys::words_parser())]
    pub(super) devices: Vec<String>,
}

/// Its parameters.
#[derive(Debug, Serialize, Deserialize)]
pub struct Params {
    pub(super) name: String,
    url: String,
    #[serde(default)]
    pub(super) full: bool,
    /// All else is keys of the store, which refuse what is unknown.
    #[serde(flatten)]
    pub(super) keys: Map<String, Value>,
}

/// What was pushed.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// With the image.
    url: String,
    /// How often the tag was set.
    generation: u64,
    /// False where the tag said the same before.
    changed: bool,
    /// Bytes of the pages that differ from what was there.
    changed_bytes: u64,
    /// Chunks that were sent, and their bytes.
    sent_chunks: u64,
    sent_bytes: u64,
    /// Chunks that were there.
    reused_chunks: u64,
}

impl TryFrom<Line> for Params {
    type Error = Usage;

    fn try_from(line: Line) -> Result<Self, Usage> {
        let Line { name, url, words, full, .. } = line;
        let keys = keys::of_words(label(&name), Push::METHOD, &words)?;
        let params = Self { name, url, full, keys };
        params.parse().map_err(|fault| Usage(fault.message))?;
        Ok(params)
    }
}

impl Line {
    /// Whether no server is asked.
    pub fn is_local(&self) -> bool {
        self.name.contains('=') || self.restore.is_some()
    }
}

/// The name of a device, which may have words behind it.
fn label(name: &str) -> &str {
    name.split('=').next().unwrap_or_default()
}

impl Params {
    pub(super) fn parse(&self) -> Result<(ImageUrl, PushSpec), Fault> {
        let name = self.label();
        let url: ImageUrl =
            self.url.parse().map_err(|why| Fault::invalid(format!("{name}: push: the URL {why}")))?;
        let entries = keys::of(name, Push::METHOD, &self.keys)?;
        let spec = PushSpec::from_entries(entries, &url.store).map_err(|e| Fault::invalid(e.to_string()))?;
        let ImageUrl { image: None, .. } = &url else {
            return Err(Fault::invalid(format!(
                "{name}: push: a tag is set, so the URL has no image behind @"
            )));
        };
        Ok((url, spec))
    }

    /// Whether these are the words of a device, which is opened for this alone.
    pub(super) fn is_opened(&self) -> bool {
        self.name.contains('=')
    }

    /// The name of the device.
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

    // Takes as long as the network does: nothing is claimed.
    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let (url, spec) = params.parse()?;
        let name = &params.name;
        let entry = service.find(name)?;
        check_bare(&entry, "pushed")?;
        let job = service.jobs.begin(name, Self::METHOD, Kind::ALONE)?;
        let moment = Moment::of(&entry)?;
        let spec = moment.reached_as(&url, spec, &params.keys);
        let pushed = send(&moment, name, &url, &spec, params.full, &job);
        let pushed = pushed.map_err(|refusal| match refusal.errno {
            Errno::ECANCELED => {
                job.cancelled("the tag is as it was; what was sent is found by the next push")
            }
            _ => Fault::from(refusal.of(&format!("{name}: push"))),
        })?;
        Ok(Reply::new(name, &url, &pushed))
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply { name, url, generation, changed_bytes, sent_chunks, sent_bytes, .. } = reply;
        if !reply.changed {
            return writeln!(out, "{name}: {url} is the same already");
        }
        let (differs, sent) = (human(*changed_bytes), human(*sent_bytes));
        writeln!(
            out,
            "{name}: pushed to {url}, generation {generation}; {differs} differed, {sent} sent in {sent_chunks} chunks"
        )
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

/// What a device holds at one moment.
pub(super) struct Moment {
    device: Arc<dyn Device>,
    /// What it, and what lies between, hold themselves over an image.
    own: Vec<Arc<dyn Device>>,
    base: Option<Arc<Entry>>,
}

impl Moment {
    /// Of what changes in memory a snapshot for the time being; what changes on a disk is refused.
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
                    Ok(Self { device: Arc::clone(device), own: Vec::new(), base: None })
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
        // What lies below may have no name here: a snapshot that was in a saved file for its fork alone.
        let over_base = |ram: &Ram| match ram.over_base() {
            Ok(over) => Ok(Arc::new(over) as Arc<dyn Device>),
            Err(e) => Err(failed(&e)),
        };
        let mut own = vec![over_base(&ram)?];
        let mut below = ram.lower();
        let base = loop {
            match below {
                Lower::Nothing => break None,
                Lower::Device(device) => break image_of(entry, &device),
                Lower::Snapshot(snapshot) => {
                    own.push(over_base(&snapshot)?);
                    below = snapshot.lower();
                }
            }
        };
        Ok(Self { device: Arc::new(ram), own, base })
    }

    /// What it is a change of, if that lies in the store, and what changed.
    fn over(&self, store: &Store) -> Option<(Vec<Layer<'_>>, &Pulled)> {
        let pulled = self.base.as_ref()?.kind.stored()?;
        let is_there = pulled.image.store().domain().id == store.domain().id;
        let own: Option<Vec<_>> = self.own.iter().map(|device| Layer::of(&**device)).collect();
        own.filter(|_| is_there).map(|own| (own, pulled))
    }

    /// A store is reached as its image is, where nothing else was said.
    pub(super) fn reached_as(&self, url: &ImageUrl, spec: PushSpec, said: &Map<String, Value>) -> PushSpec {
        let base = self.base.as_ref().and_then(|base| match &base.spec.kind {
            freestone_spec::kinds::KindSpec::Image(image) if image.url.store == url.store => Some(image),
            _ => None,
        });
        match base {
            Some(image) if said.is_empty() => PushSpec { store: image.store.clone(), ..spec },
            _ => spec,
        }
    }
}

/// The image that a device stands on and that is this one.
fn image_of(entry: &Entry, device: &Arc<dyn Device>) -> Option<Arc<Entry>> {
    let is_it = |base: &Arc<Entry>| {
        base.kind.stored().is_some() && base.device().is_some_and(|of_base| Arc::ptr_eq(of_base, device))
    };
    let needs = entry.needs();
    needs
        .iter()
        .find(|base| is_it(base))
        .cloned()
        .or_else(|| needs.iter().find_map(|base| image_of(base, device)))
}

/// Opens the store, and pushes to it.
pub(super) fn send(
    moment: &Moment,
    label: &str,
    url: &ImageUrl,
    spec: &PushSpec,
    full: bool,
    watched: &dyn Watched,
) -> Result<Pushed, Refusal> {
    let is_over = || watched.is_over();
    let until = Until { deadline: Instant::now() + TIME_MAX, is_over: &is_over };
    let asked = until.at_most(spec.store.timeout());
    let objects = spec.store.objects(&url.store)?;
    let secret = spec.store.secret()?;
    let begin = Begin { encrypted: spec.encrypt, grace: spec.grace };
    let failed = |error: Error| of_store(&error);
    let (store, is_new) = Store::open_or_begin(objects, secret.as_ref(), begin, asked).map_err(failed)?;
    let over = moment.over(&store);
    let over = over.as_ref().map(|(layers, pulled)| Over {
        layers,
        base: pulled.image.name(),
        tag: Some(&pulled.url.tag),
    });
    let source = Source { device: &*moment.device, label, over };
    let options = push::Options { tag: &url.tag, full, threads: push::THREADS, is_new };
    push::push(&store, source, options, &|done, total| watched.note(done, total), until).map_err(failed)
}
