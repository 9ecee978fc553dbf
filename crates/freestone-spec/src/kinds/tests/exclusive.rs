//! Tests of the exclusive use of a device as COW device or backing device of another one.

use super::building::{add, sentence};
use crate::kinds::registry::Registry;
use crate::kinds::{Spec, snapshots};

#[test]
fn unsuitable_backing_device_is_refused_with_reason() {
    let registry = Registry::default();
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, len: u64| {
        let path = dir.path().join(name);
        std::fs::File::create(&path).unwrap().set_len(len).unwrap();
        path.display().to_string()
    };
    add(&registry, &format!("ro=file,path={},readonly=yes", file("ro", 1 << 20)));
    add(&registry, &format!("odd=file,path={}", file("odd", (1 << 20) + 100)));
    add(&registry, "n=null,size=1M");
    add(&registry, "p=null,size=1M,memory_backed=1,power_cut=yes");
    add(&registry, "z=null,size=4M,memory_backed=1,zoned=1,zone_size=1M");
    add(&registry, "o=ram,disksize=1M");
    add(&registry, "s=snapshot,origin=o");
    add(&registry, "template=template,base=s");
    add(&registry, "small=null,size=2K,memory_backed=1,blocksize=512");
    let need = "pages need a ram, null, fork, file, nbd or rbd device that can be written";
    for (name, why) in [
        // `r` is the device that is being created, so it does not exist yet.
        ("r", "there is no such device (yet)"),
        ("none", "there is no such device (yet)"),
        ("ro", need),
        ("s", need),
        ("template", need),
        ("odd", "its file ends within a block, so pages cannot be stored up to its end"),
        ("n", "keeps nothing of what is written; use memory_backed=1"),
        ("z", "takes no pages: it is zoned, and pages are written in any order"),
        (
            "p",
            "keeps what is not flushed in memory, and loses it with its power; use one without power_cut, \
             cache_size and record",
        ),
    ] {
        let text = format!("r=ram,disksize=1M,backing_dev=device:{name}");
        assert_eq!(sentence(&registry, &text), format!("r: backing_dev=device:{name}: {why}"));
    }
    let small = sentence(&registry, "r=ram,disksize=1M,backing_dev=device:small");
    assert!(small.contains("has 2048 bytes; at least 4096 are needed"), "{small}");
    assert!(registry.users(&registry.find("small").unwrap()).is_none());
}

/// Every kind of device with a family (memory pool) uses its backing device exclusively.
#[test]
fn backing_device_has_one_user() {
    for words in [
        "x=ram,disksize=1M",
        "x=file,path=$DIR/image,readonly=yes",
        // A snapshot that stores copies in memory.
        "x=snapshot,origin=disk",
        "x=snapshot,origin=disk,cow=$DIR/cow,cow_size=1M,readonly=yes",
    ] {
        let registry = Registry::default();
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().display().to_string();
        for name in ["image", "disk"] {
            std::fs::File::create(dir.path().join(name)).unwrap().set_len(1 << 20).unwrap();
        }
        add(&registry, &format!("disk=file,path={at}/disk"));
        add(&registry, "m=null,size=1M,memory_backed=1");
        add(&registry, "other=ram,disksize=1M");
        let words = words.replace("$DIR", &at) + ",backing_dev=device:m";
        add(&registry, &words);
        let [x, m] = ["x", "m"].map(|name| registry.find(name).unwrap());
        assert_eq!(registry.users(&m).unwrap().to_string(), "x", "{words}");
        assert_eq!(registry.exclusive_user(&m).as_deref(), Some("holds pages of x"), "{words}");
        for (text, why) in [
            ("y=ram,disksize=1M,backing_dev=device:m", "y: backing_dev=device:m: is in use by x"),
            ("y=snapshot,origin=other,cow=m,store=N", "y: cow=m: is in use by x"),
            ("y=snapshot,origin=m", "y: origin=m: holds pages of x"),
        ] {
            assert_eq!(sentence(&registry, text), why, "{words}");
        }
        assert_eq!(registry.remove(&m).unwrap_err().to_string(), "x", "{words}");
        registry.remove(&x).unwrap();
        assert_eq!(registry.exclusive_user(&m), None, "{words}");
        registry.remove(&m).unwrap();
    }
}

#[test]
fn snapshot_keeps_backing_device_of_removed_disk() {
    let registry = Registry::default();
    add(&registry, "m=null,size=1M,memory_backed=1");
    add(&registry, "r=ram,disksize=1M,backing_dev=device:m");
    add(&registry, "s=snapshot,origin=r");
    add(&registry, "f=fork,base=s");
    let [r, s, f, m] = ["r", "s", "f", "m"].map(|name| registry.find(name).unwrap());
    registry.remove(&r).unwrap();
    assert_eq!(registry.exclusive_user(&m).as_deref(), Some("holds pages of s"));
    assert_eq!(sentence(&registry, "y=snapshot,origin=m"), "y: origin=m: holds pages of s");
    registry.remove(&f).unwrap();
    registry.remove(&s).unwrap();
    registry.remove(&m).unwrap();
}

#[test]
fn snapshots_of_one_moment_need_own_cow_devices() {
    let registry = Registry::default();
    for name in ["a", "b", "c", "d"] {
        add(&registry, &format!("{name}=ram,disksize=1M"));
    }
    let take = |of_a: &str, of_b: &str| {
        let words = [format!("sa=snapshot,origin=a,{of_a}"), format!("sb=snapshot,origin=b,{of_b}")];
        snapshots(words.map(|words| words.parse::<Spec>().unwrap()).to_vec(), &registry)
    };
    let twice = take("cow=c,force=yes", "cow=c,force=yes").err().unwrap().sentence;
    assert_eq!(twice, "sb: cow=c: is given for another of these snapshots too");
    assert_eq!(take("cow=c,force=yes", "cow=d,force=yes").unwrap().len(), 2);
}
