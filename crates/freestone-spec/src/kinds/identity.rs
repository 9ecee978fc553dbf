//! Identity of a device, and the policy for its content when the server restarts.

use uuid::Uuid;

use super::Spec;
use crate::keys::parse_bool;

/// Handling of the exports of a device whose content was lost when the server restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DataLossPolicy {
    /// The exports are withheld: not created until a user accepts the loss of the content.
    #[default]
    Withhold,
    /// The exports are created. The device is empty, or has the content of its base.
    Empty,
}

impl Spec {
    /// Returns the name of a key in the specification that needs a state directory, or `None` if no
    /// such key is set.
    pub fn key_of_state(&self) -> Option<&'static str> {
        if self.on_data_loss.is_some() { Some("on_data_loss") } else { self.keep.then_some("keep") }
    }
}

/// Keys of a [`RestartPolicy`], which are also attributes.
pub const RESTART_KEYS: [&str; 2] = ["keep", "on_data_loss"];

/// Handling of a device's content when the server restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RestartPolicy {
    /// True if the content is saved in the state directory of the server.
    pub keep: bool,
    /// Handling of the exports if the content is lost, or `None` for the default.
    pub on_data_loss: Option<DataLossPolicy>,
}

impl RestartPolicy {
    /// Sets the value of a key. Returns false if the policy has no such key.
    pub(crate) fn take(&mut self, key: &str, text: &str) -> Result<bool, String> {
        match key {
            "keep" => self.keep = parse_bool(text)?,
            "on_data_loss" => self.on_data_loss = Some(parse_data_loss_policy(text)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Returns the value of a key as it is written in a specification, or `None` if the policy has
    /// no such key.
    pub(crate) fn value(self, key: &str) -> Option<&'static str> {
        match key {
            "keep" => Some(if self.keep { "yes" } else { "no" }),
            "on_data_loss" => Some(match self.on_data_loss.unwrap_or_default() {
                DataLossPolicy::Withhold => "withhold",
                DataLossPolicy::Empty => "empty",
            }),
            _ => None,
        }
    }
}

pub(super) fn parse_data_loss_policy(text: &str) -> Result<DataLossPolicy, String> {
    match text {
        "withhold" => Ok(DataLossPolicy::Withhold),
        "empty" => Ok(DataLossPolicy::Empty),
        _ => Err("must be withhold or empty".into()),
    }
}

/// Identity of a device across restarts of the server.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    /// Random identifier of the device, which stays the same for its whole life, including restarts
    /// of the server.
    pub uuid: Uuid,
    /// Generation of the content: 1, plus the number of times that the content was lost at the end
    /// of a server process.
    pub generation: u64,
}

impl Identity {
    /// Creates the identity of a new device.
    pub(super) fn new() -> Self {
        Self { uuid: Uuid::new_v4(), generation: 1 }
    }

    /// Returns the key of the content in the memory of a family. A server that starts without the content gives
    /// the device another generation, and so another key.
    pub const fn key(self) -> u64 {
        /// Odd, with bits of all weights: 2^64 divided by the golden ratio.
        const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;
        self.uuid.as_u64_pair().1 ^ self.generation.wrapping_mul(SPREAD)
    }
}
