//! Mode calls: a sweep of failing system calls. Each scene runs once to number the system calls of the server's own
//! code, then repeatedly, each time with one of them failing.
//!
//! A [`Case`] names a call, how it fails, for how long, and how the server ends. After the case, two servers without
//! failures are started and judged by the [oracle](crate::oracle). Every completed write must still be present or be
//! reported as lost. Nothing may hang, the server must start, its exit status must be correct, and a refusal must be
//! one sentence. The cases of a run are drawn from its seed; for each finding, the report contains the line that
//! repeats the case.

mod fault;
mod judge;
mod kinds;
mod life;
mod limits;
mod model;
mod scenes;
mod trace;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use freestone_testkit::Rng;
use tempfile::TempDir;

pub use self::fault::{Case, Site};
use self::fault::{End, Extent, FailureMode};
use self::life::{Life, RunDir};
use self::model::Model;
use self::scenes::{SCENES, Scene};
use self::trace::Arm;
use super::server::{self, Resources};

/// Number of calls of each kind and object that are made to fail, in addition to the last one.
const ORDINALS_MAX: u32 = 6;
/// Number of parallel runs. Scenes mostly wait for disks and timeouts, so this may exceed the number of CPUs.
const WORKERS: usize = 8;
/// Name of the directory in which a scene runs; copied from `KEPT_DIR` for each run.
const DIR: &str = "run";
const KEPT_DIR: &str = "prepared";
/// Name of the read-only file that is the base of forks.
const BASE: &str = "g.img";

#[derive(Debug, Clone, Default)]
pub struct CaseFilter {
    /// Scenes to run; empty for all.
    pub scenes: Vec<String>,
    /// Kinds of calls to fail; empty for all.
    pub calls: Vec<String>,
    /// Maximum number of cases; `None` for all, repeatedly until the time is over.
    pub cases: Option<usize>,
    /// Time after which no further case is started. With `None`, one round of cases is run.
    pub time: Option<Duration>,
    /// Ends the sweep after the first finding.
    pub is_first: bool,
}

/// A row of the table in a report: the numbers of one scene.
#[derive(Debug, Clone, Default)]
struct Row {
    /// Number of calls, and of calls that are made to fail.
    calls: usize,
    sites: usize,
    cases: usize,
    runs: usize,
    /// Number of runs in which the call of the case did not occur.
    unmet: usize,
    findings: usize,
}

/// The results of a sweep: a table of numbers, and the cases with findings.
#[derive(Debug, Clone, Default)]
pub struct Report {
    rows: BTreeMap<String, Row>,
    findings: Vec<(Case, Vec<String>)>,
}

impl Report {
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (case, what) in &self.findings {
            let what = what.first().and_then(|what| what.lines().next()).unwrap_or_default();
            writeln!(f, "{case}: {what}")?;
        }
        let head = ["scene", "calls", "sites", "cases", "runs", "unmet", "findings"];
        writeln!(
            f,
            "{:<10} {:>7} {:>7} {:>7} {:>7} {:>7} {:>9}",
            head[0], head[1], head[2], head[3], head[4], head[5], head[6]
        )?;
        for (scene, row) in &self.rows {
            let Row { calls, sites, cases, runs, unmet, findings } = row;
            writeln!(f, "{scene:<10} {calls:>7} {sites:>7} {cases:>7} {runs:>7} {unmet:>7} {findings:>9}")?;
        }
        Ok(())
    }
}

/// A scene whose first server has ended: the state from which each run starts.
struct PreparedScene {
    scene: &'static Scene,
    model: Model,
    // Declared before `root`: the file system must be unmounted before its directory is removed.
    disk: Option<limits::Disk>,
    root: TempDir,
}

impl PreparedScene {
    /// Prepares a scene. With `has_disk`, the scene has a file system of its own.
    fn new(scene: &'static Scene, program: &Path, has_disk: bool) -> Result<Self, String> {
        let root = tempfile::Builder::new().prefix("torture-calls-").tempdir().map_err(|e| e.to_string())?;
        let disk = has_disk.then(|| limits::Disk::mount(root.path())).transpose()?;
        let dir = root.path().join(DIR);
        fs::create_dir(&dir).map_err(|e| e.to_string())?;
        let mut model = Model::default();
        let devices = (scene.prepare)(&dir, &mut model);
        let words: Vec<&str> = scene.words.iter().copied().chain(devices).collect();
        let run_dir = RunDir { program, dir };
        let mut life = Life::start(&run_dir, &mut model, &words, Arm::Never, None)
            .map_err(|(said, ended)| format!("{}: {}: {said}", scene.name, ended.status))?;
        (scene.settle)(&mut life);
        let (ended, findings) = life.end(End::Terminated);
        if !findings.is_empty() {
            return Err(format!("{}: before any call failed: {findings:?}", scene.name));
        }
        if !ended.status.success() {
            return Err(format!("{}: {}\n{}", scene.name, ended.status, server::log_tail(&run_dir.dir)));
        }
        fs::remove_file(run_dir.dir.join(server::LOG)).map_err(|e| e.to_string())?;
        let prepared = Self { scene, model, disk, root };
        copy(&run_dir.dir, &prepared.root.path().join(KEPT_DIR))?;
        Ok(prepared)
    }

    /// Runs the scene once. `case`: the call to fail, or `None`. `held`: resources of the server at the end of the
    /// script if no call fails.
    fn run(&self, program: &Path, case: Option<&Case>, held: &Resources) -> Result<Run, String> {
        let dir = self.root.path().join(DIR);
        fs::remove_dir_all(&dir).map_err(|e| e.to_string())?;
        copy(&self.root.path().join(KEPT_DIR), &dir)?;
        if let Some(disk) = &self.disk {
            disk.begin_log(&dir.join(server::LOG)).map_err(|e| e.to_string())?;
        }
        let (mut model, run_dir) = (self.model.clone(), RunDir { program, dir });
        let Scene { words, arm, script, .. } = *self.scene;
        let started = Life::start(&run_dir, &mut model, words, arm, case);
        let mut run = Run::default();
        let is_exact = match started {
            Ok(mut life) => {
                let is_exact = !life.start_may_withhold();
                judge::update_visibility(&mut life, is_exact);
                script(&mut life);
                life.server.end_script();
                match case {
                    None => {
                        (run.script, run.held) = (life.server.sites().len(), life.most_resources());
                    }
                    Some(case) if case.is_short() => life.check_resources(held),
                    Some(_) => {}
                }
                let (ended, findings) = life.end(case.map_or(End::Terminated, |case| case.end));
                (run.hits, run.sites, run.findings) = (ended.hits, ended.sites, findings);
                !ended.is_killed && ended.status.success()
            }
            Err((said, ended)) => {
                run.hits = ended.hits;
                if ended.hits == 0 {
                    return Err(format!("{}: {}: {said}", self.scene.name, ended.status));
                }
                run.findings = failed_start(case, &run_dir, &said, &ended);
                // No client has written. A killed server may have done more than it reported, so its content is not
                // exact.
                !ended.is_killed
            }
        };
        if run.findings.is_empty() {
            run.findings = judge::judge(&run_dir, &mut model, words, is_exact);
        }
        if !run.findings.is_empty() {
            run.log = server::log_tail(&run_dir.dir);
        }
        Ok(run)
    }
}

/// Judges a server that did not start after a call failed.
fn failed_start(
    case: Option<&Case>,
    run_dir: &RunDir<'_>,
    said: &str,
    ended: &life::ServerExit,
) -> Vec<String> {
    let log = server::log_tail(&run_dir.dir);
    let mut findings = Vec::new();
    if said.starts_with("HANG") {
        findings.push(said.to_owned());
    } else if !ended.is_killed && ended.status.code() != Some(1) {
        findings.push(format!("the server died at the start: {}", ended.status));
    } else if !ended.is_killed && !log.lines().any(|line| line.contains("freestone: ")) {
        findings.push("the start fails without a message".to_owned());
    }
    let is_of_device = case.is_some_and(|case| {
        let object = &case.site.object;
        let is_its_own =
            Path::new(object).extension().is_some_and(|kind| kind == "img") || object.starts_with("exports/");
        // With more than one failure, a call of the server itself may fail as well.
        is_its_own && case.extent == Extent::Once
    });
    if is_of_device && !ended.is_killed {
        findings.push(format!("the server does not start because one device or export fails\n{log}"));
    }
    findings
}

#[derive(Default)]
struct Run {
    /// All numbered calls, in order.
    sites: Vec<Site>,
    /// Number of those calls before the end of the script.
    script: usize,
    /// Resources of the server at the end of the script, if no call fails.
    held: Resources,
    hits: u32,
    findings: Vec<String>,
    log: String,
}

/// Copies a directory. The base of forks is hard-linked: a saved fork whose base has another inode is withheld (content
/// not restored).
fn copy(from: &Path, to: &Path) -> Result<(), String> {
    let status = Command::new("cp").arg("-a").arg(from).arg(to).status().map_err(|e| e.to_string())?;
    if !status.success() {
        return Err(format!("cp: {status}"));
    }
    let (from, to) = (from.join(BASE), to.join(BASE));
    if from.exists() {
        fs::remove_file(&to).and_then(|()| fs::hard_link(&from, &to)).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Runs the cases drawn from the seed. If all of them have run before the time limit, draws more cases.
pub fn run_cases(seed: u64, choice: &CaseFilter, program: &Path) -> Result<Report, String> {
    let end = choice.time.map(|time| Instant::now() + time);
    let mut report = Report::default();
    let (mut runs, mut held) = (Vec::new(), BTreeMap::new());
    let named: Vec<_> = choice.scenes.iter().map(|name| scene_of(name)).collect::<Result<_, _>>()?;
    let all: Vec<_> = SCENES.iter().collect();
    for scene in if named.is_empty() { all } else { named } {
        let mut run = number(scene, program)?;
        held.insert(scene.name.to_owned(), std::mem::take(&mut run.held));
        let row = report.rows.entry(scene.name.to_owned()).or_default();
        (row.calls, row.sites) = (run.sites.len(), distinct(&run.sites).len());
        runs.push((scene.name, run));
    }
    for round in 0.. {
        let mut all = draw(&runs, choice, seed.wrapping_add(round));
        for (scene, _) in &runs {
            let of_scene = all.iter().filter(|case| case.scene == *scene).count();
            report.rows.entry((*scene).to_owned()).or_default().cases = of_scene;
        }
        all.truncate(choice.cases.unwrap_or(usize::MAX));
        if all.is_empty() {
            return Err("no case matches the choice".into());
        }
        let is_last = choice.cases.is_some();
        sweep(&mut report, all, &held, end, choice.is_first, program)?;
        let is_over = end.is_none_or(|end| Instant::now() >= end);
        if is_last || is_over || choice.is_first && !report.is_clean() {
            break;
        }
    }
    Ok(report)
}

/// Draws a case for each way in which each call of these scenes can fail, in random order. A case and its position
/// depend only on the seed and the call. A call that occurs only in some runs thus does not change other cases.
fn draw(runs: &[(&str, Run)], choice: &CaseFilter, seed: u64) -> Vec<Case> {
    let mut all = Vec::new();
    for (scene, run) in runs {
        all.extend(cases(scene, run, seed));
        // Mounting a file system and changing limits of another process require root.
        if rustix::process::geteuid().is_root() {
            all.extend(limits::cases(scene, seed));
        }
    }
    all.retain(|case| choice.calls.is_empty() || choice.calls.contains(&case.site.call));
    all.sort_by_cached_key(|case| Rng::new(hash(&(seed, case.to_string()))).word());
    all
}

/// Runs one case again, from its line in a report.
pub fn repeat(line: &str, program: &Path) -> Result<Report, String> {
    let case: Case = line.parse()?;
    let mut report = Report::default();
    report.rows.entry(case.scene.clone()).or_default().cases = 1;
    let held = BTreeMap::from([(case.scene.clone(), number(scene_of(&case.scene)?, program)?.held)]);
    sweep(&mut report, vec![case], &held, None, false, program)?;
    Ok(report)
}

/// Runs a scene without failing calls, to number its calls. Fails if the run has findings.
fn number(scene: &'static Scene, program: &Path) -> Result<Run, String> {
    let run = PreparedScene::new(scene, program, false)?.run(program, None, &Resources::default())?;
    if run.findings.is_empty() {
        return Ok(run);
    }
    Err(format!("{}: no call failed: {:?}\n{}", scene.name, run.findings, run.log))
}

fn scene_of(name: &str) -> Result<&'static Scene, String> {
    let scene = SCENES.iter().find(|scene| scene.name == name);
    scene.ok_or_else(|| format!("{name}: unknown scene"))
}

/// Runs cases in parallel, starting with the last, until all have run or the time is over.
fn sweep(
    report: &mut Report,
    cases: Vec<Case>,
    held: &BTreeMap<String, Resources>,
    end: Option<Instant>,
    is_first: bool,
    program: &Path,
) -> Result<(), String> {
    let (queue, outcome) = (Mutex::new(cases), Mutex::new((report, Ok(()))));
    let next = || {
        let is_late = end.is_some_and(|end| Instant::now() >= end);
        if is_late { None } else { queue.lock().unwrap_or_else(PoisonError::into_inner).pop() }
    };
    let work = || {
        let mut prepared: BTreeMap<(String, bool), PreparedScene> = BTreeMap::new();
        while let Some(case) = next() {
            let ran = run_case(&mut prepared, &case, &held[&case.scene], program);
            let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
            let (report, failed) = &mut *outcome;
            match ran {
                Ok(run) => {
                    let row = report.rows.entry(case.scene.clone()).or_default();
                    row.runs += 1;
                    row.unmet += usize::from(run.hits == 0);
                    if !run.findings.is_empty() {
                        row.findings += 1;
                        if is_first {
                            queue.lock().unwrap_or_else(PoisonError::into_inner).clear();
                        }
                        println!("{case}");
                        run.findings.iter().for_each(|what| println!("    {}", what.replace('\n', "\n    ")));
                        println!("    log: {}", run.log.replace('\n', "\n    log: "));
                        report.findings.push((case, run.findings));
                    }
                }
                Err(why) => {
                    *failed = Err(format!("{case}: {why}"));
                    return;
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(work);
        }
    });
    outcome.into_inner().unwrap_or_else(PoisonError::into_inner).1
}

fn run_case(
    prepared: &mut BTreeMap<(String, bool), PreparedScene>,
    case: &Case,
    held: &Resources,
    program: &Path,
) -> Result<Run, String> {
    let has_disk = limits::limit_of(Some(case)) == Some(limits::LimitKind::Room);
    let key = (case.scene.clone(), has_disk);
    if !prepared.contains_key(&key) {
        prepared.insert(key.clone(), PreparedScene::new(scene_of(&case.scene)?, program, has_disk)?);
    }
    prepared[&key].run(program, Some(case), held)
}

fn hash(what: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

/// Returns the calls to fail: of each kind and object, the first `ORDINALS_MAX` and the last one.
fn distinct(sites: &[Site]) -> Vec<Site> {
    let mut last: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    for site in sites {
        last.insert((&site.call, &site.object), site.nth);
    }
    let is_one = |site: &&Site| site.nth <= ORDINALS_MAX || last[&(&*site.call, &*site.object)] == site.nth;
    sites.iter().filter(is_one).cloned().collect()
}

/// Returns a case for each call and each way in which it can fail. How long calls fail and how the server ends is
/// drawn.
fn cases(scene: &str, run: &Run, seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    let of_script: BTreeSet<&Site> = run.sites[..run.script].iter().collect();
    for site in distinct(&run.sites) {
        let Some(kind) = site.kind() else { continue };
        for how in FailureMode::all(kind) {
            let mut rng = Rng::new(hash(&(seed, scene, &site, how)));
            let is_met = |extent: &&Extent| **extent != Extent::Script || of_script.contains(&site);
            let extents: Vec<&Extent> = how.extents().iter().filter(is_met).collect();
            let extent = *extents[rng.below(extents.len() as u64) as usize];
            // A server that is killed after the script does not make the calls of an orderly end.
            let ends: &[End] = if of_script.contains(&site) {
                &[End::Terminated, End::Terminated, End::Killed, End::AtCall]
            } else {
                &[End::Terminated, End::AtCall]
            };
            let end = ends[rng.below(ends.len() as u64) as usize];
            cases.push(Case { scene: scene.to_owned(), site: site.clone(), how, extent, end });
        }
    }
    cases
}
