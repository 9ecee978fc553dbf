//! Drawing the kind of map that suits a device: zones, pages or extents.

use serde::Serialize;

use super::super::api::ApiError;
use super::extents::Extents;
use super::pages::Pages;
use super::walk::Walk;
use super::zones::Zones;

/// A map of a device, as the API returns it.
#[derive(Serialize)]
pub struct Map {
    name: String,
    /// Size of the device, in bytes.
    size: u64,
    /// Time in seconds that drawing the map took.
    seconds: f64,
    #[serde(flatten)]
    drawn: Drawn,
}

/// The content of a map, by kind of map.
#[derive(Serialize)]
#[serde(tag = "map", rename_all = "snake_case")]
enum Drawn {
    /// Pages of a RAM disk, fork or snapshot.
    Pages(Pages),
    /// Zones of a zoned drive.
    Zones(Zones),
    /// Data and holes, as NBD clients see them.
    Extents(Extents),
    /// The device has no map.
    None {
        /// The reason, as a sentence for the user.
        why: String,
    },
}

/// Draws the map of the device that `walk` examines, with at most `cells` cells.
///
/// # Errors
/// The device was removed, or does not report its content; or the walk was cancelled.
pub fn draw(walk: &mut Walk, cells: u64) -> Result<Map, ApiError> {
    let entry = walk.entry()?;
    let size = entry.size();
    let has_unflushed = entry.layers.power.is_some();
    let (is_ram, is_zoned) = (entry.kind.ram().is_some(), entry.layers.zones.is_some());
    let is_template = entry.device().is_none();
    drop(entry);
    let none = |why: &str| Drawn::None { why: format!("{}: {why}", walk.name()) };
    let drawn = if is_template {
        none("a template has no content; each connection gets a fork of its own")
    } else if size == 0 {
        none("the device is empty")
    } else if is_zoned {
        Drawn::Zones(Zones::draw(walk, cells)?)
    } else if is_ram {
        Drawn::Pages(Pages::draw(walk, cells, has_unflushed)?)
    } else {
        Drawn::Extents(Extents::draw(walk, cells)?)
    };
    Ok(Map { name: walk.name().to_owned(), size, seconds: walk.elapsed().as_secs_f64(), drawn })
}
