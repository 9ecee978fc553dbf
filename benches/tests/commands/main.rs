//! The program of the benchmarks: every command runs and says what it measured. Speed is not judged
//! here.

mod compare;
mod quick;

use std::path::Path;
use std::process::Command;

use serde_json::Value;

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_freestone-benches"))
}

/// The reports of a command that writes to `json`, and has to succeed.
fn reported(command: &mut Command, json: &Path) -> Vec<Value> {
    document(command.arg("--json").arg(json), json)["reports"].as_array().unwrap().clone()
}

/// What a command that has to succeed writes.
fn document(command: &mut Command, json: &Path) -> Value {
    let out = command.output().unwrap();
    let told = [out.stdout, out.stderr].map(|told| String::from_utf8_lossy(&told).into_owned());
    assert!(out.status.success(), "{}\n{}", told[0], told[1]);
    serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap()
}

fn names(reports: &[Value]) -> Vec<&str> {
    reports.iter().map(|report| report["name"].as_str().unwrap()).collect()
}

fn row<'v>(report: &'v Value, what: &str) -> &'v Value {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().find(|row| row["what"] == what).unwrap_or_else(|| panic!("no row {what} in {report}"))
}

fn part(row: &Value, name: &str) -> f64 {
    let parts = row["parts"].as_array().unwrap();
    let part = parts.iter().find(|part| part[0] == name).unwrap_or_else(|| panic!("no {name} in {row}"));
    part[1].as_f64().unwrap()
}
