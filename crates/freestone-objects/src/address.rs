//! Parsing and checking the URLs of buckets and of HTTP services.

use object_store::path::Path;
use url::Url;

use crate::OpenError;
use crate::text::plain;

/// Bucket or container, and key prefix, of an object store's URL.
#[derive(Debug, PartialEq, Eq)]
pub struct BucketPath {
    pub bucket: String,
    /// Key prefix of all objects: empty, or ends with `/`.
    pub base: String,
}

impl BucketPath {
    /// Parses `rest`, the part of a URL after `scheme://`.
    pub fn parse(scheme: &str, rest: &str) -> Result<Self, OpenError> {
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.contains(['@', ':']) {
            return Err(OpenError::UserInfo);
        }
        if rest.contains(['?', '#']) {
            return Err(OpenError::Query);
        }
        let is_good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
        if !(3..=63).contains(&bucket.len()) || !bucket.bytes().all(is_good) || bucket.contains("..") {
            return Err(OpenError::Bucket(plain(bucket)));
        }
        let prefix = prefix.trim_end_matches('/');
        let is_path = Path::parse(prefix).is_ok_and(|path| path.as_ref() == prefix);
        if !is_path {
            return Err(OpenError::Prefix(plain(&format!("{scheme}://{rest}"))));
        }
        let base = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        Ok(Self { bucket: bucket.to_owned(), base })
    }

    /// Returns the URL of the bucket and prefix, without a trailing slash.
    pub fn url(&self, scheme: &str) -> String {
        format!("{scheme}://{}/{}", self.bucket, self.base).trim_end_matches('/').to_owned()
    }
}

/// Endpoint of an object store, or a web server.
#[derive(Debug, PartialEq, Eq)]
pub struct Service {
    /// URL without a trailing slash, possibly with a path.
    pub url: String,
    /// Host and port as in requests: the default port of the scheme is omitted.
    pub authority: String,
    pub is_plain: bool,
}

impl Service {
    /// Parses `http://HOST[:PORT][/PATH]` or `https://HOST[:PORT][/PATH]`.
    pub fn parse(text: &str) -> Result<Self, OpenError> {
        // The text may contain a secret, so parse errors do not quote it.
        let url = Url::parse(text).map_err(|_| OpenError::Endpoint)?;
        if !url.username().is_empty() || url.password().is_some() {
            return Err(OpenError::UserInfo);
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(OpenError::Query);
        }
        let is_plain = url.scheme() == "http";
        if !(is_plain || url.scheme() == "https") || url.host_str().is_none_or(str::is_empty) {
            return Err(OpenError::Endpoint);
        }
        // Requests omit the default port of the scheme, and `Url::port` returns `None` then.
        let host = url.host_str().unwrap_or_default();
        let authority = url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        Ok(Self { url: url.as_str().trim_end_matches('/').to_owned(), authority, is_plain })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_path_is_parsed() {
        let parse = |rest| BucketPath::parse("s3", rest).map(|place| (place.url("s3"), place.base));
        assert_eq!(parse("disks").unwrap(), ("s3://disks".to_owned(), String::new()));
        assert_eq!(parse("disks/").unwrap(), ("s3://disks".to_owned(), String::new()));
        assert_eq!(parse("disks/a/b/").unwrap(), ("s3://disks/a/b".to_owned(), "a/b/".to_owned()));
        for bad in ["", "a", "no_\x07bucket", "a b c", "..."] {
            assert!(matches!(parse(bad), Err(OpenError::Bucket(_))), "{bad:?}");
        }
        for bad in ["disks/a//b", "disks//a", "disks/../a", "disks/\x01"] {
            assert!(matches!(parse(bad), Err(OpenError::Prefix(_))), "{bad:?}");
        }
        assert!(matches!(parse("disks/a?versionId=1"), Err(OpenError::Query)));
    }

    #[test]
    fn secrets_in_urls_are_refused_without_echo() {
        for bad in ["AKIA:geheim@disks/a", "geheim@disks", "AKIA:geheim", "AKIA:ge/heim@disks"] {
            let refused = BucketPath::parse("s3", bad).unwrap_err();
            assert!(matches!(refused, OpenError::UserInfo), "{refused:?}");
        }
        for bad in
            ["http://u:geheim@h/", "http://geheim@h", "http://h/?sig=geheim", "geheim", "http://:geheim@"]
        {
            let refused = Service::parse(bad).unwrap_err();
            assert!(!format!("{refused} {refused:?}").contains("geheim"), "{refused:?}");
        }
    }

    #[test]
    fn service_url_is_parsed() {
        let service = Service::parse("http://Example.ORG:80/x/").unwrap();
        assert_eq!((service.url.as_str(), service.is_plain), ("http://example.org/x", true));
        assert_eq!(service.authority, "example.org");
        assert_eq!(Service::parse("https://[::1]:9000").unwrap().authority, "[::1]:9000");
        assert!(matches!(Service::parse("ftp://h"), Err(OpenError::Endpoint)));
    }
}
