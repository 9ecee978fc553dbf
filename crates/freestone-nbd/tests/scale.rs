//! Checks that many sockets with an export each neither slow operations nor leak resources. The test is a
//! separate program, because it counts the threads and descriptors of the process.
#![allow(missing_docs, reason = "test code")]

#[path = "server/common/mod.rs"]
mod common;

use std::fs;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use common::prelude::*;
use freestone_core::device::Device;
use freestone_nbd::{
    Address, ConnectionDevice, DeviceFactory, ExportOptions, Limits, Server, TemplateOptions,
};
use rustix::process::{Resource, getrlimit, setrlimit};

const SOCKETS: usize = 1000;
/// Largest allowed median time to listen and publish, which is a part of the time to export a fork.
const LONGEST: Duration = Duration::from_millis(2);

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

fn resident_kib() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort();
    times[times.len() / 2]
}

#[test]
fn many_sockets_do_not_slow_operations() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let device: Arc<dyn Device> = MemDevice::new(4096);
    let server = Server::new(Limits::default());
    // The first address also starts the threads that a server starts only once.
    let first = server.listen(&Address::Unix(directory.path().join("first.sock"))).unwrap();
    let before = (descriptors(), threads());
    let resident = resident_kib();
    let mut created = Vec::new();
    let address = |i: usize| Address::Unix(directory.path().join(format!("{i}.sock")));
    for i in 0..SOCKETS {
        let start = Instant::now();
        let address = server.listen(&address(i)).unwrap();
        server.publish(&address, &format!("disk{i}"), Arc::clone(&device), ExportOptions::default()).unwrap();
        created.push(start.elapsed());
    }
    let per_listener = (resident_kib().saturating_sub(resident)) * 1024 / SOCKETS;
    let more = (descriptors() - before.0, threads() - before.1);
    let late = median(&created[SOCKETS - 100..]);
    eprintln!(
        "listen and publish: first 100 {:?}, last 100 {late:?}; {} descriptors and {} threads more, \
         {per_listener} bytes each",
        median(&created[..100]),
        more.0,
        more.1,
    );
    assert_eq!(more, (SOCKETS, 0));
    assert!(late < LONGEST, "{late:?}");
    for i in [0, SOCKETS / 2, SOCKETS - 1] {
        let mut client = connect(&address(i));
        client.greet(3);
        assert_eq!(client.go(&format!("disk{i}")).0, 4096);
        assert_eq!(client.read(0, 512), Ok(vec![0; 512]));
    }
    eventually(|| server.stats().connections == 0);
    let mut removed = Vec::new();
    for i in 0..SOCKETS {
        let start = Instant::now();
        assert_eq!(server.unpublish(&format!("disk{i}"), false), Ok(1));
        server.close(&address(i));
        removed.push(start.elapsed());
    }
    let late = median(&removed[..100]);
    eprintln!("unpublish and close: first 100 {late:?}, last 100 {:?}", median(&removed[SOCKETS - 100..]));
    assert!(late < LONGEST, "{late:?}");
    assert_eq!(server.addresses(), std::slice::from_ref(&first));
    // A connection thread ends a short time after its connection.
    eventually(|| (descriptors(), threads()) == before);
    many_exports_at_one_address(&server, &first, &device);
    many_connections_to_a_template(&server, &first);
    eventually(|| (descriptors(), threads()) == before);
    drop(server);
    eventually(|| threads() == before.1 - 1);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

fn many_exports_at_one_address(server: &Server, address: &Address, device: &Arc<dyn Device>) {
    let mut times = Vec::new();
    for i in 0..10 * SOCKETS {
        let start = Instant::now();
        let device = Arc::clone(device);
        server.publish(address, &format!("disk{i}"), device, ExportOptions::default()).unwrap();
        times.push(start.elapsed());
    }
    let late = median(&times[times.len() - 100..]);
    eprintln!("publish at one address: first 100 {:?}, last 100 {late:?}", median(&times[..100]));
    assert!(late < LONGEST, "{late:?}");
    let start = Instant::now();
    for i in 0..10 * SOCKETS {
        assert_eq!(server.unpublish(&format!("disk{i}"), false), Ok(1));
    }
    eprintln!("unpublish at one address: {:?} each", start.elapsed() / (10 * SOCKETS) as u32);
    assert_eq!(server.exports(), []);
}

fn many_connections_to_a_template(server: &Server, address: &Address) {
    let ended = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&ended);
    let make: DeviceFactory = Arc::new(move || {
        let count = Arc::clone(&count);
        let on_end = Box::new(move || {
            count.fetch_add(1, SeqCst);
        });
        Ok(ConnectionDevice { device: MemDevice::new(4096), on_end })
    });
    server.publish_template(address, "disk", TemplateOptions::default(), make).unwrap();
    let mut times = Vec::new();
    let clients: Vec<_> = (0..SOCKETS)
        .map(|_| {
            let start = Instant::now();
            let mut client = connect(address);
            client.greet(3);
            assert_eq!(client.go("disk").0, 4096);
            times.push(start.elapsed());
            client
        })
        .collect();
    let late = median(&times[times.len() - 100..]);
    eprintln!("connect to a template: first 100 {:?}, last 100 {late:?}", median(&times[..100]));
    assert_eq!(server.connections("disk"), SOCKETS);
    assert_eq!(ended.load(SeqCst), 0);
    let start = Instant::now();
    assert_eq!(server.unpublish("disk", true), Ok(1));
    eprintln!("end {SOCKETS} connections: {:?}", start.elapsed());
    assert_eq!(ended.load(SeqCst), SOCKETS);
    drop(clients);
}
