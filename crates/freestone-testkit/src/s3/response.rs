//! The responses of the S3 server to requests without faults.

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use super::buckets::Object;
use super::http::Request;
use super::storage::Storage;
use super::{Conditions, http_date, xml_date};

#[derive(Debug, Default)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    /// Content of the object or response. `part` is the range of it that is sent as the body.
    pub body: Arc<[u8]>,
    pub part: Range<usize>,
}

impl Response {
    fn new(status: u16, body: Vec<u8>) -> Self {
        Self { status, headers: Vec::new(), part: 0..body.len(), body: body.into() }
    }

    pub fn error(status: u16, code: &str) -> Self {
        let body = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{code}</Code><Message></Message></Error>"
        );
        Self::new(status, body.into_bytes())
    }
}

/// Ways in which a fault changes the range of a GET response.
#[derive(Debug, Clone, Copy, Default)]
pub struct Deviation {
    pub ignores_range: bool,
    /// Number of bytes by which the returned range is shifted.
    pub shift: u64,
}

pub fn respond(
    storage: &Storage,
    request: &Request,
    bucket: &str,
    key: &str,
    deviation: Deviation,
) -> Response {
    if let Some(wanted) = &*storage.access_key.lock().unwrap() {
        let given = request.header("authorization").and_then(|a| a.split_once("Credential="));
        let given = given.and_then(|(_, rest)| rest.split('/').next());
        if given != Some(wanted) {
            let code = if given.is_some() { "InvalidAccessKeyId" } else { "AccessDenied" };
            return Response::error(403, code);
        }
    }
    if !storage.buckets.lock().unwrap().has(bucket) {
        return Response::error(404, "NoSuchBucket");
    }
    match (request.method.as_str(), key) {
        ("GET", "") => list(storage, request, bucket),
        ("HEAD", "") => Response::new(200, Vec::new()),
        ("GET" | "HEAD", _) => {
            let found = storage.buckets.lock().unwrap().get(bucket, key).cloned();
            found.map_or_else(|| Response::error(404, "NoSuchKey"), |object| get(request, &object, deviation))
        }
        ("PUT", _) if !key.is_empty() => put(storage, request, bucket, key),
        ("DELETE", _) if !key.is_empty() => {
            storage.buckets.lock().unwrap().delete(bucket, key);
            Response::new(204, Vec::new())
        }
        _ => Response::error(405, "MethodNotAllowed"),
    }
}

fn get(request: &Request, object: &Object, deviation: Deviation) -> Response {
    let bytes = object.bytes.len() as u64;
    let mut headers = vec![
        ("ETag", format!("\"{}\"", object.tag)),
        ("Last-Modified", http_date(object.modified)),
        ("Accept-Ranges", "bytes".to_owned()),
    ];
    let range = request.header("range").filter(|_| !deviation.ignores_range && request.method == "GET");
    let Some(range) = range.and_then(|range| range.strip_prefix("bytes=")) else {
        let part = 0..object.bytes.len();
        return Response { status: 200, headers, body: object.bytes.clone(), part };
    };
    let (first, last) = range.split_once('-').unwrap_or((range, ""));
    let part = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) => first..last.saturating_add(1).min(bytes),
        (Ok(first), Err(_)) => first..bytes,
        (Err(_), Ok(last)) => bytes.saturating_sub(last)..bytes,
        (Err(_), Err(_)) => 0..0,
    };
    let part =
        part.start.saturating_add(deviation.shift)..part.end.saturating_add(deviation.shift).min(bytes);
    if part.start >= part.end {
        let mut refused = Response::error(416, "InvalidRange");
        refused.headers.push(("Content-Range", format!("bytes */{bytes}")));
        return refused;
    }
    headers.push(("Content-Range", format!("bytes {}-{}/{bytes}", part.start, part.end - 1)));
    let part = part.start as usize..part.end as usize;
    Response { status: 206, headers, body: object.bytes.clone(), part }
}

fn put(storage: &Storage, request: &Request, bucket: &str, key: &str) -> Response {
    let quota = *storage.quota.lock().unwrap();
    let now = storage.now();
    let conditions = *storage.conditions.lock().unwrap();
    let header = |name| request.header(name).filter(|_| conditions != Conditions::Ignored);
    let if_match = header("if-match").filter(|_| conditions != Conditions::IfMatchIgnored);
    let if_none_match = header("if-none-match");
    if conditions == Conditions::Unknown && (if_match.is_some() || if_none_match.is_some()) {
        return Response::error(501, "NotImplemented");
    }
    // Hold the lock from the check of the condition to the write, so that concurrent writers are
    // ordered.
    let mut buckets = storage.buckets.lock().unwrap();
    let there = buckets.get(bucket, key);
    let holds = match (if_none_match, if_match) {
        (Some("*"), _) => there.is_none(),
        (_, Some("*")) => there.is_some(),
        (_, Some(tag)) => {
            let bare = tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"'));
            let is_refused = match conditions {
                Conditions::Quoted => bare.is_none(),
                Conditions::Bare => bare.is_some(),
                Conditions::NeverMatch => true,
                _ => false,
            };
            !is_refused && there.is_some_and(|object| object.tag == bare.unwrap_or(tag))
        }
        _ => true,
    };
    if !holds {
        return Response::error(412, "PreconditionFailed");
    }
    if quota.is_some_and(|most| buckets.bytes_beside(bucket, key) + request.body.len() as u64 > most) {
        return Response::error(403, "QuotaExceeded");
    }
    let tag = buckets.set(bucket, key, request.body.as_slice().into(), now);
    Response { headers: vec![("ETag", format!("\"{tag}\""))], ..Response::new(200, Vec::new()) }
}

fn list(storage: &Storage, request: &Request, bucket: &str) -> Response {
    let query = |name: &str| request.query.get(name).map(String::as_str);
    if query("list-type") != Some("2") || query("delimiter").is_some() {
        return Response::error(501, "NotImplemented");
    }
    let asked = query("max-keys").and_then(|keys| keys.parse().ok()).unwrap_or(usize::MAX);
    let most = asked.min(storage.page.load(SeqCst));
    // The continuation token contains the last key of the previous page; clients must treat it as
    // opaque.
    let after = query("continuation-token").and_then(|token| token.strip_prefix("after:"));
    let after = after.or(query("start-after")).unwrap_or_default();
    let prefix = query("prefix").unwrap_or_default();
    let (page, more) = storage.buckets.lock().unwrap().page(bucket, prefix, after, most);
    let mut body = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult><Name>{bucket}</Name>\
         <KeyCount>{}</KeyCount><IsTruncated>{more}</IsTruncated>",
        page.len()
    );
    for (key, object) in &page {
        // Writing to a string cannot fail.
        let _ = write!(
            body,
            "<Contents><Key>{}</Key><LastModified>{}</LastModified><ETag>&quot;{}&quot;</ETag><Size>{}</Size>\
             <StorageClass>STANDARD</StorageClass></Contents>",
            escape_xml(key),
            xml_date(object.modified),
            object.tag,
            object.bytes.len()
        );
    }
    if let Some((last, _)) = page.last().filter(|_| more) {
        let _ = write!(body, "<NextContinuationToken>after:{}</NextContinuationToken>", escape_xml(last));
    }
    body += "</ListBucketResult>";
    Response {
        headers: vec![("Content-Type", "application/xml".to_owned())],
        ..Response::new(200, body.into_bytes())
    }
}

fn escape_xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
