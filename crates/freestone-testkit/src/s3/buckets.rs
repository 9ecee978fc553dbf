//! The buckets of the S3 server, and the objects in them.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::SystemTime;

use super::tag;

#[derive(Debug, Clone)]
pub struct Object {
    pub bytes: Arc<[u8]>,
    pub tag: String,
    pub modified: SystemTime,
}

#[derive(Debug, Default)]
pub struct Buckets(BTreeMap<String, BTreeMap<String, Object>>);

impl Buckets {
    pub fn make(&mut self, bucket: &str) {
        self.0.insert(bucket.to_owned(), BTreeMap::new());
    }

    pub fn remove(&mut self, bucket: &str) {
        self.0.remove(bucket);
    }

    pub fn has(&self, bucket: &str) -> bool {
        self.0.contains_key(bucket)
    }

    pub fn get(&self, bucket: &str, key: &str) -> Option<&Object> {
        self.0.get(bucket)?.get(key)
    }

    /// Stores an object and returns its entity tag. Creates the bucket if it does not exist.
    pub fn set(&mut self, bucket: &str, key: &str, bytes: Arc<[u8]>, modified: SystemTime) -> String {
        let tag = tag(&bytes);
        let object = Object { bytes, tag: tag.clone(), modified };
        self.0.entry(bucket.to_owned()).or_default().insert(key.to_owned(), object);
        tag
    }

    pub fn delete(&mut self, bucket: &str, key: &str) {
        if let Some(objects) = self.0.get_mut(bucket) {
            objects.remove(key);
        }
    }

    pub fn keys(&self, bucket: &str) -> Vec<String> {
        self.0.get(bucket).map(|objects| objects.keys().cloned().collect()).unwrap_or_default()
    }

    /// Returns the number of bytes in a bucket, except those of the object `key`.
    pub fn bytes_beside(&self, bucket: &str, key: &str) -> u64 {
        let objects = self.0.get(bucket).into_iter().flatten();
        objects.filter(|(k, _)| *k != key).map(|(_, object)| object.bytes.len() as u64).sum()
    }

    /// Returns at most `most` objects whose keys start with `prefix` and follow `after`. Also
    /// returns true if there are more.
    pub fn page(
        &self,
        bucket: &str,
        prefix: &str,
        after: &str,
        most: usize,
    ) -> (Vec<(String, Object)>, bool) {
        let Some(objects) = self.0.get(bucket) else { return (Vec::new(), false) };
        let start = if after < prefix { Bound::Included(prefix) } else { Bound::Excluded(after) };
        let rest = objects.range::<str, _>((start, Bound::Unbounded));
        let mut found = rest.take_while(|(key, _)| key.starts_with(prefix));
        let page = found.by_ref().take(most).map(|(key, object)| (key.clone(), object.clone())).collect();
        (page, found.next().is_some())
    }
}
