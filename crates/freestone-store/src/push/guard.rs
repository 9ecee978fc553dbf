//! That what a push stands on is not deleted meanwhile.

use crate::rt::time::{Duration, SystemTime};

use super::sent::LOOK_TO_DELETE;
use crate::format::name::Name;
use crate::objects::{Fault, Until};
use crate::store::{Error, MANIFESTS, Result, Store, TagRead};

/// A prune has looked at tags and manifests so long before it deletes anything at most.
pub const ROOTS_AGE_MAX: Duration = Duration::from_secs(600);

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
        now: SystemTime,
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
        let age = now.duration_since(head.modified).unwrap_or_default();
        if age + ROOTS_AGE_MAX + LOOK_TO_DELETE >= grace {
            return Err(Error::ParentGoes(key));
        }
        if age > grace / 2 {
            let most = crate::format::meta::STORED_BYTES_MAX;
            let object = store.read(&key, most, until)?.bytes;
            store.write(&key, &object, until)?;
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
