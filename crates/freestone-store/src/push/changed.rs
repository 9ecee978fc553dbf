//! Pages of a device that have data, pages that its layers (forks and snapshots) changed, and page hashes of
//! the parent image.

use freestone_core::device::{self, Device, ExtentKind};

use super::Layer;
use crate::format::bitmap::Bitmap;
use crate::format::manifest::MapRef;
use crate::format::map::{Map, PageHash, PageLocation};
use crate::format::{PAGE, SEGMENT_PAGES};
use crate::objects::CallLimits;
use crate::store::{Result, Store};

/// Returns the pages of the byte range `[start, start + len)` that may contain data, numbered from `start`.
pub fn pages_with_data(device: &dyn Device, start: u64, len: u64) -> device::Result<Bitmap> {
    let mut pages = Bitmap::default();
    describe_range(start, len, |offset, len| {
        device.extents(offset, len, &mut |extent| {
            if extent.kind == ExtentKind::Data {
                add_range(&mut pages, start, extent.offset, extent.len);
            }
            true
        })
    })?;
    Ok(pages)
}

/// Returns the pages of the byte range `[start, start + len)` that a layer changed, at least in part. Pages
/// are numbered from `start`.
pub fn own_pages(layers: &[Layer<'_>], start: u64, len: u64) -> device::Result<Bitmap> {
    let mut pages = Bitmap::default();
    for layer in layers {
        // A layer may be smaller than the device. Beyond the end of the layer, neither the layer nor its base
        // has content.
        let len = len.min(layer.size.saturating_sub(start));
        describe_range(start, len, |offset, len| {
            layer.changes.changes(offset, len, &mut |change| {
                if change.own {
                    add_range(&mut pages, start, change.offset, change.len);
                }
                true
            })
        })?;
    }
    Ok(pages)
}

/// Calls `ask` for the rest of a byte range until the whole range is described. `ask` returns the number of
/// bytes that it described.
fn describe_range(
    start: u64,
    len: u64,
    mut ask: impl FnMut(u64, u64) -> device::Result<u64>,
) -> device::Result<()> {
    let mut done = 0;
    while done < len {
        let more = ask(start + done, len - done)?;
        if more == 0 {
            return Err(device::Error::Media);
        }
        done += more;
    }
    Ok(())
}

fn add_range(pages: &mut Bitmap, start: u64, offset: u64, len: u64) {
    let (first, end) = (offset.saturating_sub(start), (offset + len).saturating_sub(start));
    let page = PAGE as u64;
    for number in first / page..end.div_ceil(page).min(SEGMENT_PAGES as u64) {
        pages.set(number as usize, true);
    }
}

/// Segment of an earlier image: its maps from the oldest to the youngest, and the hash of each page.
pub struct OldSegment {
    pub maps: Vec<Map>,
    pub hashes: Vec<PageHash>,
}

impl OldSegment {
    /// Reads the maps and page hashes of a segment from the object store, but no pages.
    pub fn read(store: &Store, maps: &[MapRef], limits: CallLimits<'_>) -> Result<Self> {
        let mut old = Self { maps: Vec::new(), hashes: vec![PageHash::default(); SEGMENT_PAGES] };
        for reference in maps {
            let map = store.map(&reference.map, limits)?;
            let hashes = store.hashes(&reference.hashes, &map, limits)?;
            for (page, hash) in old.hashes.iter_mut().enumerate() {
                match map.place(page) {
                    PageLocation::Below => {}
                    PageLocation::Zero => *hash = PageHash::default(),
                    PageLocation::In { chunk, page } => *hash = hashes.at(chunk, page),
                }
            }
            old.maps.push(map);
        }
        Ok(old)
    }

    /// Returns the pages that the deltas contain, or `None` if the oldest map is not a full map.
    pub fn held_by_deltas(&self) -> Option<Bitmap> {
        let (first, deltas) = self.maps.split_first()?;
        if first.held().is_some() {
            return None;
        }
        let mut held = Bitmap::default();
        for delta in deltas {
            held.add(&delta.held()?);
        }
        Some(held)
    }
}
