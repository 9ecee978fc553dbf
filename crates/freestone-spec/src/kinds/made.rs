//! What the kinds of devices that are there do in ways of their own.

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use freestone::cow;
use freestone::device::{self, Device};
use freestone::file::Changed;
use freestone::ram::{Family, Ram};
use serde_json::Value;

use super::registry::Registry;
use super::{Change, CowDevice, Entry};
use crate::notes::MemoryNotes;
use crate::refusal::{Errno, Refusal};

/// What is not the same for all devices that are there. What a kind does not say is the usual.
pub trait Made: Send + Sync {
    /// The name of the kind.
    fn name(&self) -> &'static str;

    /// Disk, fork or snapshot in memory.
    fn ram(&self) -> Option<&Arc<Ram>> {
        None
    }

    /// A fork.
    fn fork(&self) -> Option<&Arc<Ram>> {
        None
    }

    /// A snapshot in memory.
    fn memory_snapshot(&self) -> Option<&Arc<Ram>> {
        None
    }

    /// A snapshot whose copies lie in a store.
    fn cow(&self) -> Option<&cow::Snapshot> {
        None
    }

    /// In memory, what a file's snapshot has copied.
    fn copies(&self) -> Option<&Ram> {
        None
    }

    /// Where its copies lie.
    fn cow_device(&self) -> Option<&CowDevice> {
        None
    }

    /// The family that began with it.
    fn own_family(&self) -> Option<Family> {
        None
    }

    /// Refuses to be an origin, and to take the copies of one, with half a sentence.
    fn check_origin(&self) -> Result<(), &'static str>;

    /// What an origin notes beside its data.
    fn notes(&self) -> Box<dyn cow::Notes> {
        Box::<MemoryNotes>::default()
    }

    /// Refuses to be a base, with half a sentence.
    fn check_base(&self, base: &Entry) -> Result<(), String>;

    /// Whether forks can be made of it, each with a family that is not its own.
    fn is_outer_base(&self, _read_only: bool) -> bool {
        false
    }

    /// Which of the files of a base is not what it was when it was opened, as of the last look, and
    /// what became of it.
    fn changed(&self) -> Option<(PathBuf, Changed)> {
        None
    }

    /// Whether its data can be set back to what it was in the beginning.
    fn can_wipe(&self) -> bool {
        false
    }

    /// Sets its data back to what it was in the beginning, nothing or the base of a fork; on
    /// request the counters of a RAM disk or fork as well.
    fn wipe(&self, _counters: bool) -> device::Result<()> {
        Err(device::Error::Unsupported)
    }

    /// Begins the merge of a snapshot that was asked for with `merge=yes`, or goes on with one that
    /// was under way when its store was closed. When this returns its origin shows the snapshot.
    fn begin_merge(&self, _entry: &Arc<Entry>, _registry: &Registry) -> Result<(), Refusal> {
        Ok(())
    }

    /// What to do about an origin of which only a part is merged.
    fn half_merged(&self, _name: &str) -> String {
        "a merge into it is under way, and it is half old, half new; open the snapshot that is merged".into()
    }

    /// What says beside its data how it was closed.
    fn closes(&self) -> Option<Weak<dyn Device>> {
        None
    }

    /// Another fork, for a connection to this template; it is among the devices.
    fn fresh(&self, _template: &Entry, _registry: &Registry) -> Result<Arc<Entry>, Refusal> {
        unreachable!("only templates are published as such")
    }

    /// The names of its attributes, without those of its layers.
    fn attrs(&self) -> &'static [&'static str];

    /// The value of one of them. Sizes are numbers of bytes.
    fn value(&self, entry: &Entry, attr: &str) -> Option<Value>;

    /// Checks what an attribute is to be set to; `None` where there is none of that name. What the
    /// forks of a base share has a limit, and what is done there; all else is fixed.
    fn check(&self, entry: &Entry, attr: &str, text: &str) -> Option<Result<Change, Refusal>> {
        let (name, kind) = (entry.name(), self.name());
        if let Some(change) = Change::of_family(attr, text).filter(|_| entry.has_family()) {
            return Some(change.map_err(|why| Refusal::invalid(format!("{name}: {attr}={text}: {why}"))));
        }
        self.attrs().contains(&attr).then(|| {
            let why = format!("{name}: {attr}={text}: fixed for the life of a {kind} device");
            Err(Refusal::failed(Errno::EBUSY, why))
        })
    }

    /// Sets what [`check`](Self::check) has allowed, each with its name and text.
    fn set(
        &self,
        entry: &Arc<Entry>,
        registry: &Registry,
        changes: &[(Change, &String, String)],
    ) -> Result<(), Refusal> {
        if changes.is_empty() {
            return Ok(());
        }
        let family = entry.family_of(registry)?;
        for (change, ..) in changes {
            change.make_of_family(&family);
        }
        Ok(())
    }

    /// The name of its own statistics, and these.
    fn stat(&self) -> Option<(&'static str, Value)> {
        None
    }
}
