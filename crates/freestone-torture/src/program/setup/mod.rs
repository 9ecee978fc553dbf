//! Draws the arguments of the server, and creates the devices and files of a round with their content.
//!
//! Owns the files of a run: the image store ([`images`]) and the far server ([`far`]) too. The rounds and mode `lives`
//! call it before a server starts; verbs use its rules for device arguments.

pub mod far;
pub mod images;

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, PoisonError};

use freestone_testkit::Rng;

use super::server;
use super::transport::Address;
use super::world::{Disk, Kind, PossibleImage, TAGS, World};
use crate::oracle::{Durability, Fill, Kind as Writing, Oracle, Outcome, SECTOR_BYTES, fill};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const SECTOR: u64 = SECTOR_BYTES as u64;
/// Size of the backing device of a RAM disk: enough for all pages of its family (a base and its forks, which share
/// memory).
pub const BACKING: &str = "1G";
/// Name of the read-only file that is the base of forks.
const BASE: &str = "g.img";
/// Prefix of the names of far-server exports that serve as backing devices.
const FAR_PREFIX: &str = "far-";
/// Size of a COW device that has room for copies of all chunks and for the metadata.
pub const ROOMY_COW: &str = "48M";

/// Draws the devices of a round, creates their files, and adds the devices to the world. Returns the arguments for the
/// devices of the far server.
pub fn make(world: &World, dir: &Path, rng: &mut Rng) -> io::Result<Vec<String>> {
    world.set_disks(Vec::new());
    world.forget_machines();
    let mut far = Vec::new();
    for n in 0..=rng.below(3) {
        ram(world, dir, n, &mut far, rng);
    }
    for n in 0..=rng.below(2) {
        let origin = file(world, dir, n, &mut far, rng);
        // The snapshot flushes its origin, which must not fail while the server starts.
        if !origin.has_volatile_cache && !origin.faults && rng.chance(70) {
            snapshot(world, dir, n, &origin, rng);
        }
    }
    if rng.chance(85) {
        let base = base(world, dir, &mut far, rng)?;
        for n in 0..=rng.below(2) {
            fork(world, dir, n, &base, rng);
        }
        if rng.chance(60) {
            let device_args = "t=template,base=g".to_owned();
            let parent = Some(Arc::clone(&base));
            let oracle = base.oracle().snapshot("t", Durability::Completed);
            add(
                world,
                dir,
                Disk { parent, ..Disk::new("t", Kind::Template, oracle, Vec::new()) },
                device_args,
            );
        }
    }
    if rng.chance(70) {
        null(world, dir, rng);
    }
    image(world, dir, rng)?;
    Ok(far)
}

fn add(world: &World, dir: &Path, mut disk: Disk, device_args: String) -> Arc<Disk> {
    let limit = device_args.lines().last().and_then(limit_of);
    let size = disk.parent.is_none().then(|| disk.oracle().size() * SECTOR);
    disk.update_known(|known| (known.limit, known.size) = (limit, size));
    disk.device_args = Some(device_args);
    disk.from_start = true;
    disk.publish(Address::Nbd(dir.join(server::NBD)));
    world.add(disk)
}

/// Returns the memory limit in these device arguments, in bytes. `None` if they contain none.
pub fn limit_of(device_args: &str) -> Option<u64> {
    let limit = device_args.split(',').find_map(|pair| pair.strip_prefix("mem_limit="))?;
    let (number, unit) = limit.split_at_checked(limit.len().checked_sub(1)?)?;
    let unit = match unit {
        "K" => KIB,
        "M" => MIB,
        "G" => KIB * MIB,
        _ => return limit.parse().ok(),
    };
    Some(number.parse::<u64>().ok()? * unit)
}

/// Draws what the server does with a device that lost its content: the argument, and true if the device is served
/// empty.
fn on_data_loss(world: &World, rng: &mut Rng) -> (&'static str, bool) {
    if world.has_state && rng.chance(50) { (",on_data_loss=empty", true) } else { ("", false) }
}

/// Draws whether the content is saved at an orderly end: the argument, and true if so.
fn keep(world: &World, cut: bool, rng: &mut Rng) -> (&'static str, bool) {
    if world.has_state && !cut && rng.chance(40) { (",keep=yes", true) } else { ("", false) }
}

fn blank(name: &str, kind: Kind, bytes: u64, cut: bool) -> Disk {
    let durability = if cut { Durability::Flushed } else { Durability::Completed };
    Disk {
        has_volatile_cache: cut,
        ..Disk::new(name, kind, Oracle::new(name, bytes / SECTOR, durability), Vec::new())
    }
}

fn packing(rng: &mut Rng) -> String {
    let algorithm = ["lz4", "lz4hc", "lzo", "zstd", "store"][rng.below(5) as usize];
    let mut device_args = format!(",comp_algorithm={algorithm}");
    if rng.chance(40) {
        device_args += ",recomp_algorithm=algo=zstd priority=1";
    }
    if rng.chance(30) {
        device_args += ",auto_recompress=1,auto_group=1,auto_dedup=1";
    }
    device_args
}

/// Share of families that spill, in percent.
const SPILL_PERCENT: u8 = 60;

/// Draws the device arguments for a memory limit and a backing file.
pub fn spilling(name: &str, rng: &mut Rng) -> String {
    spilling_to(&format!("./{name}.spill,backing_size={BACKING}"), rng)
}

fn spilling_to(backing: &str, rng: &mut Rng) -> String {
    let limit = 64 << rng.below(5);
    let packed = ["yes", "no"][rng.below(2) as usize];
    let mut device_args = format!(",mem_limit={limit}K,backing_dev={backing},compressed_writeback={packed}");
    if rng.chance(50) {
        let _ = write!(device_args, ",writeback_batch_size={}", 1 + rng.below(64));
    }
    device_args
}

/// Draws the device arguments for a memory limit and a backing device: a file or an export of the far server. Returns
/// the arguments for that export, which come first, and the arguments of the RAM disk.
fn spilling_anywhere(dir: &Path, name: &str, far: &mut Vec<String>, rng: &mut Rng) -> (String, String) {
    if !rng.chance(35) {
        return (String::new(), spilling(name, rng));
    }
    let backing = format!("{FAR_PREFIX}{name}");
    far.push(format!("{backing}=file,path=./{backing}.img,size={BACKING}"));
    let own = format!("{backing}=nbd,uri={},publish=no\n", far::uri(dir, &backing));
    (own, spilling_to(&format!("device:{backing}"), rng))
}

/// Draws fault rules, none of which changes data.
pub fn faults(rng: &mut Rng) -> String {
    let rules = [
        "write error=EIO chance=1%",
        "read error=EIO chance=1%; write delay=3ms chance=5%",
        "all delay=2ms chance=10%",
        "flush error=EIO chance=10%; zeroes error=EIO chance=5%",
        "discard error=EIO nth=2; read delay=10ms chance=2%",
    ];
    rules[rng.below(rules.len() as u64) as usize].to_owned()
}

/// Draws the layers over a device: the arguments, true if the power can be cut, and true if requests may fail.
fn layers(rng: &mut Rng) -> (String, bool, bool) {
    match rng.below(10) {
        0..2 => (",power_cut=yes".into(), true, false),
        2 => (format!(",faults={},seed={}", faults(rng), rng.below(1000)), false, true),
        3 => (format!(",power_cut=yes,faults={}", faults(rng)), true, true),
        _ => (String::new(), false, false),
    }
}

fn ram(world: &World, dir: &Path, n: u64, far: &mut Vec<String>, rng: &mut Rng) {
    let name = format!("r{n}");
    let bytes = MIB * (1 + rng.below(8)) + 4 * KIB * rng.below(100);
    let (over, cut, fails) = layers(rng);
    let mut own = String::new();
    let (limit, tight, spills) = match rng.below(4) {
        _ if rng.chance(SPILL_PERCENT) => {
            let (backing, keys) = spilling_anywhere(dir, &name, far, rng);
            own = backing;
            (keys, false, true)
        }
        0..2 => (format!(",mem_limit={}K", 128 << rng.below(4)), true, false),
        _ => (String::new(), false, false),
    };
    let (lost, serves_lost) = on_data_loss(world, rng);
    let (keep, keeps) = keep(world, cut, rng);
    let device_args =
        format!("{own}{name}=ram,disksize={}K{}{limit}{over}{lost}{keep}", bytes / KIB, packing(rng));
    let disk = Disk { faults: fails, spills, serves_lost, keeps, ..blank(&name, Kind::Ram, bytes, cut) };
    disk.set_tight(tight);
    disk.set_may_fail(fails);
    add(world, dir, disk, device_args);
}

fn file(world: &World, dir: &Path, n: u64, far: &mut Vec<String>, rng: &mut Rng) -> Arc<Disk> {
    let name = format!("f{n}");
    let bytes = MIB * (1 + rng.below(6));
    let (over, cut, fails) = layers(rng);
    let direct = ["auto", "off", "on"][rng.below(3) as usize];
    let is_far = rng.chance(35);
    let at = format!("file,path=./{name}.img,size={}K,direct={direct}", bytes / KIB);
    let device_args = if is_far {
        far.push(format!("{name}={at}"));
        format!("{name}=nbd,uri={},connections={}{over}", far::uri(dir, &name), 1 + rng.below(4))
    } else {
        format!("{name}={at}{over}")
    };
    // With direct I/O, the file system under the file determines the block size.
    let block = if direct == "on" { 4 * KIB } else { SECTOR };
    let disk = Disk { faults: fails, block, survives_restart: true, ..blank(&name, Kind::File, bytes, cut) };
    // After the far server was killed, the first flush fails.
    disk.set_may_fail(fails || is_far);
    add(world, dir, disk, device_args)
}

fn snapshot(world: &World, dir: &Path, n: u64, origin: &Arc<Disk>, rng: &mut Rng) {
    let name = format!("s{n}");
    let chunk = 4 << rng.below(5);
    let store = ["P", "PO"][rng.below(2) as usize];
    let oracle = origin.oracle().snapshot(&name, Durability::Completed);
    let on_file = rng.chance(60);
    let cow = if on_file {
        format!("./{name}.cow,cow_size={ROOMY_COW}")
    } else {
        // The COW device is a RAM disk, which is not added to the world because it is not published. The RAM disk ends
        // with the server, so creating the snapshot requires `force`.
        format!("c{n},force=yes")
    };
    let own = if on_file {
        String::new()
    } else {
        let spill = spilling(&format!("c{n}"), rng);
        format!("c{n}=ram,disksize={ROOMY_COW},publish=no{spill}\n")
    };
    let device_args =
        format!("{own}{name}=snapshot,origin={},cow={cow},store={store},chunk_size={chunk}K", origin.name);
    let parent = Some(Arc::clone(origin));
    let block = origin.block;
    let disk = Disk {
        parent,
        survives_restart: on_file,
        is_lost: !on_file,
        block,
        ..Disk::new(&name, Kind::Cow, oracle, Vec::new())
    };
    disk.set_may_fail(origin.may_fail());
    add(world, dir, disk, device_args);
}

/// Returns true if a device with this name is a COW device or backing device: these are neither published nor in the
/// world.
pub fn is_unpublished_backing(name: &str) -> bool {
    if name.starts_with(FAR_PREFIX) {
        return true;
    }
    let number = name.strip_prefix('c').unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Generates the content of a device: some writes at random addresses. Returns the bytes and their oracle.
fn content(world: &World, name: &str, bytes: u64, rng: &mut Rng) -> (Vec<u8>, Oracle) {
    let mut content = vec![0; bytes as usize];
    let mut oracle = Oracle::new(name, bytes / SECTOR, Durability::Completed);
    let mut at = 0;
    while at < bytes / SECTOR {
        let end = (at + 1 + rng.below(200)).min(bytes / SECTOR);
        if rng.chance(75) {
            let id = world.write_id(Fill::ALL[rng.below(5) as usize]);
            let token = oracle.begin_write(id, at..end, Writing::Write);
            fill(id, at, &mut content[(at * SECTOR) as usize..(end * SECTOR) as usize]);
            oracle.end(token, Outcome::Done { fua: true });
        }
        at = end;
    }
    (content, oracle)
}

fn base(world: &World, dir: &Path, far: &mut Vec<String>, rng: &mut Rng) -> io::Result<Arc<Disk>> {
    let bytes = MIB * (1 + rng.below(6)) + SECTOR * rng.below(16);
    let (content, oracle) = content(world, "g", bytes, rng);
    fs::write(dir.join(BASE), &content)?;
    let mut own = String::new();
    let (limit, tight, spills) = match rng.below(4) {
        _ if rng.chance(SPILL_PERCENT) => {
            let (backing, keys) = spilling_anywhere(dir, "g", far, rng);
            own = backing;
            (keys, false, true)
        }
        0 => (",mem_limit=1M".to_owned(), true, false),
        _ => (String::new(), false, false),
    };
    let at = if rng.chance(35) {
        far.push(format!("g=file,path=../{BASE},readonly=yes"));
        format!("nbd,uri={},readonly=yes", far::uri(dir, "g"))
    } else {
        format!("file,path=./{BASE},readonly=yes")
    };
    let device_args = format!("{own}g={at}{limit}{}", packing(rng));
    let disk = Disk { survives_restart: true, spills, ..Disk::new("g", Kind::Base, oracle, Vec::new()) };
    disk.set_tight(tight);
    Ok(add(world, dir, disk, device_args))
}

fn fork(world: &World, dir: &Path, n: u64, base: &Arc<Disk>, rng: &mut Rng) {
    let name = format!("k{n}");
    let (over, cut, fails) = layers(rng);
    let own = rng.chance(25);
    let limit = if own { format!(",mem_limit={}K", 64 << rng.below(4)) } else { String::new() };
    let (lost, serves_lost) = on_data_loss(world, rng);
    let (keep, keeps) = keep(world, cut, rng);
    let device_args = format!("{name}=fork,base=g{limit}{over}{lost}{keep}");
    let durability = if cut { Durability::Flushed } else { Durability::Completed };
    let oracle = base.oracle().snapshot(&name, durability);
    let parent = Some(Arc::clone(base));
    let spills = base.spills;
    let disk = Disk {
        parent,
        has_volatile_cache: cut,
        spills,
        serves_lost,
        keeps,
        faults: fails,
        ..Disk::new(&name, Kind::Fork, oracle, Vec::new())
    };
    disk.set_tight(own && !base.spills);
    disk.set_may_fail(fails);
    add(world, dir, disk, device_args);
}

/// Creates an image in the image store, and often a device and a fork over the image. A server with a state directory
/// remembers the image to which the tag referred; other servers are given the name of the image.
fn image(world: &World, dir: &Path, rng: &mut Rng) -> io::Result<()> {
    for tag in &world.tags {
        tag.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
    let (content, oracle) = content(world, "i", MIB * (1 + rng.below(3)) + SECTOR * rng.below(16), rng);
    let name = images::begin(dir, TAGS[0], &content).map_err(io::Error::other)?;
    let may = PossibleImage { image: Some(name.clone()), oracle: oracle.clone() };
    world.tags[0].lock().unwrap_or_else(PoisonError::into_inner).push(may);
    if rng.chance(40) {
        return Ok(());
    }
    let (store, cache) = (dir.join(images::STORE), dir.join(images::CACHE));
    let url = format!("file://{}:{}", store.display(), TAGS[0]);
    let url = if world.has_state { url } else { format!("{url}@{name}") };
    let device_args = format!("i=image,url={url},cache={}", cache.display());
    let disk =
        Disk { survives_restart: true, image: Some(name), ..Disk::new("i", Kind::Image, oracle, Vec::new()) };
    let image = add(world, dir, disk, device_args);
    if rng.chance(60) {
        let (lost, serves_lost) = on_data_loss(world, rng);
        let (keep, keeps) = keep(world, false, rng);
        let device_args = format!("ki=fork,base=i{lost}{keep}");
        let oracle = image.oracle().snapshot("ki", Durability::Completed);
        let parent = Some(image);
        add(
            world,
            dir,
            Disk { parent, serves_lost, keeps, ..Disk::new("ki", Kind::Fork, oracle, Vec::new()) },
            device_args,
        );
    }
    Ok(())
}

fn null(world: &World, dir: &Path, rng: &mut Rng) {
    let block = 512 << rng.below(4);
    let bytes = MIB * (1 + rng.below(4));
    let (over, mut cut, fails) = layers(rng);
    let mut device_args = format!("n=null,size={}K,blocksize={block},memory_backed=1", bytes / KIB);
    if rng.chance(50) {
        device_args += ",discard=1";
    }
    if rng.chance(40) {
        device_args += ",comp_algorithm=lz4";
    }
    if !cut && rng.chance(30) {
        device_args += ",cache_size=128K";
        cut = true;
    }
    let (lost, serves_lost) = on_data_loss(world, rng);
    let disk = Disk { faults: fails, block, serves_lost, ..blank("n", Kind::Null, bytes, cut) };
    disk.set_may_fail(fails);
    add(world, dir, disk, device_args + &over + lost);
}
