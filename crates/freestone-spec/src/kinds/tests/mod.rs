//! Tests of device specifications: accepted and refused keys and values.

mod building;
mod drives;
mod exclusive;
#[cfg(feature = "rbd")]
mod rbd;

use freestone::codec::Algorithm;
use freestone::cow::StoreKind;
use freestone::file::Direct;

use super::{CowPlace, FileSpec, KINDS, KindSpec, Spec};
use crate::family::{BackingPlace, FamilySpec};

fn ram(keys: &str) -> FamilySpec {
    let spec: Spec = format!("r=ram,disksize=1G,{keys}").parse().unwrap();
    let KindSpec::Ram(ram) = spec.kind else { panic!("{keys}") };
    ram.family
}

#[test]
fn keys_of_each_kind_parse() {
    let spec: Spec =
        "r=ram,disksize=4G,comp_algorithm=zstd,algorithm_params=level=3,mem_limit=1g".parse().unwrap();
    assert_eq!((spec.name.as_str(), spec.publish), ("r", None));
    let KindSpec::Ram(spec) = spec.kind else { panic!() };
    let (disksize, ram) = (spec.disksize, spec.family);
    assert_eq!((disksize, ram.comp_algorithm, ram.mem_limit), (4 << 30, Algorithm::Zstd, Some(1 << 30)));
    assert_eq!((ram.algorithm_params.as_str(), ram.backing, ram.auto_recompress), ("level=3", None, None));

    for (text, limit) in [("", None), (",mem_limit=0", Some(0)), (",mem_limit=none", Some(0))] {
        let spec: Spec = format!("r=ram,disksize=1M{text}").parse().unwrap();
        assert!(matches!(spec.kind, KindSpec::Ram(ram) if ram.family.mem_limit == limit), "{text}");
    }

    let spec: Spec = "n=null,size=1T,blocksize=512,publish=no".parse().unwrap();
    let KindSpec::Null(null) = spec.kind else { panic!() };
    assert_eq!((null.size, null.blocksize), (1 << 40, 512));
    assert_eq!(spec.publish, Some(false));
    let spec: Spec = "n=null,size=1T,blocksize=2K".parse().unwrap();
    let KindSpec::Null(null) = spec.kind else { panic!() };
    assert_eq!((null.size, null.blocksize), (1 << 40, 2048));

    let spec: Spec = "f=file,path=/a=b,,c,readonly=1,direct=off,size=8K,publish=yes".parse().unwrap();
    let path = "/a=b,c".into();
    let family = ram_family();
    assert_eq!(
        spec.kind,
        KindSpec::File(Box::new(FileSpec {
            path,
            readonly: true,
            direct: Direct::Off,
            size: Some(8192),
            family
        }))
    );
    assert_eq!(spec.publish, Some(true));
}

fn ram_family() -> FamilySpec {
    let spec: Spec = "r=ram,disksize=1G".parse().unwrap();
    spec.kind.family().unwrap().clone()
}

#[test]
fn keys_of_forks_and_snapshots_parse() {
    let spec: Spec = "f=fork,base=golden,size=20G,mem_limit=512M,mem_min=64M,full=wait".parse().unwrap();
    let KindSpec::Fork(fork) = spec.kind else { panic!() };
    assert_eq!((fork.base.as_str(), fork.size), ("golden", Some(20 << 30)));
    assert_eq!((fork.mem_limit, fork.mem_min, fork.full), (512 << 20, 64 << 20, Some(true)));
    let spec: Spec = "f=fork,base=golden".parse().unwrap();
    let KindSpec::Fork(fork) = spec.kind else { panic!() };
    assert_eq!((fork.size, fork.mem_limit, fork.mem_min, fork.full), (None, 0, 0, None));
    let spec: Spec = "t=template,base=golden,ttl=60,mem_limit=none".parse().unwrap();
    let KindSpec::Template(template) = spec.kind else { panic!() };
    assert_eq!((template.ttl.map(|ttl| ttl.as_secs()), template.fork.mem_limit), (Some(60), 0));

    let spec: Spec = "s=snapshot,origin=r".parse().unwrap();
    let KindSpec::Snapshot(snapshot) = spec.kind else { panic!() };
    assert_eq!((snapshot.origin.as_str(), &snapshot.cow, snapshot.has_family_keys), ("r", &None, false));
    let text =
        "s=snapshot,origin=r,cow=./x.cow,cow_size=1G,store=po,chunk_size=64K,force=1,readonly=1,mem_limit=1G";
    let KindSpec::Snapshot(snapshot) = text.parse::<Spec>().unwrap().kind else { panic!() };
    let cow = snapshot.cow.unwrap();
    assert_eq!((cow.place, cow.size), (CowPlace::Path("./x.cow".into()), Some(1 << 30)));
    assert_eq!((cow.store, cow.force), (StoreKind::PersistentOverflow, true));
    assert_eq!((snapshot.chunk_size, snapshot.readonly), (Some(65536), Some(true)));
    assert!(snapshot.has_family_keys && snapshot.family.mem_limit == Some(1 << 30));
    let KindSpec::Snapshot(snapshot) = "s=snapshot,origin=r,cow=c".parse::<Spec>().unwrap().kind else {
        panic!()
    };
    assert_eq!(snapshot.cow.unwrap().place, CowPlace::Device("c".into()));

    let spec: Spec = "q=qcow2,path=a,standalone=1,comp_algorithm=zstd".parse().unwrap();
    assert_eq!(spec.kind.family().unwrap().comp_algorithm, Algorithm::Zstd);
    assert!(matches!(spec.kind, KindSpec::Qcow2(image) if image.standalone));
}

#[test]
fn invalid_fork_and_snapshot_keys_are_refused() {
    let unit = "(K, M, G and T are known, 1024-based)";
    for (text, sentence) in [
        ("f=fork", "f: base is missing; a fork device needs it, for example base=golden".to_owned()),
        ("f=fork,base=", "f: base=: must be the name of a device".into()),
        ("f=fork,base=./x.img", "f: base=./x.img: must be the name of a device".into()),
        ("f=fork,bsae=x", "f: unknown key \"bsae\"; base?; the keys of a fork device are base, size, mem_limit, mem_min, full, faults, seed, power_cut, power_cut_unit, record, publish, tls_clients, on_data_loss, keep; those of every device are iops, bps, iops_burst, bps_burst, max_clients".into()),
        ("f=fork,base=x,size=1", format!("f: size=1: give a unit; 1M? {unit}")),
        ("f=fork,base=x,size=0", "f: size=0: must be more than 0".into()),
        ("f=fork,base=x,mem_limit=1M,mem_min=2M", "f: mem_min=2M: above mem_limit=1M".into()),
        ("f=fork,base=x,ttl=1", "f: unknown key \"ttl\"; the keys of a fork device are base, size, mem_limit, mem_min, full, faults, seed, power_cut, power_cut_unit, record, publish, tls_clients, on_data_loss, keep; those of every device are iops, bps, iops_burst, bps_burst, max_clients".into()),
        ("t=template,base=x,ttl=forever", "t: ttl=forever: must be none, or the seconds a connection may last, 1 to 31622400".into()),
        ("s=snapshot", "s: origin is missing; a snapshot device needs it, for example origin=ram0".into()),
        ("s=snapshot,origin=r,store=PO", "s: store=PO: only with cow=PATH or cow=DEVICE".into()),
        ("s=snapshot,origin=r,merge=yes", "s: merge=yes: only with cow=PATH or cow=DEVICE".into()),
        ("s=snapshot,origin=r,cow=c,store=N,merge=yes", "s: merge=yes: a transient snapshot (store=N) cannot be merged".into()),
        ("s=snapshot,origin=r,cow=c,merge=maybe", "s: merge=maybe: must be yes or no".into()),
        ("s=snapshot,origin=r,cow_size=1G", "s: cow_size=1G: only with cow=PATH or cow=DEVICE".into()),
        ("s=snapshot,origin=r,cow=c,cow_size=1G", "s: cow_size=1G: only where cow is a file; a path has a slash, ./x.cow".into()),
        ("s=snapshot,origin=r,cow=", "s: cow=: must be a path with a slash, ./x.cow, or a device".into()),
        ("s=snapshot,origin=r,cow=c,store=X", "s: store=X: must be P (persistent), PO (persistent, with overflow) or N (transient)".into()),
        ("s=snapshot,origin=r,chunk_size=5K", "s: chunk_size=5K: must be a power of two from 4K to 1G".into()),
        ("s=snapshot,origin=r,chunk_size=2K", "s: chunk_size=2K: must be a power of two from 4K to 1G".into()),
        ("s=snapshot,origin=r,chunk_size=64", format!("s: chunk_size=64: give a unit; 64M? {unit}")),
        ("s=snapshot,origin=r,discard_passdown_origin=1", "s: discard_passdown_origin=1: only with discard_zeroes_cow=yes".into()),
        ("f=file,path=a,mem_limit=1G", "f: mem_limit=1G: only with readonly=yes; it is for the forks of the file".into()),
        ("q=qcow2", "q: path is missing; a qcow2 device needs it, for example path=disk.qcow2".into()),
        ("n=nbd", "n: uri is missing; an nbd device needs it, for example uri=nbd://host/export".into()),
        ("n=nbd,uri=http://h/x", "n: uri=http://h/x: the scheme must be nbd://, nbds://, nbd+unix:// or nbds+unix://".into()),
        ("n=nbd,uri=nbd://me:secret@h/x", "n: uri=(not shown): a user or a password before the host is not allowed; NBD has none (it is not shown here)".into()),
        ("n=nbd,uri=http://me:secret@h/x", "n: uri=(not shown): the scheme must be nbd://, nbds://, nbd+unix:// or nbds+unix://".into()),
        ("n=nbd,uri=nbd://h,connections=17", "n: connections=17: must be 1 to 16".into()),
        ("n=nbd,uri=nbd://h,connections=0", "n: connections=0: must be 1 to 16".into()),
        ("n=nbd,uri=nbd://h,timeout=10ms", "n: timeout=10ms: must be 1s to 24h".into()),
        ("n=nbd,uri=nbd://h,timeout=5", "n: timeout=5: give a unit; 5s?".into()),
        ("n=nbd,uri=nbd://h,tls_ca=x", "n: tls_ca=x: only where the uri is nbds:// or nbds+unix://".into()),
        ("n=nbd,uri=nbds://h,tls_cert=x", "n: tls_cert=x: only with tls_key=FILE".into()),
        ("n=nbd,uri=nbd://h,mem_limit=1G", "n: mem_limit=1G: only with readonly=yes; it is for the forks of the export".into()),
    ] {
        assert_eq!(text.parse::<Spec>().unwrap_err().to_string(), sentence, "{text}");
    }
}

#[test]
fn refusal_names_device_key_and_allowed_values() {
    let form = "a device is NAME=KIND[,key=value]..., for example ram0=ram,disksize=4G";
    let ram = "the keys of a ram device are disksize, readonly, on_data_loss, keep, comp_algorithm, algorithm_params, mem_limit, recomp_algorithm, \
               auto_recompress, auto_group, auto_dedup, backing_dev, backing_size, compressed_writeback, writeback_limit, \
               writeback_limit_enable, writeback_batch_size, full, full_timeout, mem_warn_threshold, zoned, zone_size, \
               zone_capacity, zone_nr_conv, zone_max_open, zone_max_active, zone_append_max_sectors, zone_full, zone_readonly, zone_offline, \
               zone_state, faults, seed, power_cut, power_cut_unit, record, publish, tls_clients; \
               those of every device are iops, bps, iops_burst, bps_burst, max_clients";
    let unit = "(K, M, G and T are known, 1024-based)";
    for (text, sentence) in [
        ("ram0", format!("\"ram0\": {form}")),
        ("", format!("\"\": {form}")),
        (
            "=ram,disksize=1G",
            "\"\": a device name is 1 to 255 bytes of printable characters without '=', ',' or blanks, and '/' only between others".into(),
        ),
        ("r=rma,disksize=1G", format!("r: unknown kind \"rma\"; ram?; the kinds are {}", KINDS.join(", "))),
        ("r=", format!("r: unknown kind \"\"; the kinds are {}", KINDS.join(", "))),
        ("r=ram,disksiez=1G", format!("r: unknown key \"disksiez\"; disksize?; {ram}")),
        ("r=ram,size=1G", format!("r: unknown key \"size\"; disksize?; {ram}")),
        ("r=ram,colour=blue", format!("r: unknown key \"colour\"; {ram}")),
        ("r=ram,disksize", "r: disksize: a value is missing; write disksize=VALUE".into()),
        ("r=ram,disksize=1G,disksize=1G", "r: disksize: given twice".into()),
        ("r=ram", "r: disksize is missing; a ram device needs it, for example disksize=4G".into()),
        ("n=null", "n: size is missing; a null device needs it, for example size=4G".into()),
        ("f=file", "f: path is missing; a file device needs it, for example path=disk.img".into()),
        ("f=file,path=", "f: path=: a path is missing".into()),
        ("r=ram,disksize=1024", format!("r: disksize=1024: give a unit; 1024M? {unit}")),
        ("r=ram,disksize=1.5G", "r: disksize=1.5G: a size is a whole number; 1536M?".into()),
        ("r=ram,disksize=0", "r: disksize=0: must be more than 0".into()),
        (
            "r=ram,disksize=99999999T",
            "r: disksize=99999999T: too large; a ram device has at most 256T".into(),
        ),
        ("r=ram,disksize=300T", "r: disksize=300T: too large; a ram device has at most 256T".into()),
        (
            "r=ram,disksize=1G,mem_limit=99999999T",
            "r: mem_limit=99999999T: too large; the largest size that can be written is 16777215T; 0 or none is no limit".into(),
        ),
        (
            "r=ram,disksize=1G,comp_algorithm=lzo-rle",
            "r: comp_algorithm=lzo-rle: lzo-rle is not offered, as no library has it; there are lz4, lz4hc, lzo, zstd and store".into(),
        ),
        (
            "r=ram,disksize=1G,comp_algorithm=store,algorithm_params=level=1",
            "r: algorithm_params=level=1: store takes no level".into(),
        ),
        (
            "r=ram,disksize=1G,algorithm_params=level=1 level=2",
            "r: algorithm_params=level=1 level=2: level is given twice".into(),
        ),
        (
            "r=ram,disksize=1G,comp_algorithm=zstd,algorithm_params=algo=lz4",
            "r: algorithm_params: algo=lz4 does not match comp_algorithm=zstd".into(),
        ),
        (
            "r=ram,disksize=1G,algorithm_params=level=13,comp_algorithm=lz4hc",
            "r: algorithm_params: level=13 is out of range: lz4hc takes 2 to 12".into(),
        ),
        (
            "r=ram,disksize=1G,algorithm_params=level=fast",
            "r: algorithm_params: level=fast is not a whole number".into(),
        ),
        (
            "r=ram,disksize=1G,algorithm_params=dict=/nowhere/d",
            "r: algorithm_params=dict=/nowhere/d: lz4 takes no dictionary".into(),
        ),
        (
            "n=null,size=8388608T",
            "n: size=8388608T: too large; the size must be less than 8388608T (2^63 bytes)".into(),
        ),
        ("n=null,size=5K", "n: size=5K: must be a multiple of the blocksize, 4096 bytes".into()),
        (
            "n=null,size=1K,blocksize=2K",
            "n: size=1K: must be a multiple of the blocksize, 2048 bytes".into(),
        ),
        (
            "f=file,path=a,size=16777216T",
            "f: size=16777216T: too large; the size must be less than 8388608T (2^63 bytes)".into(),
        ),
        (
            "r=ram,disksize=1G,mem_limit=12",
            format!("r: mem_limit=12: give a unit; 12M? {unit}; 0 or none is no limit"),
        ),
        (
            "r=ram,disksize=1G,comp_algorithm=zst",
            "r: comp_algorithm=zst: unknown algorithm; zstd?; allowed are lz4, lz4hc, lzo, zstd, store".into(),
        ),
        ("n=null,size=1G,blocksize=513", "n: blocksize=513: must be 512, 1024, 2048 or 4096 (bytes)".into()),
        ("n=null,size=1G,blocksize=8K", "n: blocksize=8K: must be 512, 1024, 2048 or 4096 (bytes)".into()),
        ("f=file,path=a,readonly=maybe", "f: readonly=maybe: must be yes or no".into()),
        ("f=file,path=a,direct=1", "f: direct=1: must be auto, on or off".into()),
        ("f=file,path=a,publish=2", "f: publish=2: must be yes or no".into()),
    ] {
        assert_eq!(text.parse::<Spec>().unwrap_err().to_string(), sentence, "{text}");
    }
}

#[test]
fn largest_sizes_parse() {
    for text in ["r=ram,disksize=256T", "n=null,size=8388607T", "f=file,path=a,size=8388607T"] {
        assert!(text.parse::<Spec>().is_ok(), "{text}");
    }
}

#[test]
fn backing_device_keys_parse() {
    let backing = ram("backing_dev=spill.img").backing.unwrap();
    let file = |path: &str| BackingPlace::Path(path.into());
    assert_eq!((backing.place, backing.size, backing.compressed), (file("spill.img"), None, true));
    assert_eq!((backing.limit, backing.limit_enable, backing.batch_size), (0, false, None));
    let backing = ram("backing_size=8G,backing_dev=a,,b,compressed_writeback=no,writeback_limit=1002,\
                       writeback_limit_enable=1,writeback_batch_size=32")
    .backing
    .unwrap();
    assert_eq!((backing.place, backing.size, backing.compressed), (file("a,b"), Some(8 << 30), false));
    assert_eq!((backing.limit, backing.limit_enable, backing.batch_size), (1002, true, Some(32)));
    let device = BackingPlace::Device { typed: "device:a/b".into(), name: "a/b".into() };
    assert_eq!(ram("backing_dev=device:a/b,writeback_limit=1").backing.unwrap().place, device);
    assert_eq!(ram("backing_dev=./device:a").backing.unwrap().place, file("./device:a"));
}

#[test]
fn secondary_algorithms_parse() {
    let algorithms = |keys: &str| ram(keys).recomp_algorithms.map(|s| s.map(|s| (s.algorithm, s.params)));
    let plain = |algorithm| Some((algorithm, String::new()));
    assert_eq!(algorithms("recomp_algorithm=zstd"), [plain(Algorithm::Zstd), None, None]);
    assert_eq!(algorithms("recomp_algorithm=algo=zstd"), [plain(Algorithm::Zstd), None, None]);
    assert_eq!(
        algorithms("recomp_algorithm=priority=3 algo=zstd ;lz4hc priority=2; store"),
        [plain(Algorithm::Store), plain(Algorithm::Lz4hc), plain(Algorithm::Zstd)]
    );
    let with = |params: &str| {
        let keys = "recomp_algorithm=algo=lz4hc;algo=zstd priority=2,algorithm_params";
        let ram = ram(&format!("{keys}={params}"));
        let [first, second, _] = ram.recomp_algorithms.map(|s| s.map(|s| s.params));
        (ram.algorithm_params, first.unwrap(), second.unwrap())
    };
    let words = |a: &str, b: &str, c: &str| (a.to_owned(), b.to_owned(), c.to_owned());
    assert_eq!(with("level=5"), words("level=5", "", ""));
    assert_eq!(with("level=9 priority=1"), words("", "level=9", ""));
    assert_eq!(with("algo=zstd level=19 dict=/d"), words("", "", "algo=zstd level=19 dict=/d"));
    assert_eq!(with("level=5;priority=2 algo=zstd level=1; algo=lz4hc level=12"), {
        words("level=5", "algo=lz4hc level=12", "algo=zstd level=1")
    });
    assert_eq!(with("priority=0 algo=lz4 level=2"), words("algo=lz4 level=2", "", ""));

    let seconds = |text: &str| ram(&format!("auto_recompress={text}")).auto_recompress.map(|d| d.as_secs());
    assert_eq!(
        (seconds("no"), seconds("0"), seconds("1"), seconds("86400")),
        (None, None, Some(1), Some(86_400))
    );
    assert!(ram("auto_recompress=60,recomp_algorithm=zstd priority=2").auto_recompress.is_some());
    let groups = |text: &str| ram(&format!("auto_group={text}")).auto_group.map(|d| d.as_secs());
    assert_eq!((groups("no"), groups("600")), (None, Some(600)));
    let dedup = |text: &str| ram(&format!("auto_dedup={text}")).auto_dedup.map(|d| d.as_secs());
    assert_eq!((dedup("no"), dedup("600")), (None, Some(600)));
    let plain = ram("comp_algorithm=lz4");
    assert_eq!((plain.auto_group, plain.auto_dedup), (None, None));
}

#[test]
fn invalid_writeback_keys_are_refused() {
    let numbers = "must be no, or the seconds a page must be idle, 1 to 86400";
    for (keys, sentence) in [
        ("backing_size=8G", "backing_size=8G: only with backing_dev=PATH or backing_dev=device:NAME"),
        (
            "compressed_writeback=no",
            "compressed_writeback=no: only with backing_dev=PATH or backing_dev=device:NAME",
        ),
        (
            "writeback_limit_enable=0",
            "writeback_limit_enable=0: only with backing_dev=PATH or backing_dev=device:NAME",
        ),
        ("backing_dev=", "backing_dev=: a path is missing"),
        (
            "backing_dev=device:",
            "backing_dev=device:: after device: must be the name of a device; a file of that name is written ./device:",
        ),
        (
            "backing_dev=device:n,backing_size=1G",
            "backing_size=1G: only where backing_dev is a file; a device has its own size",
        ),
        (
            "backing_dev=a,backing_size=8",
            "backing_size=8: give a unit; 8M? (K, M, G and T are known, 1024-based)",
        ),
        ("backing_dev=a,compressed_writeback=2", "compressed_writeback=2: must be yes or no"),
        (
            "backing_dev=a,writeback_limit=1G",
            "writeback_limit=1G: a count of 4 KiB units, without a letter; 262144?",
        ),
        (
            "backing_dev=a,writeback_limit=-1",
            "writeback_limit=-1: must be a whole number: a count of 4 KiB units",
        ),
        (
            "backing_dev=a,writeback_batch_size=0",
            "writeback_batch_size=0: must be a whole number of 4 KiB blocks, 1 to 4294967295",
        ),
        ("recomp_algorithm=", "recomp_algorithm=: an algorithm is missing; for example algo=zstd priority=1"),
        (
            "recomp_algorithm=priority=2",
            "recomp_algorithm=priority=2: an algorithm is missing; for example algo=zstd priority=1",
        ),
        (
            "recomp_algorithm=zstd;",
            "recomp_algorithm=zstd;: an algorithm is missing; for example algo=zstd priority=1",
        ),
        (
            "recomp_algorithm=algo=zstd priority=4",
            "recomp_algorithm=algo=zstd priority=4: priority=4: must be 1 to 3",
        ),
        ("recomp_algorithm=zstd priority=0", "recomp_algorithm=zstd priority=0: priority=0: must be 1 to 3"),
        ("recomp_algorithm=zstd priority=x", "recomp_algorithm=zstd priority=x: priority=x: not a priority"),
        (
            "recomp_algorithm=zstd;lz4hc",
            "recomp_algorithm=zstd;lz4hc: two algorithms at priority 1, zstd and lz4hc",
        ),
        ("recomp_algorithm=algo=zstd algo=lz4", "recomp_algorithm=algo=zstd algo=lz4: algo is given twice"),
        (
            "recomp_algorithm=zstd level=3",
            "recomp_algorithm=zstd level=3: \"level=3\" is not understood; write algo=NAME priority=1..3, and ; between \
             several",
        ),
        (
            "recomp_algorithm=zst",
            "recomp_algorithm=zst: unknown algorithm; zstd?; allowed are lz4, lz4hc, lzo, zstd, store",
        ),
        (
            "recomp_algorithm=zstd,algorithm_params=priority=2 level=3",
            "algorithm_params=priority=2 level=3: priority=2: recomp_algorithm has no algorithm there",
        ),
        (
            "algorithm_params=priority=4 level=3",
            "algorithm_params=priority=4 level=3: priority=4: must be 0 (comp_algorithm) to 3",
        ),
        (
            "recomp_algorithm=zstd,algorithm_params=algo=lz4hc level=3",
            "algorithm_params=algo=lz4hc level=3: algo=lz4hc is neither comp_algorithm nor in recomp_algorithm",
        ),
        (
            "recomp_algorithm=zstd,algorithm_params=algo=lz4 priority=1 level=3",
            "algorithm_params: algo=lz4 does not match recomp_algorithm, zstd at priority 1",
        ),
        (
            "recomp_algorithm=lz4hc,algorithm_params=level=5;priority=1 level=13",
            "algorithm_params: level=13 is out of range: lz4hc takes 2 to 12",
        ),
        (
            "algorithm_params=level=5;level=6",
            "algorithm_params=level=5;level=6: two groups of words for priority 0, lz4",
        ),
        ("auto_recompress=yes", &format!("auto_recompress=yes: {numbers}")),
        ("auto_recompress=86401", &format!("auto_recompress=86401: {numbers}")),
        ("auto_group=yes", &format!("auto_group=yes: {numbers}")),
        ("auto_dedup=86401", &format!("auto_dedup=86401: {numbers}")),
        (
            "auto_recompress=60,recomp_algorithm=zstd priority=3",
            "auto_recompress=60: takes priority 3 for a dictionary of its own, and recomp_algorithm has an algorithm there",
        ),
    ] {
        let text = format!("r=ram,disksize=1G,{keys}");
        assert_eq!(text.parse::<Spec>().unwrap_err().to_string(), format!("r: {sentence}"), "{text}");
    }
}
