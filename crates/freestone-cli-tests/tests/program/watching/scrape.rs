//! Metrics in the format of Prometheus and `OpenMetrics`.

use std::collections::{BTreeMap, BTreeSet};

use super::Watched;
use super::openmetrics::Exposition;
use crate::harness::prelude::*;

/// Returns the type and labels of each metric that docs/reference/metrics.md lists, by name.
fn documented() -> BTreeMap<String, (String, BTreeSet<String>)> {
    let page =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/metrics.md"))
            .unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| `freestone_"));
    rows.map(|row| {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let labels =
            cells[3].split(", ").filter(|label| !label.is_empty()).map(|label| label.replace('`', ""));
        (cells[1].replace('`', ""), (cells[2].to_owned(), labels.collect()))
    })
    .collect()
}

fn op(of: &Exposition, name: &str, device: &str, kind: &str, op: &str) -> u64 {
    let labels = [("device", device), ("kind", kind), ("op", op)];
    of.value(name, &labels).unwrap_or_else(|| panic!("{name} {labels:?}")) as u64
}

#[test]
fn metrics_are_exact_and_documented() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden"), vec![1; 4 << 20]).unwrap();
    let golden = format!("golden=file,path={}/golden,readonly=yes", dir.path().display());
    let watched = Watched::start(&[
        "r=ram,disksize=16M",
        "q=null,size=4M,faults=write error=EIO at=1M+4K,seed=1",
        &golden,
        "f=fork,base=golden",
        "g=fork,base=golden",
    ]);
    let serve = &watched.serve;
    let mut ram = Raw::connect(serve, "r");
    for n in 0..300 {
        assert_eq!(ram.write(0, n * 4096, &[n as u8; 4096]), 0);
    }
    for n in 0..700 {
        ram.read(n % 300 * 4096, 512).unwrap();
    }
    assert_eq!(ram.zero(0, 8192), 0);
    for _ in 0..3 {
        assert_eq!(ram.flush(), 0);
    }
    let mut faulty = Raw::connect(serve, "q");
    assert_eq!(faulty.write(0, MIB, &[1; 4096]), EIO);
    let (mut f, mut g) = (Raw::connect(serve, "f"), Raw::connect(serve, "g"));
    for n in 0..10 {
        f.read(n * 4096, 4096).unwrap();
    }
    assert_eq!(g.write(0, 0, &[1; 12288]), 0);

    let exposition = watched.scrape();
    let of_ram = |name: &str, what: &str| op(&exposition, name, "r", "ram", what);
    let requests = "freestone_device_requests_total";
    let counted =
        ["read", "write", "write_zeroes", "flush", "discard", "append"].map(|op| of_ram(requests, op));
    assert_eq!(counted, [700, 300, 1, 3, 0, 0]);
    let bytes = "freestone_device_bytes_total";
    let counted = ["read", "write", "write_zeroes", "discard"].map(|op| of_ram(bytes, op));
    assert_eq!(counted, [700 * 512, 300 * 4096, 8192, 0]);
    assert_eq!(exposition.value(bytes, &[("device", "r"), ("kind", "ram"), ("op", "flush")]), None);
    assert_eq!(of_ram("freestone_device_errors_total", "write"), 0);
    assert_eq!(op(&exposition, "freestone_device_errors_total", "q", "null", "write"), 1);
    assert_eq!(op(&exposition, requests, "q", "null", "write"), 0);
    // The requests of a connection are counted by one thread, which measures only some. Each
    // measured request is counted for those before it too.
    let measured = of_ram("freestone_device_duration_seconds_count", "read")
        + of_ram("freestone_device_duration_seconds_count", "write");
    assert!((1004 - 128..=1004).contains(&measured), "{measured}");
    let size = exposition.value("freestone_device_size_bytes", &[("device", "r"), ("kind", "ram")]);
    assert_eq!(size, Some(16.0 * MIB as f64));
    // Forks are reported as a sum for their base, and individually. Their base is reported as a
    // device.
    let base = [("base", "golden")];
    assert_eq!(exposition.value("freestone_forks", &base), Some(2.0));
    let of_forks =
        |name: &str, op: &str| exposition.value(name, &[("base", "golden"), ("op", op)]).unwrap() as u64;
    assert_eq!(of_forks("freestone_forks_requests_total", "read"), 10);
    assert_eq!(of_forks("freestone_forks_bytes_total", "write"), 12288);
    let of_f = [("fork", "f"), ("base", "golden"), ("op", "read")];
    assert_eq!(exposition.value("freestone_fork_requests_total", &of_f), Some(10.0));
    let devices = exposition.values_of(requests, "device");
    assert_eq!(devices, ["golden", "q", "r"].map(str::to_owned).into());
    let address = format!("unix:{}", serve.path("nbd").display());
    let export = [("device", "r"), ("address", address.as_str()), ("op", "read")];
    assert_eq!(exposition.value("freestone_export_requests_total", &export), Some(700.0));
    assert_eq!(exposition.value("freestone_export_connections", &export[..2]), Some(1.0));
    assert_eq!(exposition.value("freestone_nbd_connections", &[]), Some(4.0));

    // The reference page lists exactly the metrics that exist.
    let documented = documented();
    let types: BTreeMap<_, _> =
        documented.iter().map(|(name, (kind, _))| (name.clone(), kind.clone())).collect();
    assert_eq!(exposition.families, types);
    for (sample, labels, _) in &exposition.samples {
        let family = documented.iter().filter(|(name, _)| sample.starts_with(name.as_str()));
        let (_, (_, known)) = family.max_by_key(|(name, _)| name.len()).unwrap();
        let labels: BTreeSet<_> = labels.keys().filter(|label| *label != "le").cloned().collect();
        assert_eq!(labels, *known, "{sample}");
    }

    // Counters of a removed fork stay in the sum for the base, so no counter decreases.
    drop((f, g));
    serve.text(&["remove", "f", "--force"]);
    let after = watched.scrape();
    let read = after.value("freestone_forks_requests_total", &[("base", "golden"), ("op", "read")]);
    assert_eq!((read, after.value("freestone_forks", &base)), (Some(10.0), Some(1.0)));
    assert_eq!(after.value("freestone_fork_requests_total", &of_f), None);
    assert_eq!(
        op(&after, requests, "golden", "file", "read"),
        op(&exposition, requests, "golden", "file", "read")
    );
}

#[test]
fn forks_above_the_limit_are_summed() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden"), vec![1; 1 << 20]).unwrap();
    let golden = format!("golden=file,path={}/golden,readonly=yes", dir.path().display());
    let watched = Watched::start(&[&golden, "--metrics-forks", "3"]);
    let serve = &watched.serve;
    serve.text(&["fork", "golden", "job-%n", "--count", "500"]);
    // The first scrape is the baseline. The next one reports the forks that were most active since
    // then.
    let before = watched.scrape();
    for (job, reads) in [(7, 30), (450, 50), (99, 40), (3, 1)] {
        let name = format!("job-{job}");
        serve.text(&["publish", &name, "--nbd", &format!("unix:{}", serve.path(&name).display())]);
        let mut client = Raw::connect_at(&serve.path(&name), &name);
        for _ in 0..reads {
            client.read(0, 512).unwrap();
        }
    }
    std::thread::sleep(std::time::Duration::from_millis(600));
    let exposition = watched.scrape();
    let forks = exposition.values_of("freestone_fork_requests_total", "fork");
    assert_eq!(forks, ["job-450", "job-7", "job-99"].map(str::to_owned).into());
    assert_eq!(exposition.value("freestone_forks", &[("base", "golden")]), Some(500.0));
    let reads = exposition.value("freestone_forks_requests_total", &[("base", "golden"), ("op", "read")]);
    assert_eq!(reads, Some(121.0));
    assert!(exposition.samples.len() < before.samples.len() + 200, "{}", exposition.samples.len());
    let labels = exposition.values_of("freestone_device_requests_total", "device");
    assert_eq!(labels, ["golden".to_owned()].into());
}

#[test]
fn device_names_are_escaped_in_labels() {
    let dir = tempfile::Builder::new().prefix("a \"b\\ ").tempdir().unwrap();
    let watched = Watched::start(&["r=ram,disksize=4M"]);
    let at = format!("unix:{}/s", dir.path().display());
    watched.serve.text(&["publish", "r", "--nbd", &at]);
    assert!(watched.scrape().values_of("freestone_export_connections", "address").contains(&at));
}

#[test]
fn invalid_metrics_addresses_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let serve = |args: &[&str]| refused(dir.path(), 2, &[&["serve", "--check"], args].concat());
    let form = "must be PORT or HOST:PORT, for example 9100 or 127.0.0.1:9100";
    assert_eq!(serve(&["--metrics", "x"]), format!("--metrics: x: {form}"));
    assert!(serve(&["--metrics", "unix:m.sock"]).contains("HTTP needs TCP"));
    let open = serve(&["--metrics", "0.0.0.0:9100"]);
    assert!(open.starts_with("--metrics: 0.0.0.0:9100: other machines can reach this address"), "{open}");
    assert_eq!(serve(&["--metrics-open"]), "--metrics-open: has no effect without --metrics");
    let many = ["serve", "--check", "--metrics", "0", "--metrics-forks", "1001"];
    let (status, _, range) = finish(freestone(dir.path()).args(many));
    assert!(status == 2 && range.contains("1001 is not in 0..=1000"), "{range}");
    fs::write(dir.path().join("c.toml"), "metrics_forks = -1").unwrap();
    let file = serve(&["--config", "c.toml"]);
    assert_eq!(file, "c.toml: line 1: metrics_forks=-1: must be a number from 0 to 1000");
    // The address of --metrics is in use.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap().to_string();
    let why = refused(dir.path(), 1, &["serve", "--metrics", &at, "--nbd", "unix:n", "--control", "c"]);
    assert!(why.starts_with(&format!("--metrics: {at}: ")) && why.contains("in use"), "{why}");
    assert!(!dir.path().join("n").exists() && !dir.path().join("c").exists());
}

#[test]
fn rate_limited_requests_are_counted() {
    let watched = Watched::start(&["r=ram,disksize=16M,iops=1000,iops_burst=1", "free=ram,disksize=16M"]);
    for name in ["r", "free"] {
        let mut client = Raw::connect(&watched.serve, name);
        for n in 0..20 {
            client.send_write(n * 4096, &[1; 4096]);
        }
        for _ in 0..20 {
            assert_eq!(client.reply().unwrap().1, 0);
        }
    }
    let metrics = watched.scrape();
    let limited = |device: &str| {
        let labels = [("device", device), ("kind", "ram")];
        metrics.value("freestone_device_limited_total", &labels).unwrap() as u64
    };
    assert!((1..=19).contains(&limited("r")), "{}", limited("r"));
    assert_eq!(limited("free"), 0);
}
