//! Which map a device has.

use serde::Serialize;

use super::super::api::Why;
use super::extents::Extents;
use super::pages::Pages;
use super::walk::Walk;
use super::zones::Zones;

/// A map.
#[derive(Serialize)]
pub struct Map {
    name: String,
    /// Of the device, in bytes.
    size: u64,
    /// How long it was drawn.
    seconds: f64,
    #[serde(flatten)]
    drawn: Drawn,
}

/// What is in it.
#[derive(Serialize)]
#[serde(tag = "map", rename_all = "snake_case")]
enum Drawn {
    /// Pages of a RAM disk, fork or snapshot.
    Pages(Pages),
    /// Zones of a drive.
    Zones(Zones),
    /// Data and holes, as clients see them.
    Extents(Extents),
    /// There is none.
    None {
        /// A sentence.
        why: String,
    },
}

/// Draws the map of the device, in at most so many parts.
///
/// # Errors
/// It is gone, nobody waits any more, or the device cannot say.
pub fn draw(walk: &mut Walk, cells: u64) -> Result<Map, Why> {
    let entry = walk.entry()?;
    let size = entry.size();
    let of_data = entry.layers.power.is_some();
    let (is_ram, is_zoned) = (entry.kind.ram().is_some(), entry.layers.zones.is_some());
    let is_template = entry.device().is_none();
    drop(entry);
    let none = |why: &str| Drawn::None { why: format!("{}: {why}", walk.name()) };
    let drawn = if is_template {
        none("a template has no content; each connection gets a fork of its own")
    } else if size == 0 {
        none("is empty")
    } else if is_zoned {
        Drawn::Zones(Zones::draw(walk, cells)?)
    } else if is_ram {
        Drawn::Pages(Pages::draw(walk, cells, of_data)?)
    } else {
        Drawn::Extents(Extents::draw(walk, cells)?)
    };
    Ok(Map { name: walk.name().to_owned(), size, seconds: walk.took().as_secs_f64(), drawn })
}
