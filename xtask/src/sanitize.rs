//! Runs the tests of the libraries under the sanitizers of LLVM.
//!
//! `RUSTC_BOOTSTRAP` makes the stable compiler accept the unstable flag. The prebuilt standard library and the C code
//! of the codecs are not instrumented. xtask/tsan/ describes the standard library's synchronisation to
//! `ThreadSanitizer`; xtask/asan/ lists intended leaks.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

use crate::cargo::{self, Counts, LIB, Outcome, output};
use crate::record::Record;
use crate::record::content::Packages;

/// Target of the builds. With an explicit target, cargo does not pass the flags to build scripts and macros.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Number of cases of each property test. A case takes ten times longer under a sanitizer.
const PROPTEST_CASES: &str = "16";
/// Tests whose measurements a sanitizer distorts.
const SKIPPED: [&str; 2] = [
    // Counts page faults, to which the sanitizer's shadow memory adds.
    "compress_takes_no_page_fault",
    // Measures the memory of the process, which includes the sanitizer's shadow memory.
    "memory_is_bounded",
];

/// Packages whose tests run under the sanitizers.
const PACKAGES: [&str; 17] = [
    FACADE,
    "freestone-codec",
    "freestone-core",
    "freestone-cow",
    "freestone-drive",
    "freestone-explore",
    "freestone-image",
    "freestone-nbd",
    "freestone-nbd-client",
    "freestone-ram",
    "freestone-rbd",
    "freestone-save",
    "freestone-spill",
    "freestone-store",
    "freestone-testkit",
    "freestone-ublk",
    "freestone-vhost-user",
];
/// Package with the tests of all devices together, and no code of its own.
const FACADE: &str = "freestone";

/// Tests that the gate runs: package, suite (a directory or file of tests/, or `LIB`), and modules of the suite. An
/// empty list of modules selects all modules.
type InGate = (&'static str, &'static str, &'static [&'static str]);
/// Suites of the gate under `ThreadSanitizer`: those whose code shares the most data between threads. The slow lane
/// runs the other suites.
const WHERE_RACES_ARE: [InGate; 17] = [
    (FACADE, "library", &RACING_MODULES),
    ("freestone-codec", LIB, &[]),
    ("freestone-core", LIB, &[]),
    ("freestone-cow", LIB, &[]),
    ("freestone-cow", "snapshots", &["older", "store::groups"]),
    ("freestone-drive", LIB, &[]),
    ("freestone-drive", "drives", &["faults::running", "faults::waiting", "zones::threads"]),
    ("freestone-nbd", LIB, &[]),
    ("freestone-nbd", "server", &["connections::places", "requests::waiting", "requests::workers"]),
    ("freestone-ram", LIB, &[]),
    ("freestone-save", LIB, &[]),
    ("freestone-spill", LIB, &[]),
    ("freestone-store", LIB, &[]),
    ("freestone-store", "store", &["reads"]),
    ("freestone-ublk", LIB, &[]),
    ("freestone-vhost-user", LIB, &[]),
    ("freestone-vhost-user", "conformance", &[]),
];
const RACING_MODULES: [&str; 8] = [
    "devices::file_changes",
    "devices::file_stress",
    "devices::limited",
    "devices::null_threads",
    "family::race",
    "save::moments",
    "writeback::passes",
    "writeback::watched",
];
/// Suites of the gate under `AddressSanitizer`: those of packages with the most unsafe memory accesses.
const WHERE_MEMORY_IS_UNCHECKED: [InGate; 9] = [
    ("freestone-codec", LIB, &[]),
    ("freestone-core", LIB, &[]),
    ("freestone-ram", LIB, &[]),
    ("freestone-save", LIB, &[]),
    ("freestone-spill", LIB, &[]),
    ("freestone-ublk", LIB, &[]),
    ("freestone-vhost-user", LIB, &[]),
    ("freestone-vhost-user", "calls", &[]),
    ("freestone-vhost-user", "conformance", &[]),
];

/// Separator of the flags in `CARGO_ENCODED_RUSTFLAGS`, which may contain paths with spaces.
const ENCODED_SEPARATOR: &str = "\u{1f}";
/// Function that an instrumented `AtomicU64::fetch_sub` calls. `std_sync.c` wraps this function.
const FETCH_SUB: &str = "__tsan_atomic64_fetch_sub";
const RACES: &str = "xtask/tsan/suppressions";
const LEAKS: &str = "xtask/asan/leaks";
const STD_SYNC: &str = "xtask/tsan/std_sync.c";
/// Files that affect the checks, besides the packages.
const OWN_FILES: [&str; 3] = ["xtask/src/sanitize.rs", "xtask/tsan", "xtask/asan"];
/// Target directory of the sanitizers, below that of other builds. A shared directory would rebuild everything each time,
/// because `RUSTC_BOOTSTRAP` changes build scripts of common dependencies.
const BUILD_DIR: &str = "sanitizers";
/// Directory of the object file of `std_sync.c`.
const WRAPPERS_DIR: &str = "target/tsan";

/// Functions of the standard library that `std_sync.c` wraps: the macro for the mangled name, and the parts by which
/// the mangled name is found.
const WRAPPED: [(&str, &[&str]); 7] = [
    ("MUTEX_LOCK_CONTENDED", &["5mutex5futex", "5Mutex14lock_contended"]),
    ("RWLOCK_READ_CONTENDED", &["6rwlock5futex", "6RwLock14read_contended"]),
    ("RWLOCK_WRITE_CONTENDED", &["6rwlock5futex", "6RwLock15write_contended"]),
    ("CONDVAR_WAIT", &["7condvar5futex", "7Condvar4wait"]),
    ("CONDVAR_WAIT_TIMEOUT", &["7condvar5futex", "7Condvar12wait_timeout"]),
    ("ONCE_CALL", &["4once5futex", "4Once4call"]),
    ("SCOPE_THREAD_ENDS", &["6scoped", "9ScopeData29decrement_num_running_threads"]),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sanitizer {
    /// Data races
    Thread,
    /// Memory errors and leaks
    Address,
}

/// Set of suites to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Suites of the gate, for packages that have changed since they last passed.
    Gate,
    /// Suites outside the gate.
    Rest,
    /// Suites of [`FACADE`] outside the gate.
    RestOfDevices,
    /// Suites of the other packages outside the gate.
    RestOfCrates,
}

impl Extent {
    fn has(self, package: &str) -> bool {
        match self {
            Self::Gate | Self::Rest => true,
            Self::RestOfDevices => package == FACADE,
            Self::RestOfCrates => package != FACADE,
        }
    }
}

struct Suite {
    package: &'static str,
    name: String,
    /// Arguments of the test program: modules to run or to skip.
    arguments: Vec<String>,
}

/// Returns the suites to run. Fails if a suite or module of the gate does not exist.
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
        names.extend((package != FACADE).then(|| LIB.to_owned()));
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
                bail!("{package} {name}::{gone}: the module does not exist; correct xtask/src/sanitize.rs");
            }
            // The test program matches a filter anywhere in a test's path, so no other module's path may end in one of
            // these names.
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
        bail!("the gate lists suites that do not exist; correct xtask/src/sanitize.rs");
    }
    Ok(suites)
}

/// Returns true if a suite has a module, by its path.
fn is_module(suite: &Path, path: &str) -> bool {
    let path = suite.join(path.replace("::", "/"));
    path.join("mod.rs").is_file() || path.with_extension("rs").is_file()
}

/// Returns the name of a package's check in the record.
fn check(sanitizer: &str, package: &str) -> String {
    format!("{sanitizer} {package}")
}

/// Builds and runs the suites, and records packages that passed.
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
    // The sanitizers intercept system calls in libc only. Without the interception, memory that one thread unmaps and
    // another thread maps at the same address looks like a race.
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
    // Cargo accepts each name only once, for all packages.
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
        // Capturing output and printing backtraces would run code of the standard library, which is not instrumented.
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

/// Returns the path of the shared standard library of the target. Its symbols are those of the static library, and it has
/// a symbol table.
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
