//! Manifests: the size of an image, and the maps of each segment (GiB) that is not all zeroes. A manifest is
//! JSON and is stored as [`meta`](super::meta).

use serde::{Deserialize, Serialize};

use super::chunk;
use super::name::Name;
use super::{IMAGE_BYTES_MAX, PAGE, SEGMENT_BYTES, SEGMENT_CHUNKS, SEGMENT_PAGES, read};

/// Maximum number of maps of a segment. A push that would exceed this number merges the maps of the segment.
pub const DEPTH_MAX: usize = 8;
/// Maximum total size of the stored chunks of one map, in bytes.
const STORED_BYTES_MAX: u64 = (SEGMENT_CHUNKS * chunk::STORED_BYTES_MAX) as u64;
/// Maximum size of the JSON of a manifest, in bytes.
pub const BYTES_MAX: usize = 32 << 20;

/// Manifest: the size, the origin and the maps of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the store format.
    pub format: u32,
    /// Size of the image in bytes, a multiple of 512.
    pub size: u64,
    /// Time of the push in seconds since 1970, by the clock of the pushing host.
    pub pushed: u64,
    /// Name of the pushed device on the pushing host.
    pub source: String,
    /// Name of the parent image, whose unchanged content the push reused; `None` if the push had no parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Name>,
    /// Segments in ascending order of their numbers. Segments that are all zeroes are omitted.
    pub segments: Vec<Segment>,
}

/// Maps of one segment (1 GiB) of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Index of the segment in the image, which is its offset in GiB.
    pub number: u32,
    /// Maps from the oldest to the youngest. Only the oldest may be a full map.
    pub maps: Vec<MapRef>,
}

/// Reference to a map of a segment, which one push has written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapRef {
    /// Name (content hash) of the map.
    pub map: Name,
    /// Name (content hash) of the page hashes of the map.
    pub hashes: Name,
    /// Number of pages in the map: all pages of a delta, nonzero pages of a full map.
    pub pages: u32,
    /// Total size of the stored chunks of the map, in bytes.
    pub stored: u64,
}

impl Manifest {
    /// Parses and validates the JSON of a manifest. The error text is a sentence fragment about the manifest.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let manifest: Self = read(bytes).map_err(|why| why.to_string())?;
        manifest.check().map_err(str::to_owned)?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), &'static str> {
        if self.size == 0 || self.size > IMAGE_BYTES_MAX || !self.size.is_multiple_of(512) {
            return Err("its size is out of range, or not a multiple of 512");
        }
        let end = self.size.div_ceil(SEGMENT_BYTES);
        let mut next = 0;
        for segment in &self.segments {
            let number = u64::from(segment.number);
            if number < next || number >= end {
                return Err("its segments are out of order, or beyond its end");
            }
            next = number + 1;
            if segment.maps.is_empty() || segment.maps.len() > DEPTH_MAX {
                return Err("a segment has no maps, or too many");
            }
            let is_more = |map: &MapRef| map.pages as usize > SEGMENT_PAGES || map.stored > STORED_BYTES_MAX;
            if segment.maps.iter().any(is_more) {
                return Err("a map holds more than a segment has");
            }
        }
        Ok(())
    }

    /// Encodes the manifest as JSON.
    pub fn bytes(&self) -> Vec<u8> {
        // Serialization cannot fail, as all values are numbers and strings.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Returns the maps of a segment from the oldest to the youngest. Returns no maps if the segment is all
    /// zeroes.
    pub fn maps(&self, number: u32) -> &[MapRef] {
        match self.segments.binary_search_by_key(&number, |segment| segment.number) {
            Ok(at) => &self.segments[at].maps,
            Err(_) => &[],
        }
    }

    /// Returns the number of segments of the image, including segments of zeroes.
    pub fn segment_count(&self) -> u32 {
        self.size.div_ceil(SEGMENT_BYTES) as u32
    }

    /// Returns the total number of pages in all maps, and the total size of their stored chunks in bytes.
    pub fn held(&self) -> (u64, u64) {
        let maps = self.segments.iter().flat_map(|segment| &segment.maps);
        maps.fold((0, 0), |(pages, stored), map| (pages + u64::from(map.pages), stored + map.stored))
    }

    /// Returns the number of maps of the segment that has the most maps.
    pub fn depth(&self) -> usize {
        self.segments.iter().map(|segment| segment.maps.len()).max().unwrap_or(0)
    }
}

const _: () = assert!(IMAGE_BYTES_MAX / SEGMENT_BYTES < u32::MAX as u64 && (PAGE as u64) < SEGMENT_BYTES);

#[cfg(test)]
mod tests {
    use super::super::VERSION;
    use super::*;

    fn sample() -> Manifest {
        let map = |n: u8| MapRef { map: Name([n; 32]), hashes: Name([n; 32]), pages: 7, stored: 100 };
        Manifest {
            format: VERSION,
            size: 3 * SEGMENT_BYTES + 512,
            pushed: 1,
            source: "disk".into(),
            parent: None,
            segments: vec![
                Segment { number: 0, maps: vec![map(1), map(2)] },
                Segment { number: 3, maps: vec![map(3)] },
            ],
        }
    }

    #[test]
    fn manifest_round_trip() {
        let manifest = sample();
        assert_eq!(Manifest::parse(&manifest.bytes()), Ok(manifest.clone()));
        assert_eq!((manifest.maps(0).len(), manifest.maps(1).len(), manifest.maps(3).len()), (2, 0, 1));
        assert_eq!((manifest.segment_count(), manifest.held(), manifest.depth()), (4, (21, 300), 2));
    }

    #[test]
    fn invalid_manifest_is_refused() {
        let changes: [fn(&mut Manifest); 10] = [
            |m| m.format = VERSION + 1,
            |m| m.size = 0,
            |m| m.size += 1,
            |m| m.size = IMAGE_BYTES_MAX + 512,
            |m| m.segments[1].number = 4,
            |m| m.segments[1].number = 0,
            |m| m.segments[1].maps.clear(),
            |m| m.segments[1].maps[0].pages = SEGMENT_PAGES as u32 + 1,
            |m| m.segments[1].maps[0].stored = u64::MAX / 2,
            |m| m.segments[0].maps = vec![m.segments[0].maps[0].clone(); DEPTH_MAX + 1],
        ];
        for (number, change) in changes.iter().enumerate() {
            let mut manifest = sample();
            change(&mut manifest);
            assert!(Manifest::parse(&manifest.bytes()).is_err(), "{number}");
        }
        assert!(Manifest::parse(b"{}").is_err());
    }
}
