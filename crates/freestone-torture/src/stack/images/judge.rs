//! Judges the image to which a tag refers after pushes.

use freestone::store::format::name::Name;
use freestone::store::image::{Config, Image};
use freestone::store::objects::{CallLimits, Fault};
use freestone::store::push::PushReport;
use freestone::store::store::{Error, Result as Answer, Store};

use super::super::queries::read_all;
use super::super::{Causes, Finding, World, finding};
use super::{FAULTLESS_TIMEOUT, PushTask, TagImage};
use crate::oracle::{Durability, Oracle, SECTOR_BYTES};
use crate::rt::sync::Arc;

/// The name of the image to which a tag refers, and its content; `None` if the tag does not exist.
pub type TagContent = Option<(Name, Vec<u8>)>;

/// Concurrent pushes to one tag, and their results.
pub struct PushResults {
    pub tag: &'static str,
    /// Number of failures of the image store before the pushes.
    pub faults: Causes,
    /// More than one push ran at the same time.
    pub had_others: bool,
    /// A prune ran at the same time as the pushes.
    pub prunes: bool,
    pub ended: Vec<(PushTask, Answer<PushReport>)>,
}

/// Reads the whole image of a tag through a connection without faults. Returns `None` if the tag
/// does not exist.
pub fn read_tag(store: &Arc<Store>, tag: &str) -> Result<TagContent, Finding> {
    let read = store.tag(tag, CallLimits::within(FAULTLESS_TIMEOUT));
    let read = read.map_err(|error| Finding::Message(format!("tag {tag} cannot be read: {error}")))?;
    let Some(read) = read else { return Ok(None) };
    let name = read.tag.manifest;
    let config = Config { timeout: FAULTLESS_TIMEOUT, prefetch: false };
    let bytes = Image::open(Arc::clone(store), None, name, config, CallLimits::within(FAULTLESS_TIMEOUT))
        .map_err(|error| error.to_string())
        .and_then(|image| {
            let read = read_all(&image);
            read.map_err(|error| format!("{error}: {:?}", image.stat().last_error))
        });
    match bytes {
        Ok(bytes) => Ok(Some((name, bytes))),
        Err(error) => finding(format!("the image of tag {tag} cannot be read: {error}")),
    }
}

/// Checks that `bytes` is a whole content that the oracle allows.
fn check_bytes(oracle: &mut Oracle, bytes: &[u8]) -> Result<(), Finding> {
    if oracle.size() * SECTOR_BYTES as u64 != bytes.len() as u64 {
        return finding(format!(
            "an image has {} bytes, but should have {} sectors",
            bytes.len(),
            oracle.size()
        ));
    }
    let read = oracle.begin_read();
    Ok(oracle.check_read(read, 0, bytes)?)
}

impl World {
    /// Checks that a tag still refers to the image before the push or prune, with unchanged
    /// content.
    pub(super) fn check_tag_unchanged(&mut self, tag: &str, after: TagContent) -> Result<(), Finding> {
        let Some(tagged) = self.images.as_mut().and_then(|images| images.tags.get_mut(tag)) else {
            return match after {
                None => Ok(()),
                Some((name, _)) => finding(format!("tag {tag} refers to {name}, but was never set")),
            };
        };
        match after {
            Some((name, bytes)) if name == tagged.name => check_bytes(&mut tagged.shows, &bytes),
            after => {
                let name = after.map(|(name, _)| name);
                finding(format!("tag {tag} refers to {name:?}, but was set to {:?}", tagged.name))
            }
        }
    }

    /// Judges pushes by the content that the tag has afterwards. Returns the image of the tag, or
    /// `None` if the tag does not exist.
    pub(super) fn judge_push(
        &mut self,
        results: PushResults,
        after: TagContent,
    ) -> Result<Option<TagImage>, Finding> {
        let PushResults { tag, faults, had_others, prunes, ended } = results;
        let Some(images) = &self.images else { return Ok(None) };
        let had_faults = {
            let now = images.faults.causes();
            now.errors > faults.errors || now.hung > 0
        };
        let before = images.tags.get(tag).cloned();
        // Images to which the tag may refer. The name is known only if the push succeeded.
        let mut allowed: Vec<(Option<Name>, Oracle)> = Vec::new();
        let (mut set, mut failed) = (false, false);
        for (mut one, outcome) in ended {
            let shown = self.oracles.get_mut(&one.oracle);
            let shown = shown.zip(one.token.take());
            let shown =
                shown.map(|(oracle, token)| oracle.snapshot_since(token, "image", Durability::Nothing));
            let Some(mut shown) = shown else { continue };
            shown.grow(one.device.geometry().size / SECTOR_BYTES as u64);
            match outcome {
                Ok(pushed) => {
                    set = true;
                    self.count(if one.own.is_some() { "pushed changes" } else { "pushed images" });
                    allowed.push((Some(pushed.manifest), shown));
                }
                Err(error) => {
                    failed = true;
                    self.count("pushes that failed");
                    // A prune may have been deleting an object while the push wrote it again.
                    if !(prunes && matches!(error, Error::ObjectPruned(_))) {
                        self.may_push_fail(&one, &error, had_faults, had_others)?;
                    }
                    allowed.push((None, shown));
                }
            }
        }
        let Some((name, bytes)) = after else {
            return if set || before.is_some() { finding(format!("tag {tag} is gone")) } else { Ok(None) };
        };
        if let Some(before) = before.filter(|before| before.name == name) {
            let is_same = allowed.iter().any(|(known, _)| *known == Some(name));
            if set && !is_same {
                return finding(format!("tag {tag} still refers to {name} after a push succeeded"));
            }
            self.check_tag_unchanged(tag, Some((name, bytes)))?;
            return Ok(Some(before));
        }
        let known = allowed.iter().position(|(known, _)| *known == Some(name));
        let found = match known {
            Some(at) => {
                check_bytes(&mut allowed[at].1, &bytes)?;
                at
            }
            None if failed => {
                // A push that failed may have set the tag nevertheless.
                let mut why = None;
                let at = allowed.iter_mut().position(|(name, oracle)| {
                    name.is_none()
                        && check_bytes(oracle, &bytes).map_err(|finding| why = Some(finding)).is_ok()
                });
                match (at, why) {
                    (Some(at), _) => at,
                    (None, Some(why)) => return Err(why),
                    (None, None) => return finding(format!("tag {tag} refers to {name}")),
                }
            }
            None => return finding(format!("tag {tag} refers to {name}, which was never pushed")),
        };
        let tagged = TagImage { name, shows: allowed.swap_remove(found).1 };
        if let Some(images) = &mut self.images {
            images.tags.insert(tag, tagged.clone());
        }
        Ok(Some(tagged))
    }

    fn may_push_fail(
        &self,
        one: &PushTask,
        error: &Error,
        had_faults: bool,
        had_others: bool,
    ) -> Result<(), Finding> {
        let was_killed = |fault: &Fault| *fault == Fault::Other("killed".into());
        let has_cause = match error {
            Error::Device(error) => return self.judge_query(one.id, *error, one.before),
            Error::TagMoved(_) => had_others || one.may_fail,
            // Perhaps no tag refers to the parent image anymore.
            Error::ParentExpiring(_) => one.own.is_some(),
            Error::Object { fault, .. } if was_killed(fault) => one.may_fail,
            _ => one.may_fail && had_faults,
        };
        if has_cause { Ok(()) } else { finding(format!("pushing {} failed: {error}", self.name(one.id))) }
    }
}
