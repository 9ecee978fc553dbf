//! The tests of the libraries under the sanitizers of LLVM.
//!
//! The compiler of the stable channel is let use its unstable flag by `RUSTC_BOOTSTRAP`. The
//! standard library is the prebuilt one, so it is not instrumented: xtask/tsan/ tells
//! `ThreadSanitizer` what it cannot see for that, xtask/asan/ tells which leaks are meant. The C
//! code of the codecs is not instrumented either.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

use crate::cargo::{self, Counts, LIB, Outcome, output};
use crate::content::Packages;
use crate::record::Record;

/// With an explicit target, the flags do not reach build scripts and macros: those are there from
/// the other builds.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Property tests run fewer cases: each costs ten times more.
const PROPTEST_CASES: &str = "16";
/// Tests that a sanitizer makes meaningless, with the reason.
const SKIPPED: [&str; 2] = [
    // Counts page faults; the shadow memory has its own.
    "no_page_fault_is_taken_under_a_stream",
    // Measures the process's memory, to which the shadow is added.
    "memory_is_bounded",
];

/// Packages whose tests run.
const PACKAGES: [&str; 13] = [
    FACE,
    "freestone-core",
    "freestone-cow",
    "freestone-drive",
    "freestone-image",
    "freestone-nbd",
    "freestone-nbd-client",
    "freestone-ram",
    "freestone-rbd",
    "freestone-store",
    "freestone-testkit",
    "freestone-ublk",
    "freestone-vhost-user",
];
/// It has the tests of all devices together, and no code.
const FACE: &str = "freestone";

/// What the gate runs of a package's tests: a suite, which is a directory or file of tests/ or `LIB`,
/// and the modules of it, all where none is named.
type InGate = (&'static str, &'static str, &'static [&'static str]);
/// Under `ThreadSanitizer`: where threads share the most. All else is run by the slow lane.
const WHERE_RACES_ARE: [InGate; 12] = [
    (FACE, "library", &RACING_MODULES),
    ("freestone-core", LIB, &[]),
    ("freestone-cow", LIB, &[]),
    ("freestone-drive", LIB, &[]),
    ("freestone-nbd", LIB, &[]),
    ("freestone-nbd", "server", &["places", "waiting", "workers"]),
    ("freestone-ram", LIB, &[]),
    ("freestone-store", LIB, &[]),
    ("freestone-store", "store", &["reads"]),
    ("freestone-ublk", LIB, &[]),
    ("freestone-vhost-user", LIB, &[]),
    ("freestone-vhost-user", "conformance", &[]),
];
const RACING_MODULES: [&str; 13] = [
    "cow::older",
    "cow::store::groups",
    "devices::file_changes",
    "devices::file_stress",
    "devices::limited",
    "devices::null_threads",
    "family::race",
    "faults::running",
    "faults::waiting",
    "save::moments",
    "writeback::passes",
    "writeback::watched",
    "zones::threads",
];
/// Under `AddressSanitizer`: packages most of whose memory the language does not check.
const WHERE_MEMORY_IS_UNCHECKED: [InGate; 6] = [
    ("freestone-core", LIB, &[]),
    ("freestone-ram", LIB, &[]),
    ("freestone-ublk", LIB, &[]),
    ("freestone-vhost-user", LIB, &[]),
    ("freestone-vhost-user", "calls", &[]),
    ("freestone-vhost-user", "conformance", &[]),
];

/// Between the flags of `CARGO_ENCODED_RUSTFLAGS`, which may hold paths with blanks.
const ENCODED_SEPARATOR: &str = "\u{1f}";
/// What an instrumented `AtomicU64::fetch_sub` calls; `std_sync.c` wraps it too.
const FETCH_SUB: &str = "__tsan_atomic64_fetch_sub";
const RACES: &str = "xtask/tsan/suppressions";
const LEAKS: &str = "xtask/asan/leaks";
const STD_SYNC: &str = "xtask/tsan/std_sync.c";
/// What the checks depend on beside the packages.
const OWN_FILES: [&str; 3] = ["xtask/src/sanitize.rs", "xtask/tsan", "xtask/asan"];
/// Target directory of the sanitizers, below the other builds'. `RUSTC_BOOTSTRAP` changes the build scripts of crates
/// that everything else depends on, and the other builds would start anew.
const BUILD_DIR: &str = "sanitizers";
/// Where `std_sync.c` is compiled to.
const WRAPPERS_DIR: &str = "target/tsan";

/// The functions of the standard library that `std_sync.c` wraps: its name for each, and the parts
/// of the mangled name that tell it from all others.
const WRAPPED: [(&str, &[&str]); 7] = [
    ("MUTEX_LOCK_CONTENDED", &["5mutex5futex", "5Mutex14lock_contended"]),
    ("RWLOCK_READ_CONTENDED", &["6rwlock5futex", "6RwLock14read_contended"]),
    ("RWLOCK_WRITE_CONTENDED", &["6rwlock5futex", "6RwLock15write_contended"]),
    ("CONDVAR_WAIT", &["7condvar5futex", "7Condvar4wait"]),
    ("CONDVAR_WAIT_TIMEOUT", &["7condvar5futex", "7Condvar12wait_timeout"]),
    ("ONCE_CALL", &["4once5futex", "4Once4call"]),
    ("SCOPE_THREAD_ENDS", &["6scoped", "9ScopeData29decrement_num_running_threads"]),
];

/// Which one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sanitizer {
    /// Data races
    Thread,
    /// Memory errors and leaks
    Address,
}

/// Which of the suites run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Those of the gate, of packages that have changed since they last passed.
    Gate,
    /// All others.
    Rest,
    /// The others of [`FACE`], which has the tests of all devices together.
    RestOfDevices,
    /// The others of all packages but [`FACE`].
    RestOfCrates,
}

impl Extent {
    fn has(self, package: &str) -> bool {
        match self {
            Self::Gate | Self::Rest => true,
            Self::RestOfDevices => package == FACE,
            Self::RestOfCrates => package != FACE,
        }
    }
}

/// A suite, and what of it runs.
struct Suite {
    package: &'static str,
    name: String,
    /// For the test program: modules to run or to skip.
    arguments: Vec<String>,
}

/// The suites to run.
fn suites(sanitizer: Sanitizer, extent: Extent) -> Result<Vec<Suite>> {
    let in_gate: &[InGate] = match sanitizer {
        Sanitizer::Thread => &WHERE_RACES_ARE,
        Sanitizer::Address => &WHERE_MEMORY_IS_UNCHECKED,
    };
    let mut found = 0;
    let mut suites = Vec::new();
    for package in PACKAGES.into_iter().filter(|package| extent.has(package)) {
        let dir = Path::new("crates").join(package).join("tests");
        let mut names: Vec<String> = Vec::new();
        names.extend((package != FACE).then(|| LIB.to_owned()));
        for path in fs::read_dir(&dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
            if path.join("main.rs").is_file() || path.extension().is_some_and(|end| end == "rs") {
                names.push(path.file_stem().unwrap_or_default().to_string_lossy().into_owned());
            }
        }
        names.sort();
        for name in names {
            let listed = in_gate.iter().find(|(of, suite, _)| *of == package && *suite == name);
            found += usize::from(listed.is_some());
            let modules = listed.map_or(&[][..], |(_, _, modules)| modules);
            if let Some(gone) = modules.iter().find(|module| !is_module(&dir.join(&name), module)) {
                bail!(
                    "{package} {name}::{gone}: there is no such module any more; see xtask/src/sanitize.rs"
                );
            }
            // A word is found anywhere in a test's path: no other module's path may end in one of these.
            let words = modules.iter().map(|module| format!("{module}::"));
            let arguments: Option<Vec<String>> = match (extent, listed) {
                (Extent::Gate, None) => None,
                (Extent::Gate, Some(_)) => Some(words.collect()),
                (_, Some(_)) if modules.is_empty() => None,
                (_, _) => Some(words.flat_map(|word| ["--skip".to_owned(), word]).collect()),
            };
            suites.extend(arguments.map(|arguments| Suite { package, name, arguments }));
        }
    }
    if found < in_gate.iter().filter(|(package, ..)| extent.has(package)).count() {
        bail!("the gate names suites that are no more; see xtask/src/sanitize.rs");
    }
    Ok(suites)
}

/// Whether a suite has a module, by its path.
fn is_module(suite: &Path, path: &str) -> bool {
    let path = suite.join(path.replace("::", "/"));
    path.join("mod.rs").is_file() || path.with_extension("rs").is_file()
}

/// Name of a package's check in the record.
fn check(sanitizer: &str, package: &str) -> String {
    format!("{sanitizer} {package}")
}

/// Runs unit, property, conformance and protocol tests of the libraries.
pub fn run(sanitizer: Sanitizer, extent: Extent) -> Result<Outcome> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        bail!("the sanitizers are set up for {TARGET} only");
    }
    let root = env::current_dir().context("the working directory is gone")?;
    let name = match sanitizer {
        Sanitizer::Thread => "thread",
        Sanitizer::Address => "address",
    };
    let mut flags = vec![format!("-Zsanitizer={name}"), "-Cunsafe-allow-abi-mismatch=sanitizer".to_owned()];
    // System calls go through libc, where the sanitizers see them. Else memory that one thread
    // unmaps and another maps at the same address looks like one that both write to.
    flags.extend(["--cfg", "rustix_use_libc"].map(str::to_owned));
    if sanitizer == Sanitizer::Thread {
        flags.extend(wrap_std(&root.join(WRAPPERS_DIR))?);
    }
    let mut suites = suites(sanitizer, extent)?;
    let mut contents = BTreeMap::new();
    if extent == Extent::Gate {
        let record = Record::read()?;
        let packages = Packages::read()?;
        for Suite { package, .. } in &suites {
            if !contents.contains_key(package) {
                contents.insert(*package, packages.content(&[package], &OWN_FILES)?);
            }
        }
        contents.retain(|package, content| !record.has_passed(&check(name, package), content));
        suites.retain(|suite| contents.contains_key(suite.package));
        if suites.is_empty() {
            println!("no package has changed since its suites last passed");
            return Ok(Outcome::of(true));
        }
    }
    let suppressions = |file| format!("suppressions='{}'", root.join(file).display());
    let mut build = cargo::cargo();
    build.arg("test");
    build.args(["--target", TARGET, "--no-run"]);
    build.env("CARGO_TARGET_DIR", cargo::target_dir().join(BUILD_DIR));
    build.env("RUSTC_BOOTSTRAP", "1").env("CARGO_ENCODED_RUSTFLAGS", flags.join(ENCODED_SEPARATOR));
    let packages: BTreeSet<&str> = suites.iter().map(|suite| suite.package).collect();
    build.args(packages.iter().flat_map(|package| ["--package", package]));
    // Cargo takes each once, for all packages.
    let names: BTreeSet<&str> = suites.iter().map(|suite| suite.name.as_str()).collect();
    for name in names {
        if name == LIB {
            build.arg("--lib")
        } else {
            build.args(["--test", name])
        };
    }
    let Some(programs) = cargo::test_programs(&mut build)? else {
        return Ok(Outcome::default());
    };
    let mut all = Outcome::of(true);
    for Suite { package, name, arguments } in &suites {
        let program = programs.iter().find(|program| program.package == *package && program.suite == *name);
        let program = program.with_context(|| format!("{package}: cargo has not built its suite {name}"))?;
        let mut command = program.command();
        // What a test prints while it is captured goes through code of the prebuilt library, and so
        // do backtraces.
        command.arg("--nocapture").env("RUST_BACKTRACE", "0");
        command.args(SKIPPED.iter().flat_map(|test| ["--skip", test])).args(arguments);
        command.env("PROPTEST_CASES", PROPTEST_CASES);
        command.env("FREESTONE_MODEL_SECONDS", "2").env("COW_ROUNDS", "1");
        command.env("TSAN_OPTIONS", suppressions(RACES));
        command.env("LSAN_OPTIONS", suppressions(LEAKS) + ":print_suppressions=0");
        command.env("ASAN_OPTIONS", "detect_stack_use_after_return=1");
        let mut outcome = cargo::run(&mut command)?;
        if outcome.counts == Counts::default() {
            println!("no test ran");
            outcome.ok = false;
        }
        if !outcome.ok {
            contents.remove(package);
        }
        all.add(outcome);
    }
    let mut record = Record::read()?;
    for (package, content) in contents {
        record.pass(&check(name, package), &content)?;
    }
    record.write()?;
    Ok(all)
}

/// Compiles `std_sync.c` for this compiler's standard library. Returns the flags that link it.
fn wrap_std(dir: &Path) -> Result<Vec<String>> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let library = std_library()?;
    let symbols = output(Command::new("nm").args(["-D", "--defined-only"]).arg(&library))?;
    let object = dir.join("std_sync.o");
    let mut flags = vec![format!("-Clink-arg={}", object.display())];
    flags.push(format!("-Clink-arg=-Wl,--wrap={FETCH_SUB}"));
    let mut compile = Command::new("cc");
    compile.args(["-O1", "-g", "-c", STD_SYNC, "-o"]).arg(&object);
    for (name, parts) in WRAPPED {
        let symbol = symbols
            .lines()
            .filter_map(|line| line.split_whitespace().nth(2))
            .find(|symbol| parts.iter().all(|part| symbol.contains(part)) && symbol.ends_with(parts[1]))
            .with_context(|| {
                format!("{}: no {name}: {STD_SYNC} does not fit this version of Rust", library.display())
            })?;
        compile.arg(format!("-D{name}={symbol}"));
        flags.push(format!("-Clink-arg=-Wl,--wrap={symbol}"));
    }
    output(&mut compile)?;
    Ok(flags)
}

/// The shared standard library of the target: its names are those of the static one, and it has a
/// symbol table.
fn std_library() -> Result<PathBuf> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let dir = output(Command::new(rustc).args(["--print", "target-libdir", "--target", TARGET]))?;
    let dir = Path::new(&dir);
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let is_std = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libstd-") && name.ends_with(".so")
    };
    let found = entries.flatten().map(|entry| entry.path()).find(is_std);
    found.with_context(|| format!("no libstd-*.so in {}", dir.display()))
}
