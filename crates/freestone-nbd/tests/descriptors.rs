//! Checks that connections end in order if no file descriptor is left to pass them to a successor. The test is
//! a separate program, because it limits the descriptors of the process.
#![allow(missing_docs, reason = "test code")]

#[path = "server/common/mod.rs"]
mod common;

use std::time::Duration;

use common::prelude::*;
use rustix::process::{Resource, getrlimit, setrlimit};

const GRACE: Duration = Duration::from_secs(60);

#[test]
fn connection_without_descriptor_ends_in_order() {
    let device = MemDevice::new(1 << 20);
    let fixture = Fixture::serving(&device);
    let mut clients = Headers::ALL.map(|headers| fixture.enter(headers));
    device.set(Manner::Held);
    let cookies = clients.each_mut().map(|client| client.ask(0, FLUSH, 0, 0));
    eventually(|| device.held().len() == clients.len());
    let before = getrlimit(Resource::Nofile);
    // A limit below the open descriptors, which stay usable.
    let mut none = before;
    none.current = Some(3);
    setrlimit(Resource::Nofile, none).unwrap();
    let passed = std::thread::scope(|scope| {
        let passed = scope.spawn(|| fixture.server.pass_on(GRACE));
        std::thread::sleep(Duration::from_millis(100));
        // Further requests are answered too, like in a shutdown.
        for client in &mut clients {
            client.ask(0, FLUSH, 0, 0);
        }
        eventually(|| {
            device.release_all_backwards();
            passed.is_finished()
        });
        passed.join().unwrap()
    });
    setrlimit(Resource::Nofile, before).unwrap();
    assert_eq!((passed.connections.len(), passed.listeners.len()), (0, 1));
    for (client, cookie) in clients.iter_mut().zip(cookies) {
        for cookie in [cookie, cookie + 1] {
            assert_eq!(client.plain_reply(cookie), 0);
        }
        client.assert_closed();
    }
}
