//! [`Objects`] on top of `object_store`.

use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use freestone_store::objects::{
    Fault, Head, KEY_BYTES_MAX, Listed, Objects, Read, Result, Until, Version, When,
};
use futures_util::StreamExt as _;
use futures_util::future::{Either, select};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use object_store::{
    Extensions, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions,
    PutPayload, UpdateVersion,
};

use crate::fault::{Condition, Operation, Refusal, fault, is_range_past_end, refusal};
use crate::runtime::call;
use crate::text::plain;
use crate::wire::ObjectRequest;

/// Largest buffer allocated in advance for an object, in bytes, as the announced length may be wrong.
const RESERVED_BYTES_MAX: u64 = 64 << 20;

/// Form of object versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// Entity tags. Most stores accept them with quotes, as in HTTP; Ceph 16 only without.
    S3,
    /// Generation numbers.
    Google,
    /// Entity tags with quotes.
    Azure,
    /// Entity tags, if any. Read-only.
    Http,
}

/// Form of an entity tag in a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TagForm {
    Quoted,
    Bare,
}

/// Object storage over the network.
pub struct Remote {
    pub url: String,
    /// Name of the bucket for messages.
    pub place: String,
    /// Prefix of all keys: empty, or ends with `/`.
    pub base: String,
    pub dialect: Dialect,
    pub store: Arc<dyn ObjectStore>,
    /// Interface for listings, if the store can list.
    pub pages: Option<Arc<dyn PaginatedListStore>>,
    pub hedge: Option<Duration>,
    /// Set if a write has shown that the store accepts only entity tags without quotes.
    pub takes_bare_tags: AtomicBool,
}

impl Remote {
    fn path(&self, key: &str) -> Result<Path> {
        let full = format!("{}{key}", self.base);
        match Path::parse(&full) {
            Ok(path) if path.as_ref() == full && !key.is_empty() && full.len() <= KEY_BYTES_MAX => Ok(path),
            _ => Err(Fault::Other(plain(&format!("{key}: invalid object key")))),
        }
    }

    fn check_writes(&self) -> Result<()> {
        if self.dialect == Dialect::Http {
            return Err(Fault::Unsupported("a store at http:// is read-only".to_owned()));
        }
        Ok(())
    }
}

impl Remote {
    /// Returns the forms of a condition in the order of attempts.
    fn tag_forms(&self, when: When<'_>) -> [TagForm; 2] {
        match when {
            // Relaxed: a hint, which orders no other memory access.
            When::Unchanged(_) if self.dialect == Dialect::S3 => {
                if self.takes_bare_tags.load(Ordering::Relaxed) {
                    [TagForm::Bare, TagForm::Quoted]
                } else {
                    [TagForm::Quoted, TagForm::Bare]
                }
            }
            // A second attempt detects an object that changed between the refused write and the check.
            _ => [TagForm::Quoted; 2],
        }
    }

    /// Writes an object with one request. Returns the refusal if the store refuses the condition.
    fn put_once(
        &self,
        path: &Path,
        bytes: &[u8],
        when: When<'_>,
        form: TagForm,
        until: Until<'_>,
    ) -> Result<std::result::Result<Option<Version>, Refusal>> {
        let (store, path, dialect, place) =
            (self.store.clone(), path.clone(), self.dialect, self.place.clone());
        let options = PutOptions { mode: dialect.mode(when, form)?, ..PutOptions::default() };
        let operation = Operation::Put(Condition::from(when));
        let payload = PutPayload::from(bytes.to_vec());
        call(until, async move {
            match store.put_opts(&path, payload, options).await {
                Ok(put) => Ok(Ok(dialect.version(put.e_tag.as_deref(), put.version.as_deref()))),
                Err(e) => match fault(&e, operation, &place) {
                    Fault::Condition => Ok(Err(refusal(&e))),
                    fault => Err(fault),
                },
            }
        })
    }

    /// Returns the version of an object after a successful write without a version in its response, as some
    /// errors look like that.
    fn read_back_version(
        &self,
        key: &str,
        bytes: &[u8],
        when: When<'_>,
        until: Until<'_>,
    ) -> Result<Option<Version>> {
        let lost = || Fault::Transient(format!("{}: an object is missing after it was written", self.place));
        if when == When::Always {
            return match self.head(key, until) {
                Ok(head) if head.bytes == bytes.len() as u64 => Ok(head.version),
                Ok(_) | Err(Fault::NotFound) => Err(lost()),
                Err(fault) => Err(fault),
            };
        }
        // The previous object, for example a tag, may have the same length.
        match self.get(key, None, bytes.len() as u64, until) {
            Ok(read) if read.bytes == bytes => Ok(read.version),
            Ok(_) | Err(Fault::NotFound | Fault::TooLong(_)) => Err(lost()),
            Err(fault) => Err(fault),
        }
    }

    /// Returns true if the condition of a write holds now.
    fn condition_holds(&self, key: &str, when: When<'_>, until: Until<'_>) -> Result<bool> {
        match (when, self.head(key, until)) {
            (When::Unchanged(_), Err(Fault::NotFound)) | (When::Absent, Ok(_)) => Ok(false),
            (_, Err(Fault::NotFound)) | (When::Always, Ok(_)) => Ok(true),
            (_, Err(fault)) => Err(fault),
            (When::Unchanged(version), Ok(head)) => Ok(head.version.as_ref() == Some(version)),
        }
    }
}

impl Dialect {
    fn version(self, e_tag: Option<&str>, version: Option<&str>) -> Option<Version> {
        let version = if self == Self::Google { version } else { e_tag }?;
        let (weak, tag) = version.strip_prefix("W/").map_or(("", version), |tag| ("W/", tag));
        let bare = tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"')).unwrap_or(tag);
        (!bare.is_empty()).then(|| Version(format!("{weak}{bare}")))
    }

    fn mode(self, when: When<'_>, form: TagForm) -> Result<PutMode> {
        let version = match when {
            When::Always => return Ok(PutMode::Overwrite),
            When::Absent => return Ok(PutMode::Create),
            When::Unchanged(version) => version.0.clone(),
        };
        if version.is_empty() || !version.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(Fault::Other("no store gave an object that version".to_owned()));
        }
        Ok(PutMode::Update(match (self, form) {
            (Self::Google, _) => UpdateVersion { e_tag: None, version: Some(version) },
            (_, TagForm::Bare) => UpdateVersion { e_tag: Some(version), version: None },
            (_, TagForm::Quoted) => {
                let (weak, tag) = version.strip_prefix("W/").map_or(("", &*version), |tag| ("W/", tag));
                UpdateVersion { e_tag: Some(format!("{weak}\"{tag}\"")), version: None }
            }
        }))
    }

    fn head(self, meta: &ObjectMeta) -> Head {
        let version = self.version(meta.e_tag.as_deref(), meta.version.as_deref());
        Head { bytes: meta.size, modified: meta.last_modified.into(), version }
    }
}

/// Parameters of a request for an object.
#[derive(Clone)]
struct Get {
    store: Arc<dyn ObjectStore>,
    place: String,
    path: Path,
    part: Option<Range<u64>>,
    most: u64,
    dialect: Dialect,
}

impl Get {
    async fn run(self) -> Result<Read> {
        let mut extensions = Extensions::new();
        extensions.insert(ObjectRequest);
        let range = self.part.map(GetRange::Bounded);
        let options = GetOptions { range, extensions, ..GetOptions::default() };
        let response = match self.store.get_opts(&self.path, options).await {
            Err(e) if is_range_past_end(&e) => return Ok(Read { bytes: Vec::new(), version: None }),
            response => response.map_err(|e| fault(&e, Operation::Get, &self.place))?,
        };
        let version = self.dialect.head(&response.meta).version;
        let length = response.range.end.saturating_sub(response.range.start);
        if length > self.most {
            return Err(Fault::TooLong(self.most));
        }
        // The announced length may be wrong, and the limit huge, so the buffer grows with the data.
        let mut bytes = Vec::with_capacity(length.min(RESERVED_BYTES_MAX) as usize);
        let mut pieces = response.into_stream();
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|e| fault(&e, Operation::Get, &self.place))?;
            if (bytes.len() + piece.len()) as u64 > length {
                return Err(Fault::Transient(format!("{}: the response is too long", self.place)));
            }
            bytes.extend_from_slice(&piece);
        }
        if bytes.len() as u64 != length {
            let what = format!("{}: the response ended after {} of {length} bytes", self.place, bytes.len());
            return Err(Fault::Transient(what));
        }
        Ok(Read { bytes, version })
    }
}

/// Sends a request, and repeats it if it is still pending `after` that time. Returns the first good response.
async fn hedged<T, F: Future<Output = Result<T>>>(request: impl Fn() -> F, after: Duration) -> Result<T> {
    let mut first = pin!(request());
    if let Ok(response) = tokio::time::timeout(after, &mut first).await {
        return response;
    }
    let second = pin!(request());
    match select(first, second).await {
        Either::Left((Err(Fault::Transient(_)), second)) => second.await,
        Either::Right((Err(Fault::Transient(_)), first)) => first.await,
        Either::Left((response, _)) | Either::Right((response, _)) => response,
    }
}

impl Objects for Remote {
    fn url(&self) -> &str {
        &self.url
    }

    fn get(&self, key: &str, part: Option<Range<u64>>, most: u64, until: Until<'_>) -> Result<Read> {
        let (store, place) = (self.store.clone(), self.place.clone());
        let get = Get { store, place, path: self.path(key)?, part, most, dialect: self.dialect };
        match self.hedge {
            None => call(until, get.run()),
            Some(after) => call(until, hedged(move || get.clone().run(), after)),
        }
    }

    fn put(&self, key: &str, bytes: &[u8], when: When<'_>, until: Until<'_>) -> Result<Option<Version>> {
        self.check_writes()?;
        let path = self.path(key)?;
        let mut message = String::new();
        for form in self.tag_forms(when) {
            let refusal = match self.put_once(&path, bytes, when, form, until)? {
                Ok(None) if self.dialect == Dialect::S3 => {
                    return self.read_back_version(key, bytes, when, until);
                }
                Ok(version) => {
                    if matches!(when, When::Unchanged(_)) {
                        self.takes_bare_tags.store(form == TagForm::Bare, Ordering::SeqCst);
                    }
                    return Ok(version);
                }
                Err(refusal) => refusal,
            };
            // Stores also refuse a condition because of its form, or because of another operation. Check the
            // object.
            if !self.condition_holds(key, when, until)? {
                return Err(Fault::Condition);
            }
            if refusal.is_conflict {
                return Err(Fault::Transient(refusal.message));
            }
            message = refusal.message;
        }
        Err(Fault::Unsupported(format!("{message} to a write whose condition holds")))
    }

    fn head(&self, key: &str, until: Until<'_>) -> Result<Head> {
        let (store, path, dialect, place) =
            (self.store.clone(), self.path(key)?, self.dialect, self.place.clone());
        call(until, async move {
            let meta = store.head(&path).await.map_err(|e| fault(&e, Operation::Head, &place))?;
            Ok(dialect.head(&meta))
        })
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed) -> bool, until: Until<'_>) -> Result<()> {
        let Some(pages) = &self.pages else {
            return Err(Fault::Unsupported("a store at http:// cannot list objects".to_owned()));
        };
        let full = format!("{}{prefix}", self.base);
        let mut token = None;
        loop {
            let (pages, place, full) = (pages.clone(), self.place.clone(), full.clone());
            let options = PaginatedListOptions { page_token: token, ..PaginatedListOptions::default() };
            let page = call(until, async move {
                let prefix = (!full.is_empty()).then_some(full.as_str());
                let page = pages.list_paginated(prefix, options).await;
                page.map_err(|e| fault(&e, Operation::List, &place))
            })?;
            for meta in page.result.objects {
                let Some(rest) = meta.location.as_ref().strip_prefix(&self.base) else { continue };
                // The store listed a key outside the prefix, or a key that ended with `/`, which object_store
                // strips.
                if !rest.starts_with(prefix) {
                    continue;
                }
                let listed =
                    Listed { key: rest.to_owned(), bytes: meta.size, modified: meta.last_modified.into() };
                if !each(listed) {
                    return Ok(());
                }
            }
            token = page.page_token.filter(|token| !token.is_empty());
            if token.is_none() {
                return Ok(());
            }
        }
    }

    fn delete(&self, key: &str, until: Until<'_>) -> Result<()> {
        self.check_writes()?;
        let (store, path, place) = (self.store.clone(), self.path(key)?, self.place.clone());
        call(until, async move {
            match store.delete(&path).await.map_err(|e| fault(&e, Operation::Delete, &place)) {
                Err(Fault::NotFound) => Ok(()),
                deleted => deleted,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_omit_quotes() {
        let version = |tag| Dialect::S3.version(Some(tag), None).map(|version| version.0);
        assert_eq!(version("\"abc\"").as_deref(), Some("abc"));
        assert_eq!(version("abc").as_deref(), Some("abc"));
        assert_eq!(version("W/\"abc\"").as_deref(), Some("W/abc"));
        assert_eq!(version("\"\""), None);
        let abc = Version("abc".to_owned());
        let sent =
            |dialect: Dialect, form, version| match dialect.mode(When::Unchanged(version), form).unwrap() {
                PutMode::Update(update) => (update.e_tag, update.version),
                other => panic!("{other:?}"),
            };
        assert_eq!(sent(Dialect::S3, TagForm::Bare, &abc), (Some("abc".to_owned()), None));
        assert_eq!(sent(Dialect::S3, TagForm::Quoted, &abc), (Some("\"abc\"".to_owned()), None));
        assert_eq!(sent(Dialect::Google, TagForm::Quoted, &abc), (None, Some("abc".to_owned())));
        let weak = Version("W/abc".to_owned());
        assert_eq!(sent(Dialect::Azure, TagForm::Quoted, &weak), (Some("W/\"abc\"".to_owned()), None));
        let bad = Version("a\r\nb".to_owned());
        Dialect::S3.mode(When::Unchanged(&bad), TagForm::Quoted).unwrap_err();
    }
}
