//! The tests of the libraries under the sanitizers of LLVM.
//!
//! The compiler of the stable channel is let use its unstable flag by `RUSTC_BOOTSTRAP`. The standard library is
//! the prebuilt one, so it is not instrumented: xtask/tsan/ tells `ThreadSanitizer` what it cannot see for that,
//! xtask/asan/ tells which leaks are meant. The C code of the codecs is not instrumented either.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

use crate::cargo::{self, Counts, Outcome, cargo};

/// With an explicit target, the flags do not reach build scripts and macros.
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
const PACKAGES: [&str; 3] = ["freestone", "freestone-nbd", "freestone-testkit"];
/// Suites that only the sweep of the slow lane runs under `ThreadSanitizer`: long ones in which next to nothing is shared.
const NO_RACES_TO_FIND: [&str; 8] = [
    "broken",
    "broken_zoned",
    "conformance_null",
    "cow_map_random",
    "family_model",
    "qcow2",
    "qcow2_full",
    "zones_model",
];
/// Suites that only the sweep runs under `AddressSanitizer`: what they run of the code without checked memory, others run, too.
const NO_MEMORY_TO_BREAK: [&str; 13] = [
    "broken",
    "broken_zoned",
    "conformance_layers",
    "conformance_null",
    "cow_map_random",
    "cow_merge",
    "cow_store",
    "faults",
    "family_model",
    "power",
    "qcow2",
    "zones_conformance",
    "zones_model",
];

/// Between the flags of `CARGO_ENCODED_RUSTFLAGS`, which may hold paths with blanks.
const ENCODED_SEPARATOR: &str = "\u{1f}";
/// What an instrumented `AtomicU64::fetch_sub` calls; `std_sync.c` wraps it too.
const FETCH_SUB: &str = "__tsan_atomic64_fetch_sub";
const RACES: &str = "xtask/tsan/suppressions";
const LEAKS: &str = "xtask/asan/leaks";
const STD_SYNC: &str = "xtask/tsan/std_sync.c";

/// The functions of the standard library that `std_sync.c` wraps: its name for each, and the parts of the mangled
/// name that tell it from all others.
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

/// The suites (files or directories in a package's tests/) to run.
fn suites(sanitizer: Sanitizer, extent: Extent) -> Result<Vec<String>> {
    let left_out: &[&str] = match sanitizer {
        Sanitizer::Thread => &NO_RACES_TO_FIND,
        Sanitizer::Address => &NO_MEMORY_TO_BREAK,
    };
    let mut all = Vec::new();
    for package in PACKAGES {
        let dir = Path::new("crates").join(package).join("tests");
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if path.join("main.rs").is_file() || path.extension().is_some_and(|end| end == "rs") {
                all.push(name);
            }
        }
    }
    if let Some(gone) = left_out.iter().find(|name| !all.iter().any(|suite| suite == *name)) {
        bail!("{gone}: there is no such suite any more; see xtask/src/sanitize.rs");
    }
    all.retain(|suite| left_out.contains(&suite.as_str()) == (extent == Extent::Rest));
    all.sort();
    Ok(all)
}

/// Unit, property, conformance and protocol tests of the libraries.
pub fn run(sanitizer: Sanitizer, extent: Extent) -> Result<Outcome> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        bail!("the sanitizers are set up for {TARGET} only");
    }
    let root = env::current_dir().context("the working directory is gone")?;
    let (name, dir) = match sanitizer {
        Sanitizer::Thread => ("thread", "target/tsan"),
        Sanitizer::Address => ("address", "target/asan"),
    };
    let mut flags = vec![format!("-Zsanitizer={name}"), "-Cunsafe-allow-abi-mismatch=sanitizer".to_owned()];
    // System calls go through libc, where the sanitizers see them. Else memory that one thread unmaps and another maps at
    // the same address looks like one that both write to.
    flags.extend(["--cfg", "rustix_use_libc"].map(str::to_owned));
    if sanitizer == Sanitizer::Thread {
        flags.extend(wrap_std(&root.join(dir))?);
    }
    let mut command = cargo();
    command.args(["test", "--target", TARGET, "--no-fail-fast"]);
    command.args(PACKAGES.iter().flat_map(|package| ["--package", package]));
    if extent != Extent::Rest {
        command.arg("--lib");
    }
    command.args(suites(sanitizer, extent)?.iter().flat_map(|suite| ["--test", suite]));
    // What a test prints while it is captured goes through code of the prebuilt library, and so do backtraces.
    command.args(["--", "--nocapture"]).env("RUST_BACKTRACE", "0");
    command.args(SKIPPED.iter().flat_map(|test| ["--skip", test]));
    command.env("CARGO_TARGET_DIR", dir);
    command.env("RUSTC_BOOTSTRAP", "1");
    command.env("CARGO_ENCODED_RUSTFLAGS", flags.join(ENCODED_SEPARATOR));
    command.env("PROPTEST_CASES", PROPTEST_CASES);
    command.env("FREESTONE_MODEL_SECONDS", "2").env("COW_ROUNDS", "1");
    let suppressions = |file| format!("suppressions='{}'", root.join(file).display());
    command.env("TSAN_OPTIONS", suppressions(RACES));
    command.env("LSAN_OPTIONS", suppressions(LEAKS) + ":print_suppressions=0");
    command.env("ASAN_OPTIONS", "detect_stack_use_after_return=1");
    let outcome = cargo::run(&mut command)?;
    if outcome.counts == Counts::default() {
        println!("no test ran");
        return Ok(Outcome { ok: false, ..outcome });
    }
    Ok(outcome)
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

/// The shared standard library of the target: its names are those of the static one, and it has a symbol table.
fn std_library() -> Result<PathBuf> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let dir = output(Command::new(rustc).args(["--print", "target-libdir", "--target", TARGET]))?;
    let dir = Path::new(dir.trim());
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let is_std = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libstd-") && name.ends_with(".so")
    };
    let found = entries.flatten().map(|entry| entry.path()).find(is_std);
    found.with_context(|| format!("no libstd-*.so in {}", dir.display()))
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
