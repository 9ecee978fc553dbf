//! An S3 server in the test's process, with fault injection. Supports only the operations that an
//! image store needs.
//!
//! Conditions work as in Ceph: `If-None-Match: *` and `If-Match` of a PUT are honoured, `If-Match`
//! of a DELETE is not. Signatures are not checked, but an access key can be required. Clients can
//! also GET an object as from a plain web server.

mod buckets;
mod http;
mod response;
mod server;
mod server_fault;
mod storage;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, SystemTime};

use server::Shared;

pub use server_fault::{S3Request, ServerFault};

/// How the server handles conditional PUTs (with `If-Match` or `If-None-Match`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conditions {
    /// `If-Match` accepts entity tags with and without quotes.
    Any,
    /// `If-Match` fails for entity tags without quotes, as in HTTP.
    Quoted,
    /// `If-Match` fails for entity tags with quotes, as in Ceph 16.
    Bare,
    /// Both conditions are ignored: the PUT always takes effect.
    Ignored,
    /// `If-Match` is ignored, but `If-None-Match` is honoured.
    IfMatchIgnored,
    /// `If-Match` with an entity tag always fails.
    NeverMatch,
    /// Conditional PUTs fail with 501 `NotImplemented`.
    Unknown,
}

/// Number of requests and bytes that a server has processed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Number of requests by method and key. The key of a request for a bucket is the bucket name
    /// and a `/`.
    pub requests: BTreeMap<(String, String), u64>,
    /// Number of bytes received, including headers.
    pub received: u64,
    /// Number of bytes sent, including headers.
    pub sent: u64,
}

impl Traffic {
    /// Returns the number of requests with this method.
    pub fn of(&self, method: &str) -> u64 {
        self.requests.iter().filter(|((m, _), _)| m == method).map(|(_, count)| count).sum()
    }
}

/// An S3 server on a free local port. Dropping it closes all its connections.
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Server {
    /// Starts a server that has these buckets, all empty.
    pub fn start(buckets: &[&str]) -> Self {
        let (address, shared) = server::start();
        let server = Self { address, shared };
        for bucket in buckets {
            server.create_bucket(bucket);
        }
        server
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the HTTP URL to which clients connect.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn create_bucket(&self, bucket: &str) {
        self.shared.storage.buckets.lock().unwrap().make(bucket);
    }

    pub fn remove_bucket(&self, bucket: &str) {
        self.shared.storage.buckets.lock().unwrap().remove(bucket);
    }

    /// Returns the content of an object, or `None` if it does not exist.
    pub fn object(&self, bucket: &str, key: &str) -> Option<Vec<u8>> {
        let buckets = self.shared.storage.buckets.lock().unwrap();
        buckets.get(bucket, key).map(|object| object.bytes.to_vec())
    }

    /// Stores an object directly, without a request.
    pub fn set_object(&self, bucket: &str, key: &str, bytes: &[u8]) {
        let now = self.shared.storage.now();
        self.shared.storage.buckets.lock().unwrap().set(bucket, key, bytes.into(), now);
    }

    pub fn keys(&self, bucket: &str) -> Vec<String> {
        self.shared.storage.buckets.lock().unwrap().keys(bucket)
    }

    /// Sets the server's clock to a fixed time. `None` makes the clock follow the real time again.
    pub fn set_time(&self, time: Option<SystemTime>) {
        *self.shared.storage.time.lock().unwrap() = time;
    }

    /// Sets the access key with which requests must be signed; `None` accepts all requests.
    pub fn require_key(&self, key: Option<&str>) {
        *self.shared.storage.access_key.lock().unwrap() = key.map(str::to_owned);
    }

    pub fn set_conditions(&self, conditions: Conditions) {
        *self.shared.storage.conditions.lock().unwrap() = conditions;
    }

    /// Sets the maximum number of keys that one list response contains.
    pub fn set_page(&self, keys: usize) {
        self.shared.storage.page.store(keys, SeqCst);
    }

    /// Limits the bytes in each bucket; `None` means unlimited. A PUT beyond the quota fails with
    /// 403 `QuotaExceeded`.
    pub fn set_quota(&self, bytes: Option<u64>) {
        *self.shared.storage.quota.lock().unwrap() = bytes;
    }

    /// Adds a fault for the requests for which `when` returns true. If several faults match, the
    /// one added first applies.
    pub fn add_fault(&self, when: impl Fn(&S3Request) -> bool + Send + Sync + 'static, fault: ServerFault) {
        self.shared.faults.lock().unwrap().push((Box::new(when), fault));
    }

    /// Removes all faults. Requests in progress keep the faults that apply to them.
    pub fn clear_faults(&self) {
        self.shared.faults.lock().unwrap().clear();
    }

    /// Returns the traffic since the start of the server, or since [`Server::reset_traffic`].
    pub fn traffic(&self) -> Traffic {
        self.shared.traffic.lock().unwrap().clone()
    }

    /// Resets the traffic counters. The request numbers in [`S3Request::nth`] continue.
    pub fn reset_traffic(&self) {
        *self.shared.traffic.lock().unwrap() = Traffic::default();
    }

    /// Closes all connections. The server still accepts new ones.
    pub fn cut_connections(&self) {
        self.shared.cut();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.end(self.address);
    }
}

/// Returns an entity tag of the content: a fast hash in place of S3's MD5.
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

/// Returns the year, month, day, and second of the day of a time, in UTC.
fn date(time: SystemTime) -> (i64, u64, u64, u64) {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    // Count days from March 1 of the year 0, in eras of 400 years: leap days then come last in a
    // year.
    let days = since / 86_400 + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    ((year + era * 400) as i64 + i64::from(month <= 2), month, day, since % 86_400)
}

/// Formats a time as HTTP headers contain it.
fn http_date(time: SystemTime) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (year, month, day, second) = date(time);
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (name, month) = (DAYS[(since / 86_400 % 7) as usize], MONTHS[month as usize - 1]);
    format!("{name}, {day:02} {month} {year:04} {} GMT", clock(second))
}

/// Formats a time as the XML of list responses contains it.
fn xml_date(time: SystemTime) -> String {
    let (year, month, day, second) = date(time);
    format!("{year:04}-{month:02}-{day:02}T{}.000Z", clock(second))
}

fn clock(second: u64) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
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
