//! Images in an image store in memory, whose requests fail by rule. Images are bases of forks; snapshots and
//! other read-only devices are pushed as images.

mod judge;
mod rules;

use std::collections::BTreeMap;

use freestone::device::Device;
use freestone::store::cache::{self, Cache};
use freestone::store::format::name::Name;
use freestone::store::image::{Config, Image};
use freestone::store::objects::{CallLimits, Objects};
use freestone::store::prune::prune;
use freestone::store::push::{BaseImage, Layer, Options, PushReport, Source, push};
use freestone::store::store::{self, CreateOptions, Store};
use freestone_testkit::objects::MemoryStore;
use freestone_testkit::{Model, Rng};

use super::io::StartState;
use super::{
    BaseSource, DiskId, Kind, NODES_MAX, NodeId, StoredImage, VerbTask, World, act, finding, finish,
};
use crate::oracle::{Oracle, ReadToken};
use crate::rt::sync::Arc;
use crate::rt::sync::atomic::{AtomicU32, Ordering};
use crate::rt::thread::{self, JoinHandle};
use crate::rt::time::Duration;
use judge::{PushResults, TagContent, read_tag};
pub(super) use rules::StoreFaults;

/// Timeout of reads of an image through a connection whose requests may fail.
const TIMEOUT: Duration = Duration::from_millis(300);
/// Timeout of requests through a connection without faults.
const FAULTLESS_TIMEOUT: Duration = Duration::from_secs(30);
/// Grace period of a prune: younger objects are kept even if no image refers to them.
const GRACE: Duration = Duration::from_secs(3600);
/// Time limit of a push or a prune. In virtual time a push can wait until no prune can delete an object that
/// the push has written again.
const PUSH_MAX: Duration = Duration::from_secs(if cfg!(freestone_sim) { 50 } else { 8 });
/// A push through a killed connection fails after fewer than this number of requests.
const CUT_AFTER_MAX: u64 = 30;
const TAGS: [&str; 4] = ["a", "b", "c", "d"];

/// The image store, and the images that it must contain.
pub(super) struct Images {
    memory: Arc<MemoryStore>,
    faults: Arc<StoreFaults>,
    injector: DiskId,
    /// A connection to the image store whose requests may fail.
    store: Arc<Store>,
    /// A connection to the image store without faults.
    faultless: Arc<Store>,
    cache: Option<Arc<Cache>>,
    tags: BTreeMap<&'static str, TagImage>,
    /// Images that were opened. The number is non-zero if a prune may have deleted the data of the image.
    opened: Vec<(Name, Arc<AtomicU32>)>,
}

/// The image to which a tag refers.
#[derive(Clone)]
struct TagImage {
    name: Name,
    shows: Oracle,
}

/// A push in progress, with the state needed to judge the result.
struct PushTask {
    id: NodeId,
    device: Arc<dyn Device>,
    /// If the device is a fork of an image: the device with its changes only, and that image.
    own: Option<(Arc<dyn Device>, StoredImage)>,
    oracle: u32,
    token: Option<ReadToken>,
    before: StartState,
    store: Arc<Store>,
    /// Requests of the connection may fail: from some request on, or by the rules of the store.
    may_fail: bool,
    full: bool,
}

impl PushTask {
    fn run(&self, tag: &str) -> store::Result<PushReport> {
        let layers = self.own.as_ref().and_then(|(own, base)| Some(([Layer::of(&**own)?], base)));
        let base_image =
            layers.as_ref().map(|(layers, base)| BaseImage { layers, name: base.name, tag: Some(base.tag) });
        let source = Source { device: &*self.device, label: "torture", base_image };
        let options = Options { tag, full: self.full, threads: 4, is_new: false };
        push(&self.store, source, options, &|_, _| {}, CallLimits::within(PUSH_MAX))
    }
}

fn open(memory: &Arc<MemoryStore>) -> store::Result<Arc<Store>> {
    let objects = Arc::clone(memory) as Arc<dyn Objects>;
    let begin = CreateOptions { encrypted: false, grace: GRACE };
    Ok(Arc::new(Store::open_or_create(objects, None, begin, CallLimits::within(FAULTLESS_TIMEOUT))?.0))
}

impl Images {
    /// Opens another connection to the image store. After some requests all further ones fail, as if the
    /// process had been killed.
    fn killed_connection(&self, rng: &mut Rng) -> store::Result<Arc<Store>> {
        let memory = Arc::new(self.memory.new_client());
        let store = open(&memory)?;
        rules::fail_from(&memory, rng.below(CUT_AFTER_MAX), rng.chance(50));
        Ok(store)
    }

    /// Chooses a connection at random. Also returns true if requests of the connection may fail.
    fn choose_connection(&self, rng: &mut Rng) -> store::Result<(Arc<Store>, bool)> {
        match rng.below(10) {
            0..3 => Ok((self.killed_connection(rng)?, true)),
            3..6 => Ok((Arc::clone(&self.store), true)),
            _ => Ok((Arc::clone(&self.faultless), false)),
        }
    }

    /// Marks the opened images that a prune may delete: those to which no tag other than `but` refers.
    fn mark_pruned(&self, but: &str) {
        let kept = |name: &Name| self.tags.iter().any(|(tag, tagged)| *tag != but && tagged.name == *name);
        for (_, lost) in self.opened.iter().filter(|(name, _)| !kept(name)) {
            lost.store(1, Ordering::SeqCst);
        }
    }
}

impl World {
    fn images(&mut self) -> store::Result<&mut Images> {
        if self.images.is_none() {
            let memory = Arc::new(MemoryStore::default());
            let faultless = open(&Arc::new(memory.new_client()))?;
            let store = open(&memory)?;
            let faults = Arc::<StoreFaults>::default();
            let injector = self.add_store(&memory, &faults);
            let dir = self.new_path("cache");
            let cache = dir.and_then(|dir| Cache::open(dir, cache::BYTES_MIN).ok());
            let (tags, opened) = (BTreeMap::new(), Vec::new());
            self.images = Some(Images { memory, faults, injector, store, faultless, cache, tags, opened });
        }
        Ok(self.images.as_mut().expect("it was made"))
    }

    pub(super) fn make_image(&mut self, kib: u32, seed: u64, cached: bool) -> Option<VerbTask> {
        let size = (u64::from(kib) << 10).max(4096);
        let (bytes, shows) = self.content_of_base(size, seed);
        let tag = TAGS[(seed % TAGS.len() as u64) as usize];
        let faultless = match self.images() {
            Ok(images) => Arc::clone(&images.faultless),
            Err(error) => {
                return act(move || finish(move |_| finding(format!("cannot open the store: {error}"))));
            }
        };
        act(move || {
            let device = Model::new(size as usize, 512);
            let written =
                freestone::device::Blocking::write_at(&device, 0, &bytes, freestone::device::Flags::empty());
            let source = Source { device: &device, label: "torture", base_image: None };
            let options = Options { tag, full: seed.is_multiple_of(3), threads: 4, is_new: false };
            let pushed = written.map_err(store::Error::from).and_then(|()| {
                push(&faultless, source, options, &|_, _| {}, CallLimits::within(FAULTLESS_TIMEOUT))
            });
            finish(move |world| match pushed {
                Ok(PushReport { manifest: name, .. }) => {
                    let Some(images) = &mut world.images else { return Ok(()) };
                    images.tags.insert(tag, TagImage { name, shows: shows.clone() });
                    world.open_image(&StoredImage { name, tag }, shows, cached, seed.is_multiple_of(2))
                }
                Err(error) => finding(format!("an image could not be pushed: {error}")),
            })
        })
    }

    /// Opens a stored image as a node.
    fn open_image(
        &mut self,
        stored: &StoredImage,
        shows: Oracle,
        cached: bool,
        prefetch: bool,
    ) -> Result<(), super::Finding> {
        let Some(images) = &mut self.images else { return Ok(()) };
        let cache = images.cache.clone().filter(|_| cached);
        let config = Config { timeout: TIMEOUT, prefetch };
        let before = images.faults.causes();
        let opened =
            Image::open(Arc::clone(&images.store), cache, stored.name, config, CallLimits::within(TIMEOUT));
        let image = match opened {
            Ok(image) => image,
            Err(_) if images.faults.causes() != before || before.hung > 0 => return Ok(()),
            Err(error) => return finding(format!("an image could not be opened: {error}")),
        };
        let lost = Arc::new(AtomicU32::new(0));
        images.opened.push((stored.name, Arc::clone(&lost)));
        let injector = images.injector;
        let lost_image = self.add_lost_image(lost);
        let id = self.add_base("image", Arc::new(image), shows, BaseSource::Image(stored.clone()));
        self.add_cause(id, Some(injector));
        self.add_cause(id, Some(lost_image));
        let since = self.causes(&self.nodes[&id].disks);
        if let Some(node) = self.nodes.get_mut(&id) {
            node.since = since;
        }
        self.count("images");
        Ok(())
    }

    pub(super) fn store_rules(&mut self, seed: u64) -> Option<VerbTask> {
        let images = self.images.as_ref()?;
        rules::set_random(&images.memory, &images.faults, seed);
        self.count("rules of the store");
        None
    }

    /// Returns the nodes that can be pushed: snapshots of RAM disks and forks, files and images.
    pub(super) fn pushable(&self) -> Vec<NodeId> {
        self.nodes_that(|node| match &node.kind {
            Kind::Ram(ram) => ram.ram.is_snapshot(),
            Kind::Base(_) => true,
            _ => false,
        })
    }

    fn push_task(&mut self, id: NodeId, rng: &mut Rng) -> Option<PushTask> {
        let (store, may_fail) = self.images.as_ref()?.choose_connection(rng).ok()?;
        let node = &self.nodes[&id];
        let (device, oracle, before) = (Arc::clone(&node.device), node.oracle, self.before(node));
        let own = match &node.kind {
            Kind::Ram(ram) => match ram.below.as_ref().and_then(|below| below.file.as_ref()) {
                Some(BaseSource::Image(stored)) => {
                    let own: Arc<dyn Device> = Arc::new(ram.ram.over_base().ok()?);
                    Some((own, stored.clone()))
                }
                _ => None,
            },
            _ => None,
        };
        let token = Some(self.oracles.get_mut(&oracle)?.begin_read());
        Some(PushTask { id, device, own, oracle, token, before, store, may_fail, full: rng.chance(15) })
    }

    /// Pushes these nodes to one tag at the same time, perhaps beside a prune. Afterwards the tag must refer
    /// to one of the pushed images, or to its old image.
    pub(super) fn push(&mut self, nodes: &[NodeId], tag: u8, seed: u64) -> Option<VerbTask> {
        let mut rng = Rng::new(seed);
        let tag = TAGS[usize::from(tag) % TAGS.len()];
        self.images().ok()?;
        let push_tasks: Vec<PushTask> = nodes.iter().filter_map(|&id| self.push_task(id, &mut rng)).collect();
        let images = self.images.as_ref()?;
        let faultless = Arc::clone(&images.faultless);
        let pruner = if rng.chance(30) { Some(Arc::clone(&images.faultless)) } else { None };
        if pruner.is_some() {
            images.mark_pruned(tag);
            if cfg!(freestone_sim) && rng.chance(60) {
                images.memory.advance_clock(GRACE / 8 * rng.below(12) as u32);
            }
        }
        let opens = rng.chance(60) && self.nodes.len() < NODES_MAX;
        let (cached, prefetch) = (rng.chance(60), rng.chance(50));
        let faults = images.faults.causes();
        act(move || {
            let pushers = push_tasks.into_iter().map(|one| {
                thread::spawn(move || {
                    let outcome = one.run(tag);
                    (one, outcome)
                })
            });
            let pushers: Vec<_> = pushers.collect();
            let ended_prune = pruner.map(|store| prune(&store, false, &|_| {}, CallLimits::within(PUSH_MAX)));
            let ended: Vec<_> = pushers.into_iter().map(JoinHandle::join).collect();
            let after = read_tag(&faultless, tag);
            finish(move |world| {
                world.count("pushes");
                if let Some(Err(error)) = &ended_prune
                    && !world.is_without_tags(error)
                {
                    return finding(format!("a prune concurrent with a push failed: {error}"));
                }
                let ended = ended.into_iter().map(|one| one.map_err(|_| "a push panicked".into()));
                let ended = ended.collect::<Result<Vec<_>, super::Finding>>()?;
                let (had_others, has_prune) = (ended.len() > 1, ended_prune.is_some());
                let results = PushResults { tag, faults, had_others, prunes: has_prune, ended };
                let Some(tagged) = world.judge_push(results, after?)? else { return Ok(()) };
                if !opens {
                    return Ok(());
                }
                world.open_image(&StoredImage { name: tagged.name, tag }, tagged.shows, cached, prefetch)
            })
        })
    }

    /// Advances the clock of the image store and deletes the objects to which no tag refers.
    pub(super) fn prune(&mut self, eighths: u8, seed: u64) -> Option<VerbTask> {
        let mut rng = Rng::new(seed);
        let images = self.images.as_ref()?;
        if cfg!(freestone_sim) {
            images.memory.advance_clock(GRACE / 8 * u32::from(eighths % 20));
        }
        let dry = rng.chance(15);
        if !dry {
            images.mark_pruned("");
        }
        let (store, may_fail) = images.choose_connection(&mut rng).ok()?;
        let faultless = Arc::clone(&images.faultless);
        let tags: Vec<&'static str> = images.tags.keys().copied().collect();
        act(move || {
            let pruned = prune(&store, dry, &|_| {}, CallLimits::within(PUSH_MAX));
            let shown: Vec<(&str, Result<TagContent, super::Finding>)> =
                tags.into_iter().map(|tag| (tag, read_tag(&faultless, tag))).collect();
            finish(move |world| {
                world.count("prunes");
                if let Err(error) = pruned
                    && !may_fail
                    && !world.is_without_tags(&error)
                {
                    return finding(format!("a prune failed: {error}"));
                }
                shown.into_iter().try_for_each(|(tag, after)| world.check_tag_unchanged(tag, after?))
            })
        })
    }

    /// Returns true if a prune refused to run because no tag exists, and indeed none exists.
    fn is_without_tags(&self, error: &store::Error) -> bool {
        let has_tags = self.images.as_ref().is_some_and(|images| !images.tags.is_empty());
        matches!(error, store::Error::NoTags(_)) && !has_tags
    }

    /// Checks through a connection without faults that each tag refers to the expected image.
    pub fn check_images(&mut self) -> Result<(), super::Finding> {
        let Some(images) = &self.images else { return Ok(()) };
        let (faultless, tags) =
            (Arc::clone(&images.faultless), images.tags.keys().copied().collect::<Vec<_>>());
        tags.into_iter().try_for_each(|tag| self.check_tag_unchanged(tag, read_tag(&faultless, tag)?))
    }

    /// Waits until past faults of the image store can no longer affect requests.
    pub fn wait_store_faults_over(&self) {
        if let Some(images) = &self.images {
            images.faults.wait_until_over();
        }
    }
}
