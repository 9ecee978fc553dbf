//! Tests of `density`: every contender is measured, and what cannot be had is named. Speed is not judged.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::{names, part, program, row, run_and_read_reports};

const BACKGROUND: [&str; 2] = ["auto_recompress", "auto_group"];

/// Returns a `density` command that changes nothing on the machine: the named zram device does not exist.
fn density(dir: &Path, part: &str) -> Command {
    let mut command = program();
    command
        .args(["density", "--quick", "--part", part, "--zram", "zram999", "--data-dir"])
        .arg(dir.join("data"));
    command.args(["--peers", "installed", "--require-peers"]);
    command
}

fn median(report: &Value, what: &str) -> f64 {
    row(report, what)["median"].as_f64().unwrap_or_else(|| panic!("{what} is withheld"))
}

#[test]
#[ignore = "slow lane"]
fn density_measures_every_contender() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut command = density(dir.path(), "sets,hot,forks");
    let reports = run_and_read_reports(
        command.args(["--size", "16M", "--pairs", "1"]),
        &dir.path().join("density.json"),
    );
    assert_eq!(
        names(&reports),
        ["density: memory", "density: reads", "density: hot pages", "density: forks"]
    );
    let [memory, reads, hot, forks] = &reports[..] else { panic!() };
    let lz4 = median(memory, "memory a stored byte: lz4");
    assert!((0.1..1.0).contains(&lz4), "{lz4}");
    for name in ["zstd", "auto_recompress", "auto_group", "recompress group=yes"] {
        let ratio = median(memory, &format!("memory: {name} / lz4"));
        assert!((0.2..1.0).contains(&ratio), "{name}: {ratio}");
        assert!((median(memory, &format!("memory a stored byte: {name}")) / lz4 - ratio).abs() < 1e-6);
        // Slices this short may differ too much for a median.
        row(reads, &format!("time of a random 4 KiB read: {name} / lz4"));
        assert!(median(reads, &format!("128 KiB in order: {name}")) > 0.0);
    }
    assert!(median(memory, "memory a stored byte: nbdkit memory zstd") > 0.0);
    assert!(memory["notes"].to_string().contains("Absent: zram lz4: /dev/zram999"), "{}", memory["notes"]);
    for name in BACKGROUND {
        let cpu = row(memory, &format!("background CPU a percent: {name}"));
        assert!(part(cpu, "CPU s") > 0.0 && part(cpu, "gained %") > 0.0, "{cpu}");
        for what in ["reads", "writes"] {
            let late = row(hot, &format!("hot 4 KiB {what}, 99 % latency: {name} / off"));
            assert!(part(late, "background pages a window") > 0.0, "{late}");
        }
        let ratio = median(forks, &format!("memory: {name} / lz4"));
        assert!((0.2..1.0).contains(&ratio), "{name}: {ratio}");
    }
    let groups = row(reads, "time of a random 4 KiB read: auto_group / zstd");
    assert!(part(groups, "pages that left groups, %") < 10.0, "{groups}");
    let picture = std::fs::read_to_string(dir.path().join(memory["chart"].as_str().unwrap())).unwrap();
    for name in BACKGROUND.into_iter().chain(["lz4", "nbdkit memory zstd"]) {
        assert!(picture.contains(name), "{name} is not in the picture");
    }
    let left: Vec<_> =
        std::fs::read_dir(dir.path().join("data")).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(left.iter().all(|path| path.extension().is_some_and(|e| e == "tar")), "{left:?}");
}

#[test]
#[ignore = "slow lane"]
fn density_makes_sets_or_names_them() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let json = dir.path().join("density.json");
    let made = run_and_read_reports(
        density(dir.path(), "forks").args(["--set", "postgresql", "--size", "128M"]),
        &json,
    );
    assert!(made[0]["data"].as_str().unwrap().starts_with("postgresql: "), "{}", made[0]["data"]);
    assert!(dir.path().join("data/postgresql-128M.img").exists());

    // A guest's files belong to root, and this user claims to be another one.
    let fakes = dir.path().join("fakes");
    std::fs::create_dir(&fakes).unwrap();
    std::fs::write(fakes.join("id"), "#!/bin/sh\necho 1000\n").unwrap();
    std::fs::set_permissions(fakes.join("id"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", fakes.display(), std::env::var("PATH").unwrap());
    let mut command = density(dir.path(), "forks");
    command.args(["--set", "guest,real", "--size", "16M"]).env("PATH", path);
    let reports = run_and_read_reports(&mut command, &json);
    assert!(reports[0]["data"].as_str().unwrap().starts_with("real: "), "{}", reports[0]["data"]);
    let notes = reports[0]["notes"].to_string();
    assert!(notes.contains("Left out: the data set guest: guest.sh: "), "{notes}");
}
