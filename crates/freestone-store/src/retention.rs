//! Retention rules: choose the tags of a store to keep and the tags to remove.
//!
//! Tags are ordered by the time of their last push, which the tag itself records. Each removal depends on the
//! tag being unchanged since the rules were applied.

use crate::rt::time::{Duration, UNIX_EPOCH};
use freestone_core::sync::Mutex;
use std::cmp::Reverse;

use crate::objects::CallLimits;
use crate::parallel;
use crate::store::{Error, Result, Store, TagRead};

/// Maximum number of tags read at the same time.
const AT_ONCE: usize = 32;

/// Retention rules. A tag is kept if at least one rule keeps the tag.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// Number of most recently pushed tags to keep; `None` if there is no such rule.
    pub keep_last: Option<u64>,
    /// Age of the last push up to which a tag is kept, by the clock of the store; `None` if there is no such
    /// rule.
    pub keep_within: Option<Duration>,
}

/// A tag that the rules apply to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Name of the tag.
    pub name: String,
    /// Content and version of the tag when the rules were applied.
    pub read: TagRead,
}

/// Outcome of the rules, with the most recently pushed tags first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Tags to keep.
    pub kept: Vec<Candidate>,
    /// Tags to remove.
    pub removed: Vec<Candidate>,
}

impl Retention {
    /// Applies the rules to the tags whose names `applies` accepts. Changes nothing.
    ///
    /// # Errors
    /// [`Error::KeepsNone`] if the rules would remove all these tags. Errors of requests to the object store
    /// if one of these tags cannot be read.
    pub fn plan(
        &self,
        store: &Store,
        applies: impl Fn(&str) -> bool,
        limits: CallLimits<'_>,
    ) -> Result<Plan> {
        let mut names = store.tag_names(limits)?;
        names.retain(|name| applies(name));
        let candidates = Mutex::new(Vec::with_capacity(names.len()));
        parallel::for_each(AT_ONCE, names.len(), |at| {
            // Another program may have removed the tag since the listing.
            if let Some(read) = store.tag(&names[at], limits)? {
                let name = names[at].clone();
                candidates.lock().push(Candidate { name, read });
            }
            Ok::<(), Error>(())
        })?;
        let candidates = candidates.into_inner();
        let now = match self.keep_within {
            Some(_) => store.now(limits)?.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            None => 0,
        };
        let plan = self.choose(candidates, now);
        if plan.kept.is_empty() && !plan.removed.is_empty() {
            return Err(Error::KeepsNone(store.url().to_owned(), plan.removed.len()));
        }
        Ok(plan)
    }

    /// Divides the tags into tags to keep and tags to remove. `now` is in seconds since 1970.
    fn choose(&self, mut candidates: Vec<Candidate>, now: u64) -> Plan {
        candidates.sort_unstable_by(|a, b| {
            let key = |candidate: &Candidate| Reverse(candidate.read.tag.pushed);
            // Among tags pushed in the same second, the name that sorts last is first: often a later date.
            key(a).cmp(&key(b)).then_with(|| b.name.cmp(&a.name))
        });
        let mut plan = Plan::default();
        for (candidate, rank) in candidates.into_iter().zip(0_u64..) {
            let age = now.saturating_sub(candidate.read.tag.pushed);
            let is_last = self.keep_last.is_some_and(|count| rank < count);
            let is_within = self.keep_within.is_some_and(|time| Duration::from_secs(age) <= time);
            let group = if is_last || is_within { &mut plan.kept } else { &mut plan.removed };
            group.push(candidate);
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::domain::{Domain, GRACE};
    use crate::format::name::Name;
    use crate::format::tag::Tag;
    use crate::objects::Version;

    fn candidates(pushed: &[(&str, u64)]) -> Vec<Candidate> {
        let (domain, _) = Domain::new(None, false, GRACE);
        let read = |(name, pushed): &(&str, u64)| {
            let tag = Tag::new(&domain, name, Name([1; 32]), 1, *pushed);
            Candidate { name: (*name).to_owned(), read: TagRead { tag, version: Version("1".into()) } }
        };
        pushed.iter().map(read).collect()
    }

    fn kept(retention: Retention, pushed: &[(&str, u64)], now: u64) -> Vec<String> {
        let plan = retention.choose(candidates(pushed), now);
        assert_eq!(plan.kept.len() + plan.removed.len(), pushed.len());
        plan.kept.into_iter().map(|candidate| candidate.name).collect()
    }

    #[test]
    fn keep_last_takes_most_recent_pushes() {
        let tags = [("a", 10), ("b", 30), ("c", 20)];
        let last = |count| Retention { keep_last: Some(count), keep_within: None };
        assert_eq!(kept(last(1), &tags, 0), ["b"]);
        assert_eq!(kept(last(2), &tags, 0), ["b", "c"]);
        assert_eq!(kept(last(u64::MAX), &tags, 0), ["b", "c", "a"]);
        assert_eq!(kept(last(2), &[("n-1", 5), ("n-3", 5), ("n-2", 5)], 0), ["n-3", "n-2"]);
    }

    #[test]
    fn keep_within_measures_age_from_now() {
        let within = |secs| Retention { keep_last: None, keep_within: Some(Duration::from_secs(secs)) };
        let tags = [("old", 10), ("edge", 50), ("young", 90), ("ahead", 200)];
        assert_eq!(kept(within(50), &tags, 100), ["ahead", "young", "edge"]);
        assert_eq!(kept(within(49), &tags, 100), ["ahead", "young"]);
    }

    #[test]
    fn tag_kept_by_one_rule_is_kept() {
        let both = Retention { keep_last: Some(2), keep_within: Some(Duration::from_secs(5)) };
        assert_eq!(kept(both, &[("a", 10), ("b", 20), ("c", 96)], 100), ["c", "b"]);
        assert_eq!(kept(both, &[("a", 97), ("b", 98), ("c", 99)], 100), ["c", "b", "a"]);
    }
}
