//! Operations that would bypass the zones or the unflushed writes of a device are refused, with the
//! reason.

use crate::harness::prelude::*;

#[test]
fn operation_that_bypasses_a_layer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden"), vec![1; 1 << 20]).unwrap();
    fs::write(dir.path().join("disk"), vec![1; 1 << 20]).unwrap();
    let serve = Serve::start_in(
        dir,
        &[
            "golden=file,path=golden,readonly=yes",
            "zoned=ram,disksize=1M,zoned=1,zone_size=64K",
            "power=ram,disksize=1M,power_cut=yes",
            "faulty=ram,disksize=1M,faults=none",
            "disk=file,path=disk,power_cut=yes",
            "fork=fork,base=golden,power_cut=yes",
            "log=fork,base=golden,record=log,power_cut=yes",
            "n=null,size=1M",
        ],
        true,
    );
    let zoned = "it is zoned, and the state of its zones would be missing";
    let power = "it keeps unflushed writes apart (power_cut, cache_size, record), which would be missing";
    for (args, sentence) in [
        (&["snapshot", "zoned", "s"][..], format!("s: origin=zoned: has no snapshots: {zoned}")),
        (&["save", "zoned", "x"], format!("zoned: cannot be saved: {zoned}")),
        (&["save", "power", "x"], format!("power: cannot be saved: {power}")),
        (&["delta", "show", "fork"], format!("fork: cannot be looked into: {power}")),
        (&["delta", "save", "fork", "x"], format!("fork: cannot be looked into: {power}")),
        (
            &["set", "zoned", "disksize=2M"],
            "zoned: disksize=2M: a zoned device does not grow: the table of its zones is made once".into(),
        ),
        (&["power-cut", "faulty"], "faulty: its power cannot be cut: create it with power_cut=yes".into()),
        (
            &["power-cut", "n"],
            "n: its power cannot be cut: create it with memory_backed=1 and power_cut=yes or cache_size=SIZE"
                .into(),
        ),
        (
            &["power-cut", "power", "--at", "1"],
            "power: power-cut: at: there is no log; create the device with record=FILE".into(),
        ),
        (
            &["mark", "power", "x"],
            "power: mark: nothing is recorded: the device was made without a file to record to".into(),
        ),
        (&["release", "power"], "power: no held requests: it was created without faults".into()),
        (&["zones", "n"], "n: has no zones; a ram, null or file device gets them with zoned=1".into()),
    ] {
        assert_eq!(serve.refused(1, args), sentence, "{args:?}");
    }
    // Allowed are snapshots of a device with fault rules, zoned devices on other files, and rewinds
    // and resets.
    serve.text(&["snapshot", "faulty", "s"]);
    serve.text(&["create", "c=file,path=golden2,size=1M,zoned=1,zone_size=64K"]);
    serve.text(&["rewind", "fork"]);
    serve.text(&["reset", "power"]);
    serve.text(&["reset", "zoned"]);
    serve.text(&["create", "plain=file,path=golden3,size=1M"]);
    serve.text(&["create", "z=ram,disksize=4M,zoned=1,zone_size=64K"]);
    let copies = serve.refused(1, &["snapshot", "plain", "s2", "cow=z", "store=N"]);
    assert_eq!(copies, "s2: cow=z: takes no copies: it is zoned, and copies are written in any order");
    let number = serve.refused(2, &["mark", "log", "7"]);
    assert_eq!(number, "log: mark: 7: a number is the number of an entry; begin the text with a letter");
}
