//! The program `freestone` that is measured: the real one, of this workspace.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

const PACKAGE: &str = "freestone-cli";
const PROGRAM: &str = "freestone";

/// Where it is. Under cargo it is built first, so that nobody measures an old one.
pub fn program(named: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = named {
        ensure!(path.is_file(), "--freestone: there is no file {}", path.display());
        return path.canonicalize().with_context(|| format!("{}", path.display()));
    }
    let here = std::env::current_exe()?;
    let dir = here.parent().context("this program lies nowhere")?;
    if let Some(cargo) = std::env::var_os("CARGO") {
        // The directories are called after the profiles, but for dev's.
        let profile = match dir.file_name().and_then(|name| name.to_str()) {
            Some("debug") | None => "dev",
            Some(profile) => profile,
        };
        return build(Command::new(cargo), profile);
    }
    let beside = dir.join(PROGRAM);
    ensure!(
        beside.is_file(),
        "there is no {}: build it with `cargo build --release --package {PACKAGE}`, or name it with --freestone",
        beside.display()
    );
    Ok(beside)
}

fn build(mut cargo: Command, profile: &str) -> Result<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
    cargo
        .args(["build", "--quiet", "--package", PACKAGE, "--bin", PROGRAM, "--profile", profile])
        .args(["--message-format=json", "--manifest-path"])
        .arg(manifest);
    let output =
        cargo.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("cargo could not be started")?;
    let told = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{PROGRAM} could not be built: {}", complaints(&told));
    match executable(&told) {
        Some(path) => Ok(path),
        None => bail!("cargo built no {PROGRAM}"),
    }
}

fn messages(told: &str) -> impl Iterator<Item = Value> {
    told.lines().filter_map(|line| serde_json::from_str(line).ok())
}

/// Where cargo put the program, by its messages.
fn executable(told: &str) -> Option<PathBuf> {
    let ours = messages(told)
        .find(|message| message["target"]["name"] == PROGRAM && message["executable"].is_string());
    Some(PathBuf::from(ours?["executable"].as_str()?))
}

/// What the compiler said, for people.
fn complaints(told: &str) -> String {
    messages(told).filter_map(|message| message["message"]["rendered"].as_str().map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_s_messages_tell_where_the_program_is() {
        let told = "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"freestone\"},\"executable\":null}\n\
                    {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"other\"},\"executable\":\"a/other\"}\n\
                    {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"freestone\"},\"executable\":\"a/freestone\"}\n\
                    {\"reason\":\"compiler-message\",\"message\":{\"rendered\":\"error: no\"}}\n";
        assert_eq!(executable(told), Some(PathBuf::from("a/freestone")));
        assert_eq!(executable(""), None);
        assert_eq!(complaints(told), "error: no");
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = program(Some(Path::new("no/such/freestone"))).unwrap_err();
        assert!(error.to_string().contains("no/such/freestone"), "{error}");
    }
}
