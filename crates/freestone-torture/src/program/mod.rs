//! Mode program: tests the built program under load over its sockets. Judged clients, misbehaving
//! clients, verbs, `kill -9` and restarts run at the same time. At the end the server must have
//! released all resources.
//!
//! A run consists of rounds. A round has random devices and several lives of a server. Each life
//! ends by `kill -9` or SIGTERM at a random moment, except that the last one ends after the removal
//! of all devices. All random choices come from the seed. Since processes and threads are real, the
//! same seed does not give the same run. Only the devices and the random numbers of each thread are
//! the same.

#[cfg(target_arch = "x86_64")]
pub mod calls;
mod clients;
pub mod lives;
mod round;
mod server;
mod setup;
mod transport;
mod verbs;
mod watch;
mod world;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_testkit::Rng;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use world::World;

/// Approximate duration of one round, with several lives of a server.
const ROUND: Duration = Duration::from_secs(24);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of rounds, each with new devices.
    pub rounds: u64,
    /// Number of connections of judged clients, by kind of export.
    pub clients: BTreeMap<String, u64>,
    /// Number of requests of judged clients, by kind of export and command.
    pub requests: BTreeMap<String, u64>,
    /// Number of requests that failed for an accepted reason, by kind of export, command and error.
    pub errors: BTreeMap<String, u64>,
    /// Number of verbs on the control socket, by name and outcome (`ok`, or the errno).
    pub verbs: BTreeMap<String, u64>,
    /// Number of verbs run by command line, by outcome.
    pub program: BTreeMap<String, u64>,
    /// Number of misbehaving clients, by behaviour.
    pub bad_clients: BTreeMap<String, u64>,
    /// Largest memory of a server after all devices were removed, in KiB.
    pub left_kib: u64,
    pub ends: BTreeMap<String, u64>,
    /// Number of devices and cut-off verbs judged after restarts of servers with a state directory,
    /// by result.
    pub restarts: BTreeMap<String, u64>,
}

/// A finding about the program, or a failure of the torture itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub seed: u64,
    /// Time from the start of the run to the failure.
    pub after: Duration,
    pub what: String,
    /// Operations in progress at the failure.
    pub running: String,
    /// The last lines of the server's log.
    pub log: String,
    /// Directory of the server, which is kept after the run.
    pub dir: PathBuf,
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
        writeln!(f, "largest memory of a server after all devices were removed: {} KiB", self.left_kib)?;
        let groups = [
            ("clients", &self.clients),
            ("requests checked", &self.requests),
            ("requests that failed for an accepted reason", &self.errors),
            ("verbs", &self.verbs),
            ("verbs by the program", &self.program),
            ("bad clients", &self.bad_clients),
            ("servers that ended", &self.ends),
            ("after restarts with a state directory", &self.restarts),
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

/// Runs the program at `binary` under load for this number of minutes.
pub fn run(seed: u64, minutes: f64, binary: &Path) -> Result<Report, Box<Failure>> {
    // Raise the limit of descriptors, since each client of a crowd needs one.
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // An error only means that crowds are smaller.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let time = Duration::from_secs_f64(minutes.max(0.0) * 60.0);
    let world = Arc::new(World::new(binary));
    let mut rng = Rng::new(seed);
    let mut rounds = 0;
    let mut outcome = measure_empty_server(&world);
    // Start the clock now: the measurement of the empty server does not count.
    let start = Instant::now();
    while let Ok(empty) = &outcome
        && start.elapsed() < time
    {
        let left = time.saturating_sub(start.elapsed());
        let result = round::run(&world, &mut rng, ROUND.min(left), empty);
        if let Err(what) = result {
            outcome = Err(what);
        } else if let Some(first_failure) = world.first_failure() {
            outcome = Err(first_failure.what);
        } else {
            rounds += 1;
        }
    }
    let report = Report::of(&world, rounds);
    outcome.map(|_| report.clone()).map_err(|what| {
        let (dir, after) = (world.dir(), start.elapsed());
        let running = world.first_failure().map(|first_failure| first_failure.running).unwrap_or_default();
        Box::new(Failure { seed, after, what, running, log: server::log_tail(&dir), dir, report })
    })
}

fn measure_empty_server(world: &World) -> Result<(server::Resources, u64), String> {
    let dir = tempfile::Builder::new().prefix("torture-empty-").tempdir().map_err(|e| e.to_string())?;
    world.set_dir(dir.path());
    // Include the log in the message, since the directory of the empty server is removed.
    let told = |what| format!("{what}\nits log ends with:\n{}", server::log_tail(dir.path()));
    round::empty_server(world, dir.path()).map_err(told)
}
