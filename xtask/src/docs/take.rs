//! Publishes a run: adds its date and removes the paths of files on one machine.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use freestone_report::Document;
use serde_json::Value;

use super::{CHARTS_DIR, RUNS_DIR, files, run_path};
use crate::cargo;

/// Directory to which benchmarks write their runs.
const OUT_DIR: &str = "benches/out";
/// Name of all experiments together, and of the subdirectory to which they write.
const REPRODUCE: &str = "reproduce";
const EXPERIMENT: &str = "experiment-";
/// Options whose values are paths; the published command omits them.
const PLACES: [&str; 7] =
    ["--json", "--baseline", "--data-dir", "--dir", "--out", "--freestone", "--peers-dir"];
/// Maximum load average at the start of a run: above it, other programs may distort the results.
const LOAD_MAX: f64 = 0.2;
/// Benchmark that counts instructions, which the load does not affect.
const COUNTS: &str = "gate";
/// Top-level directories that exist on every machine. Paths in them are kept.
const SYSTEM_DIRS: [&str; 4] = ["usr", "dev", "proc", "sys"];

pub fn take(name: &str) -> Result<()> {
    if name != REPRODUCE {
        return copy(&Path::new(OUT_DIR).join(format!("{name}.json")), name);
    }
    let dir = Path::new(OUT_DIR).join(REPRODUCE);
    let mut taken = 0;
    for path in files(&dir, "json")? {
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        if let Some(number) = stem.strip_prefix(EXPERIMENT) {
            copy(&path, &format!("{REPRODUCE}-{number}"))?;
            taken += 1;
        }
    }
    ensure!(taken > 0, "{} has no results of experiments", dir.display());
    Ok(())
}

fn copy(from: &Path, name: &str) -> Result<()> {
    let text = fs::read_to_string(from).with_context(|| format!("cannot read {}", from.display()))?;
    let mut value: Value =
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", from.display()))?;
    // Date of the file's modification, UTC.
    let date = cargo::output(Command::new("date").args(["-u", "+%F", "-r"]).arg(from))?;
    publish(&mut value, &date).with_context(|| from.display().to_string())?;
    let text = serde_json::to_string_pretty(&value)? + "\n";
    let run: Document = serde_json::from_value(value).with_context(|| from.display().to_string())?;
    for chart in run.charts() {
        fs::create_dir_all(CHARTS_DIR).with_context(|| format!("cannot make {CHARTS_DIR}"))?;
        let name = Path::new(chart).file_name().context("a chart without a name")?;
        let from = from.with_file_name(name);
        fs::copy(&from, Path::new(CHARTS_DIR).join(name))
            .with_context(|| format!("cannot copy {}", from.display()))?;
    }
    let to = run_path(name);
    fs::create_dir_all(RUNS_DIR).with_context(|| format!("cannot make {RUNS_DIR}"))?;
    fs::write(&to, text).with_context(|| format!("cannot write {}", to.display()))?;
    println!("{} -> {}, and {} charts", from.display(), to.display(), run.charts().count());
    Ok(())
}

fn publish(run: &mut Value, date: &str) -> Result<()> {
    let Some(command) = run.get("command").and_then(Value::as_str) else {
        bail!("is not a run of a benchmark")
    };
    ensure!(
        !command.split(' ').any(|word| word == "--quick"),
        "a smoke run (--quick) measures nothing useful"
    );
    if command.split(' ').nth(1) != Some(COUNTS) {
        let load = run["machine"]["load"].as_str().unwrap_or("unknown");
        ensure!(
            load.parse().is_ok_and(|load: f64| load <= LOAD_MAX),
            "the load was {load} at the start, at most {LOAD_MAX} is allowed: wait some minutes until the machine is idle, \
             and run the benchmark again"
        );
    }
    let command = as_typed(command);
    without_places(run);
    run["command"] = command.into();
    run["date"] = date.into();
    Ok(())
}

/// Returns the command as a user types it, without options for paths.
fn as_typed(command: &str) -> String {
    let mut words = vec!["cargo xtask bench".to_owned()];
    let mut given = command.split(' ').skip(1);
    while let Some(word) = given.next() {
        if PLACES.contains(&word) {
            given.next();
        } else if !PLACES.iter().any(|option| word.starts_with(&format!("{option}="))) {
            words.push(without_place(word));
        }
    }
    words.join(" ")
}

/// Replaces paths in all strings by the file names, except paths of system directories.
fn without_places(value: &mut Value) {
    match value {
        Value::String(text) => *text = text.split_inclusive(' ').map(without_place).collect(),
        Value::Array(values) => values.iter_mut().for_each(without_places),
        Value::Object(values) => values.values_mut().for_each(without_places),
        _ => {}
    }
}

fn without_place(word: &str) -> String {
    let Some(at) = word
        .find('/')
        .filter(|at| !word[..*at].ends_with(|c: char| c.is_alphanumeric() || c == ':' || c == '.'))
    else {
        return word.to_owned();
    };
    let path = &word[at + 1..];
    let first = path.split('/').next().unwrap_or_default();
    let is_system = SYSTEM_DIRS.contains(&first.trim_end_matches(|c: char| !c.is_alphanumeric()));
    // The slash is between words, or the path is in a system directory.
    if is_system || !path.contains('/') {
        return word.to_owned();
    }
    format!("{}{}", &word[..at], path.rsplit('/').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn publish_removes_paths() {
        let mut run = json!({
            "command": "/somewhere/me/target/release/freestone-benches zones --pairs 11 --json /var/x.json --against /somewhere/me/old",
            "machine": {"load": "0.20"},
            "reports": [{"data": "real: /somewhere/me/a.tar", "notes": ["of /usr/bin 12 %, packed / fio, Before: /somewhere/me/old."]}],
        });
        publish(&mut run, "2026-11-22").unwrap();
        assert_eq!(run["command"], "cargo xtask bench zones --pairs 11 --against old");
        assert_eq!(run["date"], "2026-11-22");
        let report = &run["reports"][0];
        assert_eq!(report["data"], "real: a.tar");
        assert_eq!(report["notes"][0], "of /usr/bin 12 %, packed / fio, Before: old.");
    }

    #[test]
    fn publish_refuses_run_under_load() {
        let run = |bench: &str, load: &str| {
            publish(&mut json!({"command": format!("x {bench} --pairs 3"), "machine": {"load": load}}), "d")
        };
        assert!(run("zones", "0.00").is_ok() && run("gate", "7.5").is_ok());
        let refused = run("zones", "0.21").unwrap_err().to_string();
        assert!(refused.starts_with("the load was 0.21 at the start, at most 0.2 is allowed"), "{refused}");
        assert!(run("zones", "").is_err());
    }

    #[test]
    fn publish_refuses_smoke_run() {
        assert!(publish(&mut json!({"command": "x zones --quick", "machine": {"load": "0"}}), "d").is_err());
        assert!(publish(&mut json!({"reports": []}), "d").is_err());
    }
}
