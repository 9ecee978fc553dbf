//! Tags: the only objects whose content matters and changes.

use super::{Error, Result, Store, TAGS, TRY_MAX, again};
use crate::format::tag::{self, Tag};
use crate::objects::{Fault, Objects as _, Until, Version, When};
use crate::rt::thread;
use crate::rt::time::Duration;
use crate::timing::{DELETE_SETTLES, LOOK_TO_DELETE};

/// Maximum number of tags. With more, a listing could be incomplete and the objects in use unknown.
const TAGS_MAX: usize = 100_000;
/// Attempts to remove a tag from a store without conditional deletion.
const REMOVE_TRIES: u32 = 5;
/// Longest time from the claim of a tag to the end of its deletion.
const CLAIM_MAX: Duration = LOOK_TO_DELETE.saturating_add(DELETE_SETTLES);

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
    /// Errors of the store; [`Error::Damaged`].
    pub fn tag(&self, name: &str, until: Until<'_>) -> Result<Option<TagRead>> {
        let key = format!("{TAGS}{name}");
        let read = match self.read(&key, tag::BYTES_MAX, until) {
            Err(Error::Object { fault: Fault::NotFound, .. }) => return Ok(None),
            read => read?,
        };
        let tag = Tag::parse(&self.domain, name, &read.bytes).map_err(|why| Error::Damaged(key, why))?;
        // A store without versions is read-only.
        let version = read.version.unwrap_or(Version(String::new()));
        Ok(Some(TagRead { tag, version }))
    }

    /// Sets a tag if it is unchanged since `before` was read, or still missing if `before` is `None`. If the
    /// response is lost, the tag is read back to find out whether it was set.
    ///
    /// # Errors
    /// [`Error::TagMoved`], and errors of the store.
    pub fn set_tag(&self, name: &str, before: Option<&TagRead>, next: &Tag, until: Until<'_>) -> Result<()> {
        let key = format!("{TAGS}{name}");
        let when = before.map_or(When::Absent, |read| When::Unchanged(&read.version));
        let bytes = next.bytes();
        let put = again(until, || {
            let Err(fault) = self.objects.put(&key, &bytes, when, until.at_most(TRY_MAX)) else {
                return Ok(());
            };
            if fault != Fault::Condition && !fault.may_pass() {
                return Err(fault);
            }
            match self.objects.get(&key, None, tag::BYTES_MAX, until.at_most(TRY_MAX)) {
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

    /// Removes a tag. A prune deletes the objects of its image once they are old enough.
    ///
    /// # Errors
    /// [`Error::NoTag`]; [`Error::TagSet`] if a push sets the tag meanwhile; as
    /// [`remove_tag_unchanged`](Self::remove_tag_unchanged).
    pub fn remove_tag(&self, name: &str, until: Until<'_>) -> Result<()> {
        let read = self.tag(name, until)?.ok_or_else(|| Error::NoTag(name.to_owned()))?;
        if self.remove_tag_unchanged(name, &read, until)? {
            Ok(())
        } else {
            Err(Error::TagSet(name.to_owned()))
        }
    }

    /// Removes a tag if it is unchanged since `read`. Returns false if a push has set it since. A tag that is
    /// already missing counts as removed.
    ///
    /// # Errors
    /// Errors of the store; [`Error::DeletedLate`].
    pub fn remove_tag_unchanged(&self, name: &str, read: &TagRead, until: Until<'_>) -> Result<bool> {
        let key = format!("{TAGS}{name}");
        let delete = || self.objects.delete_unchanged(&key, &read.version, until.at_most(TRY_MAX));
        match again(until, delete) {
            Ok(()) => Ok(true),
            Err(Fault::Condition) => Ok(self.tag(name, until)?.is_none()),
            Err(Fault::Unsupported(_)) => self.claim_and_remove_tag(name, read, until),
            Err(fault) => Err(Error::of(&key, fault)),
        }
    }

    /// Removes a tag from a store without conditional deletion. A conditional write first replaces the tag
    /// with a new claim, then the tag is deleted at once. Pushes that read the tag before the claim fail.
    fn claim_and_remove_tag(&self, name: &str, read: &TagRead, until: Until<'_>) -> Result<bool> {
        let key = format!("{TAGS}{name}");
        let mut before = read.clone();
        for attempt in 1.. {
            let Tag { manifest, generation, pushed, .. } = before.tag;
            let claim = Tag::new(&self.domain, name, manifest, generation.saturating_add(1), pushed);
            let claimed = self.uptime();
            let elapsed = || self.uptime().saturating_sub(claimed);
            match self.set_tag(name, Some(&before), &claim, until.at_most(LOOK_TO_DELETE)) {
                Ok(()) => {}
                Err(Error::TagMoved(_)) => return Ok(self.tag(name, until)?.is_none()),
                Err(error) => return Err(error),
            }
            let left = LOOK_TO_DELETE.saturating_sub(elapsed());
            let deleted = self.objects.delete(&key, until.at_most(left.min(TRY_MAX)));
            if elapsed() > CLAIM_MAX {
                return Err(Error::DeletedLate(key));
            }
            match deleted {
                Ok(()) => return Ok(true),
                Err(fault) if !fault.may_pass() || attempt == REMOVE_TRIES => {
                    return Err(Error::of(&key, fault));
                }
                // The store may still carry out the deletion.
                Err(_) => thread::sleep(DELETE_SETTLES),
            }
            match self.tag(name, until)? {
                None => return Ok(true),
                Some(now) if now.tag == claim => before = now,
                Some(_) => return Ok(false),
            }
        }
        Ok(false)
    }

    /// Returns the names of all tags, sorted.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn tag_names(&self, until: Until<'_>) -> Result<Vec<String>> {
        let listed = self.list_all(TAGS, TAGS_MAX, until)?;
        // The listing may have been cut off.
        if listed.len() >= TAGS_MAX {
            return Err(Error::Local(format!("{}: has {TAGS_MAX} tags or more", self.url())));
        }
        let names = listed.keys().filter_map(|key| key.strip_prefix(TAGS));
        Ok(names.filter(|name| tag::is_name(name)).map(str::to_owned).collect())
    }
}
