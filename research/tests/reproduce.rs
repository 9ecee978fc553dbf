//! The experiments that need no other lock than the product's run and write JSON that makes sense. Speed is not judged here.

use std::process::Command;

use serde_json::Value;

#[test]
fn reproduce_sets_published_figures_beside_ours() {
    // Not in /tmp, whose file system may know no direct I/O.
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
    let told = String::from_utf8_lossy(&out.stdout);
    for (number, tables, loads, models) in [(3, 1, 3, 0), (4, 4, 1, 2), (5, 4, 2, 8)] {
        let json = std::fs::read(dir.path().join(format!("experiment-{number}.json"))).unwrap();
        let value: Value = serde_json::from_slice(&json).unwrap();
        let array = |value: &Value, key: &str| value[key].as_array().unwrap().clone();
        assert_eq!(value["number"], number);
        assert_eq!(array(&value, "tables").len(), tables);
        for (table, chart) in array(&value, "tables").iter().zip(array(&value, "charts")) {
            let svg = std::fs::read_to_string(dir.path().join(chart.as_str().unwrap())).unwrap();
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{chart}");
            assert!(svg.contains(table["name"].as_str().unwrap()), "{chart}");
            let rows = array(table, "rows");
            let mut names: Vec<_> = rows.iter().map(|row| row["what"].as_str().unwrap()).collect();
            names.dedup();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), loads, "{names:?}");
            let ours = table["ours"].as_u64().unwrap() as usize;
            for row in &rows {
                let (measured, ratio) = (&row["measured"][ours], &row["ratios"][ours]);
                assert_eq!(measured.is_null(), ratio.is_null(), "{row}");
                // So little data may be written back in less CPU time than the kernel counts.
                let least = if number == 3 { 0.0 } else { f64::MIN_POSITIVE };
                assert!(measured.is_null() || measured["median"].as_f64() >= Some(least), "{row}");
                assert!(measured.is_null() || ratio["count"] == 3, "{row}");
                assert!(!measured.is_null() || !row["published"][0].is_null(), "an empty row: {row}");
            }
        }
        // With one CPU there is nothing to model.
        let cpus = std::thread::available_parallelism().unwrap().get();
        let model = array(&value, "model");
        assert_eq!(model.len(), if cpus > 1 { models } else { 0 });
        for model in &model {
            let old: Vec<f64> =
                array(model, "beyond").iter().map(|at| at["in_turn"].as_f64().unwrap()).collect();
            assert!(old.len() == 4 && old[3] < 1.1 * old[2], "one lock does not scale: {model}");
        }
        // What is said is written as well.
        let sentences = array(&value, "sentences");
        assert!(!sentences.is_empty() && sentences.iter().all(|said| told.contains(said.as_str().unwrap())));
    }
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path()).collect();
    let img = left.iter().any(|path| path.extension().is_some_and(|extension| extension == "img"));
    assert!(!img, "{left:?}");
}

#[test]
fn an_experiment_that_there_is_not_is_refused() {
    for bad in ["6", "0", "locks"] {
        let out =
            Command::new(env!("CARGO_BIN_EXE_freestone-research")).args(["reproduce", bad]).output().unwrap();
        assert!(!out.status.success(), "{bad} was taken");
        assert!(!out.stderr.is_empty());
    }
}
