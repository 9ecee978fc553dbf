//! A file, the same as an image in a store on the same disk, and a cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use freestone::device::Device;
use freestone::file;
use freestone::store::cache::Cache;
use freestone::store::format::domain::GRACE;
use freestone::store::format::name::Name;
use freestone::store::image::{Config, Image, TIMEOUT};
use freestone::store::objects::{Directory, Objects, Until};
use freestone::store::push::{Options as PushOptions, Pushed, Source, THREADS, push};
use freestone::store::store::{Begin, Store};
use tempfile::TempDir;

use crate::data::Data;
use crate::options::{Options, Set};
use crate::place::{Own, Place};

const BYTES: u64 = 2 << 30;
/// More than all that is pulled.
const CACHE_BYTES: u64 = 64 << 30;
/// Of what is pushed.
pub const TAG: &str = "v1";

/// What the parts have in common.
pub struct Kit {
    pub data: Data,
    pub file: PathBuf,
    pub store: Arc<Store>,
    own: Own,
}

/// The name of what was pushed.
pub fn pushed(store: &Store) -> Result<Name> {
    Ok(store.tag(TAG, until())?.context("the tag is not there")?.tag.manifest)
}

pub fn until() -> Until<'static> {
    Until::within(Duration::from_secs(3600))
}

/// A store, begun if it is not there; and whether it was.
pub fn begun(objects: Arc<dyn Objects>) -> Result<(Arc<Store>, bool)> {
    let begin = Begin { encrypted: false, grace: GRACE };
    let (store, is_new) = Store::open_or_begin(objects, None, begin, until())?;
    Ok((Arc::new(store), is_new))
}

/// The image that was pushed to a store.
pub fn image(store: &Arc<Store>, cache: &Path, prefetch: bool) -> Result<Arc<Image>> {
    let cache = Cache::open(cache, CACHE_BYTES)?;
    let name = pushed(store)?;
    let config = Config { timeout: TIMEOUT, prefetch };
    Ok(Arc::new(Image::open(Arc::clone(store), Some(cache), name, config, until())?))
}

impl Kit {
    /// Fills the file, and pushes it.
    pub fn new(place: &Place, set: Set, options: &Options) -> Result<Self> {
        let data = Data::open(set, options.bytes(BYTES), options)?;
        let own = place.server()?;
        let file = own.image("disk");
        fs::File::create(&file)?;
        data.save(&file)?;
        let (store, is_new) = begun(Arc::new(Directory::new(own.path().join("store"))))?;
        let kit = Self { data, file, store, own };
        kit.push(&kit.store, is_new)?;
        Ok(kit)
    }

    /// Pushes the file.
    pub fn push(&self, store: &Store, is_new: bool) -> Result<Pushed> {
        let device = self.local()?;
        let source = Source { device: &*device, label: "disk", over: None };
        let options = PushOptions { tag: TAG, full: false, threads: THREADS, is_new };
        Ok(push(store, source, options, &|_, _| {}, until())?)
    }

    /// A directory that goes when this is dropped.
    pub fn empty_cache(&self) -> Result<TempDir> {
        Ok(tempfile::tempdir_in(self.own.path())?)
    }

    /// The file as a device.
    pub fn local(&self) -> Result<Arc<dyn Device>> {
        let mut config = file::Config::new(&self.file);
        config.read_only = true;
        Ok(Arc::new(file::File::open(&config)?))
    }

    /// Where that is which was pulled.
    pub fn cache(&self) -> PathBuf {
        self.own.path().join("cache")
    }

    /// A socket.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.own.socket(name)
    }

    /// The image, with all of it in a cache of its own.
    pub fn pulled(&self) -> Result<Arc<Image>> {
        let image = image(&self.store, &self.cache(), false)?;
        image.pull(&|_, _| {}, until())?;
        Ok(image)
    }
}
