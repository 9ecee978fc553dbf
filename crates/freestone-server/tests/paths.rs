//! The drawings in ARCHITECTURE.md: each test request takes the drawn path, file by file and thread by thread.

#![cfg(debug_assertions)]

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use freestone::device::{Completion, Device as _, IoBuf, Op, Request};
use freestone_core::trail::{self, Leg};
use freestone_nbd_client::{Config, Nbd};
use freestone_server::Server;
use freestone_testkit::s3;
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);
const PAGE: u64 = 4096;

/// Returns the threads and files of the drawing below a heading of ARCHITECTURE.md, one each line. `a/{b,c}.rs` stands
/// for two files.
fn drawing(heading: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ARCHITECTURE.md");
    let text = fs::read_to_string(path).unwrap();
    let lines =
        text.lines().skip_while(|line| *line != heading).skip_while(|line| *line != "```text").skip(1);
    let mut drawing = String::new();
    for line in lines.take_while(|line| *line != "```") {
        let mut words = line.split_whitespace();
        let word = words.next().unwrap_or_default();
        if word == "thread" {
            writeln!(drawing, "thread {}", words.next().unwrap_or_default()).unwrap();
        } else if let Some((folder, (files, end))) =
            word.split_once('{').and_then(|(folder, rest)| Some((folder, rest.split_once('}')?)))
        {
            files.split(',').for_each(|file| writeln!(drawing, "{folder}{file}{end}").unwrap());
        } else {
            writeln!(drawing, "{word}").unwrap();
        }
    }
    drawing
}

/// Returns the trail, with an explanation, if it is not the drawing below `heading`.
fn difference((heading, trail): &(&str, Vec<Leg>)) -> Option<String> {
    let mut taken = String::new();
    for leg in trail {
        writeln!(taken, "thread {}", leg.thread).unwrap();
        for file in &leg.files {
            let short = file.replacen("crates/freestone-", "", 1).replacen("/src/", "/", 1);
            writeln!(taken, "{short}").unwrap();
        }
    }
    (taken != drawing(heading))
        .then(|| format!("\n{heading}: ARCHITECTURE.md draws another path than\n{taken}"))
}

struct Client(Nbd);

impl Client {
    fn connect(uris: &[String]) -> Self {
        let [uri] = uris else { panic!("{uris:?}") };
        Self(Nbd::open(&Config::new(uri.parse().unwrap())).unwrap())
    }

    /// Reads or writes a page. Returns the data.
    fn page(&self, op: Op, page: u64, data: &[u8]) -> Vec<u8> {
        let (sender, receiver) = mpsc::channel();
        let done = Completion::new(move |outcome, buffer| sender.send(outcome.map(|()| buffer)).unwrap());
        self.0.submit(Request::new(op, page * PAGE, PAGE), IoBuf::copy_of(data).unwrap(), done);
        receiver.recv_timeout(PATIENCE).unwrap().unwrap().to_vec()
    }
}

/// Calls a verb over the control socket.
fn call(control: &UnixStream, verb: &str, params: &Value) {
    let request = json!({"jsonrpc": "2.0", "id": 1, "method": verb, "params": params});
    writeln!(&mut &*control, "{request}").unwrap();
    let mut reply = String::new();
    BufReader::new(control).read_line(&mut reply).unwrap();
    assert!(reply.contains("\"result\""), "{reply}");
}

/// Returns a page of text that compresses alike for every number.
fn text(number: u64) -> Vec<u8> {
    let words =
        (0..PAGE / 8).map(|word| format!("{:07x} ", (number + 1) * (word + 7) * 2_654_435_761 % (1 << 28)));
    words.collect::<String>().into_bytes()
}

#[test]
fn requests_take_the_drawn_paths() {
    let (dir, store) = (tempfile::tempdir().unwrap(), s3::Server::start(&["images"]));
    let at = |name: &str| dir.path().join(name).display().to_string();
    let nbd = format!("unix:{}", at("nbd"));
    let builder = Server::builder().device("disk=ram,disksize=16M").state(at("state")).nbd(&nbd);
    let server = builder.control(at("control")).start().unwrap();
    let control = UnixStream::connect(at("control")).unwrap();

    // The first pages create what the path of a later page only uses.
    let disk = Client::connect(&server.uris("disk"));
    (0..16).for_each(|page| drop(disk.page(Op::Write, page, &text(page))));
    let write = trail::record(|| drop(disk.page(Op::Write, 16, &text(16))));

    let (url, endpoint) = ("s3://images/disk:v1", store.endpoint());
    call(&control, "push", &json!({"name": "disk", "url": url, "endpoint": endpoint, "anonymous": true}));
    let image = format!(
        "image=image,url={url},endpoint={endpoint},anonymous=yes,prefetch=no,publish=no,cache={}",
        at("cache")
    );
    call(&control, "create", &json!({"device": image}));
    let fork = |name: &str| call(&control, "fork", &json!({"base": "image", "name": name, "nbd": nbd}));
    fork("first");
    let forked = trail::record(|| fork("vm"));

    let vm = Client::connect(&server.uris("vm"));
    vm.page(Op::Write, 0, &text(99));
    assert_eq!(vm.page(Op::Read, 0, &[0; PAGE as usize]), text(99));
    let read = trail::record(|| assert_eq!(vm.page(Op::Read, 9, &[0; PAGE as usize]), text(9)));

    server.shutdown().unwrap();
    let paths = [
        ("### A write of 4 KiB to a RAM disk", write),
        ("### A cold read of a fork of an image", read),
        ("### A fork", forked),
    ];
    let differences: String = paths.iter().filter_map(difference).collect();
    assert!(differences.is_empty(), "{differences}");
}
