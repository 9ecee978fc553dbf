//! `images URL`: lists the tags of an image store, or removes one. The program accesses the image store
//! itself, without a server.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Result;
use clap::Args;
use freestone::store::objects::CallLimits;
use freestone::store::store::{Error, Store};
use freestone::store::url::ImageUrl;
use freestone_control::protocol::RpcError;
use freestone_server::usage::Usage;
use freestone_server::verbs::TIME_MAX;
use freestone_server::verbs::text::keys;
use freestone_spec::kinds::of_store;
use freestone_spec::refusal::Refusal;
use freestone_spec::size::human;
use freestone_spec::stores::StoreSpec;
use freestone_spec::times;
use serde::Serialize;

use crate::client::print_json;
use crate::error::Stdout;

/// Last second of the year 9999, in seconds since 1970: the latest time that can be printed.
const LAST_SECOND: u64 = 253_402_300_799;

/// Command-line arguments of verbs on an image store.
#[derive(Debug, Args)]
pub(super) struct StoreArgs {
    /// The store
    #[arg(value_name = "URL", value_parser = keys::words_parser())]
    pub(super) url: String,
    #[arg(value_name = "KEY=VALUE", value_parser = keys::words_parser())]
    #[arg(help = "endpoint=URL, region=NAME, credentials=FILE, key=FILE, timeout=TIME")]
    words: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Command line of the verb `images`.
#[derive(Debug, Args)]
pub struct Images {
    #[command(flatten)]
    store: StoreArgs,
    /// Remove this tag; `freestone prune` then deletes the chunks that no other tag refers to
    #[arg(long, value_name = "TAG")]
    untag: Option<String>,
}

/// A tag and the properties of its image.
#[derive(Debug, Serialize)]
struct Row {
    tag: String,
    image: String,
    generation: u64,
    /// Time of the push, in seconds since 1970.
    pushed: u64,
    /// Size of the image in bytes.
    size: u64,
    /// Bytes of non-zero pages in all page maps of the image. A page is counted once for each push that wrote it.
    data_bytes: u64,
    /// Stored size of these pages in bytes. Chunks that several images share are counted for each image.
    stored_bytes: u64,
    /// Maximum number of page maps for a segment of the image.
    depth: usize,
    source: String,
}

impl StoreArgs {
    /// Opens the image store. `verb` is the prefix of error messages.
    pub(super) fn open(&self, verb: &str, until: CallLimits<'_>) -> Result<(Arc<Store>, ImageUrl)> {
        let url: ImageUrl = self.url.parse().map_err(|why| Usage(format!("{verb}: the URL {why}")))?;
        let pairs = keys::parse_words(verb, verb, &self.words)?;
        let entries = keys::entries_of("store", verb, &pairs).map_err(|fault| Usage(fault.message))?;
        let spec = StoreSpec::from_entries(entries, &url.store).map_err(Usage::from)?;
        let open = || -> Result<Store, Refusal> {
            let (objects, secret) = (spec.objects(&url.store)?, spec.secret()?);
            Store::open(objects, secret.as_ref(), until.at_most(spec.timeout())).map_err(|e| of_store(&e))
        };
        let store = open().map_err(|refusal| RpcError::from(refusal.of(verb)))?;
        Ok((Arc::new(store), url))
    }
}

/// Converts an error of the image store to an error of `verb`.
pub(super) fn failed(verb: &str, error: &Error) -> RpcError {
    RpcError::from(of_store(error).of(verb))
}

/// Formats a time in seconds since 1970. Times after [`LAST_SECOND`] are lowered to it.
pub(super) fn shown_time(secs: u64) -> String {
    times::format_utc(UNIX_EPOCH + Duration::from_secs(secs.min(LAST_SECOND)))
}

/// Runs the verb `images`.
pub fn images(line: &Images) -> Result<()> {
    let until = CallLimits::within(TIME_MAX);
    let (store, url) = line.store.open("images", until)?;
    let failed = |error: Error| failed("images", &error);
    let mut out = io::stdout().lock();
    if let Some(tag) = &line.untag {
        store.remove_tag(tag, until).map_err(failed)?;
        if line.store.json {
            return print_json(&serde_json::json!({ "removed": tag }).to_string());
        }
        writeln!(out, "{}: {tag} is not a tag any more", url.store).map_err(Stdout::from)?;
        return Ok(());
    }
    let mut rows = Vec::new();
    for tag in store.tag_names(until).map_err(failed)? {
        // The tag may have been removed since the tags were listed.
        let Some(read) = store.tag(&tag, until).map_err(failed)? else { continue };
        let image = store.manifest(&read.tag.manifest, until).map_err(failed)?;
        let (pages, stored_bytes) = image.held();
        rows.push(Row {
            tag,
            image: read.tag.manifest.to_string(),
            generation: read.tag.generation,
            pushed: read.tag.pushed,
            size: image.size,
            data_bytes: pages * freestone::PAGE_BYTES as u64,
            stored_bytes,
            depth: image.depth(),
            source: image.source,
        });
    }
    if line.store.json {
        return print_json(&serde_json::to_string(&rows)?);
    }
    let width = rows.iter().map(|row| row.tag.len()).max().unwrap_or(0).max(3);
    let written = (|| {
        writeln!(
            out,
            "{:width$} {:>4} {:20} {:>8} {:>8} {:>8}  IMAGE",
            "TAG", "GEN", "PUSHED", "SIZE", "DATA", "STORED"
        )?;
        for row in &rows {
            let pushed = shown_time(row.pushed);
            let (size, data, stored) = (human(row.size), human(row.data_bytes), human(row.stored_bytes));
            writeln!(
                out,
                "{:width$} {:>4} {pushed:20} {size:>8} {data:>8} {stored:>8}  {}",
                row.tag, row.generation, row.image
            )?;
        }
        out.flush()
    })();
    written.map_err(Stdout::from)?;
    Ok(())
}
