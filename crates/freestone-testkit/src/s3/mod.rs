//! An S3 server in this process with fault injection, limited to what an object store needs.
//!
//! Conditions work as in Ceph: `If-None-Match: *` and `If-Match` of a PUT are honoured, `If-Match`
//! of a DELETE is not. Signatures are not checked, but an access key can be required. A GET of an
//! object also works as from a plain web server.

mod buckets;
mod http;
mod response;
mod server;
mod storage;
mod trouble;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, SystemTime};

use server::Shared;

pub use trouble::{Asked, Trouble};

/// Handling of conditional PUTs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conditions {
    /// `If-Match` accepts tags with and without quotes.
    Any,
    /// `If-Match` fails for tags without quotes, as in HTTP.
    Quoted,
    /// `If-Match` fails for tags with quotes, as in Ceph 16.
    Bare,
    /// Conditions are ignored.
    Ignored,
    /// `If-Match` is ignored.
    IfMatchIgnored,
    /// `If-Match` always fails.
    NeverMatch,
    /// Conditional PUTs fail with 501 `NotImplemented`.
    Unknown,
}

/// Requests and bytes that a server has processed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Requests by method and key. Requests for a bucket have its name and a `/` as key.
    pub requests: BTreeMap<(String, String), u64>,
    /// Bytes received, including headers.
    pub received: u64,
    /// Bytes sent.
    pub sent: u64,
}

impl Traffic {
    /// Returns the number of requests with a method.
    pub fn of(&self, method: &str) -> u64 {
        self.requests.iter().filter(|((m, _), _)| m == method).map(|(_, count)| count).sum()
    }
}

/// A server on a free local port. Dropping it closes its connections.
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Server {
    /// Starts a server with these empty buckets.
    pub fn start(buckets: &[&str]) -> Self {
        let (address, shared) = server::start();
        let server = Self { address, shared };
        for bucket in buckets {
            server.make_bucket(bucket);
        }
        server
    }

    /// Returns the address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the URL.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Creates a bucket, or empties an existing one.
    pub fn make_bucket(&self, bucket: &str) {
        self.shared.storage.buckets.lock().unwrap().make(bucket);
    }

    /// Removes a bucket with its objects.
    pub fn remove_bucket(&self, bucket: &str) {
        self.shared.storage.buckets.lock().unwrap().remove(bucket);
    }

    /// Returns the content of an object.
    pub fn object(&self, bucket: &str, key: &str) -> Option<Vec<u8>> {
        let buckets = self.shared.storage.buckets.lock().unwrap();
        buckets.get(bucket, key).map(|object| object.bytes.to_vec())
    }

    /// Stores an object without a request.
    pub fn set_object(&self, bucket: &str, key: &str, bytes: &[u8]) {
        let now = self.shared.storage.now();
        self.shared.storage.buckets.lock().unwrap().set(bucket, key, bytes.into(), now);
    }

    /// Returns the keys in a bucket.
    pub fn keys(&self, bucket: &str) -> Vec<String> {
        self.shared.storage.buckets.lock().unwrap().keys(bucket)
    }

    /// Stops the server's clock at a time; `None` restarts it at the real time.
    pub fn set_time(&self, time: Option<SystemTime>) {
        *self.shared.storage.time.lock().unwrap() = time;
    }

    /// Sets the access key that requests must be signed with.
    pub fn require_key(&self, key: Option<&str>) {
        *self.shared.storage.access_key.lock().unwrap() = key.map(str::to_owned);
    }

    /// Sets the handling of conditional PUTs.
    pub fn set_conditions(&self, conditions: Conditions) {
        *self.shared.storage.conditions.lock().unwrap() = conditions;
    }

    /// Sets the maximum number of keys per page of a list.
    pub fn set_page(&self, keys: usize) {
        self.shared.storage.page.store(keys, SeqCst);
    }

    /// Limits the bytes of each bucket: a PUT beyond the quota fails with 403 `QuotaExceeded`.
    pub fn set_quota(&self, bytes: Option<u64>) {
        *self.shared.storage.quota.lock().unwrap() = bytes;
    }

    /// Adds a fault for requests that match `when`. The first matching fault applies.
    pub fn trouble(&self, when: impl Fn(&Asked) -> bool + Send + Sync + 'static, trouble: Trouble) {
        self.shared.troubles.lock().unwrap().push((Box::new(when), trouble));
    }

    /// Removes all faults. Requests in progress keep theirs.
    pub fn no_troubles(&self) {
        self.shared.troubles.lock().unwrap().clear();
    }

    /// Returns the traffic since the start, or since [`Server::forget_traffic`].
    pub fn traffic(&self) -> Traffic {
        self.shared.traffic.lock().unwrap().clone()
    }

    /// Resets the traffic counters. The request numbers that faults see continue.
    pub fn forget_traffic(&self) {
        *self.shared.traffic.lock().unwrap() = Traffic::default();
    }

    /// Closes all connections; new ones are accepted.
    pub fn cut_connections(&self) {
        self.shared.cut();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.end(self.address);
    }
}

/// Returns an entity tag of the content; a fast stand-in for S3's MD5.
fn tag(bytes: &[u8]) -> String {
    let mut halves = [0x9e37_79b9_7f4a_7c15_u64, bytes.len() as u64];
    for (index, chunk) in bytes.chunks(8).enumerate() {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        let mixed = (u64::from_le_bytes(word) ^ halves[index % 2]).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        halves[index % 2] = mixed ^ mixed.rotate_right(29);
    }
    format!("{:016x}{:016x}", halves[0], halves[1])
}

/// Returns year, month, day, and second of the day.
fn date(time: SystemTime) -> (i64, u64, u64, u64) {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    // Days since March 1 of the year 0, in eras of 400 years.
    let days = since / 86_400 + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    ((year + era * 400) as i64 + i64::from(month <= 2), month, day, since % 86_400)
}

/// Formats a time as in HTTP headers.
fn http_date(time: SystemTime) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (year, month, day, second) = date(time);
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (name, month) = (DAYS[(since / 86_400 % 7) as usize], MONTHS[month as usize - 1]);
    format!("{name}, {day:02} {month} {year:04} {} GMT", clock(second))
}

/// Formats a time as in list responses.
fn xml_date(time: SystemTime) -> String {
    let (year, month, day, second) = date(time);
    format!("{year:04}-{month:02}-{day:02}T{}.000Z", clock(second))
}

fn clock(second: u64) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write!(text, "{:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_match_calendar() {
        for (second, http, xml) in [
            (0, "Thu, 01 Jan 1970 00:00:00 GMT", "1970-01-01T00:00:00.000Z"),
            (951_868_799, "Tue, 29 Feb 2000 23:59:59 GMT", "2000-02-29T23:59:59.000Z"),
            (1_735_689_599, "Tue, 31 Dec 2024 23:59:59 GMT", "2024-12-31T23:59:59.000Z"),
            (4_107_542_400, "Mon, 01 Mar 2100 00:00:00 GMT", "2100-03-01T00:00:00.000Z"),
        ] {
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(second);
            assert_eq!((http_date(time).as_str(), xml_date(time).as_str()), (http, xml));
        }
    }

    #[test]
    fn tag_depends_on_content() {
        let mut tags: Vec<_> = [&b""[..], b"a", b"b", b"a\0", b"aaaaaaaaa", b"aaaaaaaab"].map(tag).into();
        assert_eq!(tags[1], tag(b"a"));
        tags.sort();
        tags.dedup();
        assert_eq!(tags.len(), 6);
    }
}
