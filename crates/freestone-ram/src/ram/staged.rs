//! Devices whose content lies in a file until it is loaded: an empty slot is read from there.
//!
//! # How it ends
//! The loader puts page after page into slots that are empty ([`Loader::put`]; writers win), and
//! until all are there, the device covers what it empties with zeroes, as over a base. So an empty
//! slot is the file's page. When all are there, the loader waits for the pins of those who may have
//! seen a slot empty before; from then on nobody looks at the file any more, and then it is let go.
//! Who has looked while pinned, and reads it afterwards, has a hold of his own.
//!
//! There is one loader for a chain, so none puts a page that was loaded and discarded since.

use std::sync::{Arc, LazyLock, Weak};

use super::chain::Chain;
use super::config::{ForkConfig, SetupError, round_size};
use super::export::{Incoming, Lower};
use super::layer::Layer;
use super::pages::Pages;
use super::parent::{Base, Look, Parent};
use super::{BELOW_DEPTH_MAX, Family, Inner, LOGICAL_BLOCK_BYTES, PAGE, Ram, piece, retire};
use crate::codec::Page;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{
    self, Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, Tried,
    range_end,
};
use freestone_core::pin::{self, Pin, Swap};
use freestone_core::sync::{AtomicU32, Ordering};
use freestone_core::work_queue::WorkQueue;

/// Threads that read pages for requests.
const READ_THREADS: usize = 2;

static READS: LazyLock<Arc<WorkQueue>> = LazyLock::new(|| WorkQueue::with_threads("keep-read", READ_THREADS));

/// Where pages are that are not loaded yet. What it has does not change.
pub(crate) trait Source: Send + Sync {
    /// Whether it has this page; and of how many pages, from this one on and up to `end`, that is
    /// so. Looks at memory only: slots are locked meanwhile.
    fn run(&self, page: u64, end: u64) -> (u64, bool);

    /// Hands a page that it has to `take`. It may read a disk.
    ///
    /// # Errors
    /// The page cannot be had; or those of `take`.
    fn fetch(&self, page: u64, take: &mut dyn FnMut(Incoming<'_>) -> Result<()>) -> Result<()>;
}

/// What is left in a file, as a device: of pages that it has, and no others.
struct SourceDevice {
    source: Arc<dyn Source>,
    pages: Arc<Pages>,
    size: u64,
}

/// The device, of which requests on their way have a hold.
struct Handle(Arc<SourceDevice>);

impl SourceDevice {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            let (slot, from, n) = piece(offset + done as u64, (into.len() - done) as u64);
            let mut page = [0; PAGE_BYTES];
            self.source.fetch(slot, &mut |incoming| self.pages.content(incoming, &mut page))?;
            into[done..][..n].copy_from_slice(&page[from..from + n]);
            done += n;
        }
        Ok(())
    }
}

impl Device for Handle {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.0.size,
            logical_block: LOGICAL_BLOCK_BYTES,
            physical_block: PAGE_BYTES as u32,
            io_min: PAGE_BYTES as u32,
            io_opt: PAGE_BYTES as u32,
            discard_granularity: PAGE_BYTES as u32,
            fast_zeroes: false,
            volatile_cache: false,
            padding: 0,
            volatile_media: false,
            rotational: false,
            max_request: 0,
            read_only: true,
            zones: None,
        }
    }

    fn try_io(&self, request: &Request, _: Buffer<'_>) -> device::Result<Tried> {
        request.check_place(self.0.size, LOGICAL_BLOCK_BYTES)?;
        match request.op {
            Op::Read => Ok(Tried::WouldBlock),
            Op::Flush => Ok(Tried::Done),
            _ => Err(Error::ReadOnly),
        }
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        if request.op != Op::Read || buffer.len() as u64 != request.len {
            return done.complete(Err(Error::ReadOnly), buffer);
        }
        let device = Arc::clone(&self.0);
        READS.push(move || {
            let outcome = device.read(request.offset, &mut buffer);
            drop(device);
            done.complete(outcome, buffer);
        });
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        range_end(offset, len, self.0.size)?;
        row(Extent { offset, len, kind: ExtentKind::Data });
        Ok(len)
    }
}

/// What is left in the file, for who looks.
#[derive(Clone)]
pub(super) struct Here {
    pub source: Arc<dyn Source>,
    pub base: Base,
}

impl Here {
    /// Whether this page is in the file.
    pub fn has(&self, slot: u64) -> bool {
        self.source.run(slot, slot + 1).1
    }
}

/// What lies below a device as long as not all is loaded.
pub(super) struct Staged {
    /// What is left in the file. `None`: all is loaded.
    here: Arc<Swap<Option<Here>>>,
    /// What lies below that.
    pub below: Parent,
    /// Not 0: the device has another content now, which has to do with the file no more.
    is_gone: AtomicU32,
}

impl Staged {
    fn new(source: Arc<dyn Source>, pages: &Arc<Pages>, size: u64, below: Parent) -> Self {
        let size = size.next_multiple_of(PAGE);
        let device = SourceDevice { source: Arc::clone(&source), pages: Arc::clone(pages), size };
        let base = Base::new(Arc::new(Handle(Arc::new(device))));
        let here = Arc::new(Swap::new(Box::new(Some(Here { source, base }))));
        Self { here, below, is_gone: AtomicU32::new(0) }
    }

    /// For one device, which can be rewound while others read on.
    pub fn of_device(&self) -> Self {
        Self { here: Arc::clone(&self.here), below: self.below.clone(), is_gone: AtomicU32::new(0) }
    }

    /// The device is rewound.
    pub fn is_left(&self) {
        // Release: pairs with the Acquire in `here`.
        self.is_gone.store(1, Ordering::Release);
    }

    /// What is left in the file; `None` where nothing is.
    pub fn here<'a>(&'a self, pin: &'a Pin<'_>) -> Option<&'a Here> {
        // Acquire: pairs with the Release in `is_left`.
        if self.is_gone.load(Ordering::Acquire) != 0 { None } else { self.here.load(pin).as_ref() }
    }

    /// As [`Parent::reaches`].
    pub fn reaches(&self, slot: u64) -> bool {
        pin::pinned(|pin| self.here(pin).is_some_and(|here| here.has(slot))) || self.below.reaches(slot)
    }

    /// The first page from `slot` on and before `end` that is in the file.
    pub fn next(&self, slot: u64, end: u64) -> Option<u64> {
        pin::pinned(|pin| self.here(pin).and_then(|here| next_in(&*here.source, slot, end)))
    }

    /// As that of what lies below.
    pub fn look<'a>(
        &'a self,
        pin: &Pin<'_>,
        offset: u64,
        into: &mut [u8],
    ) -> device::Result<(usize, Look<'a>)> {
        let Some(here) = self.here(pin) else { return self.below.look(pin, offset, into) };
        let end = offset + into.len() as u64;
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let (run, has) = here.source.run(at / PAGE, end.div_ceil(PAGE));
            let bytes = ((at / PAGE + run) * PAGE - at).min(end - at) as usize;
            if has {
                return Ok((done, Look::Staged(here.base.clone(), bytes)));
            }
            let (read, look) = self.below.look(pin, at, &mut into[done..][..bytes])?;
            done += read;
            if !matches!(look, Look::All) {
                return Ok((done, look));
            }
        }
        Ok((done, Look::All))
    }
}

/// The first page from `slot` on and before `end` that a source has.
pub(super) fn next_in(source: &dyn Source, slot: u64, end: u64) -> Option<u64> {
    let mut slot = slot;
    while slot < end {
        match source.run(slot, end) {
            (_, true) => return Some(slot),
            (run, false) => slot += run.max(1),
        }
    }
    None
}

// ---- loading ------------------------------------------------------------------------------------

/// Puts the pages of a source into memory. There is one for a chain.
pub(crate) struct Loader {
    /// Weak: who gives a family back does not wait for this.
    pages: Weak<Pages>,
    chain: Arc<Chain>,
    origin: Arc<Layer>,
    device: Weak<Inner>,
    here: Arc<Swap<Option<Here>>>,
}

impl Loader {
    /// Whether a device still reads what is put.
    pub fn is_wanted(&self) -> bool {
        self.pages.strong_count() > 0 && self.chain.is_wanted()
    }

    /// Puts a page in, unless somebody has written there.
    ///
    /// # Errors
    /// No memory for it, below the limit or at all: [`Error::NoSpace`], [`Error::NoMemory`].
    pub fn put(&self, page: u64, incoming: Incoming<'_>) -> Result<()> {
        let Some(pages) = self.pages.upgrade() else { return Err(Error::Gone) };
        let new = pages.word_of(&self.origin, page, incoming)?;
        let put = pin::pinned(|pin| self.chain.supply(&*pages, pin, page, new));
        if put != Ok(true) {
            pages.release(new);
        }
        put.map(drop)
    }

    /// Memory is short: whoever can make room is told.
    pub fn ask_for_room(&self) {
        if let Some(pages) = self.pages.upgrade()
            && !pages.help_to_free()
        {
            pages.keeper.kick();
        }
    }

    /// All pages are there: the source is let go.
    pub fn finish(&self) {
        // Whoever saw a slot empty before it was filled is waited for ...
        let here = pin::pinned(|pin| self.here.load(pin).clone());
        self.here.replace(Box::new(here));
        // ... and those who come now see none that is.
        self.here.replace(Box::new(None));
        if let Some(device) = self.device.upgrade() {
            device.look_if_plain();
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        if let Some(origin) = self.chain.end_supply()
            && let Some(pages) = self.pages.upgrade()
        {
            retire::layer(&pages, origin);
        }
    }
}

impl Family {
    /// An empty device of so many bytes over something, which reads from a source what it does not
    /// hold; and who loads it.
    ///
    /// # Errors
    /// As [`ram`](Self::ram) and [`fork`](Self::fork). No thread to read the source.
    pub(crate) fn staged(
        &self,
        size: u64,
        below: Lower,
        source: Arc<dyn Source>,
    ) -> std::result::Result<(Ram, Loader), SetupError> {
        READS.start().map_err(SetupError::Thread)?;
        let pages = &self.0.pages;
        // Reads of the source may have to wait.
        pages.keeper.start().map_err(SetupError::Thread)?;
        let (below, least) = match below {
            Lower::Nothing => (Parent::Nothing, 0),
            Lower::Device(device) => {
                let geometry = device.geometry();
                if !geometry.read_only {
                    return Err(SetupError::Live);
                }
                if geometry.zones.is_some() {
                    return Err(SetupError::ZonedBase);
                }
                (Parent::Device(Base::new(device)), geometry.size)
            }
            Lower::Snapshot(ram) => {
                let size = ram.0.size();
                (Parent::Snapshot(ram), size)
            }
        };
        if below.depth() > BELOW_DEPTH_MAX {
            return Err(SetupError::TooDeep);
        }
        let is_disk = matches!(below, Parent::Nothing);
        let staged = Arc::new(Staged::new(source, pages, size, below));
        let parent = Parent::Staged(Arc::clone(&staged));
        let ram = if is_disk {
            Ram::make(&self.0, round_size(size)?, parent, Arc::default())?
        } else {
            self.0.fork(parent, least, &ForkConfig { size: Some(size), ..ForkConfig::default() })?
        };
        let chain = ram.0.chain.get();
        chain.begin_supply();
        let loader = Loader {
            pages: Arc::downgrade(pages),
            origin: chain.origin(),
            chain,
            device: Arc::downgrade(&ram.0),
            here: Arc::clone(&staged.here),
        };
        Ok((ram, loader))
    }
}

impl Ram {
    /// The content of a page that comes from elsewhere.
    ///
    /// # Errors
    /// The object is not what its algorithm made of a page.
    pub(crate) fn content(&self, incoming: Incoming<'_>, page: &mut Page) -> Result<()> {
        self.0.pages.content(incoming, page)
    }
}

impl Pages {
    /// The content of a page that comes from elsewhere.
    fn content(&self, incoming: Incoming<'_>, page: &mut Page) -> Result<()> {
        match incoming {
            Incoming::Parent => page.fill(0),
            Incoming::Same(pattern) => page.as_chunks_mut().0.fill(pattern.to_ne_bytes()),
            Incoming::Pattern(pattern) => page.as_chunks_mut().0.fill(pattern),
            Incoming::Compressed { priority, object } => {
                return self.codecs.decompress(priority.into(), object, page);
            }
            Incoming::Huge(content) | Incoming::Page(content) => page.copy_from_slice(content),
        }
        Ok(())
    }
}
