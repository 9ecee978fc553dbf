//! A server that speaks as much S3 as objects need, in this process, and fails as it is told.
//!
//! It keeps to conditions as Ceph does: `If-None-Match: *` and `If-Match` of a PUT, an `If-Match` of a DELETE
//! not. Signatures are not checked; an access key can be asked for. A GET below a bucket is also what a plain
//! web server would answer.

mod answer;
mod buckets;
mod http;
mod kept;
mod server;
mod trouble;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, SystemTime};

use server::Shared;

pub use trouble::{Asked, Trouble};

/// How a server takes the conditions of a PUT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conditions {
    /// The tag of an `If-Match` has quotes or not.
    Any,
    /// A tag without quotes holds for nothing, as HTTP has it.
    Quoted,
    /// A tag with quotes holds for nothing, as in Ceph 16.
    Bare,
    /// Conditions are ignored.
    Ignored,
    /// An `If-Match` is ignored.
    IfMatchIgnored,
    /// An `If-Match` holds for nothing.
    NeverMatch,
    /// A PUT with a condition is answered with 501 `NotImplemented`.
    Unknown,
}

/// What was asked of a server, and how much went through it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Requests by method and key; those for a bucket have its name and a `/` as key.
    pub requests: BTreeMap<(String, String), u64>,
    /// Bytes that came, with the heads of requests.
    pub received: u64,
    /// Bytes that went.
    pub sent: u64,
}

impl Traffic {
    /// Requests with that method.
    pub fn of(&self, method: &str) -> u64 {
        self.requests.iter().filter(|((m, _), _)| m == method).map(|(_, count)| count).sum()
    }
}

/// A server at a free port of this host. It ends, and its connections with it, when it is dropped.
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Server {
    /// Starts one with these buckets, empty.
    pub fn start(buckets: &[&str]) -> Self {
        let (address, shared) = server::start();
        let server = Self { address, shared };
        for bucket in buckets {
            server.make_bucket(bucket);
        }
        server
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its URL.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Makes a bucket, or empties it.
    pub fn make_bucket(&self, bucket: &str) {
        self.shared.kept.buckets.lock().unwrap().make(bucket);
    }

    /// Takes a bucket away, with all that is in it.
    pub fn remove_bucket(&self, bucket: &str) {
        self.shared.kept.buckets.lock().unwrap().remove(bucket);
    }

    /// The content of an object.
    pub fn object(&self, bucket: &str, key: &str) -> Option<Vec<u8>> {
        let buckets = self.shared.kept.buckets.lock().unwrap();
        buckets.get(bucket, key).map(|object| object.bytes.to_vec())
    }

    /// Writes an object, past all troubles.
    pub fn set_object(&self, bucket: &str, key: &str, bytes: &[u8]) {
        let now = self.shared.kept.now();
        self.shared.kept.buckets.lock().unwrap().set(bucket, key, bytes.into(), now);
    }

    /// The keys in a bucket.
    pub fn keys(&self, bucket: &str) -> Vec<String> {
        self.shared.kept.buckets.lock().unwrap().keys(bucket)
    }

    /// Stops the server's clock at that time; `None` lets it go like this host's.
    pub fn set_time(&self, time: Option<SystemTime>) {
        *self.shared.kept.time.lock().unwrap() = time;
    }

    /// Requests have to be signed with that key, or are refused.
    pub fn require_key(&self, key: Option<&str>) {
        *self.shared.kept.access_key.lock().unwrap() = key.map(str::to_owned);
    }

    /// Sets how conditions of writes are taken from now on.
    pub fn set_conditions(&self, conditions: Conditions) {
        *self.shared.kept.conditions.lock().unwrap() = conditions;
    }

    /// How many keys a page of a list has at most.
    pub fn set_page(&self, keys: usize) {
        self.shared.kept.page.store(keys, SeqCst);
    }

    /// A bucket takes no more than that many bytes: a PUT beyond is refused with 403 `QuotaExceeded`.
    pub fn set_quota(&self, bytes: Option<u64>) {
        *self.shared.kept.quota.lock().unwrap() = bytes;
    }

    /// From now on requests for which `when` is true have that trouble. Of several the first one counts.
    pub fn trouble(&self, when: impl Fn(&Asked) -> bool + Send + Sync + 'static, trouble: Trouble) {
        self.shared.troubles.lock().unwrap().push((Box::new(when), trouble));
    }

    /// No request has any trouble any more; those under way keep theirs.
    pub fn no_troubles(&self) {
        self.shared.troubles.lock().unwrap().clear();
    }

    /// What was asked since the start, or since [`Server::forget_traffic`].
    pub fn traffic(&self) -> Traffic {
        self.shared.traffic.lock().unwrap().clone()
    }

    /// Counts from zero. The count that troubles see goes on.
    pub fn forget_traffic(&self) {
        *self.shared.traffic.lock().unwrap() = Traffic::default();
    }

    /// Cuts all connections; new ones are taken.
    pub fn cut_connections(&self) {
        self.shared.cut();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.end(self.address);
    }
}

/// An entity tag: like MD5 as S3 has it, the same for the same bytes, but quick.
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

/// Year, month, day, and seconds of the day.
fn date(time: SystemTime) -> (i64, u64, u64, u64) {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    // Days since 1 March of the year 0, in eras of 400 years.
    let days = since / 86_400 + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    ((year + era * 400) as i64 + i64::from(month <= 2), month, day, since % 86_400)
}

/// As headers have it.
fn http_date(time: SystemTime) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (year, month, day, second) = date(time);
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (name, month) = (DAYS[(since / 86_400 % 7) as usize], MONTHS[month as usize - 1]);
    format!("{name}, {day:02} {month} {year:04} {} GMT", clock(second))
}

/// As lists have it.
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
    fn dates_are_those_of_the_calendar() {
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
    fn a_tag_is_that_of_the_bytes() {
        let mut tags: Vec<_> = [&b""[..], b"a", b"b", b"a\0", b"aaaaaaaaa", b"aaaaaaaab"].map(tag).into();
        assert_eq!(tags[1], tag(b"a"));
        tags.sort();
        tags.dedup();
        assert_eq!(tags.len(), 6);
    }
}
