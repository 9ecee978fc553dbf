//! Device attributes in a script, and the data and checksums that both sides compute. `lab/zone_guest.c`
//! implements the same functions for the kernel side.

use std::str::FromStr;

pub const SECTOR_BYTES: u64 = 512;
/// Byte that fills the buffer before a read, so that bytes which a driver leaves unchanged are visible.
pub const UNTOUCHED: u8 = 0x5A;

/// Attributes of a device, with the names and units of the kernel's configfs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "attributes of the kernel's, each with its name")]
pub struct Config {
    /// Size of the device in MiB.
    pub size: u64,
    /// Size of a logical block in bytes.
    pub blocksize: u32,
    /// Largest request in sectors; 0 means unlimited in this crate.
    pub max_sectors: u32,
    pub memory_backed: bool,
    pub discard: bool,
    pub rotational: bool,
    /// Size of the volatile write cache in MiB; 0 means no cache.
    pub cache_size: u64,
    pub badblocks_once: bool,
    pub badblocks_partial_io: bool,
    pub zoned: bool,
    /// Size of a zone in MiB.
    pub zone_size: u64,
    /// Writable part of a zone in MiB; 0 means the whole `zone_size`.
    pub zone_capacity: u64,
    pub zone_nr_conv: u32,
    pub zone_max_open: u32,
    pub zone_max_active: u32,
    /// Largest zone append in sectors; None sets no limit.
    pub zone_append_max_sectors: Option<u64>,
    pub zone_full: bool,
    /// Set if the script changes bad blocks even without either of the two bad-block attributes above. Not an
    /// attribute of the kernel.
    pub bad: bool,
    /// Set if the script uses zone appends, for which the lab puts an `NVMe` target in front of the device.
    /// Not an attribute of the kernel.
    pub append: bool,
}

impl FromStr for Config {
    type Err = Box<dyn std::error::Error>;

    fn from_str(words: &str) -> Result<Self, Self::Err> {
        // The kernel's default attributes.
        let mut config = Self { size: 250 << 10, blocksize: 512, zone_size: 256, ..Self::default() };
        for word in words.split_whitespace() {
            let (key, value) = word.split_once('=').ok_or_else(|| format!("`{word}` has no value"))?;
            let number = || value.parse::<u64>();
            let small = || value.parse::<u32>();
            match key {
                "size" => config.size = number()?,
                "blocksize" => config.blocksize = small()?,
                "max_sectors" => config.max_sectors = small()?,
                "memory_backed" => config.memory_backed = small()? != 0,
                "discard" => config.discard = small()? != 0,
                "rotational" => config.rotational = small()? != 0,
                "cache_size" => config.cache_size = number()?,
                "badblocks_once" => config.badblocks_once = small()? != 0,
                "badblocks_partial_io" => config.badblocks_partial_io = small()? != 0,
                "zoned" => config.zoned = small()? != 0,
                "zone_size" => config.zone_size = number()?,
                "zone_capacity" => config.zone_capacity = number()?,
                "zone_nr_conv" => config.zone_nr_conv = small()?,
                "zone_max_open" => config.zone_max_open = small()?,
                "zone_max_active" => config.zone_max_active = small()?,
                "zone_append_max_sectors" => config.zone_append_max_sectors = Some(number()?),
                "zone_full" => config.zone_full = small()? != 0,
                "bad" => config.bad = small()? != 0,
                "append" => config.append = small()? != 0,
                _ => return Err(format!("`{key}` is no attribute").into()),
            }
        }
        Ok(config)
    }
}

impl Config {
    pub fn badblocks_used(&self) -> bool {
        self.bad || self.badblocks_once || self.badblocks_partial_io
    }
}

/// A repeatable random number generator. Word `i` of written data is computed by the same function, as
/// `mixed(seed + i)`.
pub struct Random(u64);

fn mixed(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d049bb133111eb);
    x ^ (x >> 31)
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(mixed(seed))
    }

    /// Returns a random number in `0..end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e3779b97f4a7c15);
        mixed(self.0) % end
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// Returns the data of a write of `len` bytes: one word of 64 bits for each whole 8 bytes, derived from the
/// seed.
pub fn data(len: u64, seed: u64) -> Vec<u8> {
    (0..len / 8).flat_map(|word| mixed(seed.wrapping_add(word)).to_ne_bytes()).collect()
}

/// Returns a checksum of the data that a read returned.
pub fn sum(data: &[u8]) -> u64 {
    data.as_chunks::<8>().0.iter().fold(data.len() as u64, |sum, word| {
        let sum = (sum ^ u64::from_ne_bytes(*word)).wrapping_mul(0x9e3779b97f4a7c15);
        sum ^ (sum >> 32)
    })
}
