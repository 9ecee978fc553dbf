//! Functions that run client programs and return their output.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use freestone_testkit::Rng;
pub use freestone_testkit::tools::find;
use freestone_testkit::tools::require_sudo;
use serde_json::Value;

use super::server::Serve;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;

/// Seconds after which a hanging client is killed, so that its test fails.
const CLIENT_SECONDS_MAX: u32 = 100;

/// Returns a command for a client program under timeout(1). The program is found in PATH or in
/// Debian's directories for administrators.
pub fn tool(name: &str) -> Command {
    let mut command = Command::new("timeout");
    command.arg("--kill-after=5").arg(CLIENT_SECONDS_MAX.to_string()).arg(find(name)).stdin(Stdio::null());
    command
}

/// Returns a command for a client program with root rights, which mounting needs.
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

/// Runs a client program that must succeed. Returns its stdout.
#[track_caller]
pub fn ok(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{err}", output.status);
    out.into_owned()
}

/// Runs commands in one qemu-io session. Fails if a command fails or a read does not match its
/// pattern.
#[track_caller]
pub fn qemu_io(uri: &str, lines: &[impl AsRef<str>]) {
    let mut command = tool("qemu-io");
    command.args(["-f", "raw"]);
    // If all commands are reads, the export may be read-only, so qemu-io must open it read-only.
    if lines.iter().all(|line| line.as_ref().starts_with("read")) {
        command.arg("-r");
    }
    for line in lines {
        command.args(["-c", line.as_ref()]);
    }
    let output = ok(command.arg(uri));
    assert!(!output.contains("failed"), "{output}");
}

/// Runs a client program that must fail by itself, not by the timeout. Returns its stdout and
/// stderr.
#[track_caller]
pub fn fails(command: &mut Command) -> String {
    const STATUS_OF_TIMEOUT: i32 = 124;
    let output = command.output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    let code = output.status.code();
    assert!(
        code.is_some_and(|code| (1..STATUS_OF_TIMEOUT).contains(&code)),
        "{command:?}: {code:?}\n{printed}"
    );
    printed
}

/// Runs a client program that must succeed. Returns its stdout parsed as JSON.
#[track_caller]
pub fn json(command: &mut Command) -> Value {
    let text = ok(command);
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{command:?}: {e}\n{text}"))
}

/// Returns a path as text.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Returns the URI of an export at the server's Unix socket.
pub fn uri(serve: &Serve, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", serve.path("nbd").display())
}

/// Publishes a device at the server's Unix socket. Returns the URI of the export.
pub fn publish(serve: &Serve, device: &str) -> String {
    serve.text(&["publish", device, "--nbd", &format!("unix:{}", serve.path("nbd").display())]);
    uri(serve, device)
}

/// Returns the content of an export, read by nbdcopy.
#[track_caller]
pub fn content(serve: &Serve, export: &str) -> Vec<u8> {
    let file = serve.path("copied-out");
    ok(tool("nbdcopy").arg(uri(serve, export)).arg(&file));
    let content = fs::read(&file).unwrap();
    fs::remove_file(file).unwrap();
    content
}

/// Writes `data` to the start of an export, by nbdcopy without a flush.
#[track_caller]
pub fn copy_in(serve: &Serve, export: &str, data: &[u8]) {
    let file = serve.path("copied-in");
    fs::write(&file, data).unwrap();
    ok(tool("nbdcopy").arg(&file).arg(uri(serve, export)));
    fs::remove_file(file).unwrap();
}

/// Checks that an export has the content of a raw image.
#[track_caller]
pub fn assert_same(uri: &str, image: &Path) {
    ok(tool("qemu-img").args(["compare", "-f", "raw", "-F", "raw", uri]).arg(image));
}

/// Returns a number from the output of `stat` for a device.
#[track_caller]
pub fn stat(serve: &Serve, device: &str, section: &str, column: &str) -> u64 {
    let stat = serve.json(&["stat", device]);
    stat[section][column].as_u64().unwrap_or_else(|| panic!("no {section}.{column} in {stat}"))
}

pub fn sha256(file: &Path) -> String {
    ok(tool("sha256sum").arg("--").arg(file)).split(' ').next().unwrap().to_owned()
}

/// Returns the sorted names of the files in a directory.
pub fn names_in(dir: &Path) -> Vec<String> {
    let rows = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = rows.map(|row| row.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Returns the allocated size of a file, in bytes.
pub fn allocated(file: &Path) -> u64 {
    const SECTOR_BYTES: u64 = 512;
    fs::metadata(file).unwrap().blocks() * SECTOR_BYTES
}

/// Returns incompressible pseudorandom bytes, the same for the same seed.
pub fn noise(seed: u64, length: u64) -> Vec<u8> {
    // The generator of the testkit is compiled with optimisation, unlike this test program.
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

/// Returns true if all bytes are zero. Compares whole pages, because an unoptimised loop over bytes
/// is slow.
pub fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(4096).all(|page| *page == [0; 4096][..page.len()])
}
