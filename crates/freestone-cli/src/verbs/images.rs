//! `images URL` and `prune URL`: what lies in a store, and what of it nobody needs. This program asks
//! the store itself, without a server.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use anyhow::Result;
use clap::Args;
use freestone::store::objects::Until;
use freestone::store::prune;
use freestone::store::store::{Error, Store};
use freestone::store::url::ImageUrl;
use freestone_spec::kinds::of_store;
use freestone_spec::refusal::Refusal;
use freestone_spec::size::human;
use freestone_spec::stores::StoreSpec;
use freestone_spec::times;
use serde::Serialize;

use super::long::{Here, Long, TIME_MAX};
use super::{keys, print_json};
use crate::control::protocol::Fault;
use crate::error::{Stdout, Usage};
use crate::job::Watched as _;

/// The end of the year 9999, beyond which no time is written.
const LAST_SECOND: u64 = 253_402_300_799;

/// How a store is reached.
#[derive(Debug, Args)]
struct Place {
    /// The store
    #[arg(value_name = "URL", value_parser = keys::words_parser())]
    url: String,
    /// How it is reached.
    #[arg(value_name = "KEY=VALUE", value_parser = keys::words_parser())]
    #[arg(help = "endpoint=URL, region=NAME, credentials=FILE, key=FILE, timeout=TIME")]
    words: Vec<String>,
    /// Print the answer as JSON
    #[arg(long)]
    json: bool,
}

/// The command line of `images`.
#[derive(Debug, Args)]
pub struct Images {
    #[command(flatten)]
    place: Place,
    /// Remove this tag; `freestone prune` then deletes what nothing else refers to
    #[arg(long, value_name = "TAG")]
    untag: Option<String>,
}

/// The command line of `prune`.
#[derive(Debug, Args)]
pub struct Prune {
    #[command(flatten)]
    place: Place,
    /// Delete nothing; show what would be
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    long: Long,
}

/// A tag, and its image.
#[derive(Debug, Serialize)]
struct Row {
    tag: String,
    image: String,
    generation: u64,
    /// Seconds since 1970.
    pushed: u64,
    /// Bytes of the image.
    size: u64,
    /// Bytes of pages that are no zeroes, each time one was pushed.
    data_bytes: u64,
    /// The same as they are stored; what several images share is in each.
    stored_bytes: u64,
    /// The most maps that a part of the image has.
    depth: usize,
    source: String,
}

impl Place {
    fn open(&self, verb: &str, until: Until<'_>) -> Result<(Arc<Store>, ImageUrl)> {
        let url: ImageUrl = self.url.parse().map_err(|why| Usage(format!("{verb}: the URL {why}")))?;
        let pairs = keys::of_words(verb, verb, &self.words)?;
        let entries = keys::of("store", verb, &pairs).map_err(|fault| Usage(fault.message))?;
        let spec = StoreSpec::from_entries(entries, &url.store).map_err(|e| Usage(e.to_string()))?;
        let open = || -> Result<Store, Refusal> {
            let (objects, secret) = (spec.objects(&url.store)?, spec.secret()?);
            Store::open(objects, secret.as_ref(), until.at_most(spec.timeout())).map_err(|e| of_store(&e))
        };
        let store = open().map_err(|refusal| Fault::from(refusal.of(verb)))?;
        Ok((Arc::new(store), url))
    }
}

fn failed(verb: &str, error: &Error) -> Fault {
    Fault::from(of_store(error).of(verb))
}

/// `images`.
pub fn images(line: &Images) -> Result<()> {
    let until = Until::within(TIME_MAX);
    let (store, url) = line.place.open("images", until)?;
    let failed = |error: Error| failed("images", &error);
    let mut out = io::stdout().lock();
    if let Some(tag) = &line.untag {
        if store.tag(tag, until).map_err(failed)?.is_none() {
            return Err(failed(Error::NoTag(tag.clone())).into());
        }
        store.remove_tag(tag, until).map_err(failed)?;
        writeln!(out, "{}: {tag} is no tag any more", url.store).map_err(Stdout::from)?;
        return Ok(());
    }
    let mut rows = Vec::new();
    for tag in store.tag_names(until).map_err(failed)? {
        // One that went meanwhile is none.
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
    if line.place.json {
        return print_json(&serde_json::to_string(&rows)?);
    }
    let width = rows.iter().map(|row| row.tag.len()).max().unwrap_or(0).max(3);
    let shown = (|| {
        writeln!(
            out,
            "{:width$} {:>4} {:20} {:>8} {:>8} {:>8}  IMAGE",
            "TAG", "GEN", "PUSHED", "SIZE", "DATA", "STORED"
        )?;
        for row in &rows {
            let pushed = times::shown(UNIX_EPOCH + Duration::from_secs(row.pushed.min(LAST_SECOND)));
            let (size, data, stored) = (human(row.size), human(row.data_bytes), human(row.stored_bytes));
            writeln!(
                out,
                "{:width$} {:>4} {pushed:20} {size:>8} {data:>8} {stored:>8}  {}",
                row.tag, row.generation, row.image
            )?;
        }
        out.flush()
    })();
    shown.map_err(Stdout::from)?;
    Ok(())
}

/// What a prune did, for programs.
#[derive(Serialize)]
struct Pruned {
    #[serde(flatten)]
    done: prune::Pruned,
    dry_run: bool,
}

/// `prune`.
pub fn prune(line: &Prune) -> Result<ExitCode> {
    if line.long.is_background() {
        return Err(Usage("prune: --background is for a server".into()).into());
    }
    let here = Here::new(&line.long, &line.place.url, "prune")?;
    let is_over = || here.is_over();
    let until = Until { deadline: Instant::now() + TIME_MAX, is_over: &is_over };
    let (store, url) = line.place.open("prune", until)?;
    let outcome = prune::prune(&store, line.dry_run, &|bytes| here.note(bytes, 0), until);
    let outcome = outcome.map_err(|error| anyhow::Error::from(failed("prune", &error)));
    let done = match here.end(outcome)? {
        Ok(done) => done,
        Err(interrupted) => return Ok(interrupted),
    };
    if line.place.json {
        print_json(&serde_json::to_string(&Pruned { done, dry_run: line.dry_run })?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let prune::Pruned { images, objects, bytes, deleted, deleted_bytes, young } = done;
    let would = if line.dry_run { "would be" } else { "were" };
    let (bytes, deleted_bytes) = (human(bytes), human(deleted_bytes));
    let shown = writeln!(
        io::stdout(),
        "{}: {images} images in {objects} objects, {bytes}; {deleted} objects, {deleted_bytes}, {would} deleted; {young} that nothing refers to are too young",
        url.store
    );
    shown.map_err(Stdout::from)?;
    Ok(ExitCode::SUCCESS)
}
