//! The tests of the libraries under the sanitizers of LLVM.
//!
//! The compiler of the stable channel is let use its unstable flag by `RUSTC_BOOTSTRAP`. The
//! standard library is the prebuilt one, so it is not instrumented: xtask/tsan/ tells
//! `ThreadSanitizer` what it cannot see for that, xtask/asan/ tells which leaks are meant. The C
//! code of the codecs is not instrumented either.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

use crate::cargo::{self, Counts, Outcome, output};

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
    "freestone",
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
/// Those that only the sweep of the slow lane runs under a sanitizer: test tools share little, and
/// no other package has unchecked memory (one has a call with a structure, for a lock).
const NO_THREADS: [&str; 1] = ["freestone-testkit"];
const NO_UNSAFE: [&str; 5] =
    ["freestone-cow", "freestone-nbd", "freestone-nbd-client", "freestone-store", "freestone-testkit"];
/// Suites (directories in tests/), and modules of suites, that only the sweep runs under
/// `ThreadSanitizer`: long ones in which next to nothing is shared. Words of `--skip` are found
/// anywhere in a name: no other module's path may end in one of these.
const NO_RACES_TO_FIND: [&str; 35] = [
    "library::cow::conformance",
    "library::cow::failed_writes",
    "library::cow::map_random",
    "library::cow::store::bad_input",
    "library::cow::store::crash",
    "library::cow::store::merge",
    "library::devices::conformance_file",
    "library::devices::conformance_layers",
    "library::devices::conformance_null",
    "library::devices::conformance_ram",
    "library::devices::counting",
    "library::devices::null_memory",
    "library::family::hunt",
    "library::family::memory",
    "library::family::model",
    "library::faults::conformance",
    "library::faults::effects",
    "library::faults::repeat",
    "library::power::conformance",
    "library::power::database",
    "library::power::model",
    "library::power::recording",
    "library::power::units",
    "library::qcow2",
    "library::save::bad_files",
    "library::save::crash",
    "library::save::forged",
    "library::save::round_trips",
    "library::writeback::fault_sweep",
    "library::zones::conformance",
    "library::zones::model",
    "library::zones::state",
    "store::faults",
    "store::pushes",
    // It counts descriptors and memory, of which the sanitizer has its own.
    "leaks",
];
/// Those that only the sweep runs under `AddressSanitizer`: what they run of the code without
/// checked memory, others run, too.
const NO_MEMORY_TO_BREAK: [&str; 12] = [
    "library::cow",
    "library::devices::conformance_layers",
    "library::devices::conformance_null",
    "library::devices::counting",
    "library::family::hunt",
    "library::family::model",
    "library::faults",
    "library::power",
    "library::qcow2",
    "library::zones::conformance",
    "library::zones::model",
    "library::zones::state",
];

/// For cargo: a package's unit tests.
const LIB: &str = "--lib";
/// Between the flags of `CARGO_ENCODED_RUSTFLAGS`, which may hold paths with blanks.
const ENCODED_SEPARATOR: &str = "\u{1f}";
/// What an instrumented `AtomicU64::fetch_sub` calls; `std_sync.c` wraps it too.
const FETCH_SUB: &str = "__tsan_atomic64_fetch_sub";
const RACES: &str = "xtask/tsan/suppressions";
const LEAKS: &str = "xtask/asan/leaks";
const STD_SYNC: &str = "xtask/tsan/std_sync.c";
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

/// Which of the suites.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// What the gate runs: those that a sanitizer is for.
    Gate,
    /// What it leaves out.
    Rest,
}

/// A suite, and what of it runs.
struct Suite {
    package: &'static str,
    /// For cargo.
    targets: Vec<String>,
    /// For the test program: modules to run or to skip.
    arguments: Vec<String>,
}

/// The suites to run.
fn suites(sanitizer: Sanitizer, extent: Extent) -> Result<Vec<Suite>> {
    let (left_out, whole_packages): (&[&str], &[&str]) = match sanitizer {
        Sanitizer::Thread => (&NO_RACES_TO_FIND, &NO_THREADS),
        Sanitizer::Address => (&NO_MEMORY_TO_BREAK, &NO_UNSAFE),
    };
    let mut known = Vec::new();
    let mut suites = Vec::new();
    for package in PACKAGES {
        let package_is_left_out = whole_packages.contains(&package);
        if package != FACE && package_is_left_out == (extent == Extent::Rest) {
            suites.push(Suite { package, targets: vec![LIB.to_owned()], arguments: Vec::new() });
        }
        let dir = Path::new("crates").join(package).join("tests");
        for path in fs::read_dir(&dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
            if !path.join("main.rs").is_file() && path.extension().is_none_or(|end| end != "rs") {
                continue;
            }
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let whole = package_is_left_out || left_out.contains(&name.as_str());
            let parts = left_out.iter().filter_map(|left_out| left_out.strip_prefix(&format!("{name}::")));
            let parts: Vec<&str> = parts.filter(|part| is_module(&path, part)).collect();
            known.extend(whole.then(|| name.clone()));
            known.extend(parts.iter().map(|part| format!("{name}::{part}")));
            let words = parts.iter().map(|part| format!("{part}::"));
            let arguments: Option<Vec<String>> = match extent {
                Extent::Gate if whole => None,
                Extent::Gate => Some(words.flat_map(|part| ["--skip".to_owned(), part]).collect()),
                Extent::Rest if whole => Some(Vec::new()),
                Extent::Rest => Some(words.collect()).filter(|words: &Vec<_>| !words.is_empty()),
            };
            suites.extend(arguments.map(|arguments| Suite {
                package,
                targets: vec!["--test".to_owned(), name],
                arguments,
            }));
        }
    }
    if let Some(gone) = left_out.iter().find(|name| !known.iter().any(|known| known == *name)) {
        bail!("{gone}: there is no such suite any more; see xtask/src/sanitize.rs");
    }
    suites.sort_by(|a, b| (a.package, &a.targets).cmp(&(b.package, &b.targets)));
    Ok(suites)
}

/// Whether a suite has a module, by its path.
fn is_module(suite: &Path, path: &str) -> bool {
    let path = suite.join(path.replace("::", "/"));
    path.join("mod.rs").is_file() || path.with_extension("rs").is_file()
}

/// Unit, property, conformance and protocol tests of the libraries.
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
    let suites = suites(sanitizer, extent)?;
    let suppressions = |file| format!("suppressions='{}'", root.join(file).display());
    let test = |packages: &[&str], targets: &[String], arguments: &[&str]| -> Result<Outcome> {
        let mut command = cargo::tests();
        command.args(["--target", TARGET, "--no-fail-fast"]);
        command.args(packages.iter().flat_map(|package| ["--package", package]));
        command.args(targets).args(arguments);
        command.env("RUSTC_BOOTSTRAP", "1").env("RUST_BACKTRACE", "0");
        command.env("CARGO_ENCODED_RUSTFLAGS", flags.join(ENCODED_SEPARATOR));
        command.env("PROPTEST_CASES", PROPTEST_CASES);
        command.env("FREESTONE_MODEL_SECONDS", "2").env("COW_ROUNDS", "1");
        command.env("TSAN_OPTIONS", suppressions(RACES));
        command.env("LSAN_OPTIONS", suppressions(LEAKS) + ":print_suppressions=0");
        command.env("ASAN_OPTIONS", "detect_stack_use_after_return=1");
        cargo::run(&mut command)
    };
    let mut targets: Vec<String> = Vec::new();
    for suite in &suites {
        // Cargo takes `--lib` once, for all packages.
        let is_new = suite.targets[0] != LIB || !targets.iter().any(|target| target == LIB);
        targets.extend(suite.targets.iter().filter(|_| is_new).cloned());
    }
    let mut packages: Vec<&str> = suites.iter().map(|suite| suite.package).collect();
    packages.dedup();
    let mut all = test(&packages, &targets, &["--no-run"])?;
    if !all.ok {
        return Ok(all);
    }
    for Suite { package, targets, arguments } in &suites {
        // What a test prints while it is captured goes through code of the prebuilt library, and so
        // do backtraces.
        let mut words = vec!["--", "--nocapture"];
        words.extend(SKIPPED.iter().flat_map(|test| ["--skip", test]));
        words.extend(arguments.iter().map(String::as_str));
        let outcome = test(&[package], targets, &words)?;
        if outcome.counts == Counts::default() {
            println!("no test ran");
            all.ok = false;
        }
        all.ok &= outcome.ok;
        all.counts += outcome.counts;
    }
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
