//! Test of the experiments that need no other lock than the product's: they run and write plausible
//! JSON. Speed is not judged.

use std::collections::BTreeSet;
use std::process::Command;

use freestone_report::{Document, Row};

#[test]
fn reproduce_writes_published_and_measured_figures() {
    // /tmp may be on a file system without direct I/O.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let small = ["--quick", "--size", "8M", "--slice-ms", "5"];
    let out = Command::new(env!("CARGO_BIN_EXE_freestone-research"))
        .args(["reproduce", "3", "4", "5"])
        .args(small)
        .arg("--out")
        .arg(dir.path())
        .arg("--data-dir")
        .arg(dir.path().join("data"))
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let stdout = String::from_utf8_lossy(&out.stdout);
    for (number, tables, loads, models) in [(3, 1, 3, 0), (4, 8, 1, 2), (5, 4, 2, 8)] {
        let document = Document::load(&dir.path().join(format!("experiment-{number}.json"))).unwrap();
        assert_eq!(document.charts().count(), tables);
        for report in &document.reports[..tables] {
            let chart = report.chart.as_ref().unwrap();
            let svg = std::fs::read_to_string(dir.path().join(chart)).unwrap();
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{chart}");
            assert!(svg.contains(&report.name), "{chart}");
            let names: BTreeSet<_> =
                report.rows.iter().map(|row| row.what.rsplit_once(", ").unwrap().0).collect();
            assert_eq!(names.len(), loads, "{names:?}");
            for row in &report.rows {
                let Row { value, published, refused, .. } = row;
                let here = value.count > 0;
                assert!(here || published.is_some(), "an empty row: {row:?}");
                // Writing back this little data may take less CPU time than the kernel's tick.
                let least = if number == 3 { 0.0 } else { f64::MIN_POSITIVE };
                assert!(!here || *refused || value.median >= least, "{row:?}");
                assert!(!here || value.count == 3, "{row:?}");
            }
            assert!(
                report.rows.iter().any(|row| row.published.is_some())
                    || ["memory", "store P"].iter().any(|without| report.name.contains(without))
            );
        }
        // A model needs two CPUs.
        let cpus = std::thread::available_parallelism().unwrap().get();
        let rows = document.reports.get(tables).map(|model| &model.rows[..]).unwrap_or_default();
        let in_turn = |cores: &str| -> Vec<f64> {
            let rows = rows.iter().filter(|row| row.what.starts_with(cores));
            rows.map(|row| row.parts.iter().find(|(name, _)| name == "in turn").unwrap().1).collect()
        };
        let [some, more] = ["on 16 cores, upper bound: ", "on 48 cores, upper bound: "].map(in_turn);
        assert_eq!([some.len(), more.len()], [if cpus > 1 { models } else { 0 }; 2]);
        for (some, more) in some.iter().zip(&more) {
            assert!(*more < 1.1 * some, "one lock does not scale: {some} and {more}");
        }
        // Findings are also printed.
        let findings = &document.findings;
        assert!(!findings.is_empty() && findings.iter().all(|finding| stdout.contains(finding)));
    }
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path()).collect();
    let img = left.iter().any(|path| path.extension().is_some_and(|extension| extension == "img"));
    assert!(!img, "{left:?}");
}

#[test]
fn unknown_experiment_is_rejected() {
    for bad in ["6", "0", "locks"] {
        let out =
            Command::new(env!("CARGO_BIN_EXE_freestone-research")).args(["reproduce", bad]).output().unwrap();
        assert!(!out.status.success(), "{bad} was taken");
        assert!(!out.stderr.is_empty());
    }
}
