//! ublk exports on a machine without the ublk driver. The kernel lab tests ublk with the driver
//! (`lab/run-ublk.sh`).

use crate::harness::prelude::*;

const DRIVER: &str = "/dev/ublk-control";

#[test]
fn ublk_without_driver_names_its_module() {
    let serve = Serve::start(&["r=ram,disksize=1M"]);
    if Path::new(DRIVER).exists() {
        let block = serve.text(&["publish", "r", "--ublk"]);
        assert!(block.starts_with("/dev/ublkb"), "{block}");
        serve.text(&["unpublish", "r"]);
        return;
    }
    let why = format!("r: there is no {DRIVER}: load the kernel's driver with `modprobe ublk_drv`");
    assert_eq!(serve.refused(1, &["publish", "r", "--ublk"]), why);
    // If one of the given addresses fails, the device is published at none of them.
    assert_eq!(serve.refused(1, &["publish", "r", "--vhost-user", "unix:r.sock", "--ublk"]), why);
    assert!(!serve.path("r.sock").exists());
    assert!(serve.text(&["list"]).lines().all(|line| !line.contains("vhost-user")));

    let dir = tempfile::tempdir().unwrap();
    let sockets = ["--nbd", "unix:nbd", "--control", "control"];
    let (status, message, error) =
        finish(freestone(dir.path()).args(["serve", "r=ram,disksize=1M", "--ublk"]).args(sockets));
    assert_eq!((status, message.as_str(), error.trim_end()), (1, "", format!("freestone: {why}").as_str()));
    assert!(!dir.path().join("nbd").exists() && !dir.path().join("control").exists());
}

#[test]
fn ublk_refuses_unsuitable_devices() {
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
        let (status, _, message) = finish(freestone(serve.dir.path()).args(words));
        assert!(status == 2 && message.contains(why), "{words:?}: {message}");
    }
}

#[test]
fn ublk_owner_reports_owner_to_udev() {
    let dir = tempfile::tempdir().unwrap();
    for node in ["sda", "ublk-control", "ublkbx"] {
        let why = format!("ublk-owner: {node}: must be ublkcN or ublkbN");
        assert_eq!(refused(dir.path(), 1, &["ublk-owner", node]), why);
    }
    if !Path::new(DRIVER).exists() {
        let why = refused(dir.path(), 1, &["ublk-owner", "ublkb0"]);
        assert!(why.starts_with(&format!("ublk-owner: {DRIVER}: ")), "{why}");
    }
    // The udev rule runs the subcommand `ublk-owner`.
    let rule = include_str!("../../../../../../packaging/udev/60-freestone-ublk.rules");
    assert!(rule.contains("PROGRAM=\"/usr/bin/freestone ublk-owner %k\", OWNER=\"%c{1}\", GROUP=\"%c{2}\""));
}
