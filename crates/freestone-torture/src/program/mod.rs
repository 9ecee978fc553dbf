//! The built program, over its sockets: clients that are judged by the oracle, clients that
//! misbehave, verbs beside them, `kill -9`, restarts, and at the end nothing may be left.
//!
//! Time goes in rounds. A round has random devices and some lives of a server; each life ends by
//! `kill -9` or SIGTERM in the middle of everything, the last one by removing all devices.
//! Everything that is random is drawn from the seed. With real processes and threads the same seed
//! does not give the same run: it gives the same devices, and each thread the same numbers to
//! choose by.

mod asleep;
mod bad;
mod bad_machine;
mod block;
#[cfg(target_arch = "x86_64")]
pub mod calls;
mod clients;
mod control;
mod disk;
mod far;
mod flight;
mod images;
mod link;
pub mod lives;
mod look;
mod machine;
mod plan;
mod refusals;
mod round;
mod said;
mod server;
mod stall;
mod verbs;
mod watch;
mod wire;
mod world;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_testkit::Rng;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use world::World;

/// About how long a round takes.
const ROUND: Duration = Duration::from_secs(24);

/// What was done without a fault.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Rounds with devices of their own.
    pub rounds: u64,
    /// Connections of judged clients by export.
    pub clients: BTreeMap<String, u64>,
    /// Requests of judged clients by export and command.
    pub requests: BTreeMap<String, u64>,
    /// Those that were answered with an error for which there is a reason, by export, command and
    /// error.
    pub errors: BTreeMap<String, u64>,
    /// Verbs on the control socket by name and outcome (`ok`, or the errno).
    pub verbs: BTreeMap<String, u64>,
    /// Those by the command line.
    pub program: BTreeMap<String, u64>,
    /// Clients that misbehaved, by what they did.
    pub bad_clients: BTreeMap<String, u64>,
    /// Memory that the largest server still had when all devices were removed, in KiB.
    pub left_kib: u64,
    /// How servers ended.
    pub ends: BTreeMap<String, u64>,
    /// What servers with a state had when they were started again.
    pub restarts: BTreeMap<String, u64>,
}

/// A fault: of the program, or of the torture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The seed of the run.
    pub seed: u64,
    /// How long it took.
    pub after: Duration,
    /// What is wrong.
    pub what: String,
    /// What was running just then.
    pub running: String,
    /// The end of the server's log.
    pub log: String,
    /// The server's directory, which is kept.
    pub dir: PathBuf,
    /// What was done until then.
    pub report: Report,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, after, what, running, log, dir, report } = self;
        writeln!(
            f,
            "seed {seed}, after {:.1} s in round {}: {what}",
            after.as_secs_f64(),
            report.rounds + 1
        )?;
        writeln!(f, "running then:\n{running}the server's log ends with:\n{log}")?;
        write!(f, "the server's directory is kept: {}", dir.display())
    }
}

impl std::error::Error for Failure {}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "rounds: {}", self.rounds)?;
        writeln!(f, "memory of a server after all was removed, at most: {} KiB", self.left_kib)?;
        let groups = [
            ("clients", &self.clients),
            ("requests checked", &self.requests),
            ("requests that failed for a reason", &self.errors),
            ("verbs", &self.verbs),
            ("verbs by the program", &self.program),
            ("bad clients", &self.bad_clients),
            ("servers that ended", &self.ends),
            ("after restarts on a state", &self.restarts),
        ];
        for (title, counts) in groups {
            writeln!(f, "{title}: {}", counts.values().sum::<u64>())?;
            for (name, count) in counts {
                writeln!(f, "  {count:>9} {name}")?;
            }
        }
        Ok(())
    }
}

impl Report {
    fn of(world: &World, rounds: u64) -> Self {
        let of = |group| world.counts.of(group);
        Self {
            rounds,
            clients: of("clients"),
            requests: of("requests"),
            errors: of("errors"),
            verbs: of("verbs"),
            program: of("verbs by the program"),
            bad_clients: of("bad clients"),
            left_kib: of("left").values().copied().max().unwrap_or(0),
            ends: of("ends"),
            restarts: of("restarts"),
        }
    }

    /// Adds what another run did.
    fn add(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.left_kib = self.left_kib.max(other.left_kib);
        let groups = [
            (&mut self.clients, &other.clients),
            (&mut self.requests, &other.requests),
            (&mut self.errors, &other.errors),
            (&mut self.verbs, &other.verbs),
            (&mut self.program, &other.program),
            (&mut self.bad_clients, &other.bad_clients),
            (&mut self.ends, &other.ends),
            (&mut self.restarts, &other.restarts),
        ];
        for (all, more) in groups {
            for (name, count) in more {
                *all.entry(name.clone()).or_default() += count;
            }
        }
    }
}

/// Tortures the program at `binary` for so many minutes.
///
/// # Errors
/// What was wrong first.
pub fn run(seed: u64, minutes: f64, binary: &Path) -> Result<Report, Box<Failure>> {
    // A descriptor for each client of a crowd.
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Where it may not be raised, crowds are smaller.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let time = Duration::from_secs_f64(minutes.max(0.0) * 60.0);
    let world = Arc::new(World::new(binary));
    let mut rng = Rng::new(seed);
    let mut rounds = 0;
    let mut outcome = empty(&world);
    // Rounds have all of the time, however long that took.
    let start = Instant::now();
    while let Ok(empty) = &outcome
        && start.elapsed() < time
    {
        let left = time.saturating_sub(start.elapsed());
        let result = round::run(&world, &mut rng, ROUND.min(left), empty);
        if let Err(what) = result {
            outcome = Err(what);
        } else if let Some(trouble) = world.trouble() {
            outcome = Err(trouble.what);
        } else {
            rounds += 1;
        }
    }
    let report = Report::of(&world, rounds);
    outcome.map(|_| report.clone()).map_err(|what| {
        let (dir, after) = (world.dir(), start.elapsed());
        let running = world.trouble().map(|trouble| trouble.running).unwrap_or_default();
        Box::new(Failure { seed, after, what, running, log: server::log_tail(&dir), dir, report })
    })
}

fn empty(world: &World) -> Result<(server::Held, u64), String> {
    let dir = tempfile::Builder::new().prefix("torture-empty-").tempdir().map_err(|e| e.to_string())?;
    world.set_dir(dir.path());
    // Its directory goes with it.
    let told = |what| format!("{what}\nits log ends with:\n{}", server::log_tail(dir.path()));
    round::empty_server(world, dir.path()).map_err(told)
}
