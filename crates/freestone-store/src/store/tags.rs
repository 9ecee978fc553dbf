//! Reads, sets and removes tags. Tags are the only objects that change and whose updates must not be lost.

use super::{Error, Result, Store, TAGS, TRY_MAX, retry};
use crate::format::tag::{self, Tag};
use crate::objects::{CallLimits, Fault, Objects as _, Version, WriteCondition};
use crate::rt::thread;
use crate::rt::time::Duration;
use crate::timing::{DELETION_SETTLE_TIME, DELETION_TIME_MAX};

/// Maximum number of tags. With more tags, a listing could be incomplete, and the objects in use would be
/// unknown.
const TAGS_MAX: usize = 100_000;
/// Maximum number of attempts to remove a tag from a store without conditional deletion.
const REMOVE_TRIES: u32 = 5;
/// Longest allowed time from the claim of a tag (the write that precedes its removal) to the end of its
/// deletion.
const CLAIM_MAX: Duration = DELETION_TIME_MAX.saturating_add(DELETION_SETTLE_TIME);

/// A tag as read from the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagRead {
    /// Content of the tag.
    pub tag: Tag,
    /// Version for conditional updates of the tag.
    pub version: Version,
}

impl Store {
    /// Reads a tag. Returns `None` if the tag does not exist.
    ///
    /// # Errors
    /// Errors of requests to the object store; [`Error::Damaged`].
    pub fn tag(&self, name: &str, limits: CallLimits<'_>) -> Result<Option<TagRead>> {
        let key = format!("{TAGS}{name}");
        let read = match self.read(&key, tag::BYTES_MAX, limits) {
            Err(Error::Object { fault: Fault::NotFound, .. }) => return Ok(None),
            read => read?,
        };
        let tag = Tag::parse(&self.domain, name, &read.bytes).map_err(|why| Error::Damaged(key, why))?;
        // A store without versions is read-only, so the empty version is never used as a condition.
        let version = read.version.unwrap_or(Version(String::new()));
        Ok(Some(TagRead { tag, version }))
    }

    /// Sets a tag if the tag is unchanged since `before` was read, or is still missing if `before` is `None`.
    /// If the response is lost, the tag is read back to find out whether the write succeeded.
    ///
    /// # Errors
    /// [`Error::TagMoved`], and errors of requests to the object store.
    pub fn set_tag(
        &self,
        name: &str,
        before: Option<&TagRead>,
        next: &Tag,
        limits: CallLimits<'_>,
    ) -> Result<()> {
        let key = format!("{TAGS}{name}");
        let condition =
            before.map_or(WriteCondition::Absent, |read| WriteCondition::Unchanged(&read.version));
        let bytes = next.bytes();
        let put = retry(limits, || {
            let Err(fault) = self.objects.put(&key, &bytes, condition, limits.at_most(TRY_MAX)) else {
                return Ok(());
            };
            if fault != Fault::Condition && !fault.is_retryable() {
                return Err(fault);
            }
            match self.objects.get(&key, None, tag::BYTES_MAX, limits.at_most(TRY_MAX)) {
                Ok(read) if read.bytes == bytes => Ok(()),
                _ => Err(fault),
            }
        });
        match put {
            Ok(()) => Ok(()),
            Err(Fault::Condition) => Err(Error::TagMoved(name.to_owned())),
            Err(fault) => Err(Error::of(&key, fault)),
        }
    }

    /// Removes a tag. A later prune deletes the objects of its image that are unused and old enough.
    ///
    /// # Errors
    /// [`Error::NoTag`] if the tag does not exist; [`Error::TagSet`] if a push sets the tag meanwhile; errors
    /// of [`remove_tag_unchanged`](Self::remove_tag_unchanged).
    pub fn remove_tag(&self, name: &str, limits: CallLimits<'_>) -> Result<()> {
        let read = self.tag(name, limits)?.ok_or_else(|| Error::NoTag(name.to_owned()))?;
        if self.remove_tag_unchanged(name, &read, limits)? {
            Ok(())
        } else {
            Err(Error::TagSet(name.to_owned()))
        }
    }

    /// Removes a tag if the tag is unchanged since `read`. Returns true if the tag was removed, false if a
    /// push has set it since. A tag that is already missing counts as removed.
    ///
    /// # Errors
    /// Errors of requests to the object store; [`Error::DeletedLate`].
    pub fn remove_tag_unchanged(&self, name: &str, read: &TagRead, limits: CallLimits<'_>) -> Result<bool> {
        let key = format!("{TAGS}{name}");
        let delete = || self.objects.delete_unchanged(&key, &read.version, limits.at_most(TRY_MAX));
        match retry(limits, delete) {
            Ok(()) => Ok(true),
            Err(Fault::Condition) => Ok(self.tag(name, limits)?.is_none()),
            Err(Fault::Unsupported(_)) => self.claim_and_remove_tag(name, read, limits),
            Err(fault) => Err(Error::of(&key, fault)),
        }
    }

    /// Removes a tag from a store without conditional deletion. A conditional write first replaces the tag
    /// with a claim, which is a new version with the same image. Then the tag is deleted at once. Pushes that
    /// read the tag before the claim fail.
    fn claim_and_remove_tag(&self, name: &str, read: &TagRead, limits: CallLimits<'_>) -> Result<bool> {
        let key = format!("{TAGS}{name}");
        let mut before = read.clone();
        for attempt in 1.. {
            let Tag { manifest, generation, pushed, .. } = before.tag;
            let claim = Tag::new(&self.domain, name, manifest, generation.saturating_add(1), pushed);
            let claimed = self.uptime();
            let elapsed = || self.uptime().saturating_sub(claimed);
            match self.set_tag(name, Some(&before), &claim, limits.at_most(DELETION_TIME_MAX)) {
                Ok(()) => {}
                Err(Error::TagMoved(_)) => return Ok(self.tag(name, limits)?.is_none()),
                Err(error) => return Err(error),
            }
            let left = DELETION_TIME_MAX.saturating_sub(elapsed());
            let deleted = self.objects.delete(&key, limits.at_most(left.min(TRY_MAX)));
            if elapsed() > CLAIM_MAX {
                return Err(Error::DeletedLate(key));
            }
            match deleted {
                Ok(()) => return Ok(true),
                Err(fault) if !fault.is_retryable() || attempt == REMOVE_TRIES => {
                    return Err(Error::of(&key, fault));
                }
                // The store may still carry out the deletion, so wait before the next attempt.
                Err(_) => thread::sleep(DELETION_SETTLE_TIME),
            }
            match self.tag(name, limits)? {
                None => return Ok(true),
                Some(now) if now.tag == claim => before = now,
                Some(_) => return Ok(false),
            }
        }
        Ok(false)
    }

    /// Returns the names of all tags, sorted.
    pub fn tag_names(&self, limits: CallLimits<'_>) -> Result<Vec<String>> {
        let listed = self.list_all(TAGS, TAGS_MAX, limits)?;
        // The listing ends after `TAGS_MAX` objects, so tags may be missing.
        if listed.len() >= TAGS_MAX {
            return Err(Error::Local(format!("{}: has {TAGS_MAX} tags or more", self.url())));
        }
        let names = listed.keys().filter_map(|key| key.strip_prefix(TAGS));
        Ok(names.filter(|name| tag::is_name(name)).map(str::to_owned).collect())
    }
}
