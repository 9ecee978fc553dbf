//! Test whether an object store supports conditional writes, before an image store is created.

use super::{CLOCKS, Error, Result, TRY_MAX, retry};
use crate::objects::{CallLimits, Fault, Objects, Version, WriteCondition};

/// Writes a test object with conditions that hold and conditions that do not, then deletes the object.
///
/// # Errors
/// [`Fault::Unsupported`] if the store ignores or refuses conditions; errors of requests to the object store.
pub fn check(objects: &dyn Objects, limits: CallLimits<'_>) -> Result<()> {
    let unsupported = |why: &str| {
        let why = format!(
            "{why}; a store of images needs writes with If-None-Match and If-Match, as two pushes to one tag \
             would overwrite each other"
        );
        Error::of(objects.url(), Fault::Unsupported(why))
    };
    let key = format!("{CLOCKS}{}", crate::rt::unique_id());
    let failed = |fault| match fault {
        Fault::Unsupported(why) => unsupported(&why),
        fault => Error::of(&key, fault),
    };
    let is_accepted = |bytes: &[u8], condition| match retry(limits, || {
        objects.put(&key, bytes, condition, limits.at_most(TRY_MAX))
    }) {
        Ok(_) => Ok(true),
        Err(Fault::Condition) => Ok(false),
        Err(fault) => Err(failed(fault)),
    };
    let version = || -> Result<Version> {
        let head = retry(limits, || objects.head(&key, limits.at_most(TRY_MAX))).map_err(failed)?;
        head.version.ok_or_else(|| unsupported("the store gives objects no ETag"))
    };
    // These two conditions hold, so the results are ignored. If one fails, an earlier attempt succeeded and
    // its response was lost.
    is_accepted(b"1", WriteCondition::Absent)?;
    let first = version()?;
    is_accepted(b"2", WriteCondition::Unchanged(&first))?;
    let second = version()?;
    let ignored = if second == first {
        Some("the store does not change the ETag of an object with its content")
    } else if is_accepted(b"3", WriteCondition::Absent)? {
        Some("the store ignores If-None-Match")
    } else if is_accepted(b"4", WriteCondition::Unchanged(&first))? {
        Some("the store ignores If-Match")
    } else {
        None
    };
    retry(limits, || objects.delete(&key, limits.at_most(TRY_MAX))).map_err(failed)?;
    ignored.map_or(Ok(()), |why| Err(unsupported(why)))
}
