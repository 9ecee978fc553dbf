//! What tells a device from others that have had its name, and what becomes of one that has lost its
//! content.

use uuid::Uuid;

use super::Spec;

/// What a server that is started again does with the exports of a device whose content ended with the
/// server before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnLost {
    /// They are withheld, until somebody says that the device may be seen as it is.
    #[default]
    Withhold,
    /// They are there, and the device is empty, or shows its base.
    Empty,
}

impl Spec {
    /// The key that only has a meaning where there is a next start with the same devices.
    pub fn key_of_state(&self) -> Option<&'static str> {
        if self.on_lost.is_some() { Some("on_lost") } else { self.keep.then_some("keep") }
    }
}

pub(super) fn parse_on_lost(text: &str) -> Result<OnLost, String> {
    match text {
        "withhold" => Ok(OnLost::Withhold),
        "empty" => Ok(OnLost::Empty),
        _ => Err("must be withhold or empty".into()),
    }
}

/// Who a device is.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    /// For as long as it is there, servers that are started again included.
    pub uuid: Uuid,
    /// Of its content: 1, and one more for each time that a server which ended has lost it.
    pub generation: u64,
}

impl Identity {
    /// A new device.
    pub(super) fn new() -> Self {
        Self { uuid: Uuid::new_v4(), generation: 1 }
    }
}
