//! Generates scripts of random operations that fill zones, reach limits and produce every zone condition. The
//! generator also executes each line on this crate's devices, and reads the next write offset from their zone
//! report.

use freestone::device::zoned::{Zone, ZoneCondition, ZoneType};

use crate::compare::FIRST_WRITE_FAILED;
use crate::ours::{Ours, Result};
use crate::scenes;
use crate::script::{Config, Random, SECTOR_BYTES};

/// Largest request in bytes. The kernel splits requests above 255 sectors, and then both sides would get
/// different requests.
const MAX_REQUEST_BYTES: u64 = 64 << 10;
/// Number of operations between two reports of all zones. After each operation only the zone of that
/// operation is reported.
const FULL_REPORT_INTERVAL: u64 = 64;

/// Attributes of zoned devices, with the number of random operations on each device.
const ZONED: [(&str, u64); 16] = [
    ("size=24 blocksize=4096 memory_backed=1 zone_size=2", 2000),
    ("size=24 blocksize=512 memory_backed=1 zone_size=2 zone_capacity=1 zone_nr_conv=2", 2000),
    ("size=12 blocksize=512 memory_backed=1 zone_size=1 zone_nr_conv=1 zone_max_open=3", 2500),
    ("size=12 blocksize=4096 memory_backed=1 zone_size=1 zone_max_active=4", 2500),
    (
        "size=16 blocksize=4096 memory_backed=1 zone_size=1 zone_nr_conv=3 zone_max_open=3 zone_max_active=5",
        3000,
    ),
    ("size=16 blocksize=512 memory_backed=0 zone_size=1 zone_max_open=4 zone_max_active=4", 2500),
    ("size=8 blocksize=512 memory_backed=0 zone_size=1 zone_max_open=1 zone_max_active=3", 1500),
    ("size=8 blocksize=4096 memory_backed=0 zone_size=1 zone_max_open=1", 1500),
    ("size=15 blocksize=1024 memory_backed=1 zone_size=2 zone_max_open=2 zone_max_active=3", 2000),
    ("size=9 blocksize=4096 memory_backed=0 zone_size=4 zone_full=1", 1000),
    ("size=16 blocksize=4096 memory_backed=1 zone_size=2 zone_capacity=1 zone_full=1 zone_max_open=2", 1500),
    ("size=12 blocksize=512 memory_backed=1 zone_size=1 zone_nr_conv=2 bad=1", 2000),
    (
        "size=12 blocksize=4096 memory_backed=1 zone_size=1 zone_max_open=3 zone_max_active=4 badblocks_partial_io=1",
        2000,
    ),
    (
        "size=12 blocksize=512 memory_backed=0 zone_size=1 zone_max_open=3 badblocks_once=1 badblocks_partial_io=1",
        2000,
    ),
    (
        "size=12 blocksize=4096 memory_backed=1 zone_size=2 zone_capacity=1 zone_max_open=3 zone_max_active=4 append=1",
        2500,
    ),
    ("size=16 blocksize=512 memory_backed=1 zone_size=2 zone_append_max_sectors=64 append=1", 1500),
];

/// Attributes of devices without zones, with the number of random operations on each device.
const PLAIN: [(&str, u64); 7] = [
    ("size=4 blocksize=512 memory_backed=1 discard=1", 1500),
    ("size=4 blocksize=4096 memory_backed=1", 1000),
    ("size=4 blocksize=1024 memory_backed=1 discard=1 badblocks_once=1", 1500),
    ("size=4 blocksize=4096 memory_backed=1 discard=1 badblocks_partial_io=1", 1500),
    ("size=4 blocksize=2048 memory_backed=0 badblocks_once=1 badblocks_partial_io=1 rotational=1", 1000),
    ("size=8 blocksize=4096 memory_backed=1 cache_size=64 discard=1", 1500),
    ("size=8 blocksize=512 memory_backed=1 cache_size=1 discard=1", 1500),
];

/// Returns the script of random operations for a seed, as lines.
pub fn script(seed: u64) -> Result<Vec<String>> {
    let mut writer = Writer {
        ours: Ours::default(),
        lines: Vec::new(),
        random: Random::new(seed),
        config: Config::default(),
    };
    for attributes in scenes::SETUP {
        writer.run_line(&format!("device {attributes}"))?;
    }
    for line in scenes::SCENES.lines() {
        writer.run_line(line)?;
    }
    for (attributes, count) in ZONED {
        writer.zoned(&format!("zoned=1 {attributes}"), count)?;
    }
    for (attributes, count) in PLAIN {
        writer.plain(attributes, count)?;
    }
    Ok(writer.lines)
}

struct Writer {
    ours: Ours,
    lines: Vec<String>,
    random: Random,
    /// Attributes of the device that the script is using.
    config: Config,
}

impl Writer {
    /// Adds a line to the script and executes the line on this crate's devices. Returns the result lines.
    fn run_line(&mut self, line: &str) -> Result<Vec<String>> {
        self.lines.push(line.to_owned());
        self.ours.line(line).map_err(|error| format!("{line}: {error}").into())
    }

    /// Adds a write or an append to a zone. If that fails at a bad block of an empty zone, `null_blk` may
    /// leave the zone open, but this crate leaves it empty. The script then closes the zone, which makes both
    /// sides equal again.
    fn run_write(&mut self, zone: &Zone, line: &str) -> Result<Vec<String>> {
        let answer = self.run_line(line)?;
        let failed = matches!(answer[0].as_str(), "EIO" | "failed");
        if failed && zone.condition == ZoneCondition::Empty && self.config.badblocks_used() {
            self.run_line(&format!("# {FIRST_WRITE_FAILED}"))?;
            self.run_line(&format!("close {} {}", zone.start, zone.len))?;
        }
        Ok(answer)
    }

    fn device(&mut self, attributes: &str) -> Result<()> {
        self.run_line(&format!("device {attributes}"))?;
        self.config = attributes.parse()?;
        Ok(())
    }

    fn block(&self) -> u64 {
        u64::from(self.config.blocksize)
    }

    /// Returns a random request length in bytes: at most 8 KiB in 70 % of the cases, else at most
    /// `MAX_REQUEST_BYTES`.
    fn request_len(&mut self) -> u64 {
        let most = if self.random.chance(70) { 8 << 10 } else { MAX_REQUEST_BYTES };
        (1 + self.random.below(most / self.block())) * self.block()
    }

    fn seed(&mut self) -> u64 {
        self.random.below(1 << 32)
    }

    fn zone(&self, at: u64) -> Result<Zone> {
        let zone = self.ours.zones()?.into_iter().find(|zone| zone.start == at);
        Ok(zone.ok_or("a zone is gone")?)
    }

    fn zoned(&mut self, attributes: &str, count: u64) -> Result<()> {
        self.device(attributes)?;
        let zones = self.ours.zones()?;
        self.run_line("report 0 256")?;
        for number in 1..=count {
            // The smaller of two random numbers prefers low zones, so that some zones fill up and others are
            // rarely used.
            let (one, other) = (self.random.below(zones.len() as u64), self.random.below(zones.len() as u64));
            let at = zones[one.min(other) as usize].start;
            self.zone_step(at)?;
            self.run_line(&format!("report {at} 1"))?;
            if number % FULL_REPORT_INTERVAL == 0 || number == count {
                self.run_line("report 0 256")?;
            }
        }
        Ok(())
    }

    fn zone_step(&mut self, at: u64) -> Result<()> {
        let zone = self.zone(at)?;
        let (start, len, block) = (zone.start, zone.len, self.block());
        let (within, end) = (start + self.random.below(len / block) * block, self.config.size << 20);
        let bad = self.config.badblocks_used();
        match self.random.below(1000) {
            350..400 | 905..920 if self.config.append => self.append(&zone)?,
            // Fills the zone up to its capacity.
            400..430 => self.fill_up(at)?,
            // Writes at an offset that is usually not the write pointer.
            430..470 => {
                let (len, seed) = (self.request_len().min(start + len - within), self.seed());
                self.run_write(&zone, &format!("write {within} {len} {seed}"))?;
            }
            470..620 => self.read_around(&zone)?,
            620..710 => drop(self.run_line(&format!("open {start} {len}"))?),
            710..780 => drop(self.run_line(&format!("close {start} {len}"))?),
            780..820 => drop(self.run_line(&format!("finish {start} {len}"))?),
            820..890 => drop(self.run_line(&format!("reset {start} {len}"))?),
            890..905 if !self.has_side_effects(&zone)? => {
                let verb = if self.random.chance(50) { "zone_readonly" } else { "zone_offline" };
                self.run_line(&format!("{verb} {within}"))?;
                self.reset_if_empty(at)?;
                self.run_line(&format!("report {start} 1"))?;
                self.read_around(&zone)?;
                // Most read-only or offline zones are made writable again, so that enough zones stay usable.
                if self.random.chance(70) && !self.has_side_effects(&self.zone(at)?)? {
                    self.run_line(&format!("{verb} {start}"))?;
                    self.reset_if_empty(at)?;
                }
            }
            905..950 if bad => self.bad_blocks(&zone)?,
            950..955 if bad => drop(self.run_line("ranges")?),
            920..930 => self.run_on_zones(&zone)?,
            955..958 => drop(self.run_line(&format!("reset 0 {end}"))?),
            958..965 => drop(self.run_line("flush")?),
            965..968 => drop(self.run_line(&format!("discard {start} {block}"))?),
            968..976 => self.run_invalid(&zone, end)?,
            _ => self.write_at_pointer(&zone)?,
        }
        Ok(())
    }

    /// Returns true if making the zone read-only or offline has a side effect in `null_blk`, which finishes
    /// the zone first. Finishing can close another zone or leak an open-zone resource. Fixed scenes
    /// (`scenes.rs`) cover both effects.
    fn has_side_effects(&self, zone: &Zone) -> Result<bool> {
        use ZoneCondition::{Closed, Empty, ExplicitOpen, ImplicitOpen};
        let zones = self.ours.zones()?;
        let open = zones.iter().filter(|zone| matches!(zone.condition, ImplicitOpen | ExplicitOpen)).count();
        let most = self.config.zone_max_open as usize;
        Ok(matches!(zone.condition, Empty | Closed) && most != 0 && open >= most)
    }

    /// Resets a zone if it is empty. The kernel's block layer keeps its own copy of write pointers. An
    /// attribute, or a reset of several zones that fails for one, can empty a zone unnoticed by that copy. A
    /// reset updates the copy and does not change an empty zone.
    fn reset_if_empty(&mut self, at: u64) -> Result<()> {
        let zone = self.zone(at)?;
        if zone.condition == ZoneCondition::Empty {
            self.run_line(&format!("reset {at} {}", zone.len))?;
        }
        Ok(())
    }

    /// Writes at the write pointer, sometimes beyond the zone's capacity.
    fn write_at_pointer(&mut self, zone: &Zone) -> Result<()> {
        let (wanted, seed, block) = (self.request_len(), self.seed(), self.block());
        let end = zone.start + zone.len;
        let offset = match (zone.kind, zone.condition) {
            (ZoneType::Conventional, _) => zone.start + self.random.below(zone.len / block) * block,
            _ => zone.write_pointer.min(end - block),
        };
        // Both sides refuse a write beyond the zone's capacity. A fixed scene covers writes into the next
        // zone.
        let left = (zone.start + zone.capacity).saturating_sub(offset);
        let most = if left != 0 && self.random.chance(80) { left } else { end - offset };
        let fua = if self.random.chance(5) { " fua" } else { "" };
        self.run_write(zone, &format!("write {offset} {} {seed}{fua}", wanted.min(most)))?;
        Ok(())
    }

    fn append(&mut self, zone: &Zone) -> Result<()> {
        // The NVMe target refuses appends above the device's limit before `null_blk` sees them, so the script
        // has none.
        let (len, seed) = (self.request_len().min(self.ours.max_append()), self.seed());
        self.run_write(zone, &format!("append {} {len} {seed}", zone.start))?;
        Ok(())
    }

    fn fill_up(&mut self, at: u64) -> Result<()> {
        loop {
            let zone = self.zone(at)?;
            let left = (zone.start + zone.capacity).saturating_sub(zone.write_pointer);
            if zone.kind == ZoneType::Conventional || left == 0 {
                return Ok(());
            }
            let seed = self.seed();
            let line = format!("write {} {} {seed}", zone.write_pointer, left.min(MAX_REQUEST_BYTES));
            if self.run_write(&zone, &line)?[0] != "ok" {
                return Ok(());
            }
        }
    }

    /// Reads before, across and after the write pointer, and into the next zone.
    fn read_around(&mut self, zone: &Zone) -> Result<()> {
        let (len, block) = (self.request_len(), self.block());
        let (end, zone_size) = (self.config.size << 20, self.config.zone_size << 20);
        let offset = if self.random.chance(50) {
            let before = self.random.below(len / block + 2) * block;
            zone.write_pointer.saturating_sub(before).max(zone.start)
        } else {
            zone.start + self.random.below(zone.len / block) * block
        };
        let offset = offset.min(end - block);
        // The kernel's block layer splits a read at zone boundaries and executes all parts, even if one
        // fails. With badblocks_once, each failed part clears a bad block, so the read must stay in one zone.
        let end = if self.config.badblocks_once { (offset / zone_size + 1) * zone_size } else { end };
        self.run_line(&format!("read {offset} {}", len.min(end - offset)))?;
        Ok(())
    }

    /// Executes a zone operation on all zones from this one to another random one, in either direction.
    fn run_on_zones(&mut self, zone: &Zone) -> Result<()> {
        let zones = self.ours.zones()?;
        let other = zones[self.random.below(zones.len() as u64) as usize];
        let (low, high) = (zone.start.min(other.start), (zone.start + zone.len).max(other.start + other.len));
        let verb = ["open", "close", "finish", "reset", "reset"][self.random.below(5) as usize];
        let answer = self.run_line(&format!("{verb} {low} {}", high - low))?;
        if verb == "reset" && answer[0] != "ok" {
            for zone in zones.iter().filter(|zone| (low..high).contains(&zone.start)) {
                self.reset_if_empty(zone.start)?;
            }
        }
        self.run_line("report 0 256")?;
        Ok(())
    }

    /// Executes a request that is misaligned or beyond the end of the device.
    fn run_invalid(&mut self, zone: &Zone, end: u64) -> Result<()> {
        let (block, seed, len) = (self.block(), self.seed(), zone.len);
        let misaligned = zone.write_pointer.min(end - block) + SECTOR_BYTES;
        let line = match self.random.below(8) {
            0 => format!("write {end} {block} {seed}"),
            1 => format!("read {end} {block}"),
            2 => format!("read {} {}", end - block, 2 * block),
            3 => format!("report {end} 1"),
            4 => format!("open {end} {len}"),
            5 => format!("reset {} {len}", zone.start + 8 * SECTOR_BYTES),
            6 if block > SECTOR_BYTES => format!("write {misaligned} {block} {seed}"),
            _ => format!("write {} {} {seed}", zone.start, block + SECTOR_BYTES / 2),
        };
        self.run_line(&line)?;
        Ok(())
    }

    /// Adds or clears bad blocks near the write pointer, where requests reach them.
    fn bad_blocks(&mut self, zone: &Zone) -> Result<()> {
        let near = zone.write_pointer.min(zone.start + zone.len - SECTOR_BYTES) / SECTOR_BYTES;
        let sectors = (self.config.size << 20) / SECTOR_BYTES;
        let first = (near + self.random.below(64)).min(sectors - 1);
        let last =
            if self.random.chance(50) { first } else { (first + self.random.below(24)).min(sectors - 1) };
        let sign = if self.random.chance(65) { '+' } else { '-' };
        self.run_line(&format!("badblocks {sign}{first}-{last}"))?;
        Ok(())
    }

    fn plain(&mut self, attributes: &str, count: u64) -> Result<()> {
        self.device(attributes)?;
        let (block, end) = (self.block(), self.config.size << 20);
        let bad = self.config.badblocks_used();
        // The kernel refuses an unsupported discard before it checks bad blocks, so such a discard would
        // differ.
        let discards = self.config.discard || !bad;
        for _ in 0..count {
            // Requests stay within the first MiB, so that they overlap each other.
            let offset = self.random.below((1 << 20) / block) * block;
            let (len, seed) = (self.request_len(), self.seed());
            let sector = offset / SECTOR_BYTES;
            match self.random.below(100) {
                0..35 => {
                    let fua = if self.random.chance(10) { " fua" } else { "" };
                    self.run_line(&format!("write {offset} {len} {seed}{fua}"))?;
                }
                35..42 if discards => {
                    self.run_line(&format!("discard {offset} {len}"))?;
                    if self.config.cache_size != 0 {
                        self.run_line("flush")?;
                    }
                }
                42..46 => drop(self.run_line(&format!("zeroes {offset} {len}"))?),
                46..48 => drop(self.run_line("flush")?),
                48..53 if bad => {
                    let (sign, last) =
                        (if self.random.chance(65) { '+' } else { '-' }, sector + self.random.below(16));
                    self.run_line(&format!("badblocks {sign}{sector}-{last}"))?;
                }
                53..55 if bad => drop(self.run_line("ranges")?),
                55 => drop(self.run_line(&format!("write {end} {block} {seed}"))?),
                56 => drop(self.run_line(&format!("read {} {}", end - block, 2 * block))?),
                57 if self.config.discard && block > SECTOR_BYTES => {
                    self.run_line(&format!("discard {} {block}", offset + SECTOR_BYTES))?;
                }
                58 if block > SECTOR_BYTES => {
                    self.run_line(&format!("write {offset} {} {seed}", block + SECTOR_BYTES))?;
                }
                59..62 if self.config.cache_size != 0 => {
                    self.run_line("flush")?;
                    self.run_line("power")?;
                }
                _ => drop(self.run_line(&format!("read {offset} {len}"))?),
            }
        }
        Ok(())
    }
}
