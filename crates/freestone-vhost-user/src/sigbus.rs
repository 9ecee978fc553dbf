//! Handles SIGBUS from truncated memory files. If a frontend truncates its memory file, access to
//! the lost pages raises SIGBUS. The handler replaces the whole mapping by zeroed anonymous memory
//! and marks the mapping dead, so that its connection ends and the process continues. Other SIGBUS
//! signals are passed to the previous handler.
#![expect(unsafe_code)]
// UNSAFETY: installs a signal handler, which maps memory and calls the previous handler.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Maximum number of guarded mappings in the process.
const MAX_MAPPINGS: usize = 2048;

/// The entry of a guarded mapping. All accesses are `SeqCst`, because the handler may run between
/// any two accesses of another thread.
struct Slot {
    taken: AtomicBool,
    /// A sequence count; odd while the bounds change.
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

/// The SIGBUS handler that was installed before.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();
static INSTALLED: OnceLock<()> = OnceLock::new();

impl Slot {
    fn set(&self, start: usize, end: usize) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.end.store(end, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns the bounds of the mapping if it contains `address`. Bounds that change meanwhile
    /// belong to another mapping: the faulting thread keeps its own mapping alive.
    fn bounds_of(&self, address: usize) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::SeqCst);
        let (start, end) = (self.start.load(Ordering::SeqCst), self.end.load(Ordering::SeqCst));
        let steady = version.is_multiple_of(2) && version == self.version.load(Ordering::SeqCst);
        (steady && (start..end).contains(&address)).then_some((start, end))
    }
}

/// A guarded mapping. The guard must be dropped before the mapping is unmapped.
pub struct MappingGuard(&'static Slot);

impl MappingGuard {
    /// Guards the mapping of `len` bytes at `start`. Returns `None` if [`MAX_MAPPINGS`] are
    /// guarded.
    pub fn new(start: usize, len: usize) -> Option<Self> {
        INSTALLED.get_or_init(install);
        let slot = SLOTS.iter().find(|slot| !slot.taken.swap(true, Ordering::SeqCst))?;
        slot.dead.store(false, Ordering::SeqCst);
        slot.set(start, start + len);
        Some(Self(slot))
    }

    /// Returns true if the mapping's file was truncated and a lost page was accessed.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.0.dead.load(Ordering::SeqCst)
    }
}

impl Drop for MappingGuard {
    fn drop(&mut self) {
        self.0.set(0, 0);
        self.0.taken.store(false, Ordering::SeqCst);
    }
}

fn install() {
    // SAFETY: all zeroes is a valid value of the C struct.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: only reads the current action into a local variable.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) } != 0 {
        return;
    }
    let _ = PREVIOUS.set(before);
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler uses only atomics and system calls, which are async-signal-safe.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) } != 0 {
        tracing::warn!(
            "cannot handle SIGBUS: a frontend that truncates its memory file will end this process"
        );
    }
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo, which has an address for SIGBUS.
    let address = unsafe { (*info).si_addr() }.addr();
    for slot in &SLOTS {
        let Some((start, end)) = slot.bounds_of(address) else { continue };
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let at = std::ptr::without_provenance_mut(start);
        // SAFETY: the range is one mapping of frontend memory, which is accessed only by raw copies
        // of bytes. The copies see zeroes from now on. The faulting thread holds the region, so the
        // range stays mapped.
        let mapped = unsafe { mmap_anonymous(at, end - start, ProtFlags::READ | ProtFlags::WRITE, flags) };
        if mapped.is_ok() {
            slot.dead.store(true, Ordering::SeqCst);
            return;
        }
    }
    match PREVIOUS.get() {
        Some(before) if before.sa_sigaction != libc::SIG_DFL && before.sa_sigaction != libc::SIG_IGN => {
            if before.sa_flags & libc::SA_SIGINFO == 0 {
                // SAFETY: without the flag, the address is a handler of this type.
                let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(before.sa_sigaction) };
                handler(signal);
            } else {
                // SAFETY: with the flag, the address is a handler of this type.
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    unsafe { std::mem::transmute(before.sa_sigaction) };
                handler(signal, info, context);
            }
        }
        _ => {
            // SAFETY: sets the default action; the access repeats and ends the process.
            unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        }
    }
}
