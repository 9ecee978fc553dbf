//! The trail of a request: the files that the request enters and the threads that run it, in order. A test compares
//! trails with the drawings in `ARCHITECTURE.md`.
//!
//! `step!` in a function adds the file of the function. `arrive!` does so too, and marks that the request has come to
//! this thread; from then on only this thread adds files, although the thread that handed the request over may still be
//! running. Each thread's part of the trail has a file once, at its first entry. Without debug assertions both macros
//! are empty.
//!
//! A process records one trail at a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

/// Adds the file of the calling function to the trail, if one is recorded.
#[doc(hidden)]
#[macro_export]
macro_rules! trail_step {
    () => {
        #[cfg(debug_assertions)]
        $crate::trail::add(file!(), false);
    };
}

/// Adds the file of the calling function to the trail as the first one on this thread.
#[doc(hidden)]
#[macro_export]
macro_rules! trail_arrive {
    () => {
        #[cfg(debug_assertions)]
        $crate::trail::add(file!(), true);
    };
}

pub use crate::{trail_arrive as arrive, trail_step as step};

/// The part of a trail on one thread.
#[derive(Debug)]
pub struct Leg {
    /// Name of the thread.
    pub thread: String,
    /// Paths of the source files from the root of the workspace.
    pub files: Vec<&'static str>,
    id: ThreadId,
}

static IS_RECORDING: AtomicBool = AtomicBool::new(false);
static TRAIL: Mutex<Vec<Leg>> = Mutex::new(Vec::new());

fn trail() -> MutexGuard<'static, Vec<Leg>> {
    TRAIL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the trail of the one request that `run` causes. `run` returns when the request is answered.
pub fn record(run: impl FnOnce()) -> Vec<Leg> {
    IS_RECORDING.store(true, Ordering::SeqCst);
    run();
    IS_RECORDING.store(false, Ordering::SeqCst);
    std::mem::take(&mut *trail())
}

/// Adds a file to the trail. Called by the macros.
#[doc(hidden)]
#[inline]
pub fn add(file: &'static str, arrives: bool) {
    // Relaxed: the request to record is sent after the flag is set, through a socket.
    if IS_RECORDING.load(Ordering::Relaxed) {
        add_to_trail(file, arrives);
    }
}

#[cold]
fn add_to_trail(file: &'static str, arrives: bool) {
    let current = thread::current();
    let mut trail = trail();
    match trail.last_mut() {
        Some(leg) if leg.id == current.id() && leg.files.contains(&file) => {}
        Some(leg) if leg.id == current.id() => leg.files.push(file),
        _ if arrives => {
            let thread = current.name().unwrap_or_default().to_owned();
            trail.push(Leg { thread, files: vec![file], id: current.id() });
        }
        _ => {}
    }
}
