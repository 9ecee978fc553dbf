//! Block devices of this machine, as far as that goes without the driver: what works with it is run
//! in the kernel lab (`lab/run-ublk.sh`).

use std::path::Path;

use crate::harness::{Serve, finish, freestone, refused};

const DRIVER: &str = "/dev/ublk-control";

#[test]
fn without_the_driver_its_module_is_named() {
    let serve = Serve::start(&["r=ram,disksize=1M"]);
    if Path::new(DRIVER).exists() {
        let block = serve.text(&["publish", "r", "--ublk"]);
        assert!(block.starts_with("/dev/ublkb"), "{block}");
        serve.text(&["unpublish", "r"]);
        return;
    }
    let why = format!("r: there is no {DRIVER}: load the kernel's driver with `modprobe ublk_drv`");
    assert_eq!(serve.refused(1, &["publish", "r", "--ublk"]), why);
    // All places or none.
    assert_eq!(serve.refused(1, &["publish", "r", "--vhost-user", "unix:r.sock", "--ublk"]), why);
    assert!(!serve.path("r.sock").exists());
    assert!(serve.text(&["list"]).lines().all(|line| !line.contains("vhost-user")));

    let dir = tempfile::tempdir().unwrap();
    let sockets = ["--nbd", "unix:nbd", "--control", "control"];
    let (status, said, error) =
        finish(freestone(dir.path()).args(["serve", "r=ram,disksize=1M", "--ublk"]).args(sockets));
    assert_eq!((status, said.as_str(), error.trim_end()), (1, "", format!("freestone: {why}").as_str()));
    assert!(!dir.path().join("nbd").exists() && !dir.path().join("control").exists());
}

#[test]
fn what_cannot_be_a_block_device_is_refused() {
    let serve = Serve::start(&[
        "z=null,size=8M,zoned=1,zone_size=1M,zone_append_max_sectors=0",
        "s=null,size=9M,zoned=1,zone_size=2M",
        "b=ram,disksize=1M",
    ]);
    let refused = serve.refused(1, &["publish", "z", "--ublk"]);
    assert_eq!(refused, "z: ublk has no zones without appends: zone_append_max_sectors must not be 0");
    let refused = serve.refused(1, &["publish", "s", "--ublk"]);
    assert!(refused.starts_with("s: the last zone is shorter"), "{refused}");
    let refused = serve.refused(2, &["publish", "b", "--template", "--ublk"]);
    assert!(refused.starts_with("b: ublk: a template is published over NBD"), "{refused}");
    for (words, why) in [
        (&["publish", "b", "--nbd", "unix:x", "--queues", "2"][..], "--ublk"),
        (&["publish", "b", "--ublk", "--queues", "0"], "1..=16"),
        (&["publish", "b", "--ublk", "--queues", "17"], "1..=16"),
    ] {
        let (status, _, said) = finish(freestone(serve.dir.path()).args(words));
        assert!(status == 2 && said.contains(why), "{words:?}: {said}");
    }
}

#[test]
fn whose_a_device_is_is_told_to_udev() {
    let dir = tempfile::tempdir().unwrap();
    for node in ["sda", "ublk-control", "ublkbx"] {
        let why = format!("ublk-owner: {node}: must be ublkcN or ublkbN");
        assert_eq!(refused(dir.path(), 1, &["ublk-owner", node]), why);
    }
    if !Path::new(DRIVER).exists() {
        let why = refused(dir.path(), 1, &["ublk-owner", "ublkb0"]);
        assert!(why.starts_with(&format!("ublk-owner: {DRIVER}: ")), "{why}");
    }
    // The rule asks what there is to ask.
    let rule = include_str!("../../../../../packaging/udev/60-freestone-ublk.rules");
    assert!(rule.contains("PROGRAM=\"/usr/bin/freestone ublk-owner %k\", OWNER=\"%c{1}\", GROUP=\"%c{2}\""));
}
