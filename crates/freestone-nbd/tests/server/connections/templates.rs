//! Tests of templates: the server creates a device for each connection, and ends the device exactly once,
//! however the connection ends.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::common::prelude::*;
use freestone_core::device::Device;
use freestone_nbd::{
    ConnectionDevice, DeviceFactory, ExportOptions, Limits, MAX_STRING_BYTES, PublishError, TemplateOptions,
};

const MIB: u64 = 1 << 20;
const SHORT: Duration = Duration::from_millis(100);

/// Device factory that counts the devices it creates and the devices that end.
#[derive(Default)]
struct Maker {
    made: AtomicUsize,
    ended: AtomicUsize,
    /// Weak references to the created devices, to detect that the server still holds an ended device.
    devices: Mutex<Vec<Weak<MemDevice>>>,
    /// Error that the next call of the factory returns.
    fails: Mutex<Option<String>>,
    panics: AtomicBool,
    end_panics: AtomicBool,
    /// True if the test or a device thread also holds devices, which disables the check for leaked
    /// references.
    shared: AtomicBool,
    /// While true, calls of the factory block.
    held: Mutex<bool>,
    released: Condvar,
}

impl Maker {
    fn make(self: &Arc<Self>) -> DeviceFactory {
        let maker = Arc::clone(self);
        Arc::new(move || {
            let mut held = maker.held.lock().unwrap();
            while *held {
                held = maker.released.wait(held).unwrap();
            }
            drop(held);
            assert!(!maker.panics.load(SeqCst), "injected");
            if let Some(text) = maker.fails.lock().unwrap().take() {
                return Err(text);
            }
            maker.made.fetch_add(1, SeqCst);
            let device = MemDevice::new(MIB);
            device.forked.store(true, SeqCst);
            let weak = Arc::downgrade(&device);
            maker.devices.lock().unwrap().push(weak.clone());
            let maker = Arc::clone(&maker);
            let on_end = Box::new(move || {
                let held = weak.strong_count() > 0 && !maker.shared.load(SeqCst);
                assert!(!held, "the server still holds the device");
                maker.ended.fetch_add(1, SeqCst);
                assert!(!maker.end_panics.load(SeqCst), "injected");
            });
            Ok(ConnectionDevice { device: device as Arc<dyn Device>, on_end })
        })
    }

    fn counts(&self) -> (usize, usize) {
        (self.made.load(SeqCst), self.ended.load(SeqCst))
    }

    fn device(&self, index: usize) -> Arc<MemDevice> {
        self.devices.lock().unwrap()[index].upgrade().expect("the device is in use")
    }

    fn hold(&self, held: bool) {
        *self.held.lock().unwrap() = held;
        self.released.notify_all();
    }
}

fn serving(ttl: Option<Duration>) -> (Fixture, Arc<Maker>) {
    let (fixture, maker) = (Fixture::new(), Arc::new(Maker::default()));
    let export = ExportOptions { default: true, ..ExportOptions::default() };
    let options = TemplateOptions { export, ttl };
    fixture.server.publish_template(&fixture.address, "disk", options, maker.make()).unwrap();
    (fixture, maker)
}

/// Enters the transmission phase like [`Fixture::enter`], but selects no contexts: no query precedes the
/// choice of the export.
fn enter(fixture: &Fixture) -> Client {
    let mut client = fixture.connect();
    client.greet(3);
    client.agree(Headers::Structured);
    let (_, flags) = client.go("disk");
    assert_eq!(flags & MULTI_CONN, 0);
    client
}

#[test]
fn template_gives_each_connection_a_device() {
    let (fixture, maker) = serving(None);
    let infos = fixture.server.exports();
    assert!(infos.len() == 1 && infos[0].template && infos[0].connections == 0, "{infos:?}");
    assert_eq!(fixture.server.exports_named("disk"), infos);
    assert_eq!(maker.counts(), (0, 0));
    let (mut one, mut two) = (enter(&fixture), enter(&fixture));
    assert_eq!(fixture.server.connections("disk"), 2);
    assert_eq!(fixture.server.exports()[0].connections, 2);
    assert_eq!(one.write(0, 0, &[1; 512]), 0);
    assert_eq!(two.write(0, 512, &[2; 512]), 0);
    assert_eq!(one.read(0, 1024).unwrap(), [[1; 512], [0; 512]].concat());
    assert_eq!(two.read(0, 1024).unwrap(), [[0; 512], [2; 512]].concat());
    one.disconnect();
    eventually(|| maker.counts() == (2, 1));
    assert_eq!(two.read(512, 512).unwrap(), [2; 512]);
    two.disconnect();
    eventually(|| maker.counts() == (2, 2));
    fixture.assert_no_connections();
    // The server also creates a device for a client that uses OPT_EXPORT_NAME with the empty name.
    let mut client = fixture.connect();
    client.greet(3);
    client.send(&option(EXPORT_NAME, b""));
    let reply = client.bytes(10);
    assert_eq!(reply[..8], MIB.to_be_bytes());
    assert_eq!(u16::from_be_bytes(reply[8..].try_into().unwrap()) & MULTI_CONN, 0);
    assert_eq!(client.read(0, 512), Ok(vec![0; 512]));
    drop(client);
    eventually(|| maker.counts() == (3, 3));
}

#[test]
fn template_query_keeps_no_device() {
    let (fixture, maker) = serving(None);
    let mut client = fixture.connect();
    client.greet(3);
    assert_eq!(client.option(LIST, &[])[0].kind, SERVER);
    assert_eq!(maker.counts(), (0, 0));
    client.agree(Headers::Structured);
    for _ in 0..3 {
        let replies = client.option(OPT_INFO, &info_data("disk", &[3]));
        let (size, flags) = export_info(&replies).unwrap();
        assert_eq!((size, flags & MULTI_CONN), (MIB, 0));
        assert_eq!(client.option(LIST_META_CONTEXT, &context_data("disk", &[])).len(), 3);
    }
    assert_eq!(maker.counts(), (1, 1));
    assert_eq!(fixture.server.connections("disk"), 0);
    assert_eq!(client.set_contexts("disk", &["freestone:changed"]).len(), 1);
    client.go("disk");
    assert_eq!(maker.counts(), (2, 1));
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    assert_eq!(client.statuses(0, 0, 8192), Ok(vec![(2, vec![(4096, 1), (4096, 0)])]));
    client.disconnect();
    eventually(|| maker.counts() == (2, 2));
}

#[test]
fn template_failure_is_reported_and_can_be_retried() {
    let (fixture, maker) = serving(None);
    fixture
        .server
        .publish(&fixture.address, "other", MemDevice::new(4096), ExportOptions::default())
        .unwrap();
    let mut client = fixture.connect();
    client.greet(3);
    for kind in [GO, OPT_INFO] {
        *maker.fails.lock().unwrap() = Some("the family's limit is reached".to_owned());
        let replies = client.option(kind, &info_data("disk", &[]));
        assert_eq!(replies.len(), 1);
        assert_eq!(replies[0].kind, ERR_POLICY);
        assert_eq!(replies[0].data, b"the family's limit is reached");
    }
    client.agree(Headers::Structured);
    *maker.fails.lock().unwrap() = Some("no".to_owned());
    assert_eq!(client.outcome(LIST_META_CONTEXT, &context_data("disk", &[])), ERR_POLICY);
    // An error message longer than the protocol allows is truncated at a character boundary.
    *maker.fails.lock().unwrap() = Some("x".to_owned() + &"ü".repeat(MAX_STRING_BYTES));
    let replies = client.option(GO, &info_data("disk", &[]));
    assert_eq!(replies[0].data.len(), MAX_STRING_BYTES - 1);
    assert_eq!(fixture.server.connections("disk"), 0);
    assert_eq!(fixture.server.unpublish("nothing", false), Err(PublishError::NotPublished("nothing".into())));
    assert_eq!(client.outcome(GO, &info_data("other", &[])), ACK);
    client.disconnect();
    // OPT_EXPORT_NAME has no error reply, so the server closes the connection.
    *maker.fails.lock().unwrap() = Some("no".to_owned());
    let mut client = fixture.connect();
    client.greet(3);
    client.send(&option(EXPORT_NAME, b"disk"));
    client.assert_closed();
    fixture.assert_no_connections();
    assert_eq!(maker.counts(), (0, 0));
    assert_eq!(fixture.server.stats().panics, 0);
    // After these failures, another attempt succeeds.
    enter(&fixture).disconnect();
    eventually(|| maker.counts() == (1, 1));
}

#[test]
fn client_killed_with_requests_ends_device() {
    let (fixture, maker) = serving(None);
    for round in 0..20 {
        let mut client = enter(&fixture);
        let threads = round % 2 == 1;
        maker.shared.store(threads, SeqCst);
        maker.device(round).set(if threads { Manner::Thread } else { Manner::Inline });
        // An incomplete write follows reads whose replies the client does not receive.
        let mut bytes = Vec::new();
        for cookie in 0..20 {
            bytes.extend(request(0, READ, cookie, 0, 1 << 20));
        }
        bytes.extend(request(0, WRITE, 99, 0, 1 << 20));
        bytes.extend([7; 1000]);
        client.send(&bytes);
        if round % 3 == 0 {
            client.chunk();
        }
        drop(client);
        eventually(|| maker.counts() == (round + 1, round + 1));
    }
    fixture.assert_no_connections();
    assert_eq!(fixture.server.stats().panics, 0);
}

#[test]
fn device_end_waits_for_requests_or_cut() {
    let (fixture, maker) = serving(None);
    maker.shared.store(true, SeqCst);
    let enter_and_wait = |index: usize| {
        let mut client = enter(&fixture);
        let device = maker.device(index);
        device.set(Manner::Held);
        client.ask(0, READ, 0, 512);
        eventually(|| device.held().len() == 1);
        (client, device)
    };
    let (client, device) = enter_and_wait(0);
    drop(client);
    std::thread::sleep(SHORT);
    assert_eq!(maker.counts(), (1, 0));
    assert_eq!(fixture.server.connections("disk"), 1);
    device.release(0);
    eventually(|| maker.counts() == (1, 1));
    // A server shutdown cuts the connection after its grace time, although a request still hangs.
    let (mut client, device) = enter_and_wait(1);
    fixture.server.shutdown(SHORT);
    assert_eq!(maker.counts(), (2, 2));
    client.assert_closed();
    device.release(0);
    assert_eq!(maker.counts(), (2, 2));
}

#[test]
fn panic_ends_template_device() {
    let (fixture, maker) = serving(None);
    let mut client = enter(&fixture);
    maker.device(0).panics.store(true, SeqCst);
    client.send(&request(0, READ, 1, 0, 512));
    client.assert_closed();
    eventually(|| maker.counts() == (1, 1) && fixture.server.stats().panics == 1);
    // The factory panics while it creates a device.
    maker.panics.store(true, SeqCst);
    let mut client = fixture.connect();
    client.greet(3);
    client.send(&option(GO, &info_data("disk", &[])));
    client.assert_closed();
    eventually(|| fixture.server.stats().panics == 2);
    maker.panics.store(false, SeqCst);
    // The end callback of a device panics.
    maker.end_panics.store(true, SeqCst);
    enter(&fixture).disconnect();
    eventually(|| fixture.server.stats().panics == 3);
    assert_eq!(maker.counts(), (2, 2));
    maker.end_panics.store(false, SeqCst);
    fixture.assert_no_connections();
    assert_eq!(fixture.server.connections("disk"), 0);
    enter(&fixture).disconnect();
    eventually(|| maker.counts() == (3, 3));
}

#[test]
fn unpublish_close_and_shutdown_end_devices() {
    let (fixture, maker) = serving(None);
    let mut client = enter(&fixture);
    let busy = PublishError::Busy { name: "disk".to_owned(), connections: 1 };
    assert_eq!(fixture.server.unpublish("disk", false), Err(busy));
    assert_eq!(client.read(0, 512), Ok(vec![0; 512]));
    assert_eq!(fixture.server.unpublish("disk", true), Ok(1));
    // `unpublish` returns only after the devices have ended.
    assert_eq!(maker.counts(), (1, 1));
    client.assert_closed();
    let options = TemplateOptions::default();
    fixture.server.publish_template(&fixture.address, "disk", options.clone(), maker.make()).unwrap();
    let _client = enter(&fixture);
    fixture.server.close(&fixture.address);
    assert_eq!(maker.counts(), (2, 2));
    fixture.server.listen(&fixture.address).unwrap();
    fixture.server.publish_template(&fixture.address, "disk", options, maker.make()).unwrap();
    let _clients: Vec<_> = (0..10).map(|_| enter(&fixture)).collect();
    fixture.server.shutdown(Duration::from_secs(5));
    assert_eq!(maker.counts(), (12, 12));
    // The server releases the template when the last connection thread has returned.
    eventually(|| Arc::strong_count(&maker) == 1);
}

#[test]
fn unpublish_while_device_is_created_waits() {
    let (fixture, maker) = serving(None);
    maker.hold(true);
    let mut client = fixture.connect();
    client.greet(3);
    client.send(&option(GO, &info_data("disk", &[])));
    eventually(|| fixture.server.connections("disk") == 1);
    // While the factory blocks, the server holds no lock: other exports can be published and used.
    fixture
        .server
        .publish(&fixture.address, "other", MemDevice::new(4096), ExportOptions::default())
        .unwrap();
    let mut other = fixture.connect();
    other.greet(3);
    assert_eq!(other.go("other").0, 4096);
    assert!(matches!(fixture.server.unpublish("disk", false), Err(PublishError::Busy { .. })));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| fixture.server.unpublish("disk", true));
        eventually(|| fixture.server.exports().len() == 1);
        maker.hold(false);
        assert_eq!(waiting.join().unwrap(), Ok(1));
    });
    assert_eq!(maker.counts(), (1, 1));
    assert_eq!(other.read(0, 512), Ok(vec![0; 512]));
    let mut late = fixture.connect();
    late.greet(3);
    assert_eq!(late.outcome(GO, &info_data("disk", &[])), ERR_UNKNOWN);
}

#[test]
fn connection_ends_after_time_to_live() {
    let (fixture, maker) = serving(Some(SHORT));
    let start = Instant::now();
    let mut idle = enter(&fixture);
    let mut clients: Vec<_> = (0..5).map(|_| enter(&fixture)).collect();
    // A connection that ends early removes its deadline.
    clients.pop().unwrap().disconnect();
    idle.assert_closed();
    assert!(start.elapsed() >= SHORT);
    for client in &mut clients {
        client.assert_closed();
    }
    eventually(|| maker.counts() == (6, 6));
    fixture.assert_no_connections();
    assert!(start.elapsed() < freestone_nbd::SHUTDOWN_GRACE, "they were cut, not drained");
    // A busy connection is ended between two requests, and each reply is complete.
    let mut busy = enter(&fixture);
    let mut answered = 0;
    loop {
        // Reads shorter than 512 bytes are sent as data even if they are zeroes, so all replies have the same
        // length.
        let bytes = request(0, READ, answered, 0, 256);
        if busy.stream.write_all(&bytes).is_err() {
            break;
        }
        let mut head = [0; 28];
        if busy.stream.read_exact(&mut head).is_err() {
            break;
        }
        busy.bytes(256);
        answered += 1;
    }
    assert!(answered > 0);
    eventually(|| maker.counts() == (7, 7));
}

#[test]
fn connection_limit_applies_to_template() {
    let fixture = Fixture::with(Limits { max_connections: 3, ..Limits::default() });
    let maker = Arc::new(Maker::default());
    let options = TemplateOptions::default();
    fixture.server.publish_template(&fixture.address, "disk", options, maker.make()).unwrap();
    let clients: Vec<_> = (0..3).map(|_| enter(&fixture)).collect();
    fixture.connect().assert_closed();
    assert_eq!(maker.counts(), (3, 0));
    drop(clients);
    eventually(|| maker.counts() == (3, 3));
}

#[test]
fn templates_and_devices_share_export_names() {
    let (fixture, maker) = serving(None);
    let again =
        fixture.server.publish_template(&fixture.address, "disk", TemplateOptions::default(), maker.make());
    assert_eq!(
        again,
        Err(PublishError::Duplicate { name: "disk".to_owned(), address: fixture.address.clone() })
    );
    let export = ExportOptions { read_only: true, ..ExportOptions::default() };
    let options = TemplateOptions { export, ttl: Some(Duration::MAX) };
    fixture.server.publish_template(&fixture.address, "ro", options, maker.make()).unwrap();
    let mut client = fixture.connect();
    client.greet(3);
    assert_eq!(client.go("ro").1 & (2 | MULTI_CONN), 2);
    // Error 1 is EPERM.
    assert_eq!(client.write(0, 0, &[1; 512]), 1);
    client.disconnect();
    assert_eq!(fixture.server.unpublish("ro", true), Ok(1));
    eventually(|| maker.counts() == (1, 1));
}
