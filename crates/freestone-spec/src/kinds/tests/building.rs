//! Tests of specifications of which no device can be built, and of the error messages.

use std::sync::Arc;

use super::super::build;
use super::super::registry::Registry;

pub(super) fn sentence(registry: &Registry, text: &str) -> String {
    build(text.parse().unwrap(), registry).err().unwrap_or_else(|| panic!("{text}")).sentence
}

pub(super) fn add(registry: &Registry, text: &str) {
    registry.add(&Arc::new(build(text.parse().unwrap(), registry).unwrap())).unwrap();
}

#[test]
fn build_error_names_device_and_cause() {
    let registry = Registry::default();
    let error = sentence(&registry, "f=file,path=/nowhere/at/all");
    assert!(error.starts_with("f: ") && error.contains("/nowhere/at/all"), "{error}");
    let dict = "r=ram,disksize=1M,comp_algorithm=zstd,algorithm_params=level=3 dict=/nowhere/d";
    let missing = "r: algorithm_params: dict=/nowhere/d: No such file or directory (os error 2)";
    assert_eq!(sentence(&registry, dict), missing);

    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(8192).unwrap();
    let path = file.path().display();
    let differs = format!("f: size=1G: {path} has 8K; leave size out to take the file as it is");
    assert_eq!(sentence(&registry, &format!("f=file,path={path},size=1G")), differs);
    let raw = format!("q: {path}: is not a qcow2 image; a raw image is of kind file");
    assert_eq!(sentence(&registry, &format!("q=qcow2,path={path}")), raw);
}

#[test]
fn unsuitable_base_or_origin_is_refused_with_reason() {
    let registry = Registry::default();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk").display().to_string();
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    add(&registry, &format!("disk=file,path={path}"));
    add(&registry, "r=ram,disksize=1M");
    add(&registry, "n=null,size=1M");
    add(&registry, "m=null,size=1M,memory_backed=1");
    add(&registry, "ro=null,size=1M,readonly=yes");
    add(&registry, "z=ram,disksize=4M,zoned=1,zone_size=64K");
    add(&registry, "c=ram,disksize=4M");
    add(&registry, "held=snapshot,origin=n,cow=c,store=N");
    add(&registry, "s=snapshot,origin=r");
    add(&registry, "f=fork,base=s");
    add(&registry, "t=template,base=s");
    add(&registry, "w=snapshot,origin=disk,readonly=no");
    for (text, expected) in [
        ("x=fork,base=none", "x: base=none: there is no such device (yet)"),
        ("x=fork,base=r", "x: base=r: is live; take a snapshot and fork that: freestone snapshot r NAME"),
        ("x=fork,base=f", "x: base=f: is live; take a snapshot and fork that: freestone snapshot f NAME"),
        (
            "x=fork,base=disk",
            "x: base=disk: is live; take a snapshot and fork that: freestone snapshot disk NAME",
        ),
        ("x=fork,base=n", "x: base=n: a null device cannot be a base"),
        ("x=fork,base=t", "x: base=t: is a template; fork its base, s"),
        (
            "x=fork,base=w",
            "x: base=w: is a snapshot that its users write (readonly=no); take one with readonly=yes",
        ),
        (
            "x=fork,base=s,size=512K",
            "x: size=512K: smaller than the base, which has 1M; a fork shows all of it",
        ),
        ("x=fork,base=s,mem_min=999T", "x: mem_min=999T: the family's mem_limit has "),
        ("x=template,base=s,size=512K", "x: size=512K: smaller than the base"),
        (
            "x=snapshot,origin=z",
            "x: origin=z: has no snapshots: it is zoned, and the state of its zones would be missing",
        ),
        ("x=snapshot,origin=ro", "x: origin=ro: is read-only, so it does not change"),
        ("x=snapshot,origin=s", "x: origin=s: is a snapshot, which does not change; fork it"),
        ("x=snapshot,origin=t", "x: origin=t: a template has no content; take a snapshot of a fork"),
        ("x=snapshot,origin=none", "x: origin=none: there is no such device (yet)"),
        (
            "x=snapshot,origin=r,chunk_size=8K",
            "x: chunk_size=8K: only with cow; without it a ram device preserves single pages",
        ),
        (
            "x=snapshot,origin=r,readonly=no",
            "x: readonly=no: only with cow; without it fork the snapshot to write",
        ),
        ("x=snapshot,origin=r,cow=r", "x: cow=r: is the origin itself"),
        (
            "x=snapshot,origin=r,mem_limit=1G",
            "x: its forks are in the family of r; set mem_limit and the like there",
        ),
        ("x=snapshot,origin=disk,cow=disk", "x: cow=disk: is the origin itself"),
        (
            "x=snapshot,origin=disk,cow=none",
            "x: cow=none: there is no such device (yet); a file is written with a slash, ./none",
        ),
        (
            "x=snapshot,origin=disk,cow=n",
            "x: cow=n: keeps nothing of what is written; use a transient store (N), or memory_backed=1",
        ),
        (
            "x=snapshot,origin=disk,cow=ro,store=N",
            "x: cow=ro: copies need a ram, null, fork, file, nbd or rbd device that can be written",
        ),
        (
            "x=snapshot,origin=disk,cow=w,store=N",
            "x: cow=w: copies need a ram, null, fork, file, nbd or rbd device that can be written",
        ),
        (
            "x=snapshot,origin=disk,cow=z,store=N",
            "x: cow=z: takes no copies: it is zoned, and copies are written in any order",
        ),
        ("x=snapshot,origin=c,readonly=no,cow=r", "x: origin=c: holds the copies of held"),
        ("x=snapshot,origin=disk,cow=c,store=N", "x: cow=c: is in use by held"),
        (
            "x=snapshot,origin=r,cow=m",
            "x: cow=m: the origin ends with the process, so a persistent store is pointless; use a transient one (N), or force it",
        ),
        (
            "x=snapshot,origin=disk,cow=r",
            "x: cow=r: the COW device ends with the process, so a persistent store is pointless; use a transient one (N), or force it",
        ),
    ] {
        let message = sentence(&registry, text);
        assert!(message.starts_with(expected), "{text}: {message}");
    }
}

#[test]
fn snapshot_of_empty_device_is_empty() {
    let registry = Registry::default();
    add(&registry, "empty=null,size=0");
    add(&registry, "c=ram,disksize=1M,power_cut=yes");
    for text in ["s=snapshot,origin=empty", "p=snapshot,origin=empty,cow=c"] {
        let snapshot = build(text.parse().unwrap(), &registry).unwrap();
        assert_eq!(snapshot.size(), 0, "{text}");
    }
}
