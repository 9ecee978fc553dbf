//! A round: random devices, some lives of a server with them, and the end, at which nothing may be
//! left.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use freestone_testkit::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::control::{self, No};
use super::far::{FAR, Far};
use super::link::Place;
use super::server::{self, Held, Server};
use super::watch::VERB_MAX;
use super::world::{Disk, Kind, Known, World};
use super::{bad, bad_machine, clients, images, look, plan, stall, verbs};

/// How long a server may take until it has ended: 5 s for clients that hang, 2 s for verbs, 60 s
/// for what is not flushed.
pub const END_MAX: Duration = Duration::from_secs(90);
/// How long threads and descriptors may take to go after the last verb.
const QUIET_MAX: Duration = Duration::from_secs(60);
/// More memory of its own than an empty server has: of small pieces that were freed some stay with
/// the process.
const LEFT_BYTES_MAX: u64 = 64 << 20;
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How a life ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// `kill -9`, in the middle of everything.
    Killed,
    /// SIGTERM, in the middle of everything.
    Told,
    /// Threads end first, then all devices are removed, then SIGTERM.
    Emptied,
}

/// What a server without devices holds, once each kind of device was there.
pub fn empty_server(world: &World, dir: &Path) -> Result<(Held, u64), String> {
    let server = Server::start(&world.program, dir, &["x=null,size=1M".into()], world.has_ublk)?;
    fs::write(dir.join("x.img"), vec![1; 1 << 20]).map_err(|e| e.to_string())?;
    let ask = |method: &str, params: &Value| {
        control::ask(&server.control, method, params).map_err(|no| format!("{method} {params}: {no:?}"))
    };
    for device in [
        "r=ram,disksize=1M,mem_limit=1M,backing_dev=./x.spill,backing_size=8M,auto_recompress=1",
        "f=file,path=./f.img,size=1M,faults=none,power_cut=yes",
        "h=file,path=./h.img,size=1M",
        "g=file,path=./x.img,readonly=yes",
        "k=fork,base=g",
        "hs=snapshot,origin=h,cow=./h.cow,cow_size=4M",
        "rs=snapshot,origin=r",
        "n=null,size=1M,memory_backed=1,completion_nsec=1000",
    ] {
        ask("create", &json!({ "device": device }))?;
    }
    for name in ["n", "rs", "hs", "k", "g", "h", "f", "r", "x"] {
        ask("remove", &json!({ "name": name }))?;
    }
    // The cleaner frees what was removed; its threads are gone when nothing changes any more.
    let start = Instant::now();
    let mut held = server.held();
    while held.threads.contains_key("keeper") || held.descriptors.keys().any(|what| what.contains("memfd")) {
        if start.elapsed() > QUIET_MAX {
            return Err(format!("an empty server holds {held:?}"));
        }
        thread::sleep(LOOK_EVERY);
        held = server.held();
    }
    let memory = server.memory_bytes();
    server.signal(Signal::TERM);
    match server.wait(END_MAX) {
        Some(status) if status.success() => Ok((held, memory)),
        status => Err(format!("an empty server ended with {status:?}")),
    }
}

/// One round of about this length.
pub fn run(world: &Arc<World>, rng: &mut Rng, time: Duration, empty: &(Held, u64)) -> Result<(), String> {
    let dir = tempfile::Builder::new().prefix("torture-").tempdir().map_err(|e| e.to_string())?;
    world.set_dir(dir.path());
    let far = plan::make(world, dir.path(), rng).map_err(|e| format!("the files of a round: {e}"))?;
    let mut far = Far::start(&world.program, dir.path(), far)?;
    let lives = 1 + rng.below(4) as u32;
    let mut outcome = Ok(());
    for life in 0..lives {
        let end = match rng.below(100) {
            _ if life + 1 == lives => End::Emptied,
            0..65 => End::Killed,
            _ => End::Told,
        };
        outcome = one_life(world, dir.path(), &mut far, rng, (time / lives, end), empty);
        if outcome.is_err() || world.trouble().is_some() {
            break;
        }
        outcome = images::settle_all(world);
        if outcome.is_err() {
            break;
        }
        if end != End::Emptied {
            again(world, dir.path(), end == End::Killed);
        }
    }
    if outcome.is_err() || world.trouble().is_some() {
        // Somebody will want to look at it.
        let _ = dir.keep();
    }
    outcome
}

/// What a server is told of the devices.
pub fn words(world: &World) -> Vec<String> {
    let words = world.disks(|_| true).into_iter().filter_map(|disk| disk.words.clone());
    words.flat_map(|words| words.lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// What is there when the server is started again.
fn again(world: &World, dir: &Path, killed: bool) {
    let at = vec![Place::Nbd(dir.join(server::NBD))];
    let mut disks: Vec<Arc<Disk>> = Vec::new();
    let merged = world.disks(|disk| disk.words.is_some() && disk.is_merging());
    let half_merged: Vec<_> = merged.iter().filter_map(|disk| disk.of.as_ref()).collect();
    for disk in world.disks(|disk| disk.words.is_some()) {
        // A snapshot whose COW device ends with the server begins anew, and none begins with what
        // is half merged.
        let is_new = disk.kind == Kind::Cow && !disk.kept;
        let is_of = |origin: &Arc<Disk>| disk.of.as_ref().is_some_and(|of| of.name == origin.name);
        if is_new && half_merged.iter().any(|origin| is_of(origin)) {
            continue;
        }
        let of = disk.of.as_ref().map(|of| &of.name);
        let of = of.and_then(|of| disks.iter().find(|disk| disk.name == *of)).cloned();
        disks.push(Arc::new(disk.again(killed, of, at.clone(), Known::default(), None)));
    }
    world.set_disks(disks);
}

fn one_life(
    world: &Arc<World>,
    dir: &Path,
    far: &mut Far,
    rng: &mut Rng,
    (time, end): (Duration, End),
    empty: &(Held, u64),
) -> Result<(), String> {
    let words = words(world);
    world.set_stop(false);
    world.set_dying(false);
    world.note(format!("a server starts: {words:?}"));
    let server =
        Server::start(&world.program, dir, &words, world.has_ublk).map_err(|e| format!("{words:?}: {e}"))?;
    show(world, &server, rng)?;
    let time = time.mul_f64(0.5 + rng.below(100) as f64 / 100.0);
    let over = AtomicBool::new(false);
    let removed = thread::scope(|scope| {
        let watchdog = scope.spawn(|| watch(world, &server, &over));
        let mut threads = Vec::new();
        let mut start = |name: String, run: fn(&World, &super::watch::Slot, Rng)| {
            let (slot, rng) = (world.watch.slot(name), Rng::new(rng.word()));
            threads.push(scope.spawn(move || run(world, &slot, rng)));
        };
        (0..4).for_each(|n| start(format!("client {n}"), clients::run));
        (0..3).for_each(|n| start(format!("verbs {n}"), verbs::run));
        (0..2).for_each(|n| start(format!("bad {n}"), bad::run));
        start("bad machine".into(), bad_machine::run);
        start("program".into(), look::run);
        start("stall".into(), stall::run);
        let far_rng = Rng::new(rng.word());
        threads.push(scope.spawn(move || far.run(world, far_rng)));
        let begun = Instant::now();
        while begun.elapsed() < time && !world.stopped() {
            thread::sleep(LOOK_EVERY);
        }
        if end != End::Emptied && world.trouble().is_none() {
            let _unsteady = world.steady.write().unwrap_or_else(PoisonError::into_inner);
            world.set_dying(true);
            world.note(format!("the server is to be {end:?}"));
            server.signal(if end == End::Killed { Signal::KILL } else { Signal::TERM });
            world.counts.add("ends", if end == End::Killed { "kill -9" } else { "SIGTERM in traffic" }, 1);
        }
        world.set_stop(true);
        // A thread that panicked is a mistake of the torture's.
        for thread in threads {
            if thread.join().is_err() {
                world.fail("a thread of the torture panicked");
            }
        }
        let mut removed = Ok(());
        if end == End::Emptied && world.trouble().is_none() {
            // Once more all that is there, judged to its last sector.
            clients::sweep_all(world);
            let slot = world.watch.slot("end".into());
            slot.begin("removes all devices", 2 * VERB_MAX);
            removed = remove_all(world, &server);
        }
        over.store(true, Ordering::SeqCst);
        let _ = watchdog.join();
        removed
    });
    world.watch.clear();
    if world.trouble().is_some() {
        return Ok(());
    }
    match end {
        End::Killed => match server.wait(END_MAX) {
            Some(status) if server::was_killed(status) => Ok(()),
            status => Err(format!("killed, the server ended with {status:?}")),
        },
        End::Told => ended(world, &server),
        End::Emptied => {
            removed?;
            nothing_left(world, &server, empty)?;
            server.signal(Signal::TERM);
            ended(world, &server)?;
            no_block_devices(world)?;
            world.counts.add("ends", "emptied", 1);
            no_files(world, dir)
        }
    }
}

/// Shows some devices to virtual machines from the beginning, so that those which were connected to
/// the last server find them; and finds the block devices.
fn show(world: &World, server: &Server, rng: &mut Rng) -> Result<(), String> {
    let ask = |method: &str, params: &Value| {
        control::ask(&server.control, method, params).map_err(|no| format!("{method} {params}: {no:?}"))
    };
    for disk in world.disks(|disk| disk.kind != Kind::Template && !disk.is_merging()) {
        if rng.chance(60) {
            let path = world.dir().join(format!("p{}", world.number()));
            ask("publish", &json!({ "name": disk.name, "vhost_user": format!("unix:{}", path.display()) }))?;
            disk.publish(Place::Machine(path));
        }
        if world.has_ublk {
            let stat = ask("stat", &json!({ "name": disk.name }))?;
            let exports = stat["exports"].as_array().into_iter().flatten();
            let addresses = exports.filter_map(|export| export["address"].as_str());
            for path in addresses.filter(|address| address.starts_with("/dev/")) {
                disk.publish(Place::Block(path.into()));
            }
        }
    }
    Ok(())
}

/// In order: status 0, in time.
pub fn ended(world: &World, server: &Server) -> Result<(), String> {
    // What its power layer holds may find no room below.
    let may_fail_to_flush = || !world.disks(|disk| disk.cut && disk.is_tight()).is_empty();
    match server.wait(END_MAX) {
        Some(status) if status.success() => Ok(()),
        Some(status) if status.code() == Some(1) && may_fail_to_flush() => Ok(()),
        Some(status) => Err(format!("SIGTERM ended the server with {status}")),
        None => {
            Err(format!("SIGTERM did not end the server in {} s\n{}", END_MAX.as_secs(), server.stacks()))
        }
    }
}

/// Until all is over: the server lives, and everybody gets on.
pub fn watch(world: &World, server: &Server, over: &AtomicBool) {
    while !over.load(Ordering::SeqCst) {
        if let Some(late) = world.watch.late() {
            world.fail(format!("{late}\nthreads of the server:\n{}", server.stacks()));
        } else if !world.dying()
            && let Some(status) = server.ended()
        {
            world.fail(format!("the server ended by itself: {status}"));
        }
        if world.trouble().is_some() {
            // Who waits for it gets on.
            world.set_dying(true);
            server.signal(Signal::KILL);
            return;
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Every device, what stands on others first.
pub fn remove_all(world: &World, server: &Server) -> Result<(), String> {
    let ask = |method: &str, params: &Value| control::ask(&server.control, method, params);
    let names = || -> Result<Vec<String>, String> {
        let list = ask("list", &json!({})).map_err(|no| format!("list at the end: {no:?}"))?;
        let devices = list["devices"].as_array().cloned().unwrap_or_default();
        Ok(devices.iter().filter_map(|device| device["name"].as_str().map(str::to_owned)).collect())
    };
    let start = Instant::now();
    loop {
        let left = names()?;
        if left.is_empty() {
            break;
        }
        let mut why = Vec::new();
        for name in left.iter().rev() {
            match ask("remove", &json!({ "name": name, "force": true })) {
                Ok(_) => world.counts.add("verbs", "remove ok", 1),
                // Forks of connections that are just ending go by themselves, as may those that we
                // come to next.
                Err(No::Refused { errno, .. }) if errno == "ENODEV" => {}
                Err(No::Refused { errno, message, .. }) if errno == "EBUSY" => {
                    // Its origin failed, by chance.
                    if message.contains("its merge into") {
                        let _ = ask("merge", &json!({ "name": name, "into_origin": true, "force": true }));
                    }
                    why.push(message);
                }
                Err(no) => return Err(format!("remove {name} at the end: {no:?}")),
            }
        }
        if start.elapsed() > VERB_MAX {
            return Err(format!("cannot be removed at the end: {why:?}\n{}", server.stacks()));
        }
        if !why.is_empty() {
            thread::sleep(LOOK_EVERY);
        }
    }
    let left = ask("stat", &json!({})).map_err(|no| format!("stat at the end: {no:?}"))?;
    if left["devices"] != json!([]) {
        return Err(format!("stat shows devices after all were removed: {left}"));
    }
    Ok(())
}

/// Descriptors and threads are those of a server that never had a device; memory is given back.
fn nothing_left(world: &World, server: &Server, (empty, memory): &(Held, u64)) -> Result<(), String> {
    let start = Instant::now();
    loop {
        let held = server.held();
        // Some are only started when they are needed first.
        let more: Vec<_> = beyond(&held.descriptors, &empty.descriptors)
            .chain(beyond(&held.threads, &empty.threads))
            .collect();
        let bytes = server.memory_bytes();
        world.counts.most("left", "KiB", bytes >> 10);
        if more.is_empty() && bytes <= memory + LEFT_BYTES_MAX {
            return Ok(());
        }
        if start.elapsed() > QUIET_MAX {
            let stacks = server.stacks();
            return Err(format!(
                "after all was removed the server holds {more:?} more than an empty one, and {} KiB (an empty one {})\n{stacks}",
                bytes >> 10,
                memory >> 10,
            ));
        }
        thread::sleep(LOOK_EVERY);
    }
}

fn beyond<'a>(
    held: &'a std::collections::BTreeMap<String, usize>,
    empty: &'a std::collections::BTreeMap<String, usize>,
) -> impl Iterator<Item = String> + 'a {
    held.iter().filter_map(|(what, count)| {
        let more = count.saturating_sub(empty.get(what).copied().unwrap_or(0));
        (more > 0).then(|| format!("{more} {what}"))
    })
}

/// Images, stores, saved files: nothing else is there when the server has ended.
pub fn no_files(world: &World, dir: &Path) -> Result<(), String> {
    let killed = world.counts.of("ends").keys().any(|end| end.starts_with("kill -9"));
    let ours = [".img", ".cow", ".saved", ".qcow2"];
    for entry in fs::read_dir(dir).map_err(|e| e.to_string())?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        // A kill leaves sockets behind, and may leave the new name of a file that was just being
        // replaced, or the directory in which a control socket was just being made.
        let left = killed && (name.starts_with(".freestone-") || is_socket(&entry.path()));
        if !(ours.iter().any(|end| name.ends_with(end))
            || [images::STORE, images::CACHE, FAR].contains(&&*name)
            || name == "log"
            || name == server::STATE
            || left)
        {
            return Err(format!("{name} is left in the directory of the server"));
        }
    }
    Ok(())
}

/// The kernel removes the last ones a little after the server has ended.
fn no_block_devices(world: &World) -> Result<(), String> {
    let start = Instant::now();
    if !world.has_ublk {
        return Ok(());
    }
    loop {
        let names =
            fs::read_dir("/sys/block").map_err(|e| e.to_string())?.flatten().map(|entry| entry.file_name());
        let left: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with("ublkb")).collect();
        if left.is_empty() {
            return Ok(());
        }
        if start.elapsed() > QUIET_MAX {
            return Err(format!("block devices are left: {left:?}"));
        }
        thread::sleep(LOOK_EVERY);
    }
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}
