//! Tags: the only objects that are changed.

use super::{Error, Result, Store, TAGS, TRY_MAX, again};
use crate::format::tag::{self, Tag};
use crate::objects::{Fault, Objects as _, Until, Version, When};

/// Most tags of a store. Where there are more, nobody knows what is referred to.
const TAGS_MAX: usize = 100_000;

/// A tag as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagRead {
    /// What it says.
    pub tag: Tag,
    /// By which it is known whether it is still that.
    pub version: Version,
}

impl Store {
    /// What a tag says; `None` where there is none.
    ///
    /// # Errors
    /// What the store answers; [`Error::Damaged`].
    pub fn tag(&self, name: &str, until: Until<'_>) -> Result<Option<TagRead>> {
        let key = format!("{TAGS}{name}");
        let read = match self.read(&key, tag::BYTES_MAX, until) {
            Err(Error::Object { fault: Fault::NotFound, .. }) => return Ok(None),
            read => read?,
        };
        let tag = Tag::parse(&self.domain, name, &read.bytes).map_err(|why| Error::Damaged(key, why))?;
        // A store that does not tell is one that is only read.
        let version = read.version.unwrap_or(Version(String::new()));
        Ok(Some(TagRead { tag, version }))
    }

    /// Sets a tag, if it is still what was read (or not there, where none was). An answer that is lost
    /// leaves open whether it was set: then it is read.
    ///
    /// # Errors
    /// [`Error::TagMoved`], and what the store answers.
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

    /// Removes a tag. What it referred to is deleted by a prune, when it is old enough.
    ///
    /// # Errors
    /// What the store answers.
    pub fn remove_tag(&self, name: &str, until: Until<'_>) -> Result<()> {
        self.delete(&format!("{TAGS}{name}"), until)
    }

    /// The names of all tags, in order.
    ///
    /// # Errors
    /// What the store answers.
    pub fn tag_names(&self, until: Until<'_>) -> Result<Vec<String>> {
        let listed = self.list_all(TAGS, TAGS_MAX, until)?;
        // Others may lie behind them.
        if listed.len() >= TAGS_MAX {
            return Err(Error::Local(format!("{}: has {TAGS_MAX} tags or more", self.url())));
        }
        let names = listed.keys().filter_map(|key| key.strip_prefix(TAGS));
        Ok(names.filter(|name| tag::is_name(name)).map(str::to_owned).collect())
    }
}
