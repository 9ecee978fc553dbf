//! What a tag may show after pushes.

use freestone::store::format::name::Name;
use freestone::store::image::{Config, Image};
use freestone::store::objects::{Fault, Until};
use freestone::store::push::Pushed;
use freestone::store::store::{Error, Result as Answer, Store};

use super::super::look::read_all;
use super::super::{Causes, World, Wrong, wrong};
use super::{CALM, Pushing, Tagged};
use crate::oracle::{Durability, Oracle, SECTOR_BYTES};
use crate::rt::sync::Arc;

/// What a tag says, and what that image shows.
pub type After = Option<(Name, Vec<u8>)>;

/// Pushes of one tag, and what came of them.
pub struct Judged {
    pub tag: &'static str,
    /// Those of the store before.
    pub faults: Causes,
    /// There were several.
    pub beside: bool,
    /// A prune was done meanwhile.
    pub prunes: bool,
    pub ended: Vec<(Pushing, Answer<Pushed>)>,
}

/// Reads all of what a tag says; nothing is wrong with the store for whoever asks here.
pub fn look(store: &Arc<Store>, tag: &str) -> Result<After, Wrong> {
    let read = store.tag(tag, Until::within(CALM));
    let read = read.map_err(|error| Wrong::Said(format!("tag {tag} cannot be read: {error}")))?;
    let Some(read) = read else { return Ok(None) };
    let name = read.tag.manifest;
    let config = Config { timeout: CALM, prefetch: false };
    let bytes = Image::open(Arc::clone(store), None, name, config, Until::within(CALM))
        .map_err(|error| error.to_string())
        .and_then(|image| {
            let read = read_all(&image);
            read.map_err(|error| format!("{error}: {:?}", image.stat().last_error))
        });
    match bytes {
        Ok(bytes) => Ok(Some((name, bytes))),
        Err(error) => wrong(format!("the image of tag {tag} cannot be read: {error}")),
    }
}

/// Whether these bytes are what was to be seen there.
fn shows(oracle: &mut Oracle, bytes: &[u8]) -> Result<(), Wrong> {
    if oracle.size() * SECTOR_BYTES as u64 != bytes.len() as u64 {
        return wrong(format!(
            "an image has {} bytes, and should have {} sectors",
            bytes.len(),
            oracle.size()
        ));
    }
    let read = oracle.begin_read();
    Ok(oracle.check_read(read, 0, bytes)?)
}

impl World {
    /// No push has changed this tag since.
    pub(super) fn is_as_it_was(&mut self, tag: &str, after: After) -> Result<(), Wrong> {
        let Some(tagged) = self.images.as_mut().and_then(|images| images.tags.get_mut(tag)) else {
            return match after {
                None => Ok(()),
                Some((name, _)) => wrong(format!("tag {tag} says {name}, and nobody has set it")),
            };
        };
        match after {
            Some((name, bytes)) if name == tagged.name => shows(&mut tagged.shows, &bytes),
            after => {
                let name = after.map(|(name, _)| name);
                wrong(format!("tag {tag} says {name:?}, and was set to {:?}", tagged.name))
            }
        }
    }

    /// What the tag says now, where it was set.
    pub(super) fn judge_push(&mut self, judged: Judged, after: After) -> Result<Option<Tagged>, Wrong> {
        let Judged { tag, faults, beside, prunes, ended } = judged;
        let Some(images) = &self.images else { return Ok(None) };
        let had_faults = {
            let now = images.faults.causes();
            now.errors > faults.errors || now.hung > 0
        };
        let before = images.tags.get(tag).cloned();
        // What it may say, with a name where that is known.
        let mut may: Vec<(Option<Name>, Oracle)> = Vec::new();
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
                    may.push((Some(pushed.manifest), shown));
                }
                Err(error) => {
                    failed = true;
                    self.count("pushes that failed");
                    // A prune may have been about to delete what the push then wrote again.
                    if !(prunes && matches!(error, Error::Pruned(_))) {
                        self.may_push_fail(&one, &error, had_faults, beside)?;
                    }
                    may.push((None, shown));
                }
            }
        }
        let Some((name, bytes)) = after else {
            return if set || before.is_some() { wrong(format!("tag {tag} is gone")) } else { Ok(None) };
        };
        if let Some(before) = before.filter(|before| before.name == name) {
            let is_same = may.iter().any(|(known, _)| *known == Some(name));
            if set && !is_same {
                return wrong(format!("tag {tag} says {name} still, and a push was answered"));
            }
            self.is_as_it_was(tag, Some((name, bytes)))?;
            return Ok(Some(before));
        }
        let known = may.iter().position(|(known, _)| *known == Some(name));
        let found = match known {
            Some(at) => {
                shows(&mut may[at].1, &bytes)?;
                at
            }
            None if failed => {
                // One that had no answer may have set it all the same.
                let mut why = None;
                let at = may.iter_mut().position(|(name, oracle)| {
                    name.is_none() && shows(oracle, &bytes).map_err(|wrong| why = Some(wrong)).is_ok()
                });
                match (at, why) {
                    (Some(at), _) => at,
                    (None, Some(why)) => return Err(why),
                    (None, None) => return wrong(format!("tag {tag} says {name}")),
                }
            }
            None => return wrong(format!("tag {tag} says {name}, which nobody pushed")),
        };
        let tagged = Tagged { name, shows: may.swap_remove(found).1 };
        if let Some(images) = &mut self.images {
            images.tags.insert(tag, tagged.clone());
        }
        Ok(Some(tagged))
    }

    fn may_push_fail(
        &self,
        one: &Pushing,
        error: &Error,
        had_faults: bool,
        beside: bool,
    ) -> Result<(), Wrong> {
        let was_killed = |fault: &Fault| *fault == Fault::Other("killed".into());
        let has_cause = match error {
            Error::Device(error) => return self.judge_look(one.id, *error, one.before),
            Error::TagMoved(_) => beside || one.may_fail,
            // Its image has no tag any more.
            Error::ParentGoes(_) => one.own.is_some(),
            Error::Object { fault, .. } if was_killed(fault) => one.may_fail,
            // The tag of its image was set meanwhile.
            Error::Object { fault: Fault::Other(_), .. } => beside && one.own.is_some(),
            _ => one.may_fail && had_faults,
        };
        if has_cause { Ok(()) } else { wrong(format!("{} was not pushed: {error}", self.name(one.id))) }
    }
}
