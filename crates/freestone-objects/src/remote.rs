//! [`Remote`], the implementation of [`Objects`] that uses `object_store`.

use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use freestone_store::objects::{
    CallLimits, Fault, Head, KEY_BYTES_MAX, ListEntry, Objects, Read, Result, Version, WriteCondition,
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

/// Largest buffer in bytes that is allocated before an object is read. Larger buffers grow with the data,
/// because the length in a response may be wrong.
const RESERVED_BYTES_MAX: u64 = 64 << 20;

/// Kind of object store, which determines the form of object versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// S3: versions are entity tags. Most stores accept them with quotes, as in HTTP; Ceph 16 accepts them
    /// only without quotes.
    S3,
    /// Google Cloud Storage: versions are generation numbers.
    Google,
    /// Azure: versions are entity tags with quotes.
    Azure,
    /// Web server, read-only: versions are entity tags, if the server sends them.
    Http,
}

/// Form of the entity tag in the condition of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TagForm {
    Quoted,
    Bare,
}

/// An object store over the network.
pub struct Remote {
    pub url: String,
    /// Name of the bucket, container or server for messages.
    pub place: String,
    /// Prefix of all object keys: empty, or ends with `/`.
    pub base: String,
    pub dialect: Dialect,
    pub store: Arc<dyn ObjectStore>,
    /// Interface for listings, or `None` if the object store cannot list objects.
    pub pages: Option<Arc<dyn PaginatedListStore>>,
    pub hedge: Option<Duration>,
    /// Set if the last conditional write succeeded with an entity tag without quotes, which is then tried
    /// first.
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
    /// Returns the forms of the entity tag in a conditional write, in the order of attempts.
    fn tag_forms(&self, condition: WriteCondition<'_>) -> [TagForm; 2] {
        match condition {
            // Relaxed: the flag is a hint, which orders no other memory access.
            WriteCondition::Unchanged(_) if self.dialect == Dialect::S3 => {
                if self.takes_bare_tags.load(Ordering::Relaxed) {
                    [TagForm::Bare, TagForm::Quoted]
                } else {
                    [TagForm::Quoted, TagForm::Bare]
                }
            }
            // The form is known, but two attempts are made: the object may have changed between a refused
            // write and the check of the condition.
            _ => [TagForm::Quoted; 2],
        }
    }

    /// Writes an object with one request. Returns the new version, or the refusal if the object store refuses
    /// the condition. The version is `None` if the response does not contain one.
    fn put_once(
        &self,
        path: &Path,
        bytes: &[u8],
        condition: WriteCondition<'_>,
        form: TagForm,
        limits: CallLimits<'_>,
    ) -> Result<std::result::Result<Option<Version>, Refusal>> {
        let (store, path, dialect, place) =
            (self.store.clone(), path.clone(), self.dialect, self.place.clone());
        let options = PutOptions { mode: dialect.mode(condition, form)?, ..PutOptions::default() };
        let operation = Operation::Put(Condition::from(condition));
        let payload = PutPayload::from(bytes.to_vec());
        call(limits, async move {
            match store.put_opts(&path, payload, options).await {
                Ok(put) => Ok(Ok(dialect.version(put.e_tag.as_deref(), put.version.as_deref()))),
                Err(e) => match fault(&e, operation, &place) {
                    Fault::Condition => Ok(Err(refusal(&e))),
                    fault => Err(fault),
                },
            }
        })
    }

    /// Checks that an object exists after a successful write whose response does not contain a version,
    /// because some failed writes get such a response. Returns the version of the object.
    fn read_back_version(
        &self,
        key: &str,
        bytes: &[u8],
        condition: WriteCondition<'_>,
        limits: CallLimits<'_>,
    ) -> Result<Option<Version>> {
        let lost = || Fault::Transient(format!("{}: an object is missing after it was written", self.place));
        if condition == WriteCondition::Always {
            return match self.head(key, limits) {
                Ok(head) if head.bytes == bytes.len() as u64 => Ok(head.version),
                Ok(_) | Err(Fault::NotFound) => Err(lost()),
                Err(fault) => Err(fault),
            };
        }
        // The previous object may have the same length, for example if it is a tag, so the content is
        // compared.
        match self.get(key, None, bytes.len() as u64, limits) {
            Ok(read) if read.bytes == bytes => Ok(read.version),
            Ok(_) | Err(Fault::NotFound | Fault::TooLong(_)) => Err(lost()),
            Err(fault) => Err(fault),
        }
    }

    /// Returns true if the condition of a write is met by the object as it is now.
    fn condition_holds(
        &self,
        key: &str,
        condition: WriteCondition<'_>,
        limits: CallLimits<'_>,
    ) -> Result<bool> {
        match (condition, self.head(key, limits)) {
            (WriteCondition::Unchanged(_), Err(Fault::NotFound)) | (WriteCondition::Absent, Ok(_)) => {
                Ok(false)
            }
            (_, Err(Fault::NotFound)) | (WriteCondition::Always, Ok(_)) => Ok(true),
            (_, Err(fault)) => Err(fault),
            (WriteCondition::Unchanged(version), Ok(head)) => Ok(head.version.as_ref() == Some(version)),
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

    fn mode(self, condition: WriteCondition<'_>, form: TagForm) -> Result<PutMode> {
        let version = match condition {
            WriteCondition::Always => return Ok(PutMode::Overwrite),
            WriteCondition::Absent => return Ok(PutMode::Create),
            WriteCondition::Unchanged(version) => version.0.clone(),
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

/// Parameters of a read of an object, which may be sent twice.
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
        freestone_core::trail::step!();
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
        // The length in the response may be wrong, and `most` may be huge, so the buffer grows with the data.
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

/// Sends a request, and sends it a second time if the first is still pending after the time `after`. Returns
/// the first response that is not a transient failure, or else the last response.
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

    fn get(&self, key: &str, part: Option<Range<u64>>, most: u64, limits: CallLimits<'_>) -> Result<Read> {
        freestone_core::trail::step!();
        let (store, place) = (self.store.clone(), self.place.clone());
        let get = Get { store, place, path: self.path(key)?, part, most, dialect: self.dialect };
        match self.hedge {
            None => call(limits, get.run()),
            Some(after) => call(limits, hedged(move || get.clone().run(), after)),
        }
    }

    fn put(
        &self,
        key: &str,
        bytes: &[u8],
        condition: WriteCondition<'_>,
        limits: CallLimits<'_>,
    ) -> Result<Option<Version>> {
        self.check_writes()?;
        let path = self.path(key)?;
        let mut message = String::new();
        for form in self.tag_forms(condition) {
            let refusal = match self.put_once(&path, bytes, condition, form, limits)? {
                Ok(None) if self.dialect == Dialect::S3 => {
                    return self.read_back_version(key, bytes, condition, limits);
                }
                Ok(version) => {
                    if matches!(condition, WriteCondition::Unchanged(_)) {
                        self.takes_bare_tags.store(form == TagForm::Bare, Ordering::SeqCst);
                    }
                    return Ok(version);
                }
                Err(refusal) => refusal,
            };
            // Object stores also refuse a write because of the form of its entity tag, or because of a
            // conflict with another operation. Therefore check whether the object meets the condition.
            if !self.condition_holds(key, condition, limits)? {
                return Err(Fault::Condition);
            }
            if refusal.is_conflict {
                return Err(Fault::Transient(refusal.message));
            }
            message = refusal.message;
        }
        Err(Fault::Unsupported(format!("{message} to a write whose condition holds")))
    }

    fn head(&self, key: &str, limits: CallLimits<'_>) -> Result<Head> {
        let (store, path, dialect, place) =
            (self.store.clone(), self.path(key)?, self.dialect, self.place.clone());
        call(limits, async move {
            let meta = store.head(&path).await.map_err(|e| fault(&e, Operation::Head, &place))?;
            Ok(dialect.head(&meta))
        })
    }

    fn list(
        &self,
        prefix: &str,
        each: &mut dyn FnMut(ListEntry) -> bool,
        limits: CallLimits<'_>,
    ) -> Result<()> {
        let Some(pages) = &self.pages else {
            return Err(Fault::Unsupported("a store at http:// cannot list objects".to_owned()));
        };
        let full = format!("{}{prefix}", self.base);
        let mut token = None;
        loop {
            let (pages, place, full) = (pages.clone(), self.place.clone(), full.clone());
            let options = PaginatedListOptions { page_token: token, ..PaginatedListOptions::default() };
            let page = call(limits, async move {
                let prefix = (!full.is_empty()).then_some(full.as_str());
                let page = pages.list_paginated(prefix, options).await;
                page.map_err(|e| fault(&e, Operation::List, &place))
            })?;
            for meta in page.result.objects {
                let Some(rest) = meta.location.as_ref().strip_prefix(&self.base) else { continue };
                // Skip keys outside the prefix that the object store listed nevertheless, and keys that are
                // too short because object_store strips a final `/`.
                if !rest.starts_with(prefix) {
                    continue;
                }
                let listed =
                    ListEntry { key: rest.to_owned(), bytes: meta.size, modified: meta.last_modified.into() };
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

    fn delete(&self, key: &str, limits: CallLimits<'_>) -> Result<()> {
        self.check_writes()?;
        let (store, path, place) = (self.store.clone(), self.path(key)?, self.place.clone());
        call(limits, async move {
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
        let sent = |dialect: Dialect, form, version| match dialect
            .mode(WriteCondition::Unchanged(version), form)
            .unwrap()
        {
            PutMode::Update(update) => (update.e_tag, update.version),
            other => panic!("{other:?}"),
        };
        assert_eq!(sent(Dialect::S3, TagForm::Bare, &abc), (Some("abc".to_owned()), None));
        assert_eq!(sent(Dialect::S3, TagForm::Quoted, &abc), (Some("\"abc\"".to_owned()), None));
        assert_eq!(sent(Dialect::Google, TagForm::Quoted, &abc), (None, Some("abc".to_owned())));
        let weak = Version("W/abc".to_owned());
        assert_eq!(sent(Dialect::Azure, TagForm::Quoted, &weak), (Some("W/\"abc\"".to_owned()), None));
        let bad = Version("a\r\nb".to_owned());
        Dialect::S3.mode(WriteCondition::Unchanged(&bad), TagForm::Quoted).unwrap_err();
    }
}
