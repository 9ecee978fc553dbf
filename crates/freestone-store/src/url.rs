//! Image URLs: `STORE[:TAG][@HASH]`, where STORE is the URL of a store.

use std::fmt;
use std::str::FromStr;

use crate::format::name::Name;
use crate::format::tag::{LATEST, is_name};

/// Parsed image URL: an image store, a tag, and optionally the hash of one image.
#[derive(Debug, Clone, Eq)]
pub struct ImageUrl {
    /// The URL of the image store.
    pub store: String,
    /// Name of the tag; `latest` if the URL has no tag.
    pub tag: String,
    /// Hash (name) of the image. If `None`, the URL refers to the current image of the tag.
    pub image: Option<Name>,
}

/// URLs with the same store and tag are equal unless they have different hashes. If only one URL has a hash,
/// both may refer to the same image.
impl PartialEq for ImageUrl {
    fn eq(&self, other: &Self) -> bool {
        let same_image = match (self.image, other.image) {
            (Some(own), Some(other)) => own == other,
            _ => true,
        };
        (&self.store, &self.tag) == (&other.store, &other.tag) && same_image
    }
}

impl ImageUrl {
    /// Returns this URL with the hash of `image`, so that it refers to this image.
    #[must_use]
    pub fn with_image(&self, image: Name) -> Self {
        Self { image: Some(image), ..self.clone() }
    }
}

impl FromStr for ImageUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let example = "for example s3://bucket/images:debian or file:///srv/images:debian";
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(format!("must be a URL, {example}"));
        };
        let is_scheme =
            |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !is_scheme(scheme) || rest.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(format!("must be a URL without blanks, {example}"));
        }
        if rest.contains(['?', '#']) {
            return Err("has no part behind ? or #".into());
        }
        let authority = rest.split('/').next().unwrap_or_default();
        if authority.contains('@') {
            // The text may contain a password, so the error does not repeat it.
            return Err("has no user or password; say credentials=FILE, or set the variables".into());
        }
        let (rest, image) = match rest.rsplit_once('@') {
            Some((rest, image)) if !image.contains('/') => {
                (rest, Some(image.parse().map_err(|e| format!("what follows @ {e}"))?))
            }
            _ => (rest, None),
        };
        // In an HTTP URL without a path, the text after the colon is the port of the server. In other URLs it
        // is a tag, as buckets have no ports.
        let has_port = |rest: &str| scheme.starts_with("http") && !rest.contains('/');
        let (rest, tag) = match rest.rsplit_once(':') {
            Some((rest, tag)) if !has_port(rest) && !tag.contains('/') => (rest, tag),
            _ => (rest, LATEST),
        };
        if !is_name(tag) {
            return Err("a tag has letters, digits, dots, _ and -, and 128 of them at most".into());
        }
        let rest = rest.trim_end_matches('/');
        if rest.is_empty() {
            return Err(format!("must name a place, {example}"));
        }
        if scheme == "file" && !rest.starts_with('/') {
            return Err("must have an absolute path: file:///srv/images:debian".into());
        }
        Ok(Self { store: format!("{scheme}://{rest}"), tag: tag.to_owned(), image })
    }
}

impl fmt::Display for ImageUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.store, self.tag)?;
        self.image.map_or(Ok(()), |image| write!(f, "@{image}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_url_is_split_into_parts() {
        let hash = "0123456789abcdef".repeat(4);
        for (text, store, tag, has_image) in [
            ("s3://bucket", "s3://bucket", "latest", false),
            ("s3://bucket:v1", "s3://bucket", "v1", false),
            ("s3://bucket/a/b:v1.2", "s3://bucket/a/b", "v1.2", false),
            ("s3://bucket/a/:v1", "s3://bucket/a", "v1", false),
            (&format!("s3://bucket/a:v1@{hash}"), "s3://bucket/a", "v1", true),
            (&format!("s3://bucket/a@{hash}"), "s3://bucket/a", "latest", true),
            ("http://host:8080/images", "http://host:8080/images", "latest", false),
            ("http://[::1]:8080/images:x", "http://[::1]:8080/images", "x", false),
            ("file:///srv/images:x", "file:///srv/images", "x", false),
        ] {
            let url: ImageUrl = text.parse().unwrap();
            assert_eq!((&*url.store, &*url.tag, url.image.is_some()), (store, tag, has_image), "{text}");
            assert_eq!(url.to_string().parse(), Ok(url));
        }
        let url: ImageUrl = "s3://b/a:v1".parse().unwrap();
        assert_eq!(url, url.with_image(Name([1; 32])));
        assert_ne!(url.with_image(Name([2; 32])), url.with_image(Name([1; 32])));
    }

    #[test]
    fn invalid_image_url_is_refused_without_password() {
        for bad in [
            "",
            "bucket",
            "s3:/bucket",
            "://x",
            "s3://",
            "s3:///",
            "s3://b:x y/z",
            "s3://b/a:",
            "s3://b/a:-x",
            "s3://b/a@12",
            "file://relative",
            "s3://b/a?x=1",
            "s3://key:secret@b/a",
            "s3://b/a\n",
        ] {
            let why = bad.parse::<ImageUrl>().unwrap_err();
            assert!(!why.contains("secret"), "{why}");
        }
    }
}
