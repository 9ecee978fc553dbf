//! Starts clients and reads what they say.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use freestone_testkit::Rng;
pub use freestone_testkit::tools::find;
use freestone_testkit::tools::require_sudo;
use serde_json::Value;

use crate::harness::Serve;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;

/// A client that hangs is ended, so that a test which waits for it fails.
const CLIENT_SECONDS_MAX: u32 = 100;

/// A client, found in PATH or where Debian puts the tools of the administrator.
pub fn tool(name: &str) -> Command {
    let mut command = Command::new("timeout");
    command.arg("--kill-after=5").arg(CLIENT_SECONDS_MAX.to_string()).arg(find(name)).stdin(Stdio::null());
    command
}

/// The same with the rights of root, which mounting takes.
pub fn root_tool(name: &str) -> Command {
    if rustix::process::geteuid().is_root() {
        return tool(name);
    }
    require_sudo();
    let mut command = Command::new("sudo");
    command.args(["-n", "timeout", "--kill-after=5"]).arg(CLIENT_SECONDS_MAX.to_string()).arg(find(name));
    command.stdin(Stdio::null());
    command
}

/// Runs a client that must succeed. Returns what it says on stdout.
#[track_caller]
pub fn ok(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{err}", output.status);
    out.into_owned()
}

/// Runs lines of qemu-io in one session; patterns that do not match make it fail.
#[track_caller]
pub fn qemu_io(uri: &str, lines: &[impl AsRef<str>]) {
    let mut command = tool("qemu-io");
    command.args(["-f", "raw"]);
    // What is read-only has to be opened so.
    if lines.iter().all(|line| line.as_ref().starts_with("read")) {
        command.arg("-r");
    }
    for line in lines {
        command.args(["-c", line.as_ref()]);
    }
    let said = ok(command.arg(uri));
    assert!(!said.contains("failed"), "{said}");
}

/// Runs a client that must fail by itself. Returns all it says.
#[track_caller]
pub fn fails(command: &mut Command) -> String {
    const STATUS_OF_TIMEOUT: i32 = 124;
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    let code = output.status.code();
    assert!(code.is_some_and(|code| (1..STATUS_OF_TIMEOUT).contains(&code)), "{command:?}: {code:?}\n{said}");
    said
}

/// Runs a client that must succeed and speaks JSON.
#[track_caller]
pub fn json(command: &mut Command) -> Value {
    let text = ok(command);
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{command:?}: {e}\n{text}"))
}

/// The URI of an export on the server's Unix socket.
pub fn uri(serve: &Serve, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", serve.path("nbd").display())
}

/// A number in the statistics of a device.
#[track_caller]
pub fn stat(serve: &Serve, device: &str, section: &str, column: &str) -> u64 {
    let stat = serve.json(&["stat", device]);
    stat[section][column].as_u64().unwrap_or_else(|| panic!("no {section}.{column} in {stat}"))
}

pub fn sha256(file: &Path) -> String {
    ok(tool("sha256sum").arg("--").arg(file)).split(' ').next().unwrap().to_owned()
}

/// What a file takes on its disk, in bytes.
pub fn allocated(file: &Path) -> u64 {
    const SECTOR_BYTES: u64 = 512;
    fs::metadata(file).unwrap().blocks() * SECTOR_BYTES
}

/// Bytes that no codec makes smaller, the same for the same seed.
pub fn noise(seed: u64, length: u64) -> Vec<u8> {
    // The generator of the testkit is optimised, this program is not.
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

/// Returns true if all bytes are zero. Compares pages, as an unoptimised loop over bytes is slow.
pub fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(4096).all(|page| *page == [0; 4096][..page.len()])
}
