//! Tests of `compare`: every side is measured, missing peers are reported, and no server is left
//! behind. Speed is not judged.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{names, part, program, row, run_and_read_reports};

/// Returns a `compare` command with short slices. If the workspace's program is built already, the
/// command uses it.
fn compare(dir: &Path, pairs: &str) -> Command {
    let mut command = program();
    command.args([
        "compare",
        "--quick",
        "--pairs",
        pairs,
        "--size",
        "16M",
        "--slice-ms",
        "50",
        "--set",
        "fio",
    ]);
    command.args(["--zram", "zram999", "--data-dir"]).arg(dir.join("data"));
    let freestone = Path::new(command.get_program()).with_file_name("freestone");
    if freestone.exists() {
        command.arg("--freestone").arg(freestone);
    }
    command
}

/// Runs `compare` and returns its reports. Fails if the run leaves files behind.
fn run_compare(command: &mut Command, dir: &Path) -> Vec<Value> {
    let reports = run_and_read_reports(command, &dir.join("compare.json"));
    let left: Vec<_> = std::fs::read_dir(dir.join("data")).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
    for report in &reports {
        for row in report["rows"].as_array().unwrap() {
            assert_eq!(row["median"].is_null(), row["refused"].as_bool().unwrap(), "{row}");
            assert!(!(row["refused"] == true && row["verdict"].is_string()), "{row}");
        }
    }
    reports
}

fn notes(report: &Value) -> String {
    report["notes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|note| note.as_str().unwrap())
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
#[ignore = "slow lane"]
fn compare_measures_every_side() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let reports =
        run_compare(compare(dir.path(), "1").args(["--peers", "installed", "--require-peers"]), dir.path());
    assert_eq!(
        names(&reports),
        [
            "zram",
            "compare: disks in memory over NBD",
            "compare: null drives over NBD",
            "compare: overlays of a raw image over NBD",
            "compare: NBD by TLS",
        ]
    );
    assert!(notes(&reports[0]).contains("zram999") && reports[0]["rows"].as_array().unwrap().is_empty());
    let memory = ["ram", "ram zstd", "nbdkit memory sparse", "nbdkit memory malloc", "nbdkit memory zstd"];
    let sides = [
        &[&memory[..], &["qemu-nbd raw in tmpfs"]].concat()[..],
        &["null", "nbdkit null", "qemu-nbd null-co"],
        &["fork", "nbdkit cow", "qemu-nbd qcow2 overlay"],
    ];
    for (report, sides) in reports[1..=sides.len()].iter().zip(sides) {
        let notes = notes(report);
        assert!(notes.contains("Versions: freestone ") && notes.contains("qemu-nbd --persistent"), "{notes}");
        for side in sides {
            for load in ["4 KiB reads", "4 KiB writes", "128 KiB reads", "128 KiB writes"] {
                for connections in ["1 connection", "4 connections"] {
                    let row = row(report, &format!("{load}, {connections}: {side}"));
                    assert!(row["median"].as_f64().unwrap() > 0.0 && row["count"] == 1, "{row}");
                }
            }
        }
    }
    for load in ["4 KiB reads, 1 connection", "128 KiB writes, 4 connections"] {
        for side in ["null", "nbdkit null", "qemu-nbd null-co"] {
            let row = row(&reports[4], &format!("{load}: {side}"));
            assert!(row["median"].as_f64().unwrap() > 0.0, "{row}");
        }
        for pair in ["null / nbdkit null", "null / qemu-nbd null-co"] {
            // Slices this short may differ too much for a median.
            row(&reports[4], &format!("{load}: {pair}"));
        }
    }
    let stored = |report: &Value, side: &str| {
        row(report, &format!("memory a stored byte: {side}"))["median"].as_f64().unwrap()
    };
    // The pages compress to less than half. Servers without compression use the whole size of the
    // pages, wherever they store them.
    assert!(stored(&reports[1], "ram") > 0.4 && stored(&reports[1], "nbdkit memory zstd") > 0.4);
    assert!(stored(&reports[1], "nbdkit memory sparse") > 1.0);
    assert!(stored(&reports[1], "qemu-nbd raw in tmpfs") > 1.0, "the file in tmpfs is not counted");
    for (side, least) in [("nbdkit cow", 7.9), ("qemu-nbd qcow2 overlay", 7.9)] {
        let row = row(&reports[3], &format!("memory a stored byte: {side}"));
        assert!(part(row, "on disk MiB") > least, "{row}");
    }
}

#[test]
#[ignore = "slow lane"]
fn missing_peer_is_reported_or_an_error() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let fakes = dir.path().join("fakes");
    std::fs::create_dir(&fakes).unwrap();
    for name in ["nbdkit", "apt-get"] {
        let fake = fakes.join(name);
        std::fs::write(&fake, format!("#!/bin/sh\necho {name} is broken here >&2\nexit 1\n")).unwrap();
        std::fs::set_permissions(&fake, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", fakes.display(), std::env::var("PATH").unwrap());
    let compare = |peers: &str| {
        let mut command = compare(dir.path(), "1");
        command.args(["--part", "server", "--group", "null", "--peers", peers]).env("PATH", &path);
        command.arg("--peers-dir").arg(dir.path().join("peers"));
        command
    };
    let reports = run_compare(&mut compare("debian13"), dir.path());
    let notes = notes(&reports[0]);
    assert!(notes.contains("Debian 13's peers are not available"), "{notes}");
    assert!(notes.contains("Absent: nbdkit null: ") && notes.contains("nbdkit is broken here"), "{notes}");
    for what in ["nbdkit null", "null / nbdkit null"] {
        let absent = row(&reports[0], &format!("4 KiB reads, 4 connections: {what}"));
        assert!(absent["median"].is_null() && absent["count"] == 0, "{absent}");
    }
    let present = row(&reports[0], "4 KiB reads, 4 connections: qemu-nbd null-co");
    assert!(present["median"].as_f64().unwrap() > 0.0, "{present}");
    assert!(!dir.path().join("peers").exists());

    for (peers, why) in [("installed", "nbdkit is broken here"), ("debian13", "Debian")] {
        let out = compare(peers).arg("--require-peers").output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && stderr.contains(why), "{stderr}");
    }
}

#[test]
fn interrupted_compare_leaves_no_server() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // The command lines of all three servers contain the base, which is in this directory.
    let run_dir_prefix = dir.path().join("data").join("compare-").display().to_string();
    let servers = || {
        let all = std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("cmdline")).ok());
        all.filter(|line| line.contains(&run_dir_prefix)).count()
    };
    let wait_for = |what: &dyn Fn() -> bool| {
        let started = Instant::now();
        while !what() {
            assert!(started.elapsed().as_secs() < 60, "{} servers", servers());
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    for signal in [Signal::TERM, Signal::KILL] {
        let mut command = compare(dir.path(), "100");
        command.args(["--part", "server", "--group", "overlay", "--peers", "installed", "--require-peers"]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut running = command.spawn().unwrap();
        wait_for(&|| servers() == 3);
        kill_process(Pid::from_child(&running), signal).unwrap();
        assert!(!running.wait().unwrap().success());
        wait_for(&|| servers() == 0);
        // A killed run cannot remove its directory.
        let left = std::fs::read_dir(dir.path().join("data")).unwrap().count();
        assert_eq!(left, usize::from(signal == Signal::KILL));
    }
}
