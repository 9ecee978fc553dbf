//! Image stores over the network, on an S3 server whose failures are scripted.

use std::sync::atomic::{AtomicUsize, Ordering};

use freestone_testkit::effort;
use freestone_testkit::s3::{Server, ServerFault};

use super::{content, disk, with_disk};
use crate::harness::prelude::*;

const SOURCE: &str = "d=file,path=disk.img,readonly=yes";

/// Sets the environment of a command of the program for the S3 server `server`.
pub fn with_store(server: &Server, mut command: Command) -> Command {
    for variable in
        ["AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"]
    {
        command.env_remove(variable);
    }
    command
        .env("AWS_ENDPOINT_URL", server.endpoint())
        .env("AWS_ACCESS_KEY_ID", "AKTEST")
        .env("AWS_SECRET_ACCESS_KEY", "a-secret-of-the-test");
    command
}

fn push(server: &Server, dir: &std::path::Path, url: &str) -> (i32, String, String) {
    finish(with_store(server, freestone(dir)).args(["push", SOURCE, url]))
}

/// Starts a Freestone server with the chunk cache in `cache`, which other servers may share.
pub fn serve(server: &Server, cache: &std::path::Path, devices: &[&str]) -> Serve {
    let dir = tempfile::tempdir().unwrap();
    let mut command = with_store(server, freestone(dir.path()));
    command.env("FREESTONE_CACHE", cache).arg("serve").args(devices).args([
        "--nbd",
        "unix:nbd",
        "--control",
        "control",
    ]);
    command.stderr(std::fs::File::create(dir.path().join("log")).unwrap());
    Serve::ready(dir, command)
}

#[test]
fn images_in_s3_are_readable_over_http() {
    let server = Server::start(&["images"]);
    server.require_key(Some("AKTEST"));
    let dir = with_disk(6);
    let (code, out, err) = push(&server, dir.path(), "s3://images/some/where:v1");
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert!(server.keys("images").iter().all(|key| key.starts_with("some/where/")));
    let cache = tempfile::tempdir().unwrap();
    let devices = ["i=image,url=s3://images/some/where:v1", "vm=fork,base=i"];
    let serving = serve(&server, cache.path(), &devices);
    assert!(content(&serving, "vm") == disk(6));
    qemu_io(&uri(&serving, "vm"), &["write -P 8 1M 64k"]);
    let pushed = serving.json(&["push", "vm", "s3://images/some/where:vm"]);
    assert_eq!(pushed["changed_bytes"], 64 << 10);
    // The push replaces the tag only if no other client changes it meanwhile. The present image of
    // the tag was pushed by another client.
    serving.json(&["push", "vm", "s3://images/some/where:v1"]);
    let (code, out, err) =
        finish(with_store(&server, freestone(dir.path())).args(["images", "s3://images/some/where"]));
    assert_eq!((code, err.as_str(), out.lines().count()), (0, "", 3), "{out}");
    // Another server reads the same objects over plain HTTP.
    server.require_key(None);
    let url = format!("{}/images/some/where:vm", server.endpoint());
    let elsewhere = tempfile::tempdir().unwrap();
    let web = serve(&server, elsewhere.path(), &[&format!("i=image,url={url}")]);
    assert!(content(&web, "i") == content(&serving, "vm"));
    let message = web.refused(1, &["push", "i", &url.replace(":vm", ":other")]);
    assert!(message.contains("is read-only"), "{message}");
    // No output contains the secret access key.
    for serving in [&serving, &web] {
        let outputs = [
            serving.text(&["list"]),
            serving.text(&["stat"]),
            serving.text(&["get", "i"]),
            serving.text(&["dump"]),
        ]
        .concat();
        let log = std::fs::read_to_string(serving.path("log")).unwrap();
        assert!(!(outputs + &log).contains("a-secret"));
    }
}

#[test]
fn store_errors_are_reported() {
    let server = Server::start(&["images"]);
    server.require_key(Some("OTHER"));
    let dir = with_disk(1);
    let refusal = |url: &str| {
        let (code, out, err) = push(&server, dir.path(), url);
        assert_eq!((code, out.as_str()), (1, ""));
        sentence(&err)
    };
    assert!(refusal("s3://images/x:v1").contains("refuses"), "{}", refusal("s3://images/x:v1"));
    server.require_key(None);
    assert!(refusal("s3://nowhere/x:v1").contains("bucket"), "{}", refusal("s3://nowhere/x:v1"));
    server.set_quota(Some(5000));
    let full = refusal("s3://images/x:v1");
    assert!(full.contains("Quota") || full.contains("507") || full.contains("Insufficient"), "{full}");
    server.set_quota(None);
    let message = refused(dir.path(), 1, &["push", SOURCE, "s3://images/x:v1", "credentials=nowhere"]);
    assert!(message.contains("no credentials"), "{message}");
}

#[test]
fn busy_store_is_retried_and_hung_store_times_out() {
    let server = Server::start(&["images"]);
    let dir = with_disk(6);
    let busy = |asked: &freestone_testkit::s3::S3Request<'_>| asked.nth % 2 == 1;
    server.add_fault(busy, ServerFault::Status(503, "SlowDown"));
    let (code, out, err) = push(&server, dir.path(), "s3://images/x:v1");
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    let cache = tempfile::tempdir().unwrap();
    let serving =
        serve(&server, cache.path(), &["i=image,url=s3://images/x:v1,timeout=2s", "vm=fork,base=i"]);
    assert!(content(&serving, "i") == disk(6));
    server.clear_faults();
    let elsewhere = tempfile::tempdir().unwrap();
    let serving =
        serve(&server, elsewhere.path(), &["i=image,url=s3://images/x:v1,timeout=1s", "vm=fork,base=i"]);
    qemu_io(&uri(&serving, "vm"), &["read 0 4k"]);
    server.add_fault(|_| true, ServerFault::Stall(None));
    let since = Instant::now();
    let output =
        tool("qemu-io").args(["-f", "raw", "-c", "read 4M 4k", &uri(&serving, "vm")]).output().unwrap();
    assert!(String::from_utf8(output.stdout).unwrap().contains("Input/output error"));
    assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
    // Verbs do not wait for the stalled object store, and cached chunks stay readable.
    qemu_io(&uri(&serving, "vm"), &["read 0 64k", "write -P 1 0 4k"]);
    assert!(since.elapsed() < Duration::from_secs(30));
    assert!(
        serving.json(&["stat", "i"])["store_stat"]["last_error"]
            .as_str()
            .unwrap()
            .contains("no answer in time")
    );
    let since = Instant::now();
    serving.end();
    assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
}

/// The instance metadata service, from which cloud machines read credentials, is an S3 server
/// without objects in this test.
#[test]
fn server_without_credentials_names_its_environment() {
    let (server, instance) = (Server::start(&["images"]), Server::start(&[]));
    server.require_key(Some("AKTEST"));
    let dir = with_disk(1);
    let mut command = with_store(&server, freestone(dir.path()));
    for variable in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HOME", "AWS_EC2_METADATA_DISABLED"] {
        command.env_remove(variable);
    }
    command.env("AWS_METADATA_ENDPOINT", instance.endpoint());
    command.args(["serve", SOURCE, "--nbd", "unix:nbd", "--control", "control"]);
    let serving = Serve::ready(dir, command);
    // A push by the server uses the environment of the server, not that of the client.
    let mut client = with_store(&server, freestone(serving.dir.path()));
    client.args(["push", "d", "s3://images/x:v1", "--control", "control"]);
    let (code, _, err) = finish(&mut client);
    let message = sentence(&err);
    assert_eq!(code, 1);
    assert!(message.contains(&format!("no credentials: {} answers 404 ", instance.address())), "{message}");
    assert!(
        message.contains("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give credentials=FILE"),
        "{message}"
    );
    assert!(message.ends_with("A verb of a server uses the environment of the server"), "{message}");
}

#[test]
fn interrupted_push_resumes_where_it_stopped() {
    let server = Server::start(&["images"]);
    let dir = with_disk(6);
    // The first three chunks are sent, and later ones stall.
    let begun = AtomicUsize::new(0);
    let late = move |asked: &freestone_testkit::s3::S3Request<'_>| {
        let is_chunk = asked.method == "PUT" && asked.key.contains("chunks/");
        is_chunk && begun.fetch_add(1, Ordering::SeqCst) >= 3
    };
    server.add_fault(late, ServerFault::Stall(None));
    let mut command = with_store(&server, freestone(dir.path()));
    let child = command
        .args(["push", SOURCE, "s3://images/x:v1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let since = Instant::now();
    wait_until("no chunk is pushed", || server.keys("images").iter().any(|key| key.contains("chunks/")));
    signal(&child, Signal::INT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(since.elapsed() < Duration::from_secs(30));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "freestone: d: push: cancelled\n");
    assert!(!server.keys("images").iter().any(|key| key.contains("tags/")));
    let there = server.keys("images").iter().filter(|key| key.contains("chunks/")).count();
    server.clear_faults();
    server.reset_traffic();
    let (code, _, err) = push(&server, dir.path(), "s3://images/x:v1");
    assert_eq!((code, err.as_str()), (0, ""));
    let sent = server
        .traffic()
        .requests
        .iter()
        .filter(|((method, key), _)| method == "PUT" && key.contains("chunks/"))
        .count();
    assert_eq!(sent + there, 8);
}

/// Each chunk is fetched once per host, however many servers and forks the host has.
#[test]
fn forks_of_a_host_fetch_each_chunk_once() {
    let (servers, forks) = effort((4, 6), (10, 10));
    let server = Server::start(&["images"]);
    let dir = with_disk(24);
    let (code, _, err) = push(&server, dir.path(), "s3://images/x:v1");
    assert_eq!((code, err.as_str()), (0, ""));
    server.reset_traffic();
    let cache = tempfile::tempdir().unwrap();
    let servers: Vec<Serve> =
        (0..servers).map(|_| serve(&server, cache.path(), &["i=image,url=s3://images/x:v1"])).collect();
    thread::scope(|scope| {
        for serving in &servers {
            scope.spawn(move || {
                let nbd = format!("unix:{}", serving.path("nbd").display());
                serving.text(&["fork", "i", "vm-%n", "--count", &forks.to_string(), "--nbd", &nbd]);
                for fork in 0..forks {
                    let at = fork * 2;
                    let reads = [format!("read {at}M 1M"), "read 0 4M".to_owned(), "read 20M 4M".to_owned()];
                    qemu_io(&uri(serving, &format!("vm-{fork}")), &reads);
                }
            });
        }
    });
    for serving in servers.iter().take(2) {
        assert!(content(serving, "i") == disk(24));
    }
    let traffic = server.traffic();
    let chunks: Vec<_> = traffic
        .requests
        .iter()
        .filter(|((method, key), _)| method == "GET" && key.contains("chunks/"))
        .collect();
    let stored = server.keys("images").iter().filter(|key| key.contains("chunks/")).count();
    assert_eq!(chunks.len(), stored);
    assert!(chunks.iter().all(|(_, count)| **count == 1), "{chunks:?}");
}
