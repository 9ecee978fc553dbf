//! The record of a traced process: the numbered calls, the case, and the current step of the script.

use std::collections::HashMap;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use libc::pid_t;

use crate::program::calls::fault::{Case, Extent, FailureMode, Site};
use crate::program::calls::kinds::CallKind;
use crate::program::calls::limits::{self, ImposedLimit};

#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent properties")]
pub(super) struct TraceRecord {
    pub(super) waits_for_marker: bool,
    pub(super) waits_for_file: bool,
    pub(super) is_armed: bool,
    pub(super) case: Option<Case>,
    /// The limit that the case has imposed on the process.
    pub(super) imposed: Option<ImposedLimit>,
    /// Number of calls that were chosen to fail.
    chosen: u32,
    /// Number of calls that changed a file, or would have if they had not failed.
    changes: u32,
    /// The script has ended; failures that last as long as the script end too.
    pub(super) is_over: bool,
    counts: HashMap<(&'static str, String), u32>,
    pub(super) sites: Vec<Site>,
    /// Number of chosen calls that have failed.
    pub(super) hits: u32,
    pub(super) is_killed: bool,
    pub(super) status: Option<ExitStatus>,
}

impl TraceRecord {
    /// Starts numbering calls, and imposes the limit of the case, if any.
    pub(super) fn arm(&mut self, pid: pid_t, dir: &Path) {
        self.is_armed = true;
        let Some(case) = self.case.as_ref().filter(|case| case.site.call == limits::LIMIT) else { return };
        // If the limit cannot be imposed, the run counts as one in which the call of the case did not occur.
        match ImposedLimit::new(pid, dir, case) {
            Ok(imposed) => {
                self.imposed = Some(imposed);
                self.hits = u32::from(limits::changes_left(case).is_none());
            }
            Err(error) => eprintln!("{case}: {error}"),
        }
    }

    /// Numbers a call. Returns how the call must fail, or `None` if it succeeds. `changes`: the call would fail on a
    /// read-only file system.
    pub(super) fn number(
        &mut self,
        kind: &'static CallKind,
        object: String,
        changes: bool,
    ) -> Option<FailureMode> {
        let count = self.counts.entry((kind.name, object.clone())).or_default();
        *count += 1;
        let site = Site { call: kind.name.to_owned(), object, nth: *count };
        let how = self.case.as_ref().and_then(|case| {
            let is_chosen = match limits::changes_left(case) {
                Some(left) => changes && self.changes >= left,
                None => case.site == site || (self.chosen > 0 && case.site.call == site.call),
            };
            let fails = match case.extent {
                Extent::Once => self.chosen == 0,
                Extent::Twice => self.chosen < 2,
                Extent::Script => !self.is_over,
                Extent::Ever => true,
            };
            (is_chosen && fails).then_some(case.how)
        });
        self.chosen += u32::from(how.is_some());
        self.changes += u32::from(changes);
        self.sites.push(site);
        how
    }
}

#[derive(Default)]
pub(super) struct Shared {
    pub(super) record: Mutex<TraceRecord>,
    pub(super) changed: Condvar,
    /// The current step of the script, and when it started.
    pub(super) step: Mutex<Option<(String, Instant)>>,
    /// The step that exceeded its time limit, and the kernel functions in which the threads waited.
    pub(super) hung: Mutex<Option<String>>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // If another thread panicked, the run fails anyway, so poisoning is ignored.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
