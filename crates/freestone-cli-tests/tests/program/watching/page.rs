//! The web page over HTTP: its files, headers and API requests.

use freestone_testkit::effort;

use super::Watched;
use crate::harness::prelude::*;

const FILES: [&str; 7] = ["/", "/app.js", "/device.js", "/draw.js", "/map.js", "/style.css", "/icon.svg"];

#[test]
fn page_files_are_served_without_foreign_links() {
    let watched = Watched::page(&["r=ram,disksize=4M"]);
    for path in FILES {
        let (status, head, body) = watched.ask(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes());
        assert_eq!(status, 200, "{path}");
        check_head(&head);
        let name = path.trim_start_matches('/');
        let name = if name.is_empty() { "index.html" } else { name };
        let file =
            format!("{}/../freestone-server/src/observe/page/files/{name}", env!("CARGO_MANIFEST_DIR"));
        assert_eq!(body, fs::read_to_string(file).unwrap(), "{path}");
        // The XML namespace is a URL that browsers do not fetch.
        let without = body.replace("http://www.w3.org/2000/svg", "");
        assert!(!without.contains("http://") && !without.contains("https://"), "{path}");
        for word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=\""] {
            assert!(!body.contains(word), "{path}: {word}");
        }
    }
    let url = watched.serve.json(&["stat"])["server"]["http"].clone();
    assert_eq!(url, json!(format!("http://{}/", watched.at)));
}

/// Checks HTTP headers that prevent other sites from embedding or reading the page, or running code
/// in it.
fn check_head(head: &[String]) {
    for line in [
        "X-Content-Type-Options: nosniff",
        "Cache-Control: no-store",
        "Cross-Origin-Resource-Policy: same-origin",
        "X-Frame-Options: DENY",
        "Referrer-Policy: no-referrer",
        "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ] {
        assert_eq!(head.iter().filter(|found| *found == line).count(), 1, "{line}: {head:?}");
    }
    assert!(!head.iter().any(|line| line.starts_with("Access-Control")), "{head:?}");
}

#[test]
fn invalid_page_request_is_refused() {
    let watched = Watched::page(&["r=ram,disksize=4M"]);
    let at = &watched.at;
    let refuse = |text: String, expected: u16| {
        let (status, head, _) = watched.ask(text.as_bytes());
        assert_eq!(status, expected, "{text}");
        check_head(&head);
        head
    };
    for path in ["/", "/api/overview", "/api/map/r", "/api/device/r"] {
        refuse(format!("GET {path} HTTP/1.1\r\nHost: {at}\r\n\r\n"), 200);
        refuse(format!("HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"), 200);
        refuse(format!("GET {path} HTTP/1.1\r\nHost: rebound.example.org\r\n\r\n"), 421);
        for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
            let head = refuse(format!("{method} {path} HTTP/1.1\r\nHost: {at}\r\n\r\n"), 405);
            assert!(head.iter().any(|line| line == "Allow: GET, HEAD"), "{head:?}");
        }
    }
    for path in
        ["/metrics", "/index.html", "/files/app.js", "/../etc/passwd", "/api", "/api/", "/api/set/r", "//"]
    {
        refuse(format!("GET {path} HTTP/1.1\r\nHost: {at}\r\n\r\n"), 404);
    }
    refuse(format!("GET / HTTP/1.1\r\nHost: {at}\r\nX: {}\r\n\r\n", "y".repeat(9000)), 431);
    for (path, status, sentence) in [
        ("/api/device/gone", 404, "gone: no such device"),
        ("/api/device/r?x=1", 400, "x: unknown parameter"),
        ("/api/device/%FF", 400, "%FF: is not a device name"),
        ("/api/overview?count=201", 400, "count=201: must be a number from 0 to 200"),
        ("/api/overview?from=-1", 400, "from=-1: must be a number from 0 to 1048576"),
        ("/api/overview?by=size", 400, "by=size: must be requests, bytes, latency or name"),
        ("/api/overview?a=b", 400, "a: unknown parameter"),
    ] {
        assert_eq!(watched.get(path), (status, json!({ "error": sentence })), "{path}");
    }
}

#[test]
fn page_shows_the_values_of_top_list_and_stat() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden"), vec![1; 1 << 20]).unwrap();
    let golden = format!("golden=file,path={}/golden,readonly=yes,mem_limit=64M", dir.path().display());
    let watched = Watched::page(&[&golden, "r=ram,disksize=16M,mem_limit=8M", "n=null,size=1M"]);
    let serve = &watched.serve;
    serve.text(&["fork", "golden", "job-%n", "--count", "30"]);
    serve.text(&["create", "ci/<b>ü</b>=ram,disksize=1M"]);
    let mut client = Raw::connect(serve, "r");
    watched.json("/api/overview");
    for page in 0..64_u64 {
        assert_eq!(client.write(0, page * 4096, &[page as u8 + 1; 4096]), 0);
        client.read(page * 4096, 4096).unwrap();
    }
    std::thread::sleep(std::time::Duration::from_millis(600));
    let reply = watched.json("/api/overview?count=1");
    let server = &reply["server"];
    assert_eq!(
        (&server["devices"], &server["forks"], &server["connections"]),
        (&json!(34), &json!(30), &json!(1))
    );
    assert!(server["process_rss_bytes"].as_u64().unwrap() > MIB && server["pid"].is_number(), "{server}");
    assert_eq!((&reply["found"], reply["devices"].as_array().unwrap().len()), (&json!(34), 1));
    // The busiest device is first, with rates, and with its state as `list` shows it.
    let busiest = &reply["devices"][0];
    let seconds = reply["seconds"].as_f64().unwrap();
    let reads = busiest["rates"]["reads_per_second"].as_f64().unwrap() * seconds;
    assert!(busiest["state"]["name"] == json!("r") && (reads - 64.0).abs() < 0.01, "{busiest}");
    assert_eq!(busiest["state"], serve.json(&["list", "r"])["devices"][0]);
    // The overview sums the forks of each base as a family (a base and its forks, which share
    // memory).
    let families = reply["families"].as_array().unwrap();
    let family = |name: &str| families.iter().find(|family| family["name"] == json!(name)).unwrap();
    assert_eq!((&family("golden")["forks"], &family("golden")["devices"]), (&json!(30), &json!(31)));
    assert_eq!(family("golden")["memory"], serve.json(&["stat", "golden"])["family"]);
    assert_eq!((&family("r")["orig_data_size"], &families[0]["name"]), (&json!(64 * 4096), &json!("r")));
    assert!(!families.iter().any(|family| family["name"] == json!("n")), "{families:?}");

    // Searching by prefix returns parts of the result by `from` and `count`.
    let names = |path: &str| -> (u64, Vec<String>) {
        let reply = watched.json(path);
        let rows = reply["devices"].as_array().unwrap().iter();
        (
            reply["found"].as_u64().unwrap(),
            rows.map(|row| row["state"]["name"].as_str().unwrap().to_owned()).collect(),
        )
    };
    let expected = |numbers: &[u32]| numbers.iter().map(|n| format!("job-{n}")).collect::<Vec<_>>();
    assert_eq!(
        names("/api/overview?prefix=job-2&by=name"),
        (11, expected(&[2, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29]))
    );
    assert_eq!(names("/api/overview?prefix=job-2&by=name&from=9&count=5"), (11, expected(&[28, 29])));
    assert_eq!(names("/api/overview?prefix=job-2&by=name&from=99"), (11, Vec::new()));
    assert_eq!(names("/api/overview?prefix=no"), (0, Vec::new()));
    assert_eq!(names("/api/overview?prefix=ci%2F%3Cb").1, ["ci/<b>ü</b>"]);

    // `/api/device/NAME` returns a single device.
    let reply = watched.json("/api/device/r");
    assert_eq!(reply["attributes"], serve.json(&["get", "r"]));
    let stat = serve.json(&["stat", "r"]);
    for key in ["mm_stat", "io", "exports", "uuid", "family"] {
        assert_eq!(reply["stat"][key], stat[key], "{key}");
    }
    let measured: u64 =
        reply["latency"]["read"].as_array().unwrap().iter().map(|bucket| bucket[1].as_u64().unwrap()).sum();
    assert_eq!(json!(measured), stat["latency"]["read"]["requests"]);
    let strange = watched.json("/api/device/ci%2F%3Cb%3E%C3%BC%3C%2Fb%3E");
    assert_eq!(strange["stat"]["name"], json!("ci/<b>ü</b>"));
}

/// The overview contains sums and some of the devices, so its size does not depend on the number of
/// devices.
#[test]
fn overview_of_many_forks_is_small_and_fast() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden"), vec![1; 1 << 20]).unwrap();
    let golden = format!("golden=file,path={}/golden,readonly=yes", dir.path().display());
    let watched = Watched::page(&[&golden]);
    let forks = effort(5_000, 20_000);
    watched.serve.text(&["fork", "golden", "job", "--count", &forks.to_string()]);
    let (mut quickest, mut bytes) = (f64::MAX, 0);
    for _ in 0..5 {
        let began = std::time::Instant::now();
        let (status, _, body) = watched.ask(b"GET /api/overview?count=50 HTTP/1.0\r\n\r\n");
        quickest = quickest.min(began.elapsed().as_secs_f64());
        bytes = body.len();
        let overview: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &overview["server"]["forks"]), (200, &json!(forks)));
        assert_eq!(overview["devices"].as_array().unwrap().len(), 50);
        assert_eq!(overview["families"][0]["forks"], json!(forks));
        std::thread::sleep(std::time::Duration::from_millis(600));
    }
    println!("{forks} forks: {quickest:.3} s, {bytes} bytes");
    assert!(quickest < 1.0 && bytes < 64 << 10, "{quickest} s, {bytes} bytes");
}

#[test]
fn invalid_http_addresses_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let serve = |args: &[&str]| refused(dir.path(), 2, &[&["serve", "--check"], args].concat());
    let form = "must be PORT or HOST:PORT, for example 9100 or 127.0.0.1:9100";
    assert_eq!(serve(&["--http", "x"]), format!("--http: x: {form}"));
    assert_eq!(serve(&["--http", "unix:h.sock"]), format!("--http: unix:h.sock: {form}; HTTP needs TCP"));
    let open = serve(&["--http", "0.0.0.0:9200"]);
    assert!(open.starts_with("--http: 0.0.0.0:9200: other machines can reach this address"), "{open}");
    assert!(open.ends_with("--http-open allows it"), "{open}");
    assert_eq!(serve(&["--http-open"]), "--http-open: has no effect without --http");
    fs::write(dir.path().join("c.toml"), "http = '[::]:1'").unwrap();
    let file = serve(&["--config", "c.toml"]);
    assert!(file.starts_with("http: [::]:1: other machines"), "{file}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap().to_string();
    let why = refused(dir.path(), 1, &["serve", "--http", &at, "--nbd", "unix:n", "--control", "c"]);
    assert!(why.starts_with(&format!("--http: {at}: ")) && why.contains("in use"), "{why}");
    assert!(!dir.path().join("n").exists() && !dir.path().join("c").exists());
}
