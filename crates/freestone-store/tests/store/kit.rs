//! Helpers of the image store tests.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use freestone_core::device::{
    Blocking as _, Buffer, Change, Changes, Completion, Device, Extent, Flags, Geometry, IoBuf, Op, Request,
    Result, TryResult,
};
use freestone_store::cache::{BYTES_MIN, Cache};
use freestone_store::format::PAGE;
use freestone_store::format::domain::GRACE;
use freestone_store::image::{Config, Image};
use freestone_store::objects::{CallLimits, Objects};
use freestone_store::push::{BaseImage, Layer, Options, PushReport, Source, push};
use freestone_store::store::{CreateOptions, Error, Store};
use freestone_testkit::objects::MemoryStore;
use freestone_testkit::{Model, Rng};

pub const BEGIN: CreateOptions = CreateOptions { encrypted: false, grace: GRACE };
pub const CONFIG: Config = Config { timeout: Duration::from_secs(20), prefetch: false };

pub fn soon() -> CallLimits<'static> {
    CallLimits::within(Duration::from_secs(60))
}

/// Returns an object store in memory, and an image store in it.
pub fn store() -> (Arc<MemoryStore>, Arc<Store>) {
    let memory = Arc::new(MemoryStore::default());
    let store = open(&memory);
    (memory, store)
}

pub fn open(memory: &Arc<MemoryStore>) -> Arc<Store> {
    let objects = Arc::clone(memory) as Arc<dyn Objects>;
    Arc::new(Store::open_or_create(objects, None, BEGIN, soon()).unwrap().0)
}

pub fn options(tag: &str) -> Options<'_> {
    Options { tag, full: false, threads: 8, is_new: false }
}

pub fn push_plain(store: &Store, device: &dyn Device, tag: &str) -> std::result::Result<PushReport, Error> {
    let source = Source { device, label: "test", base_image: None };
    push(store, source, options(tag), &|_, _| {}, soon())
}

pub fn cache() -> (tempfile::TempDir, Arc<Cache>) {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path().join("cache"), 4 * BYTES_MIN).unwrap();
    (dir, cache)
}

pub fn image(store: &Arc<Store>, cache: Option<&Arc<Cache>>, tag: &str) -> Image {
    let name = store.tag(tag, soon()).unwrap().unwrap().tag.manifest;
    Image::open(Arc::clone(store), cache.cloned(), name, CONFIG, soon()).unwrap()
}

/// Returns the whole content of a device.
pub fn content(device: &dyn Device) -> Vec<u8> {
    let mut all = vec![0xee; device.geometry().size as usize];
    for (number, part) in all.chunks_mut(700 << 10).enumerate() {
        device.read_at((number * (700 << 10)) as u64, part).unwrap();
    }
    all
}

/// Returns a device of `pages` pages with noise, text, same-filled pages and holes.
pub fn mixed(pages: usize, seed: u64) -> Model {
    let mut rng = Rng::new(seed);
    let device = Model::new(pages * PAGE, 512);
    let mut page = vec![0; PAGE];
    for number in 0..pages {
        if number / 50 % 4 == 3 {
            continue;
        }
        rng.content(&mut page);
        device.write_at((number * PAGE) as u64, &page, Flags::empty()).unwrap();
    }
    device
}

/// Overwrites `count` random pages with noise, and returns `count`.
pub fn change(device: &dyn Device, count: usize, seed: u64) -> usize {
    let mut rng = Rng::new(seed);
    let pages = device.geometry().size / PAGE as u64;
    let mut changed = BTreeSet::new();
    let mut page = vec![0; PAGE];
    while changed.len() < count {
        let number = rng.below(pages);
        if changed.insert(number) {
            rng.fill(&mut page);
            device.write_at(number * PAGE as u64, &page, Flags::empty()).unwrap();
        }
    }
    count
}

/// A writable device over an image, which keeps and reports its own pages, like a fork.
pub struct Overlay {
    pub base: Image,
    pub pages: std::sync::Mutex<std::collections::BTreeMap<u64, Vec<u8>>>,
    /// Number of pages that were read from the base image.
    pub read: std::sync::atomic::AtomicU64,
}

impl Overlay {
    pub fn new(base: Image) -> Self {
        Self { base, pages: std::sync::Mutex::default(), read: std::sync::atomic::AtomicU64::new(0) }
    }

    pub fn over<'a>(&'a self, layers: &'a [Layer<'a>], tag: Option<&'a str>) -> BaseImage<'a> {
        BaseImage { layers, name: self.base.name(), tag }
    }
}

impl Device for Overlay {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: false, ..self.base.geometry() }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        let mut pages = self.pages.lock().unwrap();
        let numbers = request.offset / PAGE as u64..(request.offset + request.len) / PAGE as u64;
        match buffer {
            Buffer::Read(out) => {
                for (number, out) in numbers.zip(out.chunks_mut(PAGE)) {
                    if let Some(page) = pages.get(&number) {
                        out.copy_from_slice(page);
                    } else {
                        self.read.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        self.base.read_at(number * PAGE as u64, out)?;
                    }
                }
            }
            Buffer::Write(data) => {
                for (number, data) in numbers.zip(data.chunks(PAGE)) {
                    pages.insert(number, data.to_vec());
                }
            }
            Buffer::None if request.op == Op::Flush => {}
            Buffer::None => {
                for number in numbers {
                    pages.insert(number, vec![0; PAGE]);
                }
            }
        }
        Ok(TryResult::Done)
    }

    fn submit(&self, _: Request, buffer: IoBuf, done: Completion) {
        done.complete(Ok(()), buffer);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        row(Extent { offset, len, kind: freestone_core::device::ExtentKind::Data });
        Ok(len)
    }

    fn changes(&self) -> Option<&dyn Changes> {
        Some(self)
    }
}

impl Changes for Overlay {
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        let pages = self.pages.lock().unwrap();
        let page = PAGE as u64;
        for number in offset / page..(offset + len).div_ceil(page) {
            let start = offset.max(number * page);
            let len = (offset + len).min((number + 1) * page) - start;
            if !row(Change { offset: start, len, own: pages.contains_key(&number) }) {
                return Ok(start + len - offset);
            }
        }
        Ok(len)
    }
}
