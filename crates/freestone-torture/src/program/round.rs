//! A round: random devices, and several lives of a server with these devices. At the end the round checks that the
//! server has released all resources.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use freestone_testkit::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::clients::{bad, bad_machine};
use super::server::control::{self, VerbError};
use super::server::{self, Resources, Server};
use super::setup::far::{FAR_DIR, FarServer};
use super::setup::images;
use super::transport::Address;
use super::verbs::{cli_verbs, stall};
use super::watch::VERB_MAX;
use super::world::{ContentEnd, Disk, Kind, KnownState, World};
use super::{clients, setup, verbs};

/// Longest wait for the end of a server. Its own limits are 5 s for clients that hang, 2 s for verbs, and 60 s for
/// unflushed data.
pub const END_MAX: Duration = Duration::from_secs(90);
/// Longest wait until threads and descriptors are gone after the last verb.
const QUIET_MAX: Duration = Duration::from_secs(60);
/// Bytes by which the memory of a server without devices may exceed that of an unused one: the allocator keeps small
/// freed pieces.
const LEFT_BYTES_MAX: u64 = 64 << 20;
const POLL_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// SIGKILL under load.
    Killed,
    /// SIGTERM under load.
    Terminated,
    /// All client and verb threads end, then all devices are removed, then the server receives SIGTERM.
    Emptied,
}

/// Starts a server that creates and removes a device of each kind. Returns its descriptors and threads, and its memory
/// in bytes, after that.
pub fn empty_server(world: &World, dir: &Path) -> Result<(Resources, u64), String> {
    let server = Server::start(&world.program, dir, &["x=null,size=1M".into()], world.has_ublk)?;
    fs::write(dir.join("x.img"), vec![1; 1 << 20]).map_err(|e| e.to_string())?;
    let ask = |method: &str, params: &Value| {
        control::ask(&server.control, method, params).map_err(|error| format!("{method} {params}: {error:?}"))
    };
    for device in [
        "r=ram,disksize=1M,mem_limit=1M,backing_dev=./x.spill,backing_size=8M,auto_recompress=1,auto_group=1,auto_dedup=1",
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
    // Removed devices are freed in the background: wait until the keeper thread has ended and no memfd is open.
    let start = Instant::now();
    let mut held = server.resources();
    while held.threads.contains_key("keeper") || held.descriptors.keys().any(|what| what.contains("memfd")) {
        if start.elapsed() > QUIET_MAX {
            return Err(format!("an empty server holds {held:?}"));
        }
        thread::sleep(POLL_INTERVAL);
        held = server.resources();
    }
    let memory = server.memory_bytes();
    server.signal(Signal::TERM);
    match server.wait(END_MAX) {
        Some(status) if status.success() => Ok((held, memory)),
        status => Err(format!("an empty server ended with {status:?}")),
    }
}

/// Runs one round that lasts about `time`.
pub fn run(
    world: &Arc<World>,
    rng: &mut Rng,
    time: Duration,
    empty: &(Resources, u64),
) -> Result<(), String> {
    let dir = tempfile::Builder::new().prefix("torture-").tempdir().map_err(|e| e.to_string())?;
    world.set_dir(dir.path());
    let far = setup::make(world, dir.path(), rng).map_err(|e| format!("the files of a round: {e}"))?;
    let mut far = FarServer::start(&world.program, dir.path(), far)?;
    let lives = 1 + rng.below(4) as u32;
    let mut outcome = Ok(());
    for life in 0..lives {
        let end = match rng.below(100) {
            _ if life + 1 == lives => End::Emptied,
            0..65 => End::Killed,
            _ => End::Terminated,
        };
        outcome = run_life(world, dir.path(), &mut far, rng, (time / lives, end), empty);
        if outcome.is_err() || world.first_failure().is_some() {
            break;
        }
        outcome = images::settle_all(world);
        if outcome.is_err() {
            break;
        }
        if end != End::Emptied {
            restart_devices(world, dir.path(), end == End::Killed);
        }
    }
    if outcome.is_err() || world.first_failure().is_some() {
        // Keep the directory of the round for the analysis of the failure.
        let _ = dir.keep();
    }
    outcome
}

/// Returns the arguments of `serve` that create the devices of the world.
pub fn device_args(world: &World) -> Vec<String> {
    let device_args = world.disks(|_| true).into_iter().filter_map(|disk| disk.device_args.clone());
    device_args.flat_map(|device_args| device_args.lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// Replaces the devices of the world by what they must be after a restart.
fn restart_devices(world: &World, dir: &Path, killed: bool) {
    let at = vec![Address::Nbd(dir.join(server::NBD))];
    let mut disks: Vec<Arc<Disk>> = Vec::new();
    let merged = world.disks(|disk| disk.device_args.is_some() && disk.is_merging());
    let half_merged: Vec<_> = merged.iter().filter_map(|disk| disk.parent.as_ref()).collect();
    for disk in world.disks(|disk| disk.device_args.is_some()) {
        // A snapshot whose COW device ends with the server is created anew. The creation fails while the origin is half
        // merged, so omit the snapshot.
        let is_new = disk.kind == Kind::Cow && !disk.survives_restart;
        let is_of = |origin: &Arc<Disk>| disk.parent.as_ref().is_some_and(|of| of.name == origin.name);
        if is_new && half_merged.iter().any(|origin| is_of(origin)) {
            continue;
        }
        let of = disk.parent.as_ref().map(|of| &of.name);
        let of = of.and_then(|of| disks.iter().find(|disk| disk.name == *of)).cloned();
        disks.push(Arc::new(disk.after_restart(
            ContentEnd::of(killed),
            of,
            at.clone(),
            KnownState::default(),
            None,
        )));
    }
    world.set_disks(disks);
}

fn run_life(
    world: &Arc<World>,
    dir: &Path,
    far: &mut FarServer,
    rng: &mut Rng,
    (time, end): (Duration, End),
    empty: &(Resources, u64),
) -> Result<(), String> {
    let device_args = device_args(world);
    world.set_stop(false);
    world.set_server_ending(false);
    world.note(format!("a server starts: {device_args:?}"));
    let server = Server::start(&world.program, dir, &device_args, world.has_ublk)
        .map_err(|e| format!("{device_args:?}: {e}"))?;
    publish_some(world, &server, rng)?;
    let time = time.mul_f64(0.5 + rng.below(100) as f64 / 100.0);
    let over = AtomicBool::new(false);
    let removed = thread::scope(|scope| {
        let watchdog = scope.spawn(|| watch(world, &server, &over));
        let mut threads = Vec::new();
        let mut start = |name: String, run: fn(&World, &super::watch::WatchedThread, Rng)| {
            let (slot, rng) = (world.watch.slot(name), Rng::new(rng.word()));
            threads.push(scope.spawn(move || run(world, &slot, rng)));
        };
        (0..4).for_each(|n| start(format!("client {n}"), clients::run));
        (0..3).for_each(|n| start(format!("verbs {n}"), verbs::run));
        (0..2).for_each(|n| start(format!("bad {n}"), bad::run));
        start("bad machine".into(), bad_machine::run);
        start("program".into(), cli_verbs::run);
        start("stall".into(), stall::run);
        let far_rng = Rng::new(rng.word());
        threads.push(scope.spawn(move || far.run(world, far_rng)));
        let begun = Instant::now();
        while begun.elapsed() < time && !world.is_stopped() {
            thread::sleep(POLL_INTERVAL);
        }
        if end != End::Emptied && world.first_failure().is_none() {
            let _no_kill_guard = world.no_kill.write().unwrap_or_else(PoisonError::into_inner);
            world.set_server_ending(true);
            world.note(format!("the server ends: {end:?}"));
            server.signal(if end == End::Killed { Signal::KILL } else { Signal::TERM });
            world.counts.add("ends", if end == End::Killed { "kill -9" } else { "SIGTERM in traffic" }, 1);
        }
        world.set_stop(true);
        // A panic of a thread is a defect of the torture itself, and also a failure.
        for thread in threads {
            if thread.join().is_err() {
                world.fail("a thread of the torture panicked");
            }
        }
        let mut removed = Ok(());
        if end == End::Emptied && world.first_failure().is_none() {
            // Read all devices once more before they are removed.
            clients::read_all_devices(world);
            let slot = world.watch.slot("end".into());
            slot.begin("removes all devices", 2 * VERB_MAX);
            removed = remove_all(world, &server);
        }
        over.store(true, Ordering::SeqCst);
        let _ = watchdog.join();
        removed
    });
    world.watch.clear();
    if world.first_failure().is_some() {
        return Ok(());
    }
    match end {
        End::Killed => match server.wait(END_MAX) {
            Some(status) if server::was_killed(status) => Ok(()),
            status => Err(format!("killed, the server ended with {status:?}")),
        },
        End::Terminated => wait_orderly_end(world, &server),
        End::Emptied => {
            removed?;
            check_resources_released(world, &server, empty)?;
            server.signal(Signal::TERM);
            wait_orderly_end(world, &server)?;
            check_no_block_devices(world)?;
            world.counts.add("ends", "emptied", 1);
            check_files(world, dir)
        }
    }
}

/// Publishes some devices at vhost-user sockets, so that machines of the last server can reconnect. Also records the
/// addresses of the block devices.
fn publish_some(world: &World, server: &Server, rng: &mut Rng) -> Result<(), String> {
    let ask = |method: &str, params: &Value| {
        control::ask(&server.control, method, params).map_err(|error| format!("{method} {params}: {error:?}"))
    };
    for disk in world.disks(|disk| disk.kind != Kind::Template && !disk.is_merging()) {
        if rng.chance(60) {
            let path = world.dir().join(format!("p{}", world.next_number()));
            ask("publish", &json!({ "name": disk.name, "vhost_user": format!("unix:{}", path.display()) }))?;
            disk.publish(Address::Machine(path));
        }
        if world.has_ublk {
            let stat = ask("stat", &json!({ "name": disk.name }))?;
            let exports = stat["exports"].as_array().into_iter().flatten();
            let addresses = exports.filter_map(|export| export["address"].as_str());
            for path in addresses.filter(|address| address.starts_with("/dev/")) {
                disk.publish(Address::Block(path.into()));
            }
        }
    }
    Ok(())
}

/// Waits for an orderly end of the server, with exit status 0.
pub fn wait_orderly_end(world: &World, server: &Server) -> Result<(), String> {
    // Unflushed data of a power layer may find no space on the device below. A far server that was killed may have lost
    // unflushed writes.
    let may_fail_to_flush =
        || !world.disks(|disk| disk.has_volatile_cache && disk.is_tight() || disk.may_fail()).is_empty();
    match server.wait(END_MAX) {
        Some(status) if status.success() => Ok(()),
        Some(status) if status.code() == Some(1) && may_fail_to_flush() => Ok(()),
        Some(status) => Err(format!("SIGTERM ended the server with {status}")),
        None => {
            Err(format!("SIGTERM did not end the server in {} s\n{}", END_MAX.as_secs(), server.stacks()))
        }
    }
}

/// Watches a server until `over` is set: it must not end by itself, and every thread must make progress.
pub fn watch(world: &World, server: &Server, over: &AtomicBool) {
    while !over.load(Ordering::SeqCst) {
        if let Some(late) = world.watch.overdue() {
            world.fail(format!("{late}\nthreads of the server:\n{}", server.stacks()));
        } else if !world.is_server_ending()
            && let Some(status) = server.ended()
        {
            world.fail(format!("the server ended on its own: {status}"));
        }
        if world.first_failure().is_some() {
            // Kill the server, so that threads that wait for it continue.
            world.set_server_ending(true);
            server.signal(Signal::KILL);
            return;
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Removes every device of the server, the topmost first.
pub fn remove_all(world: &World, server: &Server) -> Result<(), String> {
    let ask = |method: &str, params: &Value| control::ask(&server.control, method, params);
    let names = || -> Result<Vec<String>, String> {
        let list = ask("list", &json!({})).map_err(|error| format!("list at the end: {error:?}"))?;
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
                // The server removes a fork with the connection to which it belongs, perhaps before this loop does.
                Err(VerbError::Refused { errno, .. }) if errno == "ENODEV" => {}
                Err(VerbError::Refused { errno, message, .. }) if errno == "EBUSY" => {
                    // The merge has stopped because of an injected fault of the origin, so start it again.
                    if message.contains("its merge into") {
                        let _ = ask("merge", &json!({ "name": name, "into_origin": true, "force": true }));
                    }
                    why.push(message);
                }
                Err(error) => return Err(format!("remove {name} at the end: {error:?}")),
            }
        }
        if start.elapsed() > VERB_MAX {
            return Err(format!("devices cannot be removed at the end: {why:?}\n{}", server.stacks()));
        }
        if !why.is_empty() {
            thread::sleep(POLL_INTERVAL);
        }
    }
    let left = ask("stat", &json!({})).map_err(|error| format!("stat at the end: {error:?}"))?;
    if left["devices"] != json!([]) {
        return Err(format!("stat shows devices after all were removed: {left}"));
    }
    Ok(())
}

/// Checks that the server has no more descriptors, threads and memory than an empty one.
fn check_resources_released(
    world: &World,
    server: &Server,
    (empty, memory): &(Resources, u64),
) -> Result<(), String> {
    let start = Instant::now();
    loop {
        let held = server.resources();
        // Fewer than in the empty server are allowed: some threads start at the first use.
        let more: Vec<_> = excess(&held.descriptors, &empty.descriptors)
            .chain(excess(&held.threads, &empty.threads))
            .collect();
        let bytes = server.memory_bytes();
        world.counts.raise("left", "KiB", bytes >> 10);
        if more.is_empty() && bytes <= memory + LEFT_BYTES_MAX {
            return Ok(());
        }
        if start.elapsed() > QUIET_MAX {
            let stacks = server.stacks();
            return Err(format!(
                "after all devices were removed the server holds {more:?} more than an empty one, and {} KiB (empty: {})\n{stacks}",
                bytes >> 10,
                memory >> 10,
            ));
        }
        thread::sleep(POLL_INTERVAL);
    }
}

fn excess<'a>(
    held: &'a std::collections::BTreeMap<String, usize>,
    empty: &'a std::collections::BTreeMap<String, usize>,
) -> impl Iterator<Item = String> + 'a {
    held.iter().filter_map(|(what, count)| {
        let more = count.saturating_sub(empty.get(what).copied().unwrap_or(0));
        (more > 0).then(|| format!("{more} {what}"))
    })
}

/// Checks that after the end of the server only lasting files are left, such as images, COW devices, saved files and
/// the log.
pub fn check_files(world: &World, dir: &Path) -> Result<(), String> {
    let killed = world.counts.of("ends").keys().any(|end| end.starts_with("kill -9"));
    let ours = [".img", ".cow", ".saved", ".qcow2"];
    for entry in fs::read_dir(dir).map_err(|e| e.to_string())?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        // A kill leaves sockets behind. The temporary file of a replacement, or the directory of a control socket being
        // created, may also remain.
        let left = killed && (name.starts_with(".freestone-") || is_socket(&entry.path()));
        if !(ours.iter().any(|end| name.ends_with(end))
            || [images::STORE, images::CACHE, FAR_DIR].contains(&&*name)
            || name == "log"
            || name == server::STATE
            || left)
        {
            return Err(format!("file {name} is left in the directory of the server"));
        }
    }
    Ok(())
}

/// Checks that no ublk block device is left. The kernel removes the last ones shortly after the end of the server.
fn check_no_block_devices(world: &World) -> Result<(), String> {
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
        thread::sleep(POLL_INTERVAL);
    }
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}
