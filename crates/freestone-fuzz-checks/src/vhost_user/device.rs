//! The device that the vhost-user checks serve.

use std::sync::Arc;

use freestone::device::{Blocking, Device};
use freestone_testkit::{Manner, Model, ModelZoned, TestDevice, ZonedConfig};

use crate::device::CheckDevice;

/// Size of the device in bytes.
pub const SIZE: u64 = 64 << 10;
/// Size of a zone in bytes.
pub const ZONE: u64 = 16 << 10;

#[derive(Debug, Clone, Copy)]
pub struct DiskConfig {
    pub manner: Manner,
    pub zoned: bool,
    /// Offset of a bad byte: requests that contain it fail. `None` if no byte is bad.
    pub bad: Option<u64>,
    /// True if some submitted requests are dropped without completion.
    pub forgets: bool,
    /// Seed of the random order of completions.
    pub seed: u64,
}

/// A test device that stores its content in a model device in memory.
pub type Disk = CheckDevice<dyn Device>;

/// Creates a model of a zoned device, with four zones.
pub fn zones() -> ModelZoned {
    ModelZoned::new(ZonedConfig {
        zone_size: ZONE,
        zone_capacity: ZONE - 4096,
        nr_zones: (SIZE / ZONE) as u32,
        conventional: 1,
        max_open: 1,
        max_active: 2,
    })
}

impl Disk {
    pub fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; SIZE as usize];
        // The inner device executes every try.
        (**self.device).read_at(0, &mut bytes).expect("a device without faults");
        bytes
    }
}

pub fn disk(config: DiskConfig) -> Disk {
    let inner: Arc<dyn Device> =
        if config.zoned { Arc::new(zones()) } else { Arc::new(Model::new(SIZE as usize, 512)) };
    let device = TestDevice::over(inner)
        .shaped(move |geometry| geometry.volatile_cache = !config.zoned)
        .with_manner(config.manner)
        .with_bad_byte(config.bad);
    CheckDevice::new(device, config.seed, config.forgets, |_, _, order| order.notify())
}
