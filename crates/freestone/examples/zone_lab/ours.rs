//! Executes a script on this crate's devices, and formats results like `lab/zone_guest.c`.

use std::sync::Arc;

use freestone::device::zoned::{Zone, ZoneCondition, ZoneOp, ZoneType, Zoned};
use freestone::device::{self, Blocking, Device, Error, Flags};
use freestone::null::{self, BadBlocks, BadBlocksConfig, Memory, Null};
use freestone::power::{self, Power};
use freestone::zone::{self, StateLocation, Zones};

use crate::script::{self, Config, SECTOR_BYTES, UNTOUCHED};

const MIB: u64 = 1 << 20;
/// Largest append, in sectors, if `null_blk` sets no limit: the maximum of the kernel's `int`.
const APPEND_MAX_SECTORS: u64 = i32::MAX as u64;

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The side of the comparison that runs on this crate: the device that the script has set up.
#[derive(Default)]
pub struct Ours {
    stack: Option<Stack>,
}

struct Stack {
    power: Option<Arc<Power>>,
    bad: Arc<BadBlocks>,
    zones: Option<Arc<Zones>>,
    top: Arc<dyn Device>,
}

impl Stack {
    fn new(config: &Config) -> Result<Self> {
        let data_config = null::Config {
            size: config.size * MIB,
            logical_block: config.blocksize,
            rotational: config.rotational,
            read_only: false,
            discard: config.discard && config.memory_backed,
            max_request: config.max_sectors * SECTOR_BYTES as u32,
        };
        let mut device: Arc<dyn Device> = if config.memory_backed {
            Arc::new(Memory::new(data_config)?)
        } else {
            Arc::new(Null::new(data_config)?)
        };
        let mut power = None;
        if config.cache_size != 0 && config.memory_backed {
            let cache = Arc::new(Power::new(
                device,
                power::Config { capacity: config.cache_size * MIB, ..power::Config::default() },
            )?);
            device = Arc::clone(&cache) as Arc<dyn Device>;
            power = Some(cache);
        }
        let rules = BadBlocksConfig { once: config.badblocks_once, partial_io: config.badblocks_partial_io };
        let bad = Arc::new(BadBlocks::new(device, rules));
        let mut top: Arc<dyn Device> = Arc::clone(&bad) as Arc<dyn Device>;
        let mut zones_layer = None;
        if config.zoned {
            let limits = zone::Config {
                zone_size: config.zone_size * MIB,
                zone_capacity: config.zone_capacity * MIB,
                zone_nr_conv: config.zone_nr_conv,
                zone_max_open: config.zone_max_open,
                zone_max_active: config.zone_max_active,
                zone_append_max: config.zone_append_max_sectors.unwrap_or(APPEND_MAX_SECTORS) * SECTOR_BYTES,
                zone_full: config.zone_full,
                stores: config.memory_backed,
            };
            let zones = Arc::new(Zones::new(top, limits, StateLocation::Volatile, Some(Arc::clone(&bad)))?);
            top = Arc::clone(&zones) as Arc<dyn Device>;
            zones_layer = Some(zones);
        }
        Ok(Self { power, bad, zones: zones_layer, top })
    }

    fn attributes(&self) -> Vec<String> {
        let geometry = self.top.geometry();
        let mut lines = vec![
            format!("size {}", geometry.size / SECTOR_BYTES),
            format!("logical_block_size {}", geometry.logical_block),
            format!("rotational {}", u8::from(geometry.rotational)),
            format!("write_cache {}", if geometry.volatile_cache { "write back" } else { "write through" }),
            format!("discard_granularity {}", geometry.discard_granularity),
        ];
        if let Some(zones) = geometry.zones {
            lines.push(format!("nr_zones {}", zones.nr_zones));
            lines.push(format!("chunk_sectors {}", zones.zone_size / SECTOR_BYTES));
            lines.push(format!("max_open_zones {}", zones.max_open));
            lines.push(format!("max_active_zones {}", zones.max_active));
            lines.push(format!("zone_append_max_bytes {}", zones.max_append));
        }
        lines
    }

    fn zones(&self) -> Result<&Zones> {
        Ok(self.zones.as_deref().ok_or("the device has no zones")?)
    }

    fn write(&self, offset: u64, len: u64, seed: u64, fua: bool) -> device::Result<()> {
        let flags = if fua { Flags::FUA } else { Flags::empty() };
        self.top.write_at(offset, &script::data(len, seed), flags)?;
        // The kernel's block devices flush after each durable write, even after a write with FUA.
        if fua { self.top.flush() } else { Ok(()) }
    }

    fn read(&self, offset: u64, len: u64) -> device::Result<String> {
        let mut data = vec![UNTOUCHED; len as usize];
        self.top.read_at(offset, &mut data)?;
        Ok(format!("ok {:016x}", script::sum(&data)))
    }

    fn append(&self, offset: u64, len: u64, seed: u64) -> Result<String> {
        Ok(match self.zones()?.try_append(offset, &script::data(len, seed), Flags::empty()) {
            Ok(Some(at)) => format!("ok {}", at - offset),
            Ok(None) => "would block".into(),
            Err(_) => "failed".into(),
        })
    }

    /// Executes an operation on each zone of a range. Like the kernel, continues after an error and returns
    /// the last error.
    fn zone_ops(&self, op: ZoneOp, offset: u64, len: u64) -> Result<device::Result<()>> {
        let (zones, geometry) = (self.zones()?, self.top.geometry());
        let zone_size = geometry.zones.ok_or("no zones")?.zone_size;
        if op == ZoneOp::Reset && offset == 0 && len == geometry.size {
            return Ok(zones.reset_all());
        }
        let count = len.div_ceil(zone_size).max(1);
        let mut answer = Ok(());
        for zone in 0..count {
            answer = zones.zone_op(op, offset + zone * zone_size).and(answer);
        }
        Ok(answer)
    }

    fn report(&self, offset: u64, count: u64) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        let outcome = self.zones()?.report(offset, &mut |zone| {
            if lines.len() as u64 == count {
                return false;
            }
            lines.push(zone_line(&zone));
            true
        });
        lines.push(status_word(outcome));
        Ok(lines)
    }
}

/// Formats a zone like the kernel's zone report: in sectors, with the kernel's numbers for types and
/// conditions.
fn zone_line(zone: &Zone) -> String {
    let sectors = |bytes: u64| bytes / SECTOR_BYTES;
    let kind = match zone.kind {
        ZoneType::Conventional => 1,
        ZoneType::SequentialRequired => 2,
    };
    let condition = match zone.condition {
        ZoneCondition::NotWritePointer => 0,
        ZoneCondition::Empty => 1,
        ZoneCondition::ImplicitOpen => 2,
        ZoneCondition::ExplicitOpen => 3,
        ZoneCondition::Closed => 4,
        ZoneCondition::ReadOnly => 13,
        ZoneCondition::Full => 14,
        ZoneCondition::Offline => 15,
    };
    let (start, len) = (sectors(zone.start), sectors(zone.len));
    let (written, capacity) = (sectors(zone.write_pointer - zone.start), sectors(zone.capacity));
    format!("zone {start} {len} {written} {capacity} {kind} {condition}")
}

fn status_word(outcome: device::Result<()>) -> String {
    let errno = match outcome {
        Ok(()) => return "ok".into(),
        Err(error) => error.errno(),
    };
    let names = [
        (libc::EIO, "EIO"),
        (libc::EINVAL, "EINVAL"),
        (libc::ENOSPC, "ENOSPC"),
        (libc::EOPNOTSUPP, "EOPNOTSUPP"),
        (libc::ETOOMANYREFS, "ETOOMANYREFS"),
        (libc::EOVERFLOW, "EOVERFLOW"),
    ];
    names
        .iter()
        .find(|(number, _)| *number == errno)
        .map_or_else(|| errno.to_string(), |(_, name)| (*name).into())
}

impl Ours {
    fn stack(&self) -> Result<&Stack> {
        Ok(self.stack.as_ref().ok_or("there is no device")?)
    }

    /// Returns the report of all zones of the device.
    pub fn zones(&self) -> Result<Vec<Zone>> {
        let mut zones = Vec::new();
        self.stack()?.zones()?.report(0, &mut |zone| {
            zones.push(zone);
            true
        })?;
        Ok(zones)
    }

    /// Returns the largest append that the device accepts, in bytes.
    pub fn max_append(&self) -> u64 {
        let zones = self.stack.as_ref().and_then(|stack| stack.top.geometry().zones);
        zones.map_or(0, |zones| u64::from(zones.max_append))
    }

    /// Executes a line of the script. Returns the lines of its result.
    pub fn line(&mut self, line: &str) -> Result<Vec<String>> {
        if let Some(attributes) = line.strip_prefix("device ") {
            self.stack = None;
            return Ok(match Stack::new(&attributes.parse()?) {
                // Setup errors are results of the script. Other errors end the program.
                Err(error) if error.is::<zone::SetupError>() || error.is::<null::SetupError>() => {
                    vec!["EINVAL".into()]
                }
                Err(error) => return Err(error),
                Ok(stack) => {
                    let mut lines = vec!["ok".into()];
                    lines.extend(stack.attributes());
                    self.stack = Some(stack);
                    lines
                }
            });
        }
        if line.starts_with('#') {
            return Ok(Vec::new());
        }
        let stack = self.stack()?;
        if let Some(change) = line.strip_prefix("badblocks ") {
            return Ok(vec![if stack.bad.change(change).is_ok() { "ok" } else { "EINVAL" }.into()]);
        }
        let mut words = line.split_whitespace();
        let verb = words.next().unwrap_or_default();
        let rest: Vec<_> = words.collect();
        let numbers: Vec<u64> = rest.iter().map_while(|word| word.parse().ok()).collect();
        let answer = match (verb, numbers.as_slice()) {
            ("write", &[offset, len, seed]) => {
                status_word(stack.write(offset, len, seed, rest.last() == Some(&"fua")))
            }
            ("read", &[offset, len]) => {
                stack.read(offset, len).unwrap_or_else(|error| status_word(Err(error)))
            }
            ("append", &[offset, len, seed]) => stack.append(offset, len, seed)?,
            ("open", &[offset, len]) => status_word(stack.zone_ops(ZoneOp::Open, offset, len)?),
            ("close", &[offset, len]) => status_word(stack.zone_ops(ZoneOp::Close, offset, len)?),
            ("finish", &[offset, len]) => status_word(stack.zone_ops(ZoneOp::Finish, offset, len)?),
            ("reset", &[offset, len]) => status_word(stack.zone_ops(ZoneOp::Reset, offset, len)?),
            ("zone_readonly", &[offset]) => {
                status_word(stack.zones()?.set_read_only(offset).map_err(configfs_error))
            }
            ("zone_offline", &[offset]) => {
                status_word(stack.zones()?.set_offline(offset).map_err(configfs_error))
            }
            ("flush", []) => status_word(stack.top.flush()),
            ("discard", &[offset, len]) => status_word(stack.top.discard(offset, len)),
            ("zeroes", &[offset, len]) => status_word(stack.top.write_zeroes(offset, len, Flags::empty())),
            ("report", &[offset, count]) => return stack.report(offset, count),
            ("ranges", []) => {
                let mut lines: Vec<_> = stack
                    .bad
                    .ranges()
                    .iter()
                    .map(|(first, last)| format!("range {first} {}", last - first + 1))
                    .collect();
                lines.push("ok".into());
                return Ok(lines);
            }
            // A power cut loses all data that was not flushed.
            ("power", []) => {
                let power = stack.power.as_ref().ok_or("the device has no cache")?;
                status_word(power.reset(&|| Ok(())))
            }
            _ => return Err(format!("`{line}` is not understood").into()),
        };
        Ok(vec![answer])
    }
}

/// Returns `OutOfRange` (`EINVAL`) for any error, because configfs files of the kernel return no other.
fn configfs_error(_: Error) -> Error {
    Error::OutOfRange
}
