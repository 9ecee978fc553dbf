//! Helpers to run programs of the system.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Error if `setpriv` cannot be started.
pub const NO_SETPRIV: &str = "cannot start setpriv; install the package util-linux";

/// Runs a program to its end and returns its output. The error names the program, and contains its
/// output or the package to install.
pub fn run(command: &mut Command, package: &str) -> Result<String> {
    let output = command.stdin(Stdio::null()).output();
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy();
    let output = output.with_context(|| format!("cannot start {name}; install the package {package}"))?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name}: {}", format!("{stdout}{stderr}").trim());
    Ok(stdout.into_owned())
}

/// Returns the first line of a program's `--version` output, or "not installed".
pub fn version(mut program: Command) -> String {
    let output = program.arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("not installed").to_owned()
}

/// Wraps a command with `setpriv` so that the kernel kills the process when this one dies in any
/// way. The process id stays the same.
pub fn die_with_parent(command: &Command) -> Command {
    let mut wrapped = Command::new("setpriv");
    wrapped.args(["--pdeathsig", "KILL"]).arg(command.get_program()).args(command.get_args());
    for (key, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(key, value),
            None => wrapped.env_remove(key),
        };
    }
    if let Some(dir) = command.get_current_dir() {
        wrapped.current_dir(dir);
    }
    wrapped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_returns_output_and_errors_contain_stderr() {
        let sh = |script: &str| run(Command::new("/bin/sh").args(["-c", script]), "dash");
        assert_eq!(sh("echo yes").unwrap(), "yes\n");
        let error = format!("{:#}", sh("echo half; echo no >&2; exit 3").unwrap_err());
        assert!(error.starts_with("sh: half") && error.contains("no"), "{error}");
        let error = format!("{:#}", run(&mut Command::new("/no/such"), "nothing").unwrap_err());
        assert!(error.contains("cannot start such; install the package nothing"), "{error}");
    }
}
