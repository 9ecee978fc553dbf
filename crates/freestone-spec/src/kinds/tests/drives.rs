//! Tests of the keys of test drives and layers: accepted and refused values.

use std::time::Duration;

use freestone::codec::Algorithm;

use super::super::{KINDS, KindSpec, NullBacking, NullSpec, Spec};
use crate::entries::SpecError;
use crate::schema::of_kind;

fn null(keys: &str) -> NullSpec {
    let spec: Spec = format!("n=null,size=1G,{keys}").parse().unwrap();
    let KindSpec::Null(null) = spec.kind else { panic!("{keys}") };
    *null
}

#[test]
fn null_accepts_parameters_of_null_blk() {
    let bare = null("blocksize=4096");
    assert_eq!(
        (bare.backing, bare.discard, bare.fua, bare.cache_size),
        (NullBacking::Nothing, false, true, None)
    );
    assert_eq!((bare.mbps, bare.completion, bare.max_request), (0, Duration::ZERO, 0));
    let full = null(
        "blocksize=512,memory_backed=1,discard=1,cache_size=16M,fua=0,mbps=100,completion_nsec=10000,badblocks=+8-15;+99-99 \
         -9-9,badblocks_once=1,badblocks_partial_io=y,max_sectors=256,rotational=1,readonly=1"
            .replace("=y,", "=yes,")
            .as_str(),
    );
    assert_eq!((full.backing, full.discard, full.fua), (NullBacking::Memory, true, false));
    assert_eq!(
        (full.cache_size, full.mbps, full.completion),
        (Some(16 << 20), 100, Duration::from_micros(10))
    );
    assert_eq!(full.badblocks, ["+8-15", "+99-99", "-9-9"]);
    assert_eq!((full.max_request, full.rotational, full.readonly), (128 << 10, true, true));
    assert!(full.badblocks_once && full.badblocks_partial_io);
    let NullBacking::Compressed(family) = null("memory_backed=1,comp_algorithm=zstd,mem_limit=1M").backing
    else {
        panic!()
    };
    assert_eq!((family.comp_algorithm, family.mem_limit), (Algorithm::Zstd, Some(1 << 20)));
    assert_eq!(null("cache_size=0").cache_size, None);
}

#[test]
fn layer_keys_parse() {
    for device in ["n=null,size=1G", "r=ram,disksize=1G", "f=file,path=a,size=1G"] {
        let spec: Spec = format!(
            "{device},zoned=1,zone_size=64M,zone_capacity=48M,zone_nr_conv=2,zone_max_open=3,zone_max_active=4,\
             zone_append_max_sectors=8,zone_full=1,zone_readonly=128M;192M,zone_offline=0 256M,faults=write error=EIO,\
             seed=18446744073709551615"
        )
        .parse()
        .unwrap();
        let zones = spec.layers.zones.unwrap();
        assert_eq!((zones.size, zones.capacity, zones.nr_conv), (64 << 20, 48 << 20, 2));
        assert_eq!((zones.max_open, zones.max_active, zones.append_max_sectors), (3, 4, Some(8)));
        assert_eq!((zones.readonly, zones.offline), (vec![128 << 20, 192 << 20], vec![0, 256 << 20]));
        assert_eq!(
            (spec.layers.faults.as_deref(), spec.layers.seed),
            (Some("write error=EIO"), Some(u64::MAX))
        );
    }
    let spec: Spec = "r=ram,disksize=1G,zoned=1".parse().unwrap();
    assert_eq!(spec.layers.zones.unwrap().size, 256 << 20);
    for (text, bytes) in [("512", 512), ("4K", 4096), ("65536", 65536)] {
        let spec: Spec = format!("f=fork,base=b,power_cut=yes,power_cut_unit={text}").parse().unwrap();
        assert_eq!(spec.layers.power_cut_unit, Some(bytes));
    }
    let spec: Spec = "f=fork,base=b,faults=none,power_cut=yes,record=/l".parse().unwrap();
    assert_eq!((spec.layers.faults.as_deref(), spec.layers.power_cut), (Some("none"), true));
    assert_eq!(spec.layers.record.unwrap().to_str(), Some("/l"));
    // These texts specify no layer.
    for text in ["r=ram,disksize=1G", "r=ram,disksize=1G,zoned=0,power_cut=no"] {
        assert!(text.parse::<Spec>().unwrap().layers.is_empty(), "{text}");
    }
}

#[test]
fn invalid_drive_keys_are_refused_with_reason() {
    let null = "n=null,size=1G,";
    let unit = "(K, M, G and T are known, 1024-based)";
    let bad = "must be +FIRST-LAST (bad) or -FIRST-LAST (good again) in 512-byte sectors, as in +8-15, with ; between \
               several";
    let cases = [
        ("discard=1", "discard=1: only with memory_backed=1: without memory there is nothing to free".to_owned()),
        (
            "memory_backed=1,zoned=1,discard=1",
            "discard=1: a zoned device has none: its zones are reset".into(),
        ),
        ("cache_size=1M", "cache_size=1M: only with memory_backed=1: there is nothing behind the cache".into()),
        ("memory_backed=1,cache_size=64", format!("cache_size=64: give a unit; 64M? {unit}; 0 is no cache")),
        (
            "power_cut=1",
            "power_cut=1: only with memory_backed=1: without memory there is no data to lose".into(),
        ),
        ("record=/l", "record=/l: only with memory_backed=1: without memory there is no data to lose".into()),
        (
            "memory_backed=1,fua=0",
            "fua=0: only with cache_size: without a cache every write is durable as it is".into(),
        ),
        ("mbps=40961", "mbps=40961: must be 0 (no limit) to 40960 (MiB per second)".into()),
        (
            "completion_nsec=60000000001",
            "completion_nsec=60000000001: must be 0 to 60000000000 (nanoseconds); longer is faults='all delay=120s'"
                .into(),
        ),
        ("badblocks=8-15", format!("badblocks=8-15: {bad}")),
        ("badblocks=+15-8", format!("badblocks=+15-8: {bad}")),
        ("badblocks=+8-15;x", format!("badblocks=+8-15;x: {bad}")),
        ("badblocks=", format!("badblocks=: {bad}")),
        (
            "max_sectors=128K",
            "max_sectors=128K: a count of 512-byte sectors, without a letter; 256?".into(),
        ),
        (
            "max_sectors=7",
            "max_sectors=7: must be 0 (no limit), or 8 to 2097152 and a multiple of the blocksize, 4096 bytes".into(),
        ),
        ("comp_algorithm=zstd", "comp_algorithm=zstd: only with memory_backed=1".into()),
        (
            "memory_backed=1,mem_limit=1G",
            "mem_limit=1G: only with memory_backed=1 and comp_algorithm".into(),
        ),
        ("zone_size=64M", "zone_size=64M: only with zoned=1".into()),
        ("zoned=1,zone_size=64", format!("zone_size=64: give a unit; 64M? {unit}")),
        ("zoned=1,zone_size=48M", "zone_size=48M: must be a power of two".into()),
        ("zoned=1,zone_size=2G", "zone_size=2G: the device has 1G; it must hold at least one zone".into()),
        (
            "zoned=1,zone_size=64M,zone_capacity=65M",
            "zone_capacity=65M: larger than a zone, which has 64M".into(),
        ),
        ("zoned=1,zone_max_open=4M", "zone_max_open=4M: must be a whole number: a count of zones".into()),
        (
            "zoned=1,zone_readonly=131072",
            format!("zone_readonly=131072: 131072: give a unit; 64M, if these are sectors? {unit}"),
        ),
        ("zoned=1,zone_offline=", "zone_offline=: must be offsets, with ; between several".into()),
        (
            "zoned=1,zone_state=/z",
            "zone_state=/z: only for a file: a device in memory ends with the process, and so do its zones".into(),
        ),
        (
            "seed=1",
            "seed=1: decides about faults and power cuts; only with faults or power_cut=yes".into(),
        ),
        (
            "memory_backed=1,power_cut_unit=4K",
            "power_cut_unit=4K: what a power cut does not tear; only with power_cut=yes".into(),
        ),
        (
            "memory_backed=1,power_cut=1,power_cut_unit=128K",
            "power_cut_unit=128K: must be a power of two from 512 (bytes) to 64K".into(),
        ),
        (
            "memory_backed=1,power_cut=1,power_cut_unit=3000",
            "power_cut_unit=3000: must be a power of two from 512 (bytes) to 64K".into(),
        ),
        ("faults=none,seed=-1", "seed=-1: must be a whole number from 0 to 18446744073709551615".into()),
    ];
    for (keys, sentence) in cases {
        let text = format!("{null}{keys}");
        assert_eq!(text.parse::<Spec>().unwrap_err().to_string(), format!("n: {sentence}"), "{text}");
    }
    for (text, sentence) in [
        (
            "n=null,size=1M,zoned=1",
            "n: zoned=1: the device has 1M; it must hold at least one zone, a zone_size of 256M is the default",
        ),
        ("f=file,path=a,readonly=1,zoned=1", "f: zoned=1: not with readonly=yes: the zones could not change"),
        (
            "f=file,path=a,readonly=1,power_cut=1",
            "f: power_cut=1: not with readonly=yes: nothing is written that could be lost",
        ),
        (
            "f=fork,base=b,zoned=1",
            "f: unknown key \"zoned\"; the keys of a fork device are base, size, mem_limit, mem_min, full, faults, seed, \
             power_cut, power_cut_unit, record, publish, tls_clients, on_data_loss, keep; \
             those of every device are iops, bps, iops_burst, bps_burst, max_clients",
        ),
    ] {
        assert_eq!(text.parse::<Spec>().unwrap_err().to_string(), sentence, "{text}");
    }
    let faults = "n=null,size=1G,faults=write eror=EIO".parse::<Spec>().unwrap_err().to_string();
    assert!(faults.starts_with("n: faults=write eror=EIO: ") && faults.contains("error="), "{faults}");
}

/// Every parameter of the kernel's `null_blk` that is not a key of the kind `null` is refused with
/// a reason.
#[test]
fn unsupported_null_blk_parameters_are_refused() {
    for key in [
        "gb",
        "bs",
        "nr_devices",
        "queue_mode",
        "submit_queues",
        "poll_queues",
        "use_per_node_hctx",
        "hw_queue_depth",
        "shared_tags",
        "shared_tag_bitmap",
        "no_sched",
        "home_node",
        "irqmode",
        "blocking",
        "virt_boundary",
        "timeout",
        "requeue",
        "init_hctx",
        "power",
        "lightnvm",
    ] {
        let error = format!("n=null,size=1G,{key}=1").parse::<Spec>().unwrap_err().to_string();
        assert!(error.starts_with(&format!("n: {key}=1: is not for user space: ")), "{error}");
    }
}

#[test]
fn kinds_refuse_invalid_values_of_each_key() {
    for kind in KINDS {
        let required = match kind {
            "ram" => "disksize=1M",
            "null" => "size=1M",
            "file" | "qcow2" => "path=x",
            "image" => "url=file:///x:y",
            "nbd" => "uri=nbd://h/x",
            "rbd" => "image=p/n",
            "snapshot" => "origin=x",
            _ => "base=x",
        };
        assert!(of_kind(kind).count() > 2, "{kind}");
        for (number, key) in of_kind(kind).enumerate() {
            let required = if number == 0 { "" } else { required };
            let is_refused = |value: &&str| {
                let words = format!("d={kind},{required},{}={value}", key.name).replace(",,", ",");
                let Err(error) = words.parse::<Spec>() else { return false };
                !matches!(error, SpecError::Key { .. }) && error.key() == Some(key.name)
            };
            assert!(["", "\u{1}?"].iter().any(is_refused), "{kind}: {}", key.name);
        }
    }
}
