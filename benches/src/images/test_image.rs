//! Test image of the `images` parts: a file, the same content pushed to an image store on the same
//! disk, and a cache.

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
use freestone::store::objects::{CallLimits, Directory, Objects};
use freestone::store::push::{Options as PushOptions, PushReport, Source, THREADS, push};
use freestone::store::store::{CreateOptions, Store};
use tempfile::TempDir;

use crate::data::Data;
use crate::options::{Options, Set};
use crate::programs::run_dir::{RunDir, ServerDir};

const BYTES: u64 = 2 << 30;
/// Size limit of the cache in bytes, larger than everything that is pulled.
const CACHE_BYTES: u64 = 64 << 30;
pub const TAG: &str = "v1";

/// Image file and image store that all parts share.
pub struct TestImage {
    pub data: Data,
    pub file: PathBuf,
    pub store: Arc<Store>,
    server_dir: ServerDir,
}

/// Returns the name of the image to which the tag refers.
pub fn pushed_image(store: &Store) -> Result<Name> {
    Ok(store.tag(TAG, deadline())?.context("the tag does not exist")?.tag.manifest)
}

pub fn deadline() -> CallLimits<'static> {
    CallLimits::within(Duration::from_secs(3600))
}

/// Opens an image store, or creates it. The flag is true if the image store is new.
pub fn open_or_create(objects: Arc<dyn Objects>) -> Result<(Arc<Store>, bool)> {
    let begin = CreateOptions { encrypted: false, grace: GRACE };
    let (store, is_new) = Store::open_or_create(objects, None, begin, deadline())?;
    Ok((Arc::new(store), is_new))
}

/// Opens the image that was pushed to an image store.
pub fn image(store: &Arc<Store>, cache: &Path, prefetch: bool) -> Result<Arc<Image>> {
    let cache = Cache::open(cache, CACHE_BYTES)?;
    let name = pushed_image(store)?;
    let config = Config { timeout: TIMEOUT, prefetch };
    Ok(Arc::new(Image::open(Arc::clone(store), Some(cache), name, config, deadline())?))
}

impl TestImage {
    /// Fills the image file and pushes it.
    pub fn new(run_dir: &RunDir, set: Set, options: &Options) -> Result<Self> {
        let data = Data::open(set, options.bytes(BYTES), options)?;
        let server_dir = run_dir.server()?;
        let file = server_dir.image("disk");
        fs::File::create(&file)?;
        data.save(&file)?;
        let (store, is_new) = open_or_create(Arc::new(Directory::new(server_dir.path().join("store"))))?;
        let test_image = Self { data, file, store, server_dir };
        test_image.push(&test_image.store, is_new)?;
        Ok(test_image)
    }

    /// Pushes the image file to `store`.
    pub fn push(&self, store: &Store, is_new: bool) -> Result<PushReport> {
        let device = self.local()?;
        let source = Source { device: &*device, label: "disk", base_image: None };
        let options = PushOptions { tag: TAG, full: false, threads: THREADS, is_new };
        Ok(push(store, source, options, &|_, _| {}, deadline())?)
    }

    /// Creates an empty cache directory, which is removed on drop.
    pub fn empty_cache(&self) -> Result<TempDir> {
        Ok(tempfile::tempdir_in(self.server_dir.path())?)
    }

    /// Opens the image file as a read-only device.
    pub fn local(&self) -> Result<Arc<dyn Device>> {
        let mut config = file::Config::new(&self.file);
        config.read_only = true;
        Ok(Arc::new(file::File::open(&config)?))
    }

    /// Returns the cache directory that [`Self::pulled`] fills.
    pub fn cache(&self) -> PathBuf {
        self.server_dir.path().join("cache")
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.server_dir.socket(name)
    }

    /// Opens the image and pulls all of it into the cache.
    pub fn pulled(&self) -> Result<Arc<Image>> {
        let image = image(&self.store, &self.cache(), false)?;
        image.pull(&|_, _| {}, deadline())?;
        Ok(image)
    }
}
