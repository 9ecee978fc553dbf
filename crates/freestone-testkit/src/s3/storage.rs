//! Content and settings of a server.

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::time::SystemTime;

use super::Conditions;
use super::buckets::Buckets;

/// Keys per page of a list, as in S3.
const PAGE_KEYS: usize = 1000;

/// Content and settings. Each lock is held briefly, and never together with another.
#[derive(Debug)]
pub struct Storage {
    pub buckets: Mutex<Buckets>,
    /// Fixed time of the clock, if set.
    pub time: Mutex<Option<SystemTime>>,
    pub access_key: Mutex<Option<String>>,
    pub quota: Mutex<Option<u64>>,
    pub conditions: Mutex<Conditions>,
    pub page: AtomicUsize,
}

impl Default for Storage {
    fn default() -> Self {
        Self {
            buckets: Mutex::default(),
            time: Mutex::default(),
            access_key: Mutex::default(),
            quota: Mutex::default(),
            conditions: Mutex::new(Conditions::Any),
            page: AtomicUsize::new(PAGE_KEYS),
        }
    }
}

impl Storage {
    pub fn now(&self) -> SystemTime {
        self.time.lock().unwrap().unwrap_or_else(SystemTime::now)
    }
}
