//! The content and the settings of the S3 server.

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::time::SystemTime;

use super::Conditions;
use super::buckets::Buckets;

/// Default number of keys that one list response contains, as in S3.
const PAGE_KEYS: usize = 1000;

/// The content and the settings of the S3 server. Each lock is held only briefly, and no two at the
/// same time.
#[derive(Debug)]
pub struct Storage {
    pub buckets: Mutex<Buckets>,
    /// Fixed time of the clock; `None` if the clock follows the real time.
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
