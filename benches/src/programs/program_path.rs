//! Path of the `freestone` program that is measured. Under cargo it is built first.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

const PACKAGE: &str = "freestone-cli";
const PROGRAM: &str = "freestone";

/// Returns the path of the `freestone` program. Under cargo the workspace's program is built first,
/// so that an outdated one is never measured.
pub fn program(named: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = named {
        ensure!(path.is_file(), "--freestone: no such file: {}", path.display());
        return path.canonicalize().with_context(|| format!("{}", path.display()));
    }
    let here = std::env::current_exe()?;
    let dir = here.parent().context("this program has no directory")?;
    if let Some(cargo) = std::env::var_os("CARGO") {
        // Cargo's output directories have the names of the profiles, except for that of the dev
        // profile.
        let profile = match dir.file_name().and_then(|name| name.to_str()) {
            Some("debug") | None => "dev",
            Some(profile) => profile,
        };
        return build(Command::new(cargo), profile);
    }
    let beside = dir.join(PROGRAM);
    ensure!(
        beside.is_file(),
        "{} does not exist: build it with `cargo build --release --package {PACKAGE} --features full`, or name it with --freestone",
        beside.display()
    );
    Ok(beside)
}

fn build(mut cargo: Command, profile: &str) -> Result<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
    cargo
        .args(["build", "--quiet", "--package", PACKAGE, "--features", "full"])
        .args(["--bin", PROGRAM, "--profile", profile])
        .args(["--message-format=json", "--manifest-path"])
        .arg(manifest);
    let output =
        cargo.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    let messages = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{PROGRAM} could not be built: {}", compiler_messages(&messages));
    match executable(&messages) {
        Some(path) => Ok(path),
        None => bail!("cargo built no {PROGRAM}"),
    }
}

fn parse_messages(output: &str) -> impl Iterator<Item = Value> {
    output.lines().filter_map(|line| serde_json::from_str(line).ok())
}

/// Returns the path of the built program from cargo's messages.
fn executable(output: &str) -> Option<PathBuf> {
    let ours = parse_messages(output)
        .find(|message| message["target"]["name"] == PROGRAM && message["executable"].is_string());
    Some(PathBuf::from(ours?["executable"].as_str()?))
}

fn compiler_messages(output: &str) -> String {
    parse_messages(output)
        .filter_map(|message| message["message"]["rendered"].as_str().map(str::to_owned))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executable_is_found_in_cargo_messages() {
        let output = "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"freestone\"},\"executable\":null}\n\
                    {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"other\"},\"executable\":\"a/other\"}\n\
                    {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"freestone\"},\"executable\":\"a/freestone\"}\n\
                    {\"reason\":\"compiler-message\",\"message\":{\"rendered\":\"error: no\"}}\n";
        assert_eq!(executable(output), Some(PathBuf::from("a/freestone")));
        assert_eq!(executable(""), None);
        assert_eq!(compiler_messages(output), "error: no");
    }

    #[test]
    fn missing_program_is_named_in_error() {
        let error = program(Some(Path::new("no/such/freestone"))).unwrap_err();
        assert!(error.to_string().contains("no/such/freestone"), "{error}");
    }
}
