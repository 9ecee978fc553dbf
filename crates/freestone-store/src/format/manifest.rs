//! An image: its size, and for each GiB that is not all zeroes its maps. JSON, stored as
//! [`meta`](super::meta) stores things.

use serde::{Deserialize, Serialize};

use super::chunk;
use super::name::Name;
use super::{IMAGE_BYTES_MAX, PAGE, SEGMENT_BYTES, SEGMENT_CHUNKS, SEGMENT_PAGES, read};

/// Most maps of a segment. Beyond that they are made one.
pub const DEPTH_MAX: usize = 8;
/// Most bytes of the chunks of a map.
const STORED_BYTES_MAX: u64 = (SEGMENT_CHUNKS * chunk::STORED_BYTES_MAX) as u64;
/// Most bytes of one.
pub const BYTES_MAX: usize = 32 << 20;

/// An image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Of the format.
    pub format: u32,
    /// Bytes, whole sectors of 512.
    pub size: u64,
    /// When it was pushed, in seconds since 1970, by the clock of who did.
    pub pushed: u64,
    /// What was pushed, as who did calls it.
    pub source: String,
    /// What it was a change of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Name>,
    /// In their order; those without maps are zeroes, and not listed.
    pub segments: Vec<Segment>,
}

/// A GiB of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Which one.
    pub number: u32,
    /// From the oldest to the youngest. Only the oldest may be a full one.
    pub maps: Vec<MapRef>,
}

/// What one push had of a segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapRef {
    /// Where its pages lie.
    pub map: Name,
    /// Their hashes.
    pub hashes: Name,
    /// Pages that are held.
    pub pages: u32,
    /// Bytes of its chunks in the store.
    pub stored: u64,
}

impl Manifest {
    /// From its bytes; the error is half a sentence.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let manifest: Self = read(bytes).map_err(|why| why.to_string())?;
        manifest.check().map_err(str::to_owned)?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), &'static str> {
        if self.size == 0 || self.size > IMAGE_BYTES_MAX || !self.size.is_multiple_of(512) {
            return Err("its size cannot be");
        }
        let end = self.size.div_ceil(SEGMENT_BYTES);
        let mut next = 0;
        for segment in &self.segments {
            let number = u64::from(segment.number);
            if number < next || number >= end {
                return Err("its segments are not in order, or lie behind its end");
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

    /// As it is stored.
    pub fn bytes(&self) -> Vec<u8> {
        // Its values are numbers and text.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The maps of a segment, from the oldest.
    pub fn maps(&self, number: u32) -> &[MapRef] {
        match self.segments.binary_search_by_key(&number, |segment| segment.number) {
            Ok(at) => &self.segments[at].maps,
            Err(_) => &[],
        }
    }

    /// How many segments its size makes.
    pub fn segment_count(&self) -> u32 {
        self.size.div_ceil(SEGMENT_BYTES) as u32
    }

    /// Pages that are held by its maps, and their bytes in the store.
    pub fn held(&self) -> (u64, u64) {
        let maps = self.segments.iter().flat_map(|segment| &segment.maps);
        maps.fold((0, 0), |(pages, stored), map| (pages + u64::from(map.pages), stored + map.stored))
    }

    /// The most maps that a segment has.
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
    fn it_comes_back() {
        let manifest = sample();
        assert_eq!(Manifest::parse(&manifest.bytes()), Ok(manifest.clone()));
        assert_eq!((manifest.maps(0).len(), manifest.maps(1).len(), manifest.maps(3).len()), (2, 0, 1));
        assert_eq!((manifest.segment_count(), manifest.held(), manifest.depth()), (4, (21, 300), 2));
    }

    #[test]
    fn what_cannot_be_is_refused() {
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
