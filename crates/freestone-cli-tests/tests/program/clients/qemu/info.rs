//! nbdinfo: sizes, flags and names that exports report.

use crate::harness::prelude::*;

const BLOCK_MAX_BYTES: u64 = 64 * MIB;

fn flags(export: &Value, names: &[&str]) -> Vec<bool> {
    names.iter().map(|name| export[name].as_bool().unwrap_or_else(|| panic!("no {name}: {export}"))).collect()
}

#[test]
fn nbdinfo_shows_sizes_and_flags() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden"), vec![1; 3 << 20]).unwrap();
    let devices =
        ["ram0=ram,disksize=64M", "n0=null,size=1T,blocksize=4096", "g=file,path=golden,readonly=1"];
    let serve = Serve::start_in(dir, &devices, true);
    let export = |name: &str| {
        let info = json(tool("nbdinfo").arg("--json").arg(uri(&serve, name)));
        assert_eq!(info["protocol"], "newstyle-fixed");
        assert_eq!(info["structured"], true);
        info["exports"][0].clone()
    };
    let able = ["can_cache", "can_df", "can_flush", "can_fua", "can_multi_conn", "can_trim", "can_zero"];

    let ram = export("ram0");
    assert_eq!((&ram["export-size"], &ram["export-name"]), (&(64 * MIB).into(), &"ram0".into()));
    assert_eq!(flags(&ram, &able), [true; 7]);
    assert_eq!(flags(&ram, &["is_read_only", "is_rotational"]), [false; 2]);
    assert_eq!(ram["contexts"], Value::from(vec!["base:allocation"]));
    assert_eq!(ram["block_size_minimum"], 1);
    assert_eq!(ram["block_size_preferred"], 4096);
    assert_eq!(ram["block_size_maximum"], BLOCK_MAX_BYTES);

    let null = export("n0");
    assert_eq!(null["export-size"], MIB * MIB);
    assert_eq!(null["block_size_minimum"], 1);
    assert_eq!(null["is_read_only"], false);

    let file = export("g");
    assert_eq!(file["export-size"], 3 * MIB);
    assert_eq!(flags(&file, &["is_read_only", "can_multi_conn"]), [true; 2]);
    // A read-only export does not offer the commands trim and write zeroes.
    assert_eq!(flags(&file, &["can_trim", "can_zero"]), [false; 2]);

    // An empty name selects the default export, which is the first device. For an unknown name the
    // server reports an error.
    let info = json(tool("nbdinfo").arg("--json").arg(uri(&serve, "")));
    assert_eq!(info["exports"][0]["export-size"], 64 * MIB);
    assert!(!tool("nbdinfo").arg(uri(&serve, "absent")).output().unwrap().status.success());
}

#[test]
fn nbdinfo_map_shows_data_and_holes() {
    let serve = Serve::start(&["ram0=ram,disksize=1G"]);
    let uri = uri(&serve, "ram0");
    let map = || -> Vec<(u64, u64, String)> {
        let map = json(tool("nbdinfo").args(["--map", "--json"]).arg(&uri));
        let number = |extent: &Value, key: &str| extent[key].as_u64().unwrap();
        let extent = |e: &Value| {
            (number(e, "offset"), number(e, "length"), e["description"].as_str().unwrap().to_owned())
        };
        map.as_array().unwrap().iter().map(extent).collect()
    };
    let hole = |offset, length| (offset, length, "hole,zero".to_owned());
    let data = |offset, length| (offset, length, "data".to_owned());
    assert_eq!(map(), [hole(0, 1024 * MIB)]);

    let mut writes = tool("qemu-io");
    writes.args([
        "-f",
        "raw",
        "-c",
        "write -P 5 4M 1M",
        "-c",
        "write -P 6 100M 4k",
        "-c",
        "discard 4608k 64k",
    ]);
    ok(writes.arg(&uri));
    let expected = [
        hole(0, 4 * MIB),
        data(4 * MIB, 512 * KIB),
        hole(4608 * KIB, 64 * KIB),
        data(4672 * KIB, 448 * KIB),
        hole(5 * MIB, 95 * MIB),
        data(100 * MIB, 4 * KIB),
        hole(100 * MIB + 4 * KIB, 924 * MIB - 4 * KIB),
    ];
    assert_eq!(map(), expected);
    let totals = ok(tool("nbdinfo").args(["--map", "--totals"]).arg(&uri));
    assert!(totals.lines().any(|l| l.split_whitespace().next() == Some("987136")), "{totals}");
}

#[test]
fn many_exports_are_independent() {
    const DEVICES: u64 = 50;
    let size = |n: u64| (n + 1) * MIB;
    let devices: Vec<String> = (0..DEVICES).map(|n| format!("ram{n}=ram,disksize={}M", n + 1)).collect();
    let serve = Serve::start(&devices);
    let info = json(tool("nbdinfo").args(["--list", "--json"]).arg(uri(&serve, "")));
    let mut seen: Vec<(String, u64)> = Vec::new();
    for export in info["exports"].as_array().unwrap() {
        let name = export["export-name"].as_str().unwrap().to_owned();
        seen.push((name, export["export-size"].as_u64().unwrap()));
    }
    let expected: Vec<_> = (0..DEVICES).map(|n| (format!("ram{n}"), size(n))).collect();
    seen.sort_by_key(|(_, size)| *size);
    assert_eq!(seen, expected);

    // Each export is an independent device, so a write to one does not change the others.
    for n in [0, 17, 49] {
        let write = format!("write -P {} 0 1M", n + 1);
        ok(tool("qemu-io").args(["-f", "raw", "-c", &write]).arg(uri(&serve, &format!("ram{n}"))));
    }
    for (n, pattern) in [(0, 1), (17, 18), (49, 50), (16, 0), (48, 0)] {
        let read = format!("read -P {pattern} 0 1M");
        ok(tool("qemu-io").args(["-f", "raw", "-c", &read]).arg(uri(&serve, &format!("ram{n}"))));
    }
}
