//! Runs that failed once, in the form that `cargo xtask torture` printed, here with real threads.
//! Each defect also has a test of its own next to the code that was fixed.

use freestone_torture::exact::Work;
use freestone_torture::run::{RunSettings, run};

/// Runs a case. The exact mode also uses the seed of its schedule and the rate of thread switches,
/// which real threads ignore.
fn passes(_schedule: u64, _switch_one_in: u64, work: Work) {
    match work {
        Work::Stack(ops) => {
            run(None, &ops, RunSettings::default()).unwrap_or_else(|failure| panic!("{failure}"));
        }
        Work::Zones(disks, steps) => {
            freestone_torture::zoned::run(disks, &steps).unwrap_or_else(|failure| panic!("{failure}"));
        }
    }
}

/// Read of a merged snapshot while another snapshot of the same origin is merged.
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

/// The leftovers of a failed restore fill the backing device, so evictions cannot make room in
/// memory for a fork.
#[test]
fn seed_504() {
    passes(
        3635269252665945044,
        8,
        Work::stack(
            r#"
        {"Family":{"limit_kib":0,"algorithm":39,"backing":{"kib":3188,"packed":false,"inline":0},"auto":false}}
        {"Ram":{"family":31594,"kib":8192}}
        {"Ram":{"family":21933,"kib":3232}}
        {"Power":3345}
        {"Memory":{"kib":128}}
        {"Origin":16684}
        {"Wrap":{"node":46818,"layer":181}}
        {"Snapshot":[25901]}
        {"Io":{"node":1409,"what":"Write","at":3861218073,"len":703,"pages":true,"fua":false,"fill":55,"submit":true,"wait":false}}
        {"Check":52817}
        {"Disk":{"kib":2048,"block":0,"volatile":false,"inline":0}}
        {"Limit":{"family":19301,"kib":776}}
        {"Moment":{"rams":[3741],"cows":[[59941,{"store":236,"chunk":0,"ample":true,"on":2260}]]}}
        {"Fork":{"snapshot":8313,"more_sectors":1490,"cap_kib":0,"family":null}}
        {"Origin":62125}
        {"Save":{"nodes":[62329,36139],"family":40108,"whole":false}}
        {"Fork":{"snapshot":7726,"more_sectors":0,"cap_kib":512,"family":null}}
        {"Io":{"node":53836,"what":"Write","at":3861218090,"len":1,"pages":true,"fua":true,"fill":183,"submit":true,"wait":false}}
    "#,
        ),
    );
}

/// Write at the memory limit of a family, concurrent with a rewind of the disk.
#[test]
fn seed_20201() {
    passes(
        14946723726534868237,
        8,
        Work::stack(
            r#"
        {"Family":{"limit_kib":0,"algorithm":174,"backing":null,"auto":false}}
        {"Ram":{"family":53397,"kib":752}}
        {"Ram":{"family":59613,"kib":488}}
        {"Ram":{"family":42952,"kib":1012}}
        {"Disk":{"kib":420,"block":121,"volatile":true,"inline":1000}}
        {"Origin":65535}
        {"CowSnapshot":{"origin":22216,"store":12,"chunk":0,"ample":true,"on":null}}
        {"Io":{"node":28313,"what":"Read","at":3092198646,"len":3,"pages":false,"fua":false,"fill":18,"submit":false,"wait":true}}
        {"Io":{"node":56063,"what":"Write","at":4270457189,"len":8,"pages":false,"fua":false,"fill":95,"submit":false,"wait":true}}
        {"Io":{"node":59665,"what":"Discard","at":238149966,"len":61,"pages":false,"fua":false,"fill":92,"submit":true,"wait":true}}
        {"Io":{"node":42808,"what":"Read","at":4162372991,"len":33,"pages":false,"fua":true,"fill":30,"submit":true,"wait":false}}
        {"Check":2616}
        {"Merge":58602}
        {"Io":{"node":25578,"what":"Zeroes","at":447433400,"len":450,"pages":true,"fua":true,"fill":118,"submit":false,"wait":true}}
        {"Io":{"node":45627,"what":"Write","at":2563070635,"len":14,"pages":true,"fua":false,"fill":213,"submit":false,"wait":true}}
        {"Io":{"node":11322,"what":"Read","at":1233866348,"len":56,"pages":true,"fua":false,"fill":23,"submit":false,"wait":true}}
        {"Io":{"node":57955,"what":"Write","at":151415872,"len":791,"pages":true,"fua":false,"fill":145,"submit":false,"wait":true}}
        {"Io":{"node":56192,"what":"Read","at":3819651958,"len":1,"pages":false,"fua":false,"fill":205,"submit":false,"wait":false}}
        {"Io":{"node":19262,"what":"Write","at":2374697016,"len":784,"pages":true,"fua":false,"fill":108,"submit":false,"wait":true}}
        {"Io":{"node":27235,"what":"Read","at":1002415362,"len":57,"pages":true,"fua":true,"fill":133,"submit":false,"wait":true}}
        {"Io":{"node":23654,"what":"Read","at":2374696992,"len":4,"pages":false,"fua":true,"fill":220,"submit":true,"wait":true}}
        {"Limit":{"family":63026,"kib":436}}
        {"Io":{"node":56837,"what":"Flush","at":2563070638,"len":7,"pages":true,"fua":true,"fill":234,"submit":true,"wait":true}}
        {"Rewind":{"node":17171,"reset":false}}
        {"Io":{"node":51092,"what":"Write","at":3632609360,"len":41,"pages":true,"fua":false,"fill":180,"submit":false,"wait":true}}
    "#,
        ),
    );
}
