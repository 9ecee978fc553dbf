//! The benchmarks run and write JSON that makes sense. Speed is not judged here.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

// The kernel device is named so that it is not there: a test leaves the machine as it was.
fn run(bench: &str, dir: &Path) -> Value {
    let json = dir.join(format!("{bench}.json"));
    let out = Command::new(env!("CARGO_BIN_EXE_freestone-benches"))
        .args([bench, "--quick", "--size", "32M", "--zram", "zram999", "--set", "fio,real", "--json"])
        .arg(&json)
        .arg("--data-dir")
        .arg(dir.join("data"))
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    let value: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert_eq!(value["reports"].as_array().unwrap().len(), 2, "one report a data set");
    for report in value["reports"].as_array().unwrap() {
        assert_eq!(report["name"], bench);
        assert_eq!(report["data_bytes"], 32 << 20);
        for row in report["rows"].as_array().unwrap() {
            let number = |key: &str| row[key].as_f64().unwrap();
            assert!(number("median").is_finite() && number("median") >= 0.0, "{row}");
            assert!(number("min") <= number("median") && number("median") <= number("max"), "{row}");
            assert_eq!(row["target"].is_null(), row["met"].is_null(), "{row}");
        }
    }
    value
}

fn row<'v>(report: &'v Value, what: &str) -> &'v Value {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().find(|row| row["what"] == what).unwrap_or_else(|| panic!("no row {what} in {report}"))
}

#[test]
fn codec_compares_reads_and_rewrites() {
    let dir = tempfile::tempdir().unwrap();
    let value = run("codec", dir.path());
    for report in value["reports"].as_array().unwrap() {
        for what in ["random 4 KiB reads / bare codec", "random 4 KiB rewrites / bare codec"] {
            let row = row(report, what);
            assert_eq!(row["count"], 3);
            assert!(row["median"].as_f64().unwrap() > 0.0 && row["met"].is_boolean(), "{row}");
        }
    }
    assert!(value["command"].as_str().unwrap().contains("--quick"));
}

#[test]
fn threads_compares_one_to_eight() {
    let dir = tempfile::tempdir().unwrap();
    let value = run("threads", dir.path());
    for report in value["reports"].as_array().unwrap() {
        for load in ["reads", "rewrites", "mix"] {
            for threads in [1, 2, 4, 8] {
                row(report, &format!("{load}: {threads} threads / {threads} bare loops"));
            }
            assert!(row(report, &format!("{load}: scaling 1 to 2, engine / bare"))["met"].is_boolean());
        }
    }
}

#[test]
fn memory_counts_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let value = run("memory", dir.path());
    for report in value["reports"].as_array().unwrap() {
        for when in ["after the fill", "rewritten", "compacted"] {
            let overhead = row(report, &format!("overhead {when}"))["median"].as_f64().unwrap();
            // Not a bound on quality: a disk cannot take less than its compressed bytes, nor twice as much.
            assert!((1.0..2.0).contains(&overhead), "{when}: {overhead}");
        }
        let returned = row(report, "returned by discarding all")["median"].as_f64().unwrap();
        assert!((0.5..=1.0).contains(&returned), "{returned}");
    }
}

#[test]
fn bad_options_are_refused() {
    for bad in [
        &["codec", "--size", "32"][..],
        &["codec", "--size", "1T"],
        &["codec", "--pairs", "0"],
        &["zram", "--zram", "../x"],
    ] {
        let out = Command::new(env!("CARGO_BIN_EXE_freestone-benches")).args(bad).output().unwrap();
        assert!(!out.status.success(), "{bad:?} was taken");
        assert!(!out.stderr.is_empty());
    }
    let absent = Command::new(env!("CARGO_BIN_EXE_freestone-benches"))
        .args(["zram", "--quick", "--zram", "zram999", "--set", "fio"])
        .output()
        .unwrap();
    assert!(!absent.status.success());
    assert!(String::from_utf8_lossy(&absent.stderr).contains("zram999"));
}
