//! Kind `image`: read-only devices over images in object storage.

use std::sync::Arc;

use freestone::device::Device;
use freestone::store::format::name::Name;
use freestone::store::image::{self, Image};
use freestone::store::objects::{CallLimits, Fault};
use freestone::store::store::{Error, Store};
use freestone::store::url::ImageUrl;
use serde_json::{Value, json};

use crate::entries::SpecError;
use crate::family::FamilySpec;
use crate::keys::{Keys, parse_bool};
use crate::kinds::parallel_open::{Opener, opener};
use crate::kinds::registry::Registry;
use crate::kinds::{DataDevice, Entry, KindConfig, KindInstance, KindSpec, Spec};
use crate::path_text;
use crate::refusal::{Errno, Refusal};
use crate::stores::StoreSpec;
use crate::times;

pub(in crate::kinds) const NAME: &str = "image";
const NAMES: [&str; 9] =
    ["url", "image", "tag", "size", "prefetch", "cache", "cache_size", "timeout", "store_stat"];

/// Specification of a device of kind `image`.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageSpec {
    /// URL of the object store and the image in it.
    pub url: ImageUrl,
    /// Access to the object store, and the page cache for it.
    pub store: StoreSpec,
    /// True to fetch the chunks listed in the image's trace in advance.
    pub prefetch: bool,
    /// Specification of the family (memory pool) of the image's forks.
    pub family: FamilySpec,
}

impl ImageSpec {
    pub(in crate::kinds) fn take(keys: &Keys) -> Result<Self, SpecError> {
        let url: ImageUrl = keys.need("url", "url=s3://bucket/images:debian", str::parse)?;
        Ok(Self {
            store: StoreSpec::take(keys, &url.store)?,
            url,
            prefetch: keys.take("prefetch", parse_bool)?.unwrap_or(true),
            family: FamilySpec::take(keys)?,
        })
    }
}

impl KindConfig for ImageSpec {
    fn build(&self, spec: &Spec, registry: &Registry) -> Result<DataDevice, Refusal> {
        let backing = registry.backing(&self.family)?;
        let pulled = registry.parallel_open.open(&spec.name, || self.open())?;
        let image = Arc::clone(&pulled.image);
        Ok(DataDevice { backing, ..DataDevice::standalone(ImageInstance(pulled), image) })
    }

    fn opener(&self, _: &Spec) -> Option<Opener> {
        let spec = self.clone();
        Some(opener(move || spec.open()))
    }

    fn family(&self) -> Option<&FamilySpec> {
        Some(&self.family)
    }
}

impl ImageSpec {
    fn open(&self) -> Result<OpenImage, Refusal> {
        let secret = self.store.secret()?;
        let cache = self.store.open_cache()?;
        let objects = self.store.objects(&self.url.store)?;
        let until = CallLimits::within(self.store.timeout());
        let failed = |error: Error| of_store(&error);
        let place = Store::description_name(&self.url.store);
        // No request to the store is needed if the URL contains an image name instead of a tag, and
        // the cache contains the store's description.
        let description =
            cache.as_ref().filter(|_| self.url.image.is_some()).and_then(|cache| cache.get_meta(&place));
        let store = if let Some(description) = description {
            Store::open_known(objects, &description, secret.as_ref()).map_err(failed)?
        } else {
            let store = Store::open(objects, secret.as_ref(), until).map_err(failed)?;
            if let Some(cache) = &cache {
                // If the description cannot be cached, the next start requests it from the store
                // again.
                let _ = cache.insert_meta(&place, &store.description(), until);
            }
            store
        };
        let store = Arc::new(store);
        let name =
            self.url.image.map_or_else(|| resolve_tag(&store, &self.url.tag, until), Ok).map_err(failed)?;
        let config = image::Config { timeout: self.store.timeout(), prefetch: self.prefetch };
        let image = Arc::new(Image::open(store, cache, name, config, until).map_err(failed)?);
        Ok(OpenImage { image, url: self.url.with_image(name) })
    }
}

/// Returns the name of the image to which `tag` points.
fn resolve_tag(store: &Store, tag: &str, until: CallLimits<'_>) -> Result<Name, Error> {
    let read = store.tag(tag, until)?;
    read.map(|read| read.tag.manifest).ok_or_else(|| Error::NoTag(tag.to_owned()))
}

/// Converts an error of an object store to a refusal with an errno.
pub fn of_store(error: &Error) -> Refusal {
    let errno = match error {
        Error::Cancelled => Errno::ECANCELED,
        Error::NoStore(_) | Error::NoTag(_) => Errno::ENODEV,
        Error::Refused(..) | Error::TooLarge | Error::NothingRead | Error::KeepsNone(..) => Errno::EINVAL,
        Error::NoTags(_)
        | Error::TagMoved(_)
        | Error::TagSet(_)
        | Error::ParentExpiring(_)
        | Error::ObjectPruned(_) => Errno::EBUSY,
        Error::TooSlow(_) | Error::Object { fault: Fault::TimedOut, .. } => Errno::ETIMEDOUT,
        Error::Object { fault: Fault::Unsupported(_), .. } => Errno::EOPNOTSUPP,
        Error::Object { .. }
        | Error::Damaged(..)
        | Error::Device(_)
        | Error::DeletedLate(_)
        | Error::SetLate(_)
        | Error::Local(_) => Errno::EIO,
    };
    Refusal::failed(errno, error.to_string())
}

/// Open image in object storage.
pub struct OpenImage {
    /// The image as a device.
    pub image: Arc<Image>,
    /// URL of the image. Contains the name of the image, even if a tag was specified.
    pub url: ImageUrl,
}

struct ImageInstance(OpenImage);

impl KindInstance for ImageInstance {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outside(&self) -> Option<&dyn Device> {
        Some(&*self.0.image)
    }

    fn resolved_key(&self) -> Option<(&'static str, String)> {
        Some(("url", self.0.url.to_string()))
    }

    fn stored_image(&self) -> Option<&OpenImage> {
        Some(&self.0)
    }

    fn attrs(&self) -> &'static [&'static str] {
        &NAMES
    }

    fn value(&self, entry: &Entry, attr: &str) -> Option<Value> {
        let KindSpec::Image(spec) = &entry.spec.kind else { return None };
        let OpenImage { image, url } = &self.0;
        Some(match attr {
            "url" => json!(url.store),
            "image" => json!(image.name().to_string()),
            "tag" => json!(url.tag),
            "prefetch" => json!(spec.prefetch),
            "size" => json!(entry.size()),
            "cache" => image.cache().map_or(json!("none"), |cache| json!(path_text::text(cache.dir()))),
            "cache_size" => image.cache().map_or(json!(0), |cache| json!(cache.limit())),
            "timeout" => json!(times::exact(spec.store.timeout())),
            "store_stat" => store_stat(image),
            _ => return None,
        })
    }

    fn stat(&self) -> Option<(&'static str, Value)> {
        Some(("store_stat", store_stat(&self.0.image)))
    }
}

/// Returns the statistics of reads of the image and requests to the store, as a JSON object.
fn store_stat(image: &Image) -> Value {
    let (stat, requests) = (image.stat(), image.store().requests());
    json!({
        "chunks_fetched": stat.fetched,
        "fetched_bytes": stat.fetched_bytes,
        "chunks_found": stat.cache_hits,
        "chunks_ahead": stat.prefetched,
        "gets": requests.gets,
        "heads": requests.heads,
        "received_bytes": requests.read_bytes,
        "failed_requests": requests.failed,
        "failures": stat.failed,
        "last_error": stat.last_error,
    })
}
