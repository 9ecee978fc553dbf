//! Protects the parent image of a push from prunes.

use crate::clock::Clock;
use crate::format::name::Name;
use crate::objects::Until;
use crate::store::{Error, MANIFESTS, Result, Store, TagRead};
use crate::timing;

/// Reason why no prune deletes the parent image during the push.
pub enum Guard<'a> {
    /// The tag that the push sets refers to it, or there is no parent image.
    Tag,
    /// The manifest is old, but another tag refers to it, and must be unchanged at the end of the push.
    OtherTag(&'a str, TagRead),
    /// The manifest is young enough to be kept without a tag.
    Young,
}

impl<'a> Guard<'a> {
    /// Protects an image until the push is done.
    ///
    /// # Errors
    /// [`Error::ParentGoes`] if a prune may be deleting the image already.
    pub fn keep(
        store: &Store,
        image: Name,
        tag: Option<&'a str>,
        clock: &Clock<'_>,
        until: Until<'_>,
    ) -> Result<Self> {
        let key = format!("{MANIFESTS}{image}");
        let grace = store.domain().grace;
        let head = store.head(&key, until)?.ok_or_else(|| Error::ParentGoes(key.clone()))?;
        let age = || clock.age_at_most(head.modified);
        if timing::is_reusable(age(), grace) {
            return Ok(Self::Young);
        }
        if let Some(tag) = tag
            && let Some(read) = store.tag(tag, until)?
            && read.tag.manifest == image
        {
            return Ok(Self::OtherTag(tag, read));
        }
        // A prune that started while the manifest was too old does not know the objects of the image. Do not
        // rewrite such a manifest: the next push would treat it as young although parts of the image may be
        // deleted.
        if timing::may_be_in_deletion(age() + timing::ROOTS_AGE_MAX, grace) {
            return Err(Error::ParentGoes(key));
        }
        let most = crate::format::meta::STORED_BYTES_MAX;
        let soon = until.at_most(timing::ROOTS_AGE_MAX / 2);
        let object = store.read(&key, most, soon)?.bytes;
        store.write(&key, &object, soon)?;
        // The host may have been suspended.
        if timing::may_be_in_deletion(age(), grace) {
            return Err(Error::ParentGoes(key));
        }
        Ok(Self::Young)
    }

    /// Fails if the image may have been unprotected at some time since [`Guard::keep`].
    pub fn check(&self, store: &Store, until: Until<'_>) -> Result<()> {
        let Self::OtherTag(tag, read) = self else { return Ok(()) };
        match store.tag(tag, until)? {
            Some(now) if now == *read => Ok(()),
            _ => Err(Error::ParentGoes(format!("{MANIFESTS}{}", read.tag.manifest))),
        }
    }
}
