//! What is answered to a request that has no trouble.

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use super::buckets::Object;
use super::http::Request;
use super::kept::Kept;
use super::{Conditions, http_date, xml_date};

/// An answer, before it is written.
#[derive(Debug, Default)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    /// What lies in it; which part is the body says `part`.
    pub body: Arc<[u8]>,
    pub part: Range<usize>,
}

impl Answer {
    fn new(status: u16, body: Vec<u8>) -> Self {
        Self { status, headers: Vec::new(), part: 0..body.len(), body: body.into() }
    }

    /// An error as S3 has it.
    pub fn error(status: u16, code: &str) -> Self {
        let body = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{code}</Code><Message></Message></Error>"
        );
        Self::new(status, body.into_bytes())
    }
}

/// How a request is looked at that has a trouble.
#[derive(Debug, Clone, Copy, Default)]
pub struct Odd {
    pub ignores_range: bool,
    /// Added to where a part begins and ends.
    pub moved: u64,
}

/// Does what is asked for.
pub fn answer(kept: &Kept, request: &Request, bucket: &str, key: &str, odd: Odd) -> Answer {
    if let Some(wanted) = &*kept.access_key.lock().unwrap() {
        let given = request.header("authorization").and_then(|a| a.split_once("Credential="));
        let given = given.and_then(|(_, rest)| rest.split('/').next());
        if given != Some(wanted) {
            let code = if given.is_some() { "InvalidAccessKeyId" } else { "AccessDenied" };
            return Answer::error(403, code);
        }
    }
    if !kept.buckets.lock().unwrap().has(bucket) {
        return Answer::error(404, "NoSuchBucket");
    }
    match (request.method.as_str(), key) {
        ("GET", "") => list(kept, request, bucket),
        ("HEAD", "") => Answer::new(200, Vec::new()),
        ("GET" | "HEAD", _) => {
            let found = kept.buckets.lock().unwrap().get(bucket, key).cloned();
            found.map_or_else(|| Answer::error(404, "NoSuchKey"), |object| get(request, &object, odd))
        }
        ("PUT", _) if !key.is_empty() => put(kept, request, bucket, key),
        ("DELETE", _) if !key.is_empty() => {
            kept.buckets.lock().unwrap().delete(bucket, key);
            Answer::new(204, Vec::new())
        }
        _ => Answer::error(405, "MethodNotAllowed"),
    }
}

fn get(request: &Request, object: &Object, odd: Odd) -> Answer {
    let bytes = object.bytes.len() as u64;
    let mut headers = vec![
        ("ETag", format!("\"{}\"", object.tag)),
        ("Last-Modified", http_date(object.modified)),
        ("Accept-Ranges", "bytes".to_owned()),
    ];
    let range = request.header("range").filter(|_| !odd.ignores_range && request.method == "GET");
    let Some(range) = range.and_then(|range| range.strip_prefix("bytes=")) else {
        let part = 0..object.bytes.len();
        return Answer { status: 200, headers, body: object.bytes.clone(), part };
    };
    let (first, last) = range.split_once('-').unwrap_or((range, ""));
    let part = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) => first..last.saturating_add(1).min(bytes),
        (Ok(first), Err(_)) => first..bytes,
        (Err(_), Ok(last)) => bytes.saturating_sub(last)..bytes,
        (Err(_), Err(_)) => 0..0,
    };
    let part = part.start.saturating_add(odd.moved)..part.end.saturating_add(odd.moved).min(bytes);
    if part.start >= part.end {
        let mut refused = Answer::error(416, "InvalidRange");
        refused.headers.push(("Content-Range", format!("bytes */{bytes}")));
        return refused;
    }
    headers.push(("Content-Range", format!("bytes {}-{}/{bytes}", part.start, part.end - 1)));
    let part = part.start as usize..part.end as usize;
    Answer { status: 206, headers, body: object.bytes.clone(), part }
}

fn put(kept: &Kept, request: &Request, bucket: &str, key: &str) -> Answer {
    let quota = *kept.quota.lock().unwrap();
    let now = kept.now();
    let conditions = *kept.conditions.lock().unwrap();
    let header = |name| request.header(name).filter(|_| conditions != Conditions::Ignored);
    let if_match = header("if-match").filter(|_| conditions != Conditions::IfMatchIgnored);
    let if_none_match = header("if-none-match");
    if conditions == Conditions::Unknown && (if_match.is_some() || if_none_match.is_some()) {
        return Answer::error(501, "NotImplemented");
    }
    // Held over the condition and the write: of two writers one comes first.
    let mut buckets = kept.buckets.lock().unwrap();
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
        return Answer::error(412, "PreconditionFailed");
    }
    if quota.is_some_and(|most| buckets.bytes_beside(bucket, key) + request.body.len() as u64 > most) {
        return Answer::error(403, "QuotaExceeded");
    }
    let tag = buckets.set(bucket, key, request.body.as_slice().into(), now);
    Answer { headers: vec![("ETag", format!("\"{tag}\""))], ..Answer::new(200, Vec::new()) }
}

fn list(kept: &Kept, request: &Request, bucket: &str) -> Answer {
    let query = |name: &str| request.query.get(name).map(String::as_str);
    if query("list-type") != Some("2") || query("delimiter").is_some() {
        return Answer::error(501, "NotImplemented");
    }
    let asked = query("max-keys").and_then(|keys| keys.parse().ok()).unwrap_or(usize::MAX);
    let most = asked.min(kept.page.load(SeqCst));
    // The token is the last key of the page before, which no client may rely on.
    let after = query("continuation-token").and_then(|token| token.strip_prefix("after:"));
    let after = after.or(query("start-after")).unwrap_or_default();
    let prefix = query("prefix").unwrap_or_default();
    let (page, more) = kept.buckets.lock().unwrap().page(bucket, prefix, after, most);
    let mut body = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult><Name>{bucket}</Name>\
         <KeyCount>{}</KeyCount><IsTruncated>{more}</IsTruncated>",
        page.len()
    );
    for (key, object) in &page {
        // Writing to a string does not fail.
        let _ = write!(
            body,
            "<Contents><Key>{}</Key><LastModified>{}</LastModified><ETag>&quot;{}&quot;</ETag><Size>{}</Size>\
             <StorageClass>STANDARD</StorageClass></Contents>",
            escaped(key),
            xml_date(object.modified),
            object.tag,
            object.bytes.len()
        );
    }
    if let Some((last, _)) = page.last().filter(|_| more) {
        let _ = write!(body, "<NextContinuationToken>after:{}</NextContinuationToken>", escaped(last));
    }
    body += "</ListBucketResult>";
    Answer {
        headers: vec![("Content-Type", "application/xml".to_owned())],
        ..Answer::new(200, body.into_bytes())
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
