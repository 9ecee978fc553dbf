//! The image store in the directory of a run, and the images to which each tag may refer.

use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use freestone::device::{Blocking as _, Device as _, Flags};
use freestone::store::format::domain::GRACE;
use freestone::store::image::{Config, Image};
use freestone::store::objects::{CallLimits, Directory, Objects};
use freestone::store::push::{Options, Source, push};
use freestone::store::store::{CreateOptions, Error, Store};
use freestone_testkit::Model;

use crate::oracle::{Oracle, SECTOR_BYTES};
use crate::program::world::{PossibleImage, TAGS, World};

/// Names of directories in that of the run: the image store, and the image cache of the servers.
pub const STORE: &str = "store";
pub const CACHE: &str = "cache";
/// Timeout of requests to the image store.
const TIME_MAX: Duration = Duration::from_secs(60);

pub fn url(world: &World, tag: &str) -> String {
    format!("file://{}:{tag}", world.dir().join(STORE).display())
}

fn open(dir: &Path) -> Result<Store, Error> {
    let objects: Arc<dyn Objects> = Arc::new(Directory::new(dir.join(STORE)));
    let begin = CreateOptions { encrypted: false, grace: GRACE };
    Ok(Store::open_or_create(objects, None, begin, CallLimits::within(TIME_MAX))?.0)
}

/// Creates the image store with one image, to which `tag` refers. Returns the name of the image.
pub fn begin(dir: &Path, tag: &str, content: &[u8]) -> Result<String, String> {
    let device = Model::new(content.len(), SECTOR_BYTES as u32);
    let pushed = || -> Result<_, Error> {
        device.write_at(0, content, Flags::empty())?;
        let source = Source { device: &device, label: "torture", base_image: None };
        let options = Options { tag, full: false, threads: 2, is_new: false };
        push(&open(dir)?, source, options, &|_, _| {}, CallLimits::within(TIME_MAX))
    };
    pushed().map(|pushed| pushed.manifest.to_string()).map_err(|error| error.to_string())
}

/// Checks that a tag refers to one of the images in `may`, and that the whole content of that image is right. Only this
/// image stays in `may`. Returns false if the tag is not set.
pub fn settle(world: &World, tag: &str, may: &mut Vec<PossibleImage>) -> Result<bool, String> {
    let failed = |error: Error| format!("tag {tag}: {error}");
    let store = Arc::new(open(&world.dir()).map_err(failed)?);
    let Some(read) = store.tag(tag, CallLimits::within(TIME_MAX)).map_err(failed)? else {
        if may.iter().any(|one| one.image.is_some()) {
            return Err(format!("tag {tag} is gone"));
        }
        may.clear();
        return Ok(false);
    };
    let name = read.tag.manifest;
    let config = Config { timeout: TIME_MAX, prefetch: false };
    let image = Image::open(store, None, name, config, CallLimits::within(TIME_MAX)).map_err(failed)?;
    let mut bytes = vec![0; image.geometry().size as usize];
    image.read_at(0, &mut bytes).map_err(|e| format!("tag {tag}: {name}: {e}: {:?}", image.stat()))?;
    let name = name.to_string();
    let shows = |oracle: &mut Oracle| {
        let sectors = (bytes.len() / SECTOR_BYTES) as u64;
        if sectors > oracle.size() {
            return Err(format!(
                "the image has {sectors} sectors, but should have at most {}",
                oracle.size()
            ));
        }
        // The push may have come before the device grew: the image is then smaller than the oracle.
        oracle.truncate(sectors);
        let read = oracle.begin_read();
        oracle.check_read(read, 0, &bytes).map_err(|wrong| wrong.to_string())
    };
    let mut why = format!("tag {tag} refers to {name}");
    let known = may.iter().position(|one| one.image.as_ref() == Some(&name));
    let mut found = None;
    for (at, one) in may.iter_mut().enumerate() {
        let is_it = known.map_or(one.image.is_none(), |known| known == at);
        if is_it && found.is_none() {
            match shows(&mut one.oracle) {
                Ok(()) => found = Some(at),
                Err(wrong) => why = format!("{why}: {wrong}"),
            }
        }
    }
    let mut one = may.swap_remove(found.ok_or(why)?);
    one.image = Some(name);
    *may = vec![one];
    Ok(true)
}

/// Checks all tags as [`settle`] does, while no push runs.
pub fn settle_all(world: &World) -> Result<(), String> {
    for (tag, may) in TAGS.iter().zip(&world.tags) {
        let mut may = may.lock().unwrap_or_else(PoisonError::into_inner);
        let is_set = settle(world, tag, &mut may)?;
        world.counts.add("tags", if is_set { "whole" } else { "not set" }, 1);
    }
    Ok(())
}
