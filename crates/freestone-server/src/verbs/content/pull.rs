//! `pull URL[:TAG] NAME`: fetches a whole image from an image store into the local cache.

use std::io::{self, Write};
use std::time::Instant;

use clap::Args;
use freestone::store::format::CHUNK_BYTES;
use freestone::store::objects::CallLimits;
use freestone_control::protocol::RpcError;
use freestone_spec::entries::with_article;
use freestone_spec::kinds::{Spec, of_store};
use freestone_spec::size::human;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::changes::recording::Recording;
use crate::jobs::JobKind;
use crate::service::Service;
use crate::usage::Usage;
use crate::verbs::text::keys;
use crate::verbs::{TIME_MAX, Verb};

/// Size of a chunk in bytes, to convert the progress from chunks to bytes.
const CHUNK: u64 = CHUNK_BYTES as u64;

pub struct Pull;

/// Parameters of the verb `pull`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
pub struct Params {
    /// The store and the tag of the image [default tag: latest]
    #[arg(value_name = "URL[:TAG]", value_parser = keys::words_parser())]
    url: String,
    /// The image device; created if it does not exist
    name: String,
    #[arg(value_name = "KEY=VALUE", value_parser = keys::words_parser())]
    #[arg(
        help = "Keys of a new device: cache=DIR, cache_size=SIZE, key=FILE, endpoint=URL and others, as for \
                serve"
    )]
    #[serde(skip)]
    words: Vec<String>,
    /// All other members of the request are keys of the device. The device's specification refuses unknown keys.
    #[arg(skip)]
    #[serde(flatten)]
    keys: Map<String, Value>,
}

/// Result of the verb `pull`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// URL of the image, including its hash.
    url: String,
    /// True if the device did not exist before.
    created: bool,
    /// Number of chunks that were fetched because the cache did not contain them, and bytes of the pages in
    /// these chunks.
    fetched_chunks: u64,
    fetched_bytes: u64,
}

impl Params {
    /// Converts the words of the command line to keys, and checks the keys before the server is called.
    pub fn checked(mut self) -> Result<Self, Usage> {
        self.keys = keys::parse_words(&self.name, "image", &self.words)?;
        self.spec().map_err(|fault| Usage(fault.message))?;
        Ok(self)
    }

    fn spec(&self) -> Result<Spec, RpcError> {
        let mut entries = keys::entries_of(&self.name, "image", &self.keys)?;
        entries.add("url", &self.url)?;
        Ok(Spec::from_entries(entries)?)
    }
}

impl Verb for Pull {
    const METHOD: &'static str = "pull";
    const READ_ONLY: bool = false;
    const LONG: Option<fn(&Params) -> String> = Some(|params| params.name.clone());
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let spec = params.spec()?;
        let name = &params.name;
        let publish = spec.publish.unwrap_or(false);
        let (entry, created) = {
            let claim = service.claim_new(Self::METHOD, [&spec])?;
            let recording = Recording::begin(service, &claim, Self::METHOD, &[name])?;
            let (entry, created) = service.create_if_absent(&claim, spec, publish)?;
            if created {
                recording.commit().inspect_err(|_| service.undo_create(&claim, &entry))?;
            }
            (entry, created)
        };
        let Some(pulled) = entry.kind.stored_image() else {
            refuse!(EEXIST, "{name}: pull: is {} device", with_article(entry.kind.name()));
        };
        let job = service.jobs.begin(name, Self::METHOD, JobKind::EXCLUSIVE)?;
        let before = pulled.image.stat();
        let is_over = || job.should_stop();
        let until = CallLimits { deadline: Instant::now() + TIME_MAX, is_cancelled: &is_over };
        let outcome = pulled.image.pull(&|done, total| job.report(done * CHUNK, total * CHUNK), until);
        outcome.map_err(|error| {
            if job.should_stop() {
                return job.cancelled("the device exists, and the fetched chunks stay in its cache");
            }
            let kept = if created { "; the device was created" } else { "" };
            let refusal = of_store(&error);
            RpcError::failed(refusal.errno, format!("{name}: pull: {}{kept}", refusal.sentence))
        })?;
        let after = pulled.image.stat();
        Ok(Reply {
            name: name.clone(),
            url: pulled.url.to_string(),
            created,
            fetched_chunks: after.fetched - before.fetched,
            fetched_bytes: after.fetched_bytes - before.fetched_bytes,
        })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        let Reply { name, url, fetched_chunks, fetched_bytes, .. } = reply;
        writeln!(
            out,
            "{name}: {url} is in the cache; {} fetched in {fetched_chunks} chunks",
            human(*fetched_bytes)
        )
    }
}
