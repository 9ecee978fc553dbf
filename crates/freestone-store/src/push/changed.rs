//! Which pages of a device have data, which are its own, and what the pages of an image were.

use freestone_core::device::{self, Device, ExtentKind};

use super::Layer;
use crate::format::bitmap::Bitmap;
use crate::format::manifest::MapRef;
use crate::format::map::{Map, PageHash, Place};
use crate::format::{PAGE, SEGMENT_PAGES};
use crate::objects::Until;
use crate::store::{Result, Store};

/// The pages of `[start, start + len)`, of which a part at least may be no zeroes.
pub fn with_data(device: &dyn Device, start: u64, len: u64) -> device::Result<Bitmap> {
    let mut pages = Bitmap::default();
    each(start, len, |offset, len| {
        device.extents(offset, len, &mut |extent| {
            if extent.kind == ExtentKind::Data {
                add(&mut pages, start, extent.offset, extent.len);
            }
            true
        })
    })?;
    Ok(pages)
}

/// The pages of it that devices over one another hold themselves, in part at least.
pub fn own(layers: &[Layer<'_>], start: u64, len: u64) -> device::Result<Bitmap> {
    let mut pages = Bitmap::default();
    for layer in layers {
        // Behind its end there is nothing of it; what it was made from ends there as well.
        let len = len.min(layer.size.saturating_sub(start));
        each(start, len, |offset, len| {
            layer.changes.changes(offset, len, &mut |change| {
                if change.own {
                    add(&mut pages, start, change.offset, change.len);
                }
                true
            })
        })?;
    }
    Ok(pages)
}

/// Asks for the rest until all was described.
fn each(start: u64, len: u64, mut ask: impl FnMut(u64, u64) -> device::Result<u64>) -> device::Result<()> {
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

fn add(pages: &mut Bitmap, start: u64, offset: u64, len: u64) {
    let (first, end) = (offset.saturating_sub(start), (offset + len).saturating_sub(start));
    let page = PAGE as u64;
    for number in first / page..end.div_ceil(page).min(SEGMENT_PAGES as u64) {
        pages.set(number as usize, true);
    }
}

/// A segment of an image: its maps from the oldest, and the hash of each page.
pub struct Old {
    pub maps: Vec<Map>,
    pub hashes: Vec<PageHash>,
}

impl Old {
    /// Reads what describes it; none of its pages.
    pub fn read(store: &Store, maps: &[MapRef], until: Until<'_>) -> Result<Self> {
        let mut old = Self { maps: Vec::new(), hashes: vec![PageHash::default(); SEGMENT_PAGES] };
        for reference in maps {
            let map = store.map(&reference.map, until)?;
            let hashes = store.hashes(&reference.hashes, &map, until)?;
            for (page, hash) in old.hashes.iter_mut().enumerate() {
                match map.place(page) {
                    Place::Below => {}
                    Place::Zero => *hash = PageHash::default(),
                    Place::In { chunk, page } => *hash = hashes.at(chunk, page),
                }
            }
            old.maps.push(map);
        }
        Ok(old)
    }

    /// The pages that its deltas hold, if the oldest map is a full one.
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
