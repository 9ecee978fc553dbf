//! `prune URL`: removes tags by retention rules, and then deletes the stored objects that no tag refers to.
//! The program accesses the image store itself, without a server.

use std::collections::BTreeSet;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Error, Result};
use clap::{ArgGroup, Args, value_parser};
use freestone::store::objects::CallLimits;
use freestone::store::prune::{self, PruneReport};
use freestone::store::retention::{Candidate, Plan, Retention};
use freestone::store::store::{self, Store};
use freestone_server::jobs::ProgressSink as _;
use freestone_server::usage::Usage;
use freestone_server::verbs::TIME_MAX;
use freestone_server::verbs::text::pattern::Pattern;
use freestone_spec::size::human;
use freestone_spec::times;
use serde::Serialize;

use crate::client::long::{LocalProgress, Long};
use crate::client::print_json;
use crate::error::Stdout;
use crate::verbs::images::{StoreArgs, failed, shown_time};

const VERB: &str = "prune";

/// Command line of the verb `prune`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("keep").multiple(true))]
pub struct Line {
    #[command(flatten)]
    store: StoreArgs,
    /// Only show what would be removed and deleted
    #[arg(long)]
    dry_run: bool,
    /// First remove all tags except the N pushed last
    #[arg(long, value_name = "N", group = "keep", value_parser = value_parser!(u64).range(1..))]
    keep_last: Option<u64>,
    /// First remove all tags except those pushed within this time (units s, m, h, d and w); together with
    /// --keep-last, either rule keeps a tag
    #[arg(long, value_name = "TIME", group = "keep", value_parser = times::parse_age)]
    keep_within: Option<Duration>,
    /// Apply these rules only to matching tags; * matches any characters, ? one
    #[arg(long, value_name = "PATTERN", requires = "keep")]
    tags: Option<String>,
    #[command(flatten)]
    long: Long,
}

/// JSON output of `prune`.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    pruned: PruneReport,
    dry_run: bool,
    #[serde(flatten)]
    tags: Option<TagReport>,
}

/// Tags that the retention rules apply to.
#[derive(Default, Serialize)]
struct TagReport {
    kept_tags: Vec<String>,
    /// Names of removed tags; with `--dry-run`, of tags that would be removed.
    removed_tags: Vec<String>,
}

/// Runs the verb `prune`.
pub fn prune(line: &Line) -> Result<ExitCode> {
    if line.long.is_background() {
        return Err(Usage("prune: --background is for a server".into()).into());
    }
    let progress = LocalProgress::new(&line.long, &line.store.url, VERB)?;
    let is_over = || progress.should_stop();
    let until = CallLimits { deadline: Instant::now() + TIME_MAX, is_cancelled: &is_over };
    let (store, url) = line.store.open(VERB, until)?;
    let pruning = Pruning { line, store: &store, url: &url.store };
    let outcome = pruning.run(&|bytes| progress.report(bytes, 0), until);
    let report = match progress.end(outcome)? {
        Ok(report) => report,
        Err(interrupted) => return Ok(interrupted),
    };
    if line.store.json {
        print_json(&serde_json::to_string(&report)?)?;
    } else {
        pruning.show(&pruning.summary(&report.pruned))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Parameters of one run of `prune`.
struct Pruning<'a> {
    line: &'a Line,
    store: &'a Store,
    url: &'a str,
}

impl Pruning<'_> {
    fn run(&self, note: &dyn Fn(u64), until: CallLimits<'_>) -> Result<Report> {
        let dry_run = self.line.dry_run;
        let Line { keep_last, keep_within, .. } = *self.line;
        let retention = Retention { keep_last, keep_within };
        if retention == Retention::default() {
            let pruned = prune::prune(self.store, dry_run, note, until).map_err(|error| of_store(&error))?;
            return Ok(Report { pruned, dry_run, tags: None });
        }
        let pattern = self.line.tags.as_deref().map(Pattern::new);
        let applies = |tag: &str| pattern.as_ref().is_none_or(|pattern| pattern.matches(tag));
        let plan = retention.plan(self.store, applies, until).map_err(|error| of_store(&error))?;
        self.show_plan(&plan)?;
        let without: BTreeSet<String> = plan.removed.iter().map(|tag| tag.name.clone()).collect();
        if dry_run {
            for tag in plan.removed.iter().rev() {
                self.show_tag(tag, "would be removed")?;
            }
            let tags = TagReport { kept_tags: names(&plan.kept), removed_tags: names(&plan.removed) };
            let pruned =
                prune::preview(self.store, &without, note, until).map_err(|error| of_store(&error))?;
            return Ok(Report { pruned, dry_run, tags: Some(tags) });
        }
        // If an image that stays cannot be read, pruning would fail later. Check this before any tag is removed.
        if !without.is_empty() {
            prune::check_roots(self.store, &without, until).map_err(|error| of_store(&error))?;
        }
        let tags = self.remove(&plan, until)?;
        let pruned = prune::prune(self.store, false, note, until).map_err(|error| of_store(&error))?;
        Ok(Report { pruned, dry_run, tags: Some(tags) })
    }

    /// Removes tags, starting with the oldest. Stops at the first failure.
    fn remove(&self, plan: &Plan, until: CallLimits<'_>) -> Result<TagReport> {
        let mut tags = TagReport { kept_tags: names(&plan.kept), removed_tags: Vec::new() };
        for tag in plan.removed.iter().rev() {
            if self
                .store
                .remove_tag_unchanged(&tag.name, &tag.read, until)
                .map_err(|error| of_store(&error))?
            {
                tags.removed_tags.push(tag.name.clone());
                self.show_tag(tag, "removed")?;
            } else {
                tags.kept_tags.push(tag.name.clone());
                self.show_tag(tag, "kept, as another push has set it meanwhile")?;
            }
        }
        Ok(tags)
    }

    fn show_plan(&self, plan: &Plan) -> Result<()> {
        let (kept, all) = (plan.kept.len(), plan.kept.len() + plan.removed.len());
        let which = self.line.tags.as_ref().map(|pattern| format!(" match {pattern}")).unwrap_or_default();
        self.show(&format!("{all} tags{which}, {kept} of them kept"))
    }

    fn show_tag(&self, tag: &Candidate, outcome: &str) -> Result<()> {
        self.show(&format!("tag {}, pushed {}, {outcome}", tag.name, shown_time(tag.read.tag.pushed)))
    }

    fn show(&self, text: &str) -> Result<()> {
        if self.line.store.json {
            return Ok(());
        }
        writeln!(io::stdout(), "{}: {text}", self.url).map_err(Stdout::from)?;
        Ok(())
    }

    fn summary(&self, pruned: &PruneReport) -> String {
        let PruneReport { images, untagged_images, objects, deleted, young, .. } = pruned;
        let untagged =
            if *untagged_images > 0 { format!(" ({untagged_images} without a tag)") } else { String::new() };
        let would = if self.line.dry_run { "would be" } else { "were" };
        let (bytes, deleted_bytes) = (human(pruned.bytes), human(pruned.deleted_bytes));
        let kept = if *young > 0 {
            let (bytes, grace) = (human(pruned.young_bytes), times::exact(self.store.domain().grace));
            format!("; {young} objects, {bytes}, that no tag needs are kept for the grace of {grace}")
        } else {
            String::new()
        };
        let until = pruned.next_expiry.map(|at| format!(", the first until {}", shown_time(at)));
        format!(
            "{images} images{untagged} in {objects} objects, {bytes}; {deleted} objects, {deleted_bytes}, {would} deleted{kept}{}",
            until.unwrap_or_default()
        )
    }
}

fn names(tags: &[Candidate]) -> Vec<String> {
    tags.iter().map(|tag| tag.name.clone()).collect()
}

fn of_store(error: &store::Error) -> Error {
    failed(VERB, error).into()
}
