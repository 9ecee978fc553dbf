//! Programs of the system.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// What `setpriv` says when it is missing.
pub const NO_SETPRIV: &str = "setpriv could not be started; the package is called util-linux";

/// Runs a program to its end: what it prints. An error names the program and has what it complained
/// of, or the package that has it.
pub fn run(command: &mut Command, package: &str) -> Result<String> {
    let output = command.stdin(Stdio::null()).output();
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy();
    let output =
        output.with_context(|| format!("{name} could not be started; the package is called {package}"))?;
    let told = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name}: {}", format!("{told}{complaint}").trim());
    Ok(told.into_owned())
}

/// The first line of what a program says of its version.
pub fn version(mut program: Command) -> String {
    let output = program.arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output();
    let told = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    told.lines().next().unwrap_or("not installed").to_owned()
}

/// The same command, but the kernel ends it with us, also where nothing of ours runs any more; the
/// process keeps its number.
pub fn ends_with_us(command: &Command) -> Command {
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
    fn what_a_program_says_comes_back_and_what_it_complains_of_is_told() {
        let sh = |script: &str| run(Command::new("/bin/sh").args(["-c", script]), "dash");
        assert_eq!(sh("echo yes").unwrap(), "yes\n");
        let told = format!("{:#}", sh("echo half; echo no >&2; exit 3").unwrap_err());
        assert!(told.starts_with("sh: half") && told.contains("no"), "{told}");
        let told = format!("{:#}", run(&mut Command::new("/no/such"), "nothing").unwrap_err());
        assert!(told.contains("such could not be started; the package is called nothing"), "{told}");
    }
}
