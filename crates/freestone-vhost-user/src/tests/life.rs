//! Tests of how exports and connections start and end.

use std::io::Read;
use std::os::fd::AsFd;

use super::*;

#[test]
fn only_stale_socket_is_replaced() {
    let (dir, first) = export(ram());
    let path = dir.path().join("v");
    let try_export = || Export::new(&path, "disk", ram(), options());
    assert!(try_export().unwrap_err().to_string().contains("another server listens there (pid "));
    assert!(first.shutdown(PATIENCE) && first.shutdown(PATIENCE));
    assert!(!path.exists());
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    assert_served(&try_export().unwrap());
    std::fs::write(&path, "").unwrap();
    assert!(try_export().unwrap_err().to_string().ends_with("is not a socket"));
}

#[test]
fn end_closes_idle_connection() {
    let (_dir, export) = export(ram());
    let mut client = Client::connect(&export);
    client.set_up(0);
    assert!(export.is_connected());
    assert!(export.shutdown(PATIENCE));
    assert_eq!(client.front.socket.read(&mut [0]).unwrap(), 0);
}

/// Returns a frontend with one flush in flight.
fn client_with_flush(export: &Export) -> Client {
    let mut client = Client::connect(export);
    client.set_up(0);
    client.offer_flush();
    client
}

#[test]
fn cut_publishes_nothing_and_hold_delays_next_frontend() {
    let (_dir, export) = export(delayed(ram()));
    let client = client_with_flush(&export);
    let held = export.hold();
    assert!(held.is_connected() && held.disconnect());
    assert!(held.wait_disconnected(Instant::now() + PATIENCE));
    assert!(!held.disconnect() && !held.is_connected());
    assert_eq!(u16::from_le_bytes(client.get(USED + 2)), 0, "the flush was not completed");
    let mut next = Client::connect(&export);
    next.front.socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    next.send(message::GET_FEATURES, 0, &[], &[]);
    assert!(next.front.socket.read(&mut [0]).is_err(), "the hold delays the frontend");
    let other = ram();
    export.replace(other.clone(), Arc::default());
    drop(held);
    next.front.socket.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_ne!(u64::read_from_bytes(&next.receive(message::GET_FEATURES)).unwrap(), 0);
    next.set_up(0);
    next.put(DATA, &[5; 512]);
    assert_eq!(next.request(request::OUT, 0, 512, false), (status::OK, 1));
    let mut block = [0; 512];
    other.try_io(&Request::read(0, 512), Buffer::Read(&mut block)).unwrap();
    assert_eq!(block, [5; 512], "the next frontend has the new device");
}

/// Returns a frontend with a flush that the device completes after a delay.
fn stalled_flush() -> (TempDir, Export, Client) {
    let (dir, export) = export(stalled());
    let client = client_with_flush(&export);
    std::thread::sleep(Duration::from_millis(200));
    (dir, export, client)
}

#[test]
fn connection_ends_after_requests_in_flight() {
    for is_cut in [false, true] {
        let (_dir, export, mut client) = stalled_flush();
        if is_cut {
            assert!(export.hold().disconnect());
        } else {
            export.begin_shutdown();
        }
        assert_eq!(client.front.socket.read(&mut [0]).unwrap(), 0);
        let answered = client.memory.word(USED + 2);
        assert_eq!(answered, u16::from(!is_cut), "only the orderly end waits for the flush");
    }
}

#[test]
fn connection_ends_after_grace_with_stalled_request() {
    for is_cut in [false, true] {
        let (_dir, export, mut client) = stalled_flush();
        let began = Instant::now();
        if is_cut {
            let held = export.hold();
            assert!(held.disconnect() && !held.wait_disconnected(began));
        } else {
            assert!(!export.shutdown(Duration::ZERO));
        }
        assert_eq!(client.front.socket.read(&mut [0]).unwrap(), 0);
        assert_eq!(client.memory.word(USED + 2), 0, "the device still has the flush");
    }
}

#[test]
fn end_returns_false_after_grace() {
    let (_dir, export) = export(delayed(ram()));
    let _client = client_with_flush(&export);
    assert!(!export.shutdown(Duration::ZERO), "a request is in flight");
    assert!(export.shutdown(PATIENCE));
    assert!(!export.is_connected() && !export.hold().disconnect());
}

#[test]
fn resize_notifies_frontend() {
    let ram = ram();
    let (_dir, export) = export(ram.clone());
    let mut client = Client::connect(&export);
    client.set_up(0);
    export.notify_resize();
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(client.ask(message::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]));
    drop(theirs);
    ram.grow(128 << 20).unwrap();
    export.notify_resize();
    let mut header = [0; size_of::<Header>()];
    (&ours).read_exact(&mut header).unwrap();
    let header = Header::read_from_bytes(&header).unwrap();
    assert_eq!((header.request, header.flags, header.size), (2, 1, 0));
    assert_eq!(client.config().capacity.get(), 128 << 11);
    assert_eq!(client.request(request::IN, (128 << 11) - 1, 512, false), (status::OK, 513));
    // A frontend that does not read must not block the server.
    for _ in 0..100_000 {
        export.notify_resize();
    }
}
