//! A store with a reference image from two pushes, the same in each run.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use freestone::device::{Blocking as _, Flags};
use freestone::store::format::chunk::STORED_BYTES_MAX;
use freestone::store::format::name::Name;
use freestone::store::format::{PAGE, meta};
use freestone::store::objects::{
    CallLimits, Head, KEY_BYTES_MAX, ListEntry, Objects, Read, Result, Version, WriteCondition,
};
use freestone::store::push::{self, Options, PushReport, Source};
use freestone::store::store::{self, Store};
use freestone_testkit::objects::MemoryStore;
use freestone_testkit::{Model, Rng};

use super::keys::FixedDomain;

/// Number of pages in the image. The image has two chunks, of which the second is shorter.
pub const PAGES: usize = 150;

pub type Object = (String, Vec<u8>);

pub struct Reference {
    pub domain: FixedDomain,
    pub objects: Vec<Object>,
    pub image: Name,
    pub content: Vec<u8>,
}

/// Returns limits with a deadline that no call should reach.
pub fn soon() -> CallLimits<'static> {
    CallLimits::within(Duration::from_secs(60))
}

/// An object store in memory that asserts that reads request a non-empty range within the size limits.
pub struct Guarded(MemoryStore);

impl Objects for Guarded {
    fn url(&self) -> &str {
        self.0.url()
    }

    fn get(&self, key: &str, part: Option<Range<u64>>, most: u64, until: CallLimits<'_>) -> Result<Read> {
        assert!(!part.as_ref().is_some_and(Range::is_empty), "{key}: an empty range is requested");
        let bound =
            if key.starts_with("chunks/") { STORED_BYTES_MAX as u64 } else { meta::STORED_BYTES_MAX + 32 };
        assert!(most <= bound && key.len() <= KEY_BYTES_MAX, "{key}: {most} bytes are requested");
        self.0.get(key, part, most, until)
    }

    fn put(
        &self,
        key: &str,
        bytes: &[u8],
        when: WriteCondition<'_>,
        until: CallLimits<'_>,
    ) -> Result<Option<Version>> {
        self.0.put(key, bytes, when, until)
    }

    fn head(&self, key: &str, until: CallLimits<'_>) -> Result<Head> {
        self.0.head(key, until)
    }

    fn list(
        &self,
        prefix: &str,
        each: &mut dyn FnMut(ListEntry) -> bool,
        until: CallLimits<'_>,
    ) -> Result<()> {
        self.0.list(prefix, each, until)
    }

    fn delete(&self, key: &str, until: CallLimits<'_>) -> Result<()> {
        self.0.delete(key, until)
    }

    fn delete_unchanged(&self, key: &str, read: &Version, until: CallLimits<'_>) -> Result<()> {
        self.0.delete_unchanged(key, read, until)
    }

    fn uptime(&self) -> Duration {
        self.0.uptime()
    }
}

/// Creates an object store in memory with the given objects.
pub fn memory(objects: &[Object]) -> Arc<Guarded> {
    let memory = MemoryStore::default();
    for (key, bytes) in objects {
        memory.put(key, bytes, WriteCondition::Always, soon()).expect("memory");
    }
    Arc::new(Guarded(memory))
}

/// Creates a device to push. Every seventh page depends on `version`.
pub fn device(version: u64) -> Model {
    let device = Model::new(PAGES * PAGE, 512);
    let mut page = [0; PAGE];
    for number in 0..PAGES as u64 {
        let changed = if number % 7 == 3 { version } else { 1 };
        let mut rng = Rng::new(number * 64 + changed);
        // Most pages compress well, so objects are small and mutations often change headers and frames.
        if rng.chance(5) {
            rng.fill(&mut page);
        } else {
            page.fill(rng.below(4) as u8);
        }
        device.write_at(number * PAGE as u64, &page, Flags::empty()).expect("memory");
    }
    device
}

pub fn push(store: &Store, device: &Model, tag: &str) -> store::Result<PushReport> {
    let source = Source { device, label: "disk", base_image: None };
    let options = Options { tag, full: false, threads: 2, is_new: false };
    push::push(store, source, options, &|_, _| {}, soon())
}

impl Reference {
    pub fn new() -> Self {
        let domain = FixedDomain::new(false);
        let objects = memory(&[("freestone.json".to_owned(), domain.description.clone())]);
        let of_store = Arc::clone(&objects) as Arc<dyn Objects>;
        let store = Store::open(of_store, None, soon()).expect("a store");
        push(&store, &device(1), "v1").expect("it can be pushed");
        let device = device(2);
        let image = push(&store, &device, "v1").expect("it can be pushed").manifest;
        let mut content = vec![0; PAGES * PAGE];
        device.read_at(0, &mut content).expect("memory");
        let keys = objects.0.object_sizes("").into_keys();
        let object = |key: String| {
            let bytes = objects.get(&key, None, 1 << 19, soon()).expect("it is there").bytes;
            (key, bytes)
        };
        Self { domain, objects: keys.map(object).collect(), image, content }
    }
}
