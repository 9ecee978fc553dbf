//! A frontend that cuts off its memory file takes pages away under a mapping: whoever touches them
//! gets SIGBUS. Here such a mapping becomes anonymous zeroes as a whole, and is marked as dead, so
//! that its connection ends and the process lives on. A SIGBUS elsewhere goes where it went before.
#![expect(unsafe_code)]
// UNSAFETY: installs a signal handler, which maps memory and calls the handler that was there.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Mappings at once, in the whole process.
const MAX_MAPPINGS: usize = 2048;

/// A place for a mapping that may fault. All accesses are `SeqCst`: the handler may run between any
/// two of another thread.
struct Slot {
    taken: AtomicBool,
    /// Odd while the bounds change.
    version: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    dead: AtomicBool,
}

static SLOTS: [Slot; MAX_MAPPINGS] = [const {
    Slot {
        taken: AtomicBool::new(false),
        version: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        dead: AtomicBool::new(false),
    }
}; MAX_MAPPINGS];

/// What handled SIGBUS before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
static INSTALLED: OnceLock<()> = OnceLock::new();

impl Slot {
    fn set(&self, start: usize, end: usize) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.end.store(end, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Where the mapping is that has `address`. Bounds that change meanwhile are of another
    /// mapping: whoever faults keeps its own.
    fn bounds_of(&self, address: usize) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::SeqCst);
        let (start, end) = (self.start.load(Ordering::SeqCst), self.end.load(Ordering::SeqCst));
        let steady = version.is_multiple_of(2) && version == self.version.load(Ordering::SeqCst);
        (steady && (start..end).contains(&address)).then_some((start, end))
    }
}

/// A mapping that may fault, until it is dropped; that has to be before it is unmapped.
pub struct Guarded(&'static Slot);

impl Guarded {
    /// Guards a mapping; `None`: there are too many.
    pub fn new(start: usize, len: usize) -> Option<Self> {
        INSTALLED.get_or_init(install);
        let slot = SLOTS.iter().find(|slot| !slot.taken.swap(true, Ordering::SeqCst))?;
        slot.dead.store(false, Ordering::SeqCst);
        slot.set(start, start + len);
        Some(Self(slot))
    }

    /// Whether its file has lost pages that were touched.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.0.dead.load(Ordering::SeqCst)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.0.set(0, 0);
        self.0.taken.store(false, Ordering::SeqCst);
    }
}

fn install() {
    // SAFETY: all zeroes is a value of the C struct.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: asks for the present action only, into memory of ours.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) } != 0 {
        return;
    }
    let _ = BEFORE.set(before);
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler does only what a signal handler may: atomics, and system calls.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) } != 0 {
        tracing::warn!("SIGBUS cannot be handled: a frontend that cuts off its memory ends the process");
    }
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo, and for SIGBUS it has an address.
    let address = unsafe { (*info).si_addr() }.addr();
    for slot in &SLOTS {
        let Some((start, end)) = slot.bounds_of(address) else { continue };
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let at = std::ptr::without_provenance_mut(start);
        // SAFETY: the range is one mapping of frontend memory, which nobody refers to but by raw
        // copies of bytes: these find zeroes from now on. It stays mapped meanwhile, as who faults
        // holds the region.
        let mapped = unsafe { mmap_anonymous(at, end - start, ProtFlags::READ | ProtFlags::WRITE, flags) };
        if mapped.is_ok() {
            slot.dead.store(true, Ordering::SeqCst);
            return;
        }
    }
    match BEFORE.get() {
        Some(before) if before.sa_sigaction != libc::SIG_DFL && before.sa_sigaction != libc::SIG_IGN => {
            if before.sa_flags & libc::SA_SIGINFO == 0 {
                // SAFETY: the address of a handler of this type, says the lack of the flag.
                let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(before.sa_sigaction) };
                handler(signal);
            } else {
                // SAFETY: the address of a handler of this type, says the flag.
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    unsafe { std::mem::transmute(before.sa_sigaction) };
                handler(signal, info, context);
            }
        }
        _ => {
            // SAFETY: sets the default action; the access repeats, and ends the process.
            unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        }
    }
}
