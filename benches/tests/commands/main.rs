//! Tests of the benchmark program: every command runs and reports measured values. Speed is not
//! judged.

mod compare;
mod density;
mod quick;

use std::path::Path;
use std::process::Command;

use serde_json::Value;

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_freestone-benches"))
}

/// Runs a command that must succeed with `--json` and returns its reports.
fn run_and_read_reports(command: &mut Command, json: &Path) -> Vec<Value> {
    run_and_read_json(command.arg("--json").arg(json), json)["reports"].as_array().unwrap().clone()
}

/// Runs a command that must succeed and returns its JSON.
fn run_and_read_json(command: &mut Command, json: &Path) -> Value {
    let out = command.output().unwrap();
    let output = [out.stdout, out.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(out.status.success(), "{}\n{}", output[0], output[1]);
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
