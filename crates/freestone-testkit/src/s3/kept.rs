//! What a server has, and how it was set up.

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::time::SystemTime;

use super::Conditions;
use super::buckets::Buckets;

/// Keys of a page, as S3 has it.
const PAGE_KEYS: usize = 1000;

/// Of the locks each is held for a moment, and none with another.
#[derive(Debug)]
pub struct Kept {
    pub buckets: Mutex<Buckets>,
    /// Where the clock stands still.
    pub time: Mutex<Option<SystemTime>>,
    pub access_key: Mutex<Option<String>>,
    pub quota: Mutex<Option<u64>>,
    pub conditions: Mutex<Conditions>,
    pub page: AtomicUsize,
}

impl Default for Kept {
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

impl Kept {
    pub fn now(&self) -> SystemTime {
        self.time.lock().unwrap().unwrap_or_else(SystemTime::now)
    }
}
