//! Executes one run of mode lives: its lives, one after the other.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use freestone_testkit::Rng;
use rustix::process::Signal;
use serde_json::json;

use super::case::{CLIENTS, Case, End, Op, VERB_THREADS};
use super::{holder, restart};
use crate::program::round::{self, END_MAX, wait_orderly_end};
use crate::program::server::control;
use crate::program::server::{self, Server};
use crate::program::setup::far::FarServer;
use crate::program::setup::{self, images};
use crate::program::verbs::VerbThread;
use crate::program::watch::VERB_MAX;
use crate::program::world::World;
use crate::program::{Failure, Report, clients};

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Runs a case with the program at `binary`.
pub fn run(seed: u64, case: &Case, binary: &Path) -> Result<Report, Box<Failure>> {
    let began = Instant::now();
    let world = Arc::new(World::with_state(binary, case.recoverable));
    let dir = match tempfile::Builder::new().prefix("torture-lives-").tempdir() {
        Ok(dir) => dir,
        Err(error) => return Err(failed(&world, seed, began, error.to_string())),
    };
    world.set_dir(dir.path());
    let mut outcome = run_lives(&world, dir.path(), case);
    if let Some(first_failure) = world.first_failure() {
        outcome = Err(first_failure.what);
    }
    match outcome {
        Ok(()) => Ok(Report::of(&world, 1)),
        Err(what) => {
            let failure = failed(&world, seed, began, what);
            holder::kill(dir.path());
            // Keep the directory of the run for the analysis of the failure.
            let _ = dir.keep();
            Err(failure)
        }
    }
}

fn failed(world: &World, seed: u64, began: Instant, what: String) -> Box<Failure> {
    let (dir, after) = (world.dir(), began.elapsed());
    let running =
        world.first_failure().map_or_else(|| world.running(), |first_failure| first_failure.running);
    let (log, report) = (server::log_tail(&dir), Report::of(world, 0));
    Box::new(Failure { seed, after, what, running, log, dir, report })
}

fn run_lives(world: &Arc<World>, dir: &Path, case: &Case) -> Result<(), String> {
    let mut rng = Rng::new(case.devices);
    let far = setup::make(world, dir, &mut rng).map_err(|e| format!("the files of a run: {e}"))?;
    let mut far = FarServer::start(&world.program, dir, far)?;
    let mut before: Option<Ending> = None;
    for (ops, end) in case.lives() {
        if rng.chance(30) {
            far.restart(world)?;
        }
        let server = start(world, dir, before.as_ref())?;
        let must_load = matches!(end, Some((_, End::KilledTwice { .. } | End::Upgraded))) || rng.chance(50);
        let is_loaded = restart::is_loaded(world, must_load)?;
        run_life(world, &server, ops, end)?;
        if world.first_failure().is_some() {
            return Ok(());
        }
        before = end.map(|(_, how)| Ending { how, is_loaded });
    }
    // All devices were removed, so the next server must have none.
    let server = Server::start(&world.program, dir, &state(world), false)?;
    let list =
        control::ask(&server.control, "list", &json!({})).map_err(|error| format!("list: {error:?}"))?;
    if list["devices"] != json!([]) || !list["missing"].is_null() {
        return Err(format!("after all was removed, the next server has {list}"));
    }
    server.signal(Signal::TERM);
    wait_end(world, &server)?;
    images::settle_all(world)?;
    round::check_files(world, dir)
}

/// How the last life of a server ended.
struct Ending {
    how: End,
    /// All saved content was in memory before.
    is_loaded: bool,
}

fn state(world: &World) -> Vec<String> {
    let recoverable = world.is_recoverable.then(|| "--recoverable".into());
    ["--state".into(), server::STATE.into()].into_iter().chain(recoverable).collect()
}

/// Waits for the orderly end of a server, and for the end of its holder.
fn wait_end(world: &World, server: &Server) -> Result<(), String> {
    wait_orderly_end(world, server)?;
    holder::wait_ended(&world.dir())
}

/// Starts a server and judges its devices. `before`: how the last server ended; `None` for the
/// first server.
fn start(world: &World, dir: &Path, before: Option<&Ending>) -> Result<Server, String> {
    world.set_stop(false);
    world.set_server_ending(false);
    world.completions.clear();
    let Some(before) = before else {
        let device_args: Vec<String> = state(world).into_iter().chain(round::device_args(world)).collect();
        world.note(format!("a server starts: {device_args:?}"));
        let server = Server::start(&world.program, dir, &device_args, false)
            .map_err(|e| format!("{device_args:?}: {e}"))?;
        restart::check_first_start(world)?;
        return Ok(server);
    };
    let mut starts = 1 + u64::from(before.how == End::Upgraded);
    if let End::KilledTwice { micros } = before.how
        && before.is_loaded
    {
        server::killed_at_start(&world.program, dir, &state(world), Duration::from_micros(micros))?;
        world.counts.add("ends", "kill -9 at the start", 1);
        starts += 1;
    }
    world.note("a server starts on its state".into());
    let server = Server::start(&world.program, dir, &state(world), false)?;
    let adopts = world.is_recoverable && before.how != End::Terminated;
    restart::judge(world, before.how != End::Terminated, adopts.then_some(before.is_loaded), starts)?;
    images::settle_all(world)?;
    Ok(server)
}

/// Runs one life of a server: its steps on several threads, then its end.
fn run_life(world: &Arc<World>, server: &Server, ops: &[Op], end: Option<(u64, End)>) -> Result<(), String> {
    let over = AtomicBool::new(false);
    let done = thread::scope(|scope| {
        let watchdog = scope.spawn(|| round::watch(world, server, &over));
        if ops.contains(&Op::Sweep) {
            clients::read_all_devices(world);
        }
        let mut threads = Vec::new();
        for by in 0..VERB_THREADS {
            let of = |op: &Op| {
                if let Op::Verb { by: who, seed } = op { (*who == by).then_some(*seed) } else { None }
            };
            let seeds: Vec<u64> = ops.iter().filter_map(of).collect();
            threads.push(scope.spawn(move || verbs(world, by, &seeds)));
        }
        for by in 0..CLIENTS {
            let of = |op: &Op| {
                if let Op::Visit { by: who, seed } = op { (*who == by).then_some(*seed) } else { None }
            };
            let seeds: Vec<u64> = ops.iter().filter_map(of).collect();
            threads.push(scope.spawn(move || visits(world, by, &seeds)));
        }
        let all_done = || threads.iter().all(thread::ScopedJoinHandle::is_finished);
        let wait_until = |after| {
            while !world.completions.wait_for(after, POLL_INTERVAL) && !world.is_stopped() && !all_done() {}
        };
        for op in ops {
            if let Op::KillHolder { after } = op
                && world.is_recoverable
            {
                wait_until(*after);
                // A kill of both processes loses the memory, so the server lives until the next holder has it.
                holder::replace(world, server).unwrap_or_else(|why| world.fail(why));
            }
        }
        if let Some((after, how)) = end {
            wait_until(after);
            if world.first_failure().is_none() {
                let _no_kill_guard = world.no_kill.write().unwrap_or_else(PoisonError::into_inner);
                world.set_server_ending(true);
                world.note(format!("the server ends: {how:?}"));
                if how == End::Upgraded {
                    let words = ["upgrade", "--force"].map(String::from);
                    let upgraded = control::ask_program(&world.program, &server.control, &words);
                    upgraded.map_or_else(|why| world.fail(format!("upgrade: {why:?}")), drop);
                }
                let (signal, name) = match how {
                    End::Upgraded => (Signal::KILL, "upgrade"),
                    End::Terminated => (Signal::TERM, "SIGTERM"),
                    End::Killed | End::KilledTwice { .. } => (Signal::KILL, "kill -9"),
                };
                let when = if all_done() { "" } else { " in traffic" };
                server.signal(signal);
                world.counts.add("ends", format!("{name}{when}"), 1);
            }
            world.set_stop(true);
        }
        for thread in threads {
            if thread.join().is_err() {
                world.fail("a thread of the torture panicked");
            }
        }
        let mut done = Ok(());
        if end.is_none() && world.first_failure().is_none() {
            clients::read_all_devices(world);
            let slot = world.watch.slot("end".into());
            slot.begin("removes all devices", 2 * VERB_MAX);
            done = remove_all(world, server);
        }
        over.store(true, Ordering::SeqCst);
        let _ = watchdog.join();
        done
    });
    world.watch.clear();
    if world.first_failure().is_some() {
        return Ok(());
    }
    done?;
    match end {
        Some((_, End::Killed | End::KilledTwice { .. } | End::Upgraded)) => match server.wait(END_MAX) {
            Some(status) if server::was_killed(status) => Ok(()),
            status => Err(format!("killed, the server ended with {status:?}")),
        },
        Some((_, End::Terminated)) => wait_end(world, server),
        None => {
            server.signal(Signal::TERM);
            wait_end(world, server)?;
            world.counts.add("ends", "emptied", 1);
            Ok(())
        }
    }
}

fn verbs(world: &World, by: u8, seeds: &[u64]) {
    let slot = world.watch.slot(format!("verbs {by}"));
    for seed in seeds {
        if world.is_stopped() {
            break;
        }
        VerbThread::new(world, &slot, Rng::new(*seed)).run_random_verb();
        slot.end();
    }
}

fn visits(world: &World, by: u8, seeds: &[u64]) {
    let slot = world.watch.slot(format!("client {by}"));
    for seed in seeds {
        if world.is_stopped() {
            break;
        }
        clients::connect_once(world, &slot, &mut Rng::new(*seed));
    }
}

/// Removes all devices, including those that the server reports as missing because it could not
/// create them again.
fn remove_all(world: &World, server: &Server) -> Result<(), String> {
    round::remove_all(world, server)?;
    for disk in world.missing() {
        let asked = json!({ "name": disk.name });
        control::ask(&server.control, "remove", &asked)
            .map_err(|error| format!("remove {}, which is missing: {error:?}", disk.name))?;
    }
    Ok(())
}
