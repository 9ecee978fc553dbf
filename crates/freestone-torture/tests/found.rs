//! Runs that failed once, as `cargo xtask torture` printed them, here with real threads. What each showed has a test of its own
//! where it was mended.

use freestone_torture::exact::Work;
use freestone_torture::run::{Judge, run};

/// What only the exact mode needs is the seed of its schedule, and how often another thread goes on.
fn passes(_schedule: u64, _switch_one_in: u64, work: Work) {
    match work {
        Work::Stack(ops) => {
            run(None, &ops, Judge::default()).unwrap_or_else(|failure| panic!("{failure}"));
        }
        Work::Zones(disks, steps) => {
            freestone_torture::zoned::run(disks, &steps).unwrap_or_else(|failure| panic!("{failure}"));
        }
    }
}

/// A snapshot that was merged, and is read while another one of the same origin is merged.
#[test]
fn seed_58() {
    passes(
        14918082920236756572,
        40,
        Work::stack(
            r#"
        {"Family":{"limit_kib":0,"algorithm":247,"backing":null,"auto":false}}
        {"Ram":{"family":39773,"kib":1644}}
        {"Disk":{"kib":2048,"block":0,"volatile":false,"inline":1000}}
        {"Memory":{"kib":1756}}
        {"Memory":{"kib":1176}}
        {"Memory":{"kib":432}}
        {"Remove":32250}
        {"Memory":{"kib":116}}
        {"Origin":15825}
        {"CowSnapshot":{"origin":43869,"store":7,"chunk":2,"ample":true,"on":null}}
        {"Merge":28224}
        {"Remove":49715}
        {"Remove":41912}
        {"CowSnapshot":{"origin":43160,"store":0,"chunk":0,"ample":true,"on":null}}
        {"Io":{"node":58692,"what":"Write","at":879837399,"len":854,"pages":false,"fua":true,"fill":114,"submit":false,"wait":true}}
        {"Remove":63113}
        {"Merge":65411}
        {"Io":{"node":63410,"what":"Read","at":1821680136,"len":57,"pages":false,"fua":false,"fill":48,"submit":false,"wait":true}}
    "#,
        ),
    );
}
