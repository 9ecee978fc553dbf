//! Protection of the parent image of a push from concurrent prunes.

use crate::clock::Clock;
use crate::format::name::Name;
use crate::objects::CallLimits;
use crate::store::{Error, MANIFESTS, Result, Store, TagRead};
use crate::timing;

/// Reason why no prune deletes the parent image during the push.
pub enum Guard<'a> {
    /// The tag that the push sets refers to the parent image, or there is no parent image.
    Tag,
    /// The manifest of the parent image is old, but another tag refers to it. The other tag must be unchanged
    /// at the end of the push.
    OtherTag(&'a str, TagRead),
    /// The manifest of the parent image is young enough to be kept without a tag.
    Young,
}

impl<'a> Guard<'a> {
    /// Protects the parent image until the push is done. Rewrites the manifest of the image if necessary.
    ///
    /// # Errors
    /// [`Error::ParentExpiring`] if a prune may be deleting the image already.
    pub fn keep(
        store: &Store,
        image: Name,
        tag: Option<&'a str>,
        clock: &Clock<'_>,
        limits: CallLimits<'_>,
    ) -> Result<Self> {
        let key = format!("{MANIFESTS}{image}");
        let grace = store.domain().grace;
        let head = store.head(&key, limits)?.ok_or_else(|| Error::ParentExpiring(key.clone()))?;
        let age = || clock.max_age(head.modified);
        if timing::is_reusable(age(), grace) {
            return Ok(Self::Young);
        }
        if let Some(tag) = tag
            && let Some(read) = store.tag(tag, limits)?
            && read.tag.manifest == image
        {
            return Ok(Self::OtherTag(tag, read));
        }
        // A prune that started while the manifest was too old does not know the objects of the image. Do not
        // rewrite such a manifest: the next push would treat it as young although parts of the image may be
        // deleted.
        if timing::may_be_in_deletion(age() + timing::ROOTS_AGE_MAX, grace) {
            return Err(Error::ParentExpiring(key));
        }
        let most = crate::format::meta::STORED_BYTES_MAX;
        let soon = limits.at_most(timing::ROOTS_AGE_MAX / 2);
        let object = store.read(&key, most, soon)?.bytes;
        store.write(&key, &object, soon)?;
        // The host may have been suspended during the write, so the age is checked again.
        if timing::may_be_in_deletion(age(), grace) {
            return Err(Error::ParentExpiring(key));
        }
        Ok(Self::Young)
    }

    /// Fails if the parent image may have been unprotected at some time since [`Guard::keep`].
    pub fn check(&self, store: &Store, limits: CallLimits<'_>) -> Result<()> {
        let Self::OtherTag(tag, read) = self else { return Ok(()) };
        match store.tag(tag, limits)? {
            Some(now) if now == *read => Ok(()),
            _ => Err(Error::ParentExpiring(format!("{MANIFESTS}{}", read.tag.manifest))),
        }
    }
}
