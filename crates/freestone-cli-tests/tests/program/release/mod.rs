//! Compatibility with an earlier release: JSON keys, metrics, accepted input, state directories and saved files.
//!
//! The directory `0.1.0` belongs to that release:
//!
//! * `keys.txt`: key paths of all JSON that the program printed in the steps of `steps.txt`. The test
//!   `release_keys_still_exist` writes the file when `FREESTONE_RELEASE` is the path of the release's program.
//! * `inputs.txt`: options, device keys, configuration keys and parameters, from the help and the messages of the
//!   program.
//! * `state`, `family.saved`: written by the program of commit 51662d0. Each page is [`page`] of a number.

mod inputs;
mod keys;
mod scenario;

use std::ffi::OsStr;

use self::keys::Keys;
use crate::harness::prelude::*;

/// Environment variable with the path of a release's program, whose keys are then recorded.
const RELEASE: &str = "FREESTONE_RELEASE";
/// Number of times that the scenario is recorded. Keys that are missing in one of these runs depend on timing and are
/// not recorded.
const RECORDED_RUNS: usize = 8;
const PAGE_BYTES: u32 = 4096;
const KEYS_HEAD: &str = "\
# Key paths of the JSON that 0.1.0 prints: a line for each step of steps.txt, and below it `OBJECT: KEY, KEY`, or keys
# of the whole reply. Elements of a list are [KIND] or []. The metrics are names with types, and samples with labels.
";

#[test]
fn release_keys_still_exist() {
    if let Some(release) = std::env::var_os(RELEASE) {
        return record(&release);
    }
    let recorded = fs::read_to_string(files().join("keys.txt")).unwrap();
    let missing = Keys::parse(&recorded).missing_in(&scenario::run(None));
    assert!(missing.is_empty(), "the program no longer prints:\n{missing}");
}

fn record(release: &OsStr) {
    let mut keys = scenario::run(Some(release.to_owned()));
    for _ in 1..RECORDED_RUNS {
        keys.intersect(&scenario::run(Some(release.to_owned())));
    }
    fs::write(files().join("keys.txt"), KEYS_HEAD.to_owned() + &keys.text()).unwrap();
}

/// Returns the directory with the files of the release 0.1.0.
fn files() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program/release/0.1.0")
}

#[test]
fn release_state_is_restored() {
    let dir = tempdir().unwrap();
    ok(Command::new("cp").arg("-r").arg(files().join("state")).arg(dir.path()));
    let serve = Serve::start_in(dir, &["--state", "state"], true);
    let list = serve.json(&["list"]);
    let devices = list["devices"].as_array().unwrap();
    let of = |key: &str| devices.iter().map(|device| device[key].clone()).collect::<Value>();
    assert_eq!(of("name"), json!(["kept", "lost", "drive", "before", "trial", "each"]), "{list}");
    assert_eq!(of("withheld"), json!([null, true, null, null, null, null]), "{list}");
    assert_eq!(list.get("missing"), None, "{list}");
    assert_eq!(serve.json(&["stat", "kept"])["uuid"], "09ff616c-9e63-431c-bd8f-aed8a4521b8c");
    assert_eq!(serve.json(&["get", "kept", "full"])["full"], "wait");
    assert_eq!(serve.json(&["get", "each", "ttl"])["ttl"], 600);
    check_family(&serve);
}

#[test]
fn release_saved_file_is_restored() {
    let serve = Serve::start(&["drive=null,size=1M"]);
    let file = files().join("family.saved");
    serve.text(&["restore", file.to_str().unwrap()]);
    for name in ["kept", "trial"] {
        serve.text(&["publish", name, "--nbd", "unix:nbd"]);
    }
    check_family(&serve);
}

/// Checks the content of a RAM disk, of its snapshot `before`, and of a fork of the snapshot.
fn check_family(serve: &Serve) {
    serve.text(&["publish", "before", "--nbd", "unix:before"]);
    let read = |socket: &str, name: &str| {
        let mut client = Raw::connect_at(&serve.path(socket), name);
        (client.size, client.read(0, 4 * PAGE_BYTES).unwrap())
    };
    let (same, zeroes) = (vec![9; PAGE_BYTES as usize], vec![0; PAGE_BYTES as usize]);
    let content = |pages: [&[u8]; 4]| pages.concat();
    assert_eq!(read("nbd", "kept"), (8 << 20, content([&page(2), &same, &zeroes, &zeroes])));
    let before = (4 << 20, content([&page(1), &same, &zeroes, &zeroes]));
    assert_eq!(read("before", "before"), before);
    assert_eq!(read("nbd", "trial"), (4 << 20, content([&page(1), &same, &page(3), &zeroes])));
}

/// Returns a compressible page, different for each number.
fn page(number: usize) -> Vec<u8> {
    (0..PAGE_BYTES as usize).map(|index| ((index / 7 + number * 31) % 251) as u8).collect()
}
