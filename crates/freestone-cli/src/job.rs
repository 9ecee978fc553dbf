//! Verbs that take long, and how far they are: shown by `stat` while they run.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use freestone_spec::refusal::Errno;
use serde_json::{Value, json};

use crate::control::protocol::Fault;

/// What is running, by device. Locked for a look or a change.
#[derive(Default)]
pub struct Jobs {
    running: Arc<Mutex<HashMap<String, Arc<Progress>>>>,
}

/// How far a verb is.
#[derive(Debug)]
pub struct Progress {
    verb: &'static str,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
}

/// A running verb, until this is dropped.
pub struct Job {
    running: Arc<Mutex<HashMap<String, Arc<Progress>>>>,
    name: String,
    progress: Arc<Progress>,
}

impl Jobs {
    /// Begins a verb on a device, one at a time.
    pub fn begin(&self, name: &str, verb: &'static str) -> Result<Job, Fault> {
        // An insertion or removal is whole or did not happen.
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = running.get(name) {
            return Err(Fault::failed(Errno::EBUSY, format!("{name}: {} is running there", other.verb)));
        }
        let progress = Arc::new(Progress { verb, done_bytes: 0.into(), total_bytes: 0.into() });
        running.insert(name.to_owned(), Arc::clone(&progress));
        Ok(Job { running: Arc::clone(&self.running), name: name.to_owned(), progress })
    }

    /// What runs on a device: `{"verb": "delta save", "done_bytes": 4096, "total_bytes": 8192}`.
    pub fn show(&self, name: &str) -> Option<Value> {
        let progress = Arc::clone(self.running.lock().unwrap_or_else(PoisonError::into_inner).get(name)?);
        Some(json!({
            "verb": progress.verb,
            "done_bytes": progress.done_bytes.load(Ordering::SeqCst),
            "total_bytes": progress.total_bytes.load(Ordering::SeqCst),
        }))
    }
}

impl Job {
    /// How far it is.
    pub fn at(&self, done: u64, total: u64) {
        self.progress.done_bytes.store(done, Ordering::SeqCst);
        self.progress.total_bytes.store(total, Ordering::SeqCst);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::Jobs;

    #[test]
    fn one_at_a_time_and_shown_while_it_runs() {
        let jobs = Jobs::default();
        let job = jobs.begin("f", "delta save").unwrap();
        job.at(1, 2);
        let shown = json!({"verb": "delta save", "done_bytes": 1, "total_bytes": 2});
        assert_eq!(jobs.show("f"), Some(shown));
        let second = jobs.begin("f", "merge").err().unwrap().message;
        assert_eq!(second, "f: delta save is running there");
        assert!(jobs.begin("g", "merge").is_ok());
        drop(job);
        assert_eq!(jobs.show("f"), None);
        assert!(jobs.begin("f", "merge").is_ok());
    }
}
