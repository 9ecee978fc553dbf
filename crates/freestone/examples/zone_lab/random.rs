//! Scripts: what the kernel and we are told to do. Random operations, but such that zones fill,
//! limits are met, and every condition comes about: ours goes along, and its report shows where the
//! next write belongs.

use freestone::device::zoned::{Zone, ZoneCondition, ZoneType};

use crate::compare::FIRST_WRITE_FAILED;
use crate::ours::{Ours, Result};
use crate::scenes;
use crate::script::{Config, Random, SECTOR_BYTES};

/// One request of the kernel must be one of ours. `null_blk` takes 255 sectors at once; the block
/// layer cuts what is longer.
const MAX_REQUEST_BYTES: u64 = 64 << 10;
/// Operations after which all zones are looked at. The zone of an operation is looked at each time.
const FULL_REPORT_INTERVAL: u64 = 64;

/// Zoned devices, and how many operations each is to do.
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

/// Devices without zones.
const PLAIN: [(&str, u64); 7] = [
    ("size=4 blocksize=512 memory_backed=1 discard=1", 1500),
    ("size=4 blocksize=4096 memory_backed=1", 1000),
    ("size=4 blocksize=1024 memory_backed=1 discard=1 badblocks_once=1", 1500),
    ("size=4 blocksize=4096 memory_backed=1 discard=1 badblocks_partial_io=1", 1500),
    ("size=4 blocksize=2048 memory_backed=0 badblocks_once=1 badblocks_partial_io=1 rotational=1", 1000),
    ("size=8 blocksize=4096 memory_backed=1 cache_size=64 discard=1", 1500),
    ("size=8 blocksize=512 memory_backed=1 cache_size=1 discard=1", 1500),
];

/// The whole script of a seed.
pub fn script(seed: u64) -> Result<Vec<String>> {
    let mut writer = Writer {
        ours: Ours::default(),
        lines: Vec::new(),
        random: Random::new(seed),
        config: Config::default(),
    };
    for attributes in scenes::SETUP {
        writer.say(&format!("device {attributes}"))?;
    }
    for line in scenes::SCENES.lines() {
        writer.say(line)?;
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
    /// Of the device.
    config: Config,
}

impl Writer {
    /// Adds a line, and does it.
    fn say(&mut self, line: &str) -> Result<Vec<String>> {
        self.lines.push(line.to_owned());
        self.ours.line(line).map_err(|error| format!("{line}: {error}").into())
    }

    /// Adds a write or an append that begins in this zone. If it is the zone's first one and fails,
    /// `null_blk`'s zone may be open nevertheless, which ours is not: it is closed, so that they
    /// are alike again.
    fn say_write(&mut self, zone: &Zone, line: &str) -> Result<Vec<String>> {
        let answer = self.say(line)?;
        let failed = matches!(answer[0].as_str(), "EIO" | "failed");
        if failed && zone.condition == ZoneCondition::Empty && self.config.badblocks_used() {
            self.say(&format!("# {FIRST_WRITE_FAILED}"))?;
            self.say(&format!("close {} {}", zone.start, zone.len))?;
        }
        Ok(answer)
    }

    fn device(&mut self, attributes: &str) -> Result<()> {
        self.say(&format!("device {attributes}"))?;
        self.config = attributes.parse()?;
        Ok(())
    }

    fn block(&self) -> u64 {
        u64::from(self.config.blocksize)
    }

    /// Bytes of a request, mostly few.
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
        self.say("report 0 256")?;
        for number in 1..=count {
            // Some zones come oftener than others, so that some fill and some are seldom touched.
            let (one, other) = (self.random.below(zones.len() as u64), self.random.below(zones.len() as u64));
            let at = zones[one.min(other) as usize].start;
            self.zone_step(at)?;
            self.say(&format!("report {at} 1"))?;
            if number % FULL_REPORT_INTERVAL == 0 || number == count {
                self.say("report 0 256")?;
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
            // To the end of what can be written.
            400..430 => self.fill_up(at)?,
            // Elsewhere than at the write pointer.
            430..470 => {
                let (len, seed) = (self.request_len().min(start + len - within), self.seed());
                self.say_write(&zone, &format!("write {within} {len} {seed}"))?;
            }
            470..620 => self.read_around(&zone)?,
            620..710 => drop(self.say(&format!("open {start} {len}"))?),
            710..780 => drop(self.say(&format!("close {start} {len}"))?),
            780..820 => drop(self.say(&format!("finish {start} {len}"))?),
            820..890 => drop(self.say(&format!("reset {start} {len}"))?),
            890..905 if !self.has_side_effects(&zone)? => {
                let what = if self.random.chance(50) { "zone_readonly" } else { "zone_offline" };
                self.say(&format!("{what} {within}"))?;
                self.tell_empty(at)?;
                self.say(&format!("report {start} 1"))?;
                self.read_around(&zone)?;
                // Most of them come back.
                if self.random.chance(70) && !self.has_side_effects(&self.zone(at)?)? {
                    self.say(&format!("{what} {start}"))?;
                    self.tell_empty(at)?;
                }
            }
            905..950 if bad => self.bad_blocks(&zone)?,
            950..955 if bad => drop(self.say("ranges")?),
            920..930 => self.several(&zone)?,
            955..958 => drop(self.say(&format!("reset 0 {end}"))?),
            958..965 => drop(self.say("flush")?),
            965..968 => drop(self.say(&format!("discard {start} {block}"))?),
            968..976 => self.wrong(&zone, end)?,
            _ => self.write_on(&zone)?,
        }
        Ok(())
    }

    /// Whether `null_blk` would close another zone, or forget to give back a resource, when this
    /// one becomes read-only or offline: it finishes it first, and that needs what opening needs.
    /// There are scenes of both.
    fn has_side_effects(&self, zone: &Zone) -> Result<bool> {
        use ZoneCondition::{Closed, Empty, ExplicitOpen, ImplicitOpen};
        let zones = self.ours.zones()?;
        let open = zones.iter().filter(|zone| matches!(zone.condition, ImplicitOpen | ExplicitOpen)).count();
        let most = self.config.zone_max_open as usize;
        Ok(matches!(zone.condition, Empty | Closed) && most != 0 && open >= most)
    }

    /// The kernel's block layer knows write pointers, too, and refuses writes elsewhere. It does
    /// not see it when a zone becomes empty by an attribute, or by a reset of several of which one
    /// fails: a reset of its own tells it, and is nothing to an empty zone.
    fn tell_empty(&mut self, at: u64) -> Result<()> {
        let zone = self.zone(at)?;
        if zone.condition == ZoneCondition::Empty {
            self.say(&format!("reset {at} {}", zone.len))?;
        }
        Ok(())
    }

    /// At the write pointer; sometimes more than what is left.
    fn write_on(&mut self, zone: &Zone) -> Result<()> {
        let (wanted, seed, block) = (self.request_len(), self.seed(), self.block());
        let end = zone.start + zone.len;
        let offset = match (zone.kind, zone.condition) {
            (ZoneType::Conventional, _) => zone.start + self.random.below(zone.len / block) * block,
            _ => zone.write_pointer.min(end - block),
        };
        // Beyond the capacity is refused, beyond the zone is another matter.
        let left = (zone.start + zone.capacity).saturating_sub(offset);
        let most = if left != 0 && self.random.chance(80) { left } else { end - offset };
        let fua = if self.random.chance(5) { " fua" } else { "" };
        self.say_write(zone, &format!("write {offset} {} {seed}{fua}", wanted.min(most)))?;
        Ok(())
    }

    fn append(&mut self, zone: &Zone) -> Result<()> {
        // NVMe refuses by itself what is longer than the device's limit.
        let (len, seed) = (self.request_len().min(self.ours.max_append()), self.seed());
        self.say_write(zone, &format!("append {} {len} {seed}", zone.start))?;
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
            if self.say_write(&zone, &line)?[0] != "ok" {
                return Ok(());
            }
        }
    }

    /// Before, over and behind the write pointer, and into the next zone.
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
        // The kernel's block layer cuts reads at zones and does all parts, also when one fails;
        // that uses bad blocks up.
        let end = if self.config.badblocks_once { (offset / zone_size + 1) * zone_size } else { end };
        self.say(&format!("read {offset} {}", len.min(end - offset)))?;
        Ok(())
    }

    /// From this zone to another, or to that from this.
    fn several(&mut self, zone: &Zone) -> Result<()> {
        let zones = self.ours.zones()?;
        let other = zones[self.random.below(zones.len() as u64) as usize];
        let (low, high) = (zone.start.min(other.start), (zone.start + zone.len).max(other.start + other.len));
        let what = ["open", "close", "finish", "reset", "reset"][self.random.below(5) as usize];
        let answer = self.say(&format!("{what} {low} {}", high - low))?;
        if what == "reset" && answer[0] != "ok" {
            for zone in zones.iter().filter(|zone| (low..high).contains(&zone.start)) {
                self.tell_empty(zone.start)?;
            }
        }
        self.say("report 0 256")?;
        Ok(())
    }

    /// What lies beyond the device, or is askew.
    fn wrong(&mut self, zone: &Zone, end: u64) -> Result<()> {
        let (block, seed, len) = (self.block(), self.seed(), zone.len);
        let askew = zone.write_pointer.min(end - block) + SECTOR_BYTES;
        let line = match self.random.below(8) {
            0 => format!("write {end} {block} {seed}"),
            1 => format!("read {end} {block}"),
            2 => format!("read {} {}", end - block, 2 * block),
            3 => format!("report {end} 1"),
            4 => format!("open {end} {len}"),
            5 => format!("reset {} {len}", zone.start + 8 * SECTOR_BYTES),
            6 if block > SECTOR_BYTES => format!("write {askew} {block} {seed}"),
            _ => format!("write {} {} {seed}", zone.start, block + SECTOR_BYTES / 2),
        };
        self.say(&line)?;
        Ok(())
    }

    /// Near the write pointer, so that they are met.
    fn bad_blocks(&mut self, zone: &Zone) -> Result<()> {
        let near = zone.write_pointer.min(zone.start + zone.len - SECTOR_BYTES) / SECTOR_BYTES;
        let sectors = (self.config.size << 20) / SECTOR_BYTES;
        let first = (near + self.random.below(64)).min(sectors - 1);
        let last =
            if self.random.chance(50) { first } else { (first + self.random.below(24)).min(sectors - 1) };
        let sign = if self.random.chance(65) { '+' } else { '-' };
        self.say(&format!("badblocks {sign}{first}-{last}"))?;
        Ok(())
    }

    fn plain(&mut self, attributes: &str, count: u64) -> Result<()> {
        self.device(attributes)?;
        let (block, end) = (self.block(), self.config.size << 20);
        let bad = self.config.badblocks_used();
        // The kernel refuses a discard that is not offered before anything looks at bad blocks.
        let discards = self.config.discard || !bad;
        for _ in 0..count {
            // A small part of it is used again and again.
            let offset = self.random.below((1 << 20) / block) * block;
            let (len, seed) = (self.request_len(), self.seed());
            let sector = offset / SECTOR_BYTES;
            match self.random.below(100) {
                0..35 => {
                    let fua = if self.random.chance(10) { " fua" } else { "" };
                    self.say(&format!("write {offset} {len} {seed}{fua}"))?;
                }
                35..42 if discards => {
                    self.say(&format!("discard {offset} {len}"))?;
                    if self.config.cache_size != 0 {
                        self.say("flush")?;
                    }
                }
                42..46 => drop(self.say(&format!("zeroes {offset} {len}"))?),
                46..48 => drop(self.say("flush")?),
                48..53 if bad => {
                    let (sign, last) =
                        (if self.random.chance(65) { '+' } else { '-' }, sector + self.random.below(16));
                    self.say(&format!("badblocks {sign}{sector}-{last}"))?;
                }
                53..55 if bad => drop(self.say("ranges")?),
                55 => drop(self.say(&format!("write {end} {block} {seed}"))?),
                56 => drop(self.say(&format!("read {} {}", end - block, 2 * block))?),
                57 if self.config.discard && block > SECTOR_BYTES => {
                    self.say(&format!("discard {} {block}", offset + SECTOR_BYTES))?;
                }
                58 if block > SECTOR_BYTES => {
                    self.say(&format!("write {offset} {} {seed}", block + SECTOR_BYTES))?;
                }
                59..62 if self.config.cache_size != 0 => {
                    self.say("flush")?;
                    self.say("power")?;
                }
                _ => drop(self.say(&format!("read {offset} {len}"))?),
            }
        }
        Ok(())
    }
}
