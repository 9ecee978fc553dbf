//! Images in a store in memory, which fails by rule: bases of forks, and what does not change, pushed
//! as an image itself.

mod judge;
mod rules;

use std::collections::BTreeMap;

use freestone::device::Device;
use freestone::store::cache::{self, Cache};
use freestone::store::format::name::Name;
use freestone::store::image::{Config, Image};
use freestone::store::objects::{Objects, Until};
use freestone::store::prune::prune;
use freestone::store::push::{Layer, Options, Over, Pushed, Source, push};
use freestone::store::store::{self, Begin, Store};
use freestone_testkit::objects::Memory;
use freestone_testkit::{Model, Rng};

use super::io::Before;
use super::{Act, Bottom, DiskId, Kind, NODES_MAX, NodeId, Stored, World, act, finish, wrong};
use crate::oracle::{Oracle, ReadToken};
use crate::rt::sync::Arc;
use crate::rt::sync::atomic::{AtomicU32, Ordering};
use crate::rt::thread::{self, JoinHandle};
use crate::rt::time::Duration;
use judge::{After, Judged, look};
pub(super) use rules::StoreFaults;

/// How long a read of an image waits for the store.
const TIMEOUT: Duration = Duration::from_millis(300);
/// How long a store that nothing is wrong with is waited for.
const CALM: Duration = Duration::from_secs(30);
/// So long what nobody refers to is kept.
const GRACE: Duration = Duration::from_secs(3600);
/// How long a push or a prune may take. Where time is virtual, a push can wait until no prune can be about
/// to delete what it has written again.
const PUSH_MAX: Duration = Duration::from_secs(if cfg!(freestone_sim) { 50 } else { 8 });
/// Requests after which a push is cut off.
const CUT_AFTER_MAX: u64 = 30;
const TAGS: [&str; 4] = ["a", "b", "c", "d"];

/// A store, and what must be in it.
pub(super) struct Images {
    memory: Arc<Memory>,
    faults: Arc<StoreFaults>,
    injector: DiskId,
    /// Of which requests fail.
    store: Arc<Store>,
    /// Of which none do.
    calm: Arc<Store>,
    cache: Option<Arc<Cache>>,
    tags: BTreeMap<&'static str, Tagged>,
    /// Those that were opened, and whether a prune may have deleted what is in them.
    opened: Vec<(Name, Arc<AtomicU32>)>,
}

/// What a tag says.
#[derive(Clone)]
struct Tagged {
    name: Name,
    shows: Oracle,
}

/// One that is pushed.
struct Pushing {
    id: NodeId,
    device: Arc<dyn Device>,
    /// What it holds itself over an image.
    own: Option<(Arc<dyn Device>, Stored)>,
    oracle: u32,
    token: Option<ReadToken>,
    before: Before,
    store: Arc<Store>,
    /// Its requests fail from some one on, or those of the store do.
    may_fail: bool,
    full: bool,
}

impl Pushing {
    fn run(&self, tag: &str) -> store::Result<Pushed> {
        let layers = self.own.as_ref().and_then(|(own, base)| Some(([Layer::of(&**own)?], base)));
        let over =
            layers.as_ref().map(|(layers, base)| Over { layers, base: base.name, tag: Some(base.tag) });
        let source = Source { device: &*self.device, label: "torture", over };
        let options = Options { tag, full: self.full, threads: 4, is_new: false };
        push(&self.store, source, options, &|_, _| {}, Until::within(PUSH_MAX))
    }
}

fn open(memory: &Arc<Memory>) -> store::Result<Arc<Store>> {
    let objects = Arc::clone(memory) as Arc<dyn Objects>;
    let begin = Begin { encrypted: false, grace: GRACE };
    Ok(Arc::new(Store::open_or_begin(objects, None, begin, Until::within(CALM))?.0))
}

impl Images {
    /// Another one who uses it; from some request on all of his fail, as if he were killed.
    fn cut_off(&self, rng: &mut Rng) -> store::Result<Arc<Store>> {
        let memory = Arc::new(self.memory.beside());
        let store = open(&memory)?;
        rules::cut(&memory, rng.below(CUT_AFTER_MAX), rng.chance(50));
        Ok(store)
    }

    /// Whose requests they are, and whether they may fail.
    fn user(&self, rng: &mut Rng) -> store::Result<(Arc<Store>, bool)> {
        match rng.below(10) {
            0..3 => Ok((self.cut_off(rng)?, true)),
            3..6 => Ok((Arc::clone(&self.store), true)),
            _ => Ok((Arc::clone(&self.calm), false)),
        }
    }

    /// A prune may delete what no tag but these refers to.
    fn is_pruned(&self, but: &str) {
        let kept = |name: &Name| self.tags.iter().any(|(tag, tagged)| *tag != but && tagged.name == *name);
        for (_, lost) in self.opened.iter().filter(|(name, _)| !kept(name)) {
            lost.store(1, Ordering::SeqCst);
        }
    }
}

impl World {
    fn images(&mut self) -> store::Result<&mut Images> {
        if self.images.is_none() {
            let memory = Arc::new(Memory::default());
            let calm = open(&Arc::new(memory.beside()))?;
            let store = open(&memory)?;
            let faults = Arc::<StoreFaults>::default();
            let injector = self.add_store(&memory, &faults);
            let dir = self.new_path("cache");
            let cache = dir.and_then(|dir| Cache::open(dir, cache::BYTES_MIN).ok());
            let (tags, opened) = (BTreeMap::new(), Vec::new());
            self.images = Some(Images { memory, faults, injector, store, calm, cache, tags, opened });
        }
        Ok(self.images.as_mut().expect("it was made"))
    }

    /// An image with something in it.
    pub(super) fn make_image(&mut self, kib: u32, seed: u64, cached: bool) -> Option<Act> {
        let size = (u64::from(kib) << 10).max(4096);
        let (bytes, shows) = self.content_of_base(size, seed);
        let tag = TAGS[(seed % TAGS.len() as u64) as usize];
        let calm = match self.images() {
            Ok(images) => Arc::clone(&images.calm),
            Err(error) => return act(move || finish(move |_| wrong(format!("a store: {error}")))),
        };
        act(move || {
            let device = Model::new(size as usize, 512);
            let written =
                freestone::device::Blocking::write_at(&device, 0, &bytes, freestone::device::Flags::empty());
            let source = Source { device: &device, label: "torture", over: None };
            let options = Options { tag, full: seed.is_multiple_of(3), threads: 4, is_new: false };
            let pushed = written
                .map_err(store::Error::from)
                .and_then(|()| push(&calm, source, options, &|_, _| {}, Until::within(CALM)));
            finish(move |world| match pushed {
                Ok(Pushed { manifest: name, .. }) => {
                    let Some(images) = &mut world.images else { return Ok(()) };
                    images.tags.insert(tag, Tagged { name, shows: shows.clone() });
                    world.open_image(&Stored { name, tag }, shows, cached, seed.is_multiple_of(2))
                }
                Err(error) => wrong(format!("an image could not be pushed: {error}")),
            })
        })
    }

    /// The image as a node.
    fn open_image(
        &mut self,
        stored: &Stored,
        shows: Oracle,
        cached: bool,
        prefetch: bool,
    ) -> Result<(), super::Wrong> {
        let Some(images) = &mut self.images else { return Ok(()) };
        let cache = images.cache.clone().filter(|_| cached);
        let config = Config { timeout: TIMEOUT, prefetch };
        let before = images.faults.causes();
        let opened =
            Image::open(Arc::clone(&images.store), cache, stored.name, config, Until::within(TIMEOUT));
        let image = match opened {
            Ok(image) => image,
            Err(_) if images.faults.causes() != before || before.hung > 0 => return Ok(()),
            Err(error) => return wrong(format!("an image could not be opened: {error}")),
        };
        let lost = Arc::new(AtomicU32::new(0));
        images.opened.push((stored.name, Arc::clone(&lost)));
        let injector = images.injector;
        let fate = self.add_fate(lost);
        let id = self.add_base("image", Arc::new(image), shows, Bottom::Image(stored.clone()));
        self.fails_by(id, Some(injector));
        self.fails_by(id, Some(fate));
        let since = self.causes(&self.nodes[&id].disks);
        if let Some(node) = self.nodes.get_mut(&id) {
            node.since = since;
        }
        self.count("images");
        Ok(())
    }

    /// What goes wrong with the store from now on.
    pub(super) fn store_rules(&mut self, seed: u64) -> Option<Act> {
        let images = self.images.as_ref()?;
        rules::set(&images.memory, &images.faults, seed);
        self.count("rules of the store");
        None
    }

    /// What can be pushed.
    pub(super) fn pushable(&self) -> Vec<NodeId> {
        self.nodes_that(|node| match &node.kind {
            Kind::Ram(ram) => ram.ram.is_snapshot(),
            Kind::Base(_) => true,
            _ => false,
        })
    }

    fn pushing(&mut self, id: NodeId, rng: &mut Rng) -> Option<Pushing> {
        let (store, may_fail) = self.images.as_ref()?.user(rng).ok()?;
        let node = &self.nodes[&id];
        let (device, oracle, before) = (Arc::clone(&node.device), node.oracle, self.before(node));
        let own = match &node.kind {
            Kind::Ram(ram) => match ram.below.as_ref().and_then(|below| below.file.as_ref()) {
                Some(Bottom::Image(stored)) => {
                    let own: Arc<dyn Device> = Arc::new(ram.ram.over_base().ok()?);
                    Some((own, stored.clone()))
                }
                _ => None,
            },
            _ => None,
        };
        let token = Some(self.oracles.get_mut(&oracle)?.begin_read());
        Some(Pushing { id, device, own, oracle, token, before, store, may_fail, full: rng.chance(15) })
    }

    /// These go to one tag at the same time, perhaps beside a prune; and then it shows one of them, or what
    /// it showed before.
    pub(super) fn push(&mut self, nodes: &[NodeId], tag: u8, seed: u64) -> Option<Act> {
        let mut rng = Rng::new(seed);
        let tag = TAGS[usize::from(tag) % TAGS.len()];
        self.images().ok()?;
        let pushing: Vec<Pushing> = nodes.iter().filter_map(|&id| self.pushing(id, &mut rng)).collect();
        let images = self.images.as_ref()?;
        let calm = Arc::clone(&images.calm);
        let pruner = if rng.chance(30) { Some(Arc::clone(&images.calm)) } else { None };
        if pruner.is_some() {
            images.is_pruned(tag);
            if cfg!(freestone_sim) && rng.chance(60) {
                images.memory.pass(GRACE / 8 * rng.below(12) as u32);
            }
        }
        let opens = rng.chance(60) && self.nodes.len() < NODES_MAX;
        let (cached, prefetch) = (rng.chance(60), rng.chance(50));
        let faults = images.faults.causes();
        act(move || {
            let pushers = pushing.into_iter().map(|one| {
                thread::spawn(move || {
                    let outcome = one.run(tag);
                    (one, outcome)
                })
            });
            let pushers: Vec<_> = pushers.collect();
            let ended_prune = pruner.map(|store| prune(&store, false, &|_| {}, Until::within(PUSH_MAX)));
            let ended: Vec<_> = pushers.into_iter().map(JoinHandle::join).collect();
            let after = look(&calm, tag);
            finish(move |world| {
                world.count("pushes");
                if let Some(Err(error)) = &ended_prune
                    && !world.is_without_tags(error)
                {
                    return wrong(format!("a prune beside a push: {error}"));
                }
                let ended = ended.into_iter().map(|one| one.map_err(|_| "a push panicked".into()));
                let ended = ended.collect::<Result<Vec<_>, super::Wrong>>()?;
                let (beside, has_prune) = (ended.len() > 1, ended_prune.is_some());
                let judged = Judged { tag, faults, beside, prunes: has_prune, ended };
                let Some(tagged) = world.judge_push(judged, after?)? else { return Ok(()) };
                if !opens {
                    return Ok(());
                }
                world.open_image(&Stored { name: tagged.name, tag }, tagged.shows, cached, prefetch)
            })
        })
    }

    /// Time passes for the store, and what nobody refers to is deleted.
    pub(super) fn prune(&mut self, eighths: u8, seed: u64) -> Option<Act> {
        let mut rng = Rng::new(seed);
        let images = self.images.as_ref()?;
        if cfg!(freestone_sim) {
            images.memory.pass(GRACE / 8 * u32::from(eighths % 20));
        }
        let dry = rng.chance(15);
        if !dry {
            images.is_pruned("");
        }
        let (store, may_fail) = images.user(&mut rng).ok()?;
        let calm = Arc::clone(&images.calm);
        let tags: Vec<&'static str> = images.tags.keys().copied().collect();
        act(move || {
            let pruned = prune(&store, dry, &|_| {}, Until::within(PUSH_MAX));
            let shown: Vec<(&str, Result<After, super::Wrong>)> =
                tags.into_iter().map(|tag| (tag, look(&calm, tag))).collect();
            finish(move |world| {
                world.count("prunes");
                if let Err(error) = pruned
                    && !may_fail
                    && !world.is_without_tags(&error)
                {
                    return wrong(format!("a prune: {error}"));
                }
                shown.into_iter().try_for_each(|(tag, after)| world.is_as_it_was(tag, after?))
            })
        })
    }

    /// A prune refuses to work where there is no tag.
    fn is_without_tags(&self, error: &store::Error) -> bool {
        let has_tags = self.images.as_ref().is_some_and(|images| !images.tags.is_empty());
        matches!(error, store::Error::NoTags(_)) && !has_tags
    }

    /// Each tag has its image, when nothing is wrong any more.
    pub fn images_are_whole(&mut self) -> Result<(), super::Wrong> {
        let Some(images) = &self.images else { return Ok(()) };
        let (calm, tags) = (Arc::clone(&images.calm), images.tags.keys().copied().collect::<Vec<_>>());
        tags.into_iter().try_for_each(|tag| self.is_as_it_was(tag, look(&calm, tag)?))
    }

    /// Waits until what went wrong with the store cannot show any more.
    pub fn outlast(&self) {
        if let Some(images) = &self.images {
            images.faults.outlast();
        }
    }
}
