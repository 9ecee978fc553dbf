//! That what a push stands on is not deleted meanwhile.

use crate::format::name::Name;
use crate::objects::{Fault, Until};
use crate::store::{Error, MANIFESTS, Result, Store, TagRead};
use crate::timing::{self, Clock};

/// What keeps it.
pub enum Guard<'a> {
    /// The tag that is set, or nothing is stood on.
    Tag,
    /// Another tag, which has to be what it was at the end.
    OtherTag(&'a str, TagRead),
    /// Its manifest is young.
    Young,
}

impl<'a> Guard<'a> {
    /// Keeps an image until the push is done.
    pub fn keep(
        store: &Store,
        image: Name,
        tag: Option<&'a str>,
        clock: &Clock<'_>,
        until: Until<'_>,
    ) -> Result<Self> {
        if let Some(tag) = tag
            && let Some(read) = store.tag(tag, until)?
            && read.tag.manifest == image
        {
            return Ok(Self::OtherTag(tag, read));
        }
        let key = format!("{MANIFESTS}{image}");
        let grace = store.domain().grace;
        let head = store.head(&key, until)?.ok_or_else(|| Error::ParentGoes(key.clone()))?;
        let age = || clock.age_at_most(head.modified);
        if timing::is_reusable(age(), grace) {
            return Ok(Self::Young);
        }
        // A prune that began while the manifest was too old does not know what it refers to. Such a manifest is
        // not written again: the next push would take it for young, although parts of the image are deleted.
        if timing::may_be_in_deletion(age() + timing::ROOTS_AGE_MAX, grace) {
            return Err(Error::ParentGoes(key));
        }
        let most = crate::format::meta::STORED_BYTES_MAX;
        let soon = until.at_most(timing::ROOTS_AGE_MAX / 2);
        let object = store.read(&key, most, soon)?.bytes;
        store.write(&key, &object, soon)?;
        // This host may have slept.
        if timing::may_be_in_deletion(age(), grace) {
            return Err(Error::ParentGoes(key));
        }
        Ok(Self::Young)
    }

    /// Whether it was kept.
    pub fn check(&self, store: &Store, until: Until<'_>) -> Result<()> {
        let Self::OtherTag(tag, read) = self else { return Ok(()) };
        match store.tag(tag, until)? {
            Some(now) if now == *read => Ok(()),
            _ => Err(Error::of(
                tag,
                Fault::Other("was changed while what it referred to was used; push again".into()),
            )),
        }
    }
}
