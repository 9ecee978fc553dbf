//! A short torture run of the program (random requests, verbs, faults and crashes) with a fixed
//! seed.

use std::path::Path;

use freestone_testkit::effort;
use freestone_torture::program;

const SEED: u64 = 13;
/// Minutes of a run: for every change, and in the slow lane.
const MINUTES: [f64; 2] = [0.2, 1.0];

#[test]
fn torture_finds_no_violation() {
    let report = match program::run(
        SEED,
        effort(MINUTES[0], MINUTES[1]),
        Path::new(env!("CARGO_BIN_EXE_freestone")),
    ) {
        Ok(report) => report,
        Err(failure) => panic!("{failure}"),
    };
    println!("{report}");
    // The run used every kind of request, verb and server end that the assertions name.
    assert!(report.rounds >= 1);
    assert!(report.requests.values().sum::<u64>() > 100, "{report}");
    for export in ["nbd", "vhost-user"] {
        assert!(report.requests.contains_key(&format!("{export} write")), "{report}");
    }
    assert!(report.verbs.len() > 5, "{report}");
    assert!(!report.bad_clients.is_empty() && !report.program.is_empty(), "{report}");
    assert!(report.ends.contains_key("emptied"), "{report}");
}
