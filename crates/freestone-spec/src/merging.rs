//! Snapshots that are merged into their origins from the beginning on.

use std::sync::Arc;

use freestone::cow::MergeStatus;
use tracing::warn;

use crate::entry::{Entry, Kind};
use crate::notes;
use crate::refusal::{Errno, Refusal};
use crate::registry::Registry;
use crate::spec::KindSpec;

/// Begins the merge of a snapshot that was asked for with `merge=yes`, or goes on with one that was under way when its store
/// was closed. When this returns its origin shows the snapshot.
pub fn begin(registry: &Registry, entry: &Arc<Entry>) -> Result<(), Refusal> {
    let (Kind::Cow(snapshot), KindSpec::Snapshot(spec)) = (&entry.kind, &entry.spec.kind) else {
        return Ok(());
    };
    let (name, origin) = (entry.name(), &spec.origin);
    let asked = spec.cow.as_ref().is_some_and(|cow| cow.merge);
    match snapshot.merge_status() {
        MergeStatus::Stopped if !asked => {
            warn!("{name}: its merge into {origin} was under way, and goes on (merge=yes)");
        }
        MergeStatus::Stopped => {}
        MergeStatus::None if asked => {}
        _ => return Ok(()),
    }
    registry.check_unused(entry, "merged")?;
    let begun = snapshot.merge();
    begun.map_err(|error| Refusal::failed(Errno::EBUSY, format!("{name}: merge: {error}")))
}

/// Refuses to show an origin of which only a part is merged.
pub fn check_whole(entry: &Entry) -> Result<(), Refusal> {
    if let Kind::File(file, Some(origin)) = &entry.kind
        && origin.is_half_merged()
        && let Some(why) = notes::half_merged(file, entry.name())
    {
        return Err(Refusal::failed(Errno::EBUSY, format!("{}: {why}", entry.name())));
    }
    Ok(())
}
