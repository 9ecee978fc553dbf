//! Exports and frontends that come and go.

use std::io::Read;
use std::os::fd::AsFd;

use super::*;

#[test]
fn a_socket_that_is_left_is_replaced_and_one_in_use_is_not() {
    let (dir, first) = export(ram());
    let path = dir.path().join("v");
    let again = || Export::new(&path, "disk", ram(), options());
    assert!(again().unwrap_err().to_string().ends_with("another server listens there"));
    assert!(first.end(PATIENCE) && first.end(PATIENCE));
    assert!(!path.exists());
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    works(&again().unwrap());
    std::fs::write(&path, "").unwrap();
    assert!(again().unwrap_err().to_string().ends_with("that is no socket"));
}

#[test]
fn a_frontend_that_is_there_does_not_hold_up_the_end() {
    let (_dir, export) = export(ram());
    let mut client = Client::connect(&export);
    client.set_up(0);
    assert!(export.is_connected());
    assert!(export.end(PATIENCE));
    assert_eq!(client.front.socket.read(&mut [0]).unwrap(), 0);
}

/// A frontend with one flush in flight, which its device does not answer before `PATIENCE`.
fn waiting(export: &Export) -> Client {
    let mut client = Client::connect(export);
    client.set_up(0);
    client.offer_flush();
    client
}

#[test]
fn what_is_cut_is_told_nothing_more_and_the_next_one_waits_until_the_hold_ends() {
    let (_dir, export) = export(Arc::new(Late(ram())));
    let client = waiting(&export);
    let held = export.hold();
    assert!(held.is_connected() && held.cut());
    assert!(held.wait_gone(Instant::now() + PATIENCE));
    assert!(!held.cut() && !held.is_connected());
    assert_eq!(u16::from_le_bytes(client.get(USED + 2)), 0, "it was not answered");
    let mut next = Client::connect(&export);
    next.front.socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    next.send(message::GET_FEATURES, 0, &[], &[]);
    assert!(next.front.socket.read(&mut [0]).is_err(), "it is not let in");
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
    assert_eq!(block, [5; 512], "it has the other device");
}

/// One whose flush the device has, and keeps for a second.
fn stuck() -> (TempDir, Export, Client) {
    let (dir, export) = export(Arc::new(Never(ram())));
    let client = waiting(&export);
    std::thread::sleep(Duration::from_millis(200));
    (dir, export, client)
}

#[test]
fn the_end_is_seen_when_nothing_is_in_flight_any_more() {
    for is_cut in [false, true] {
        let (_dir, export, mut client) = stuck();
        if is_cut {
            assert!(export.hold().cut());
        } else {
            export.begin_to_end();
        }
        assert_eq!(client.front.socket.read(&mut [0]).unwrap(), 0);
        let answered = client.memory.word(USED + 2);
        assert_eq!(answered, u16::from(!is_cut), "it was waited for");
    }
}

#[test]
fn the_end_is_seen_after_the_grace_although_a_request_is_in_flight() {
    for is_cut in [false, true] {
        let (_dir, export, mut client) = stuck();
        let began = Instant::now();
        if is_cut {
            let held = export.hold();
            assert!(held.cut() && !held.wait_gone(began));
        } else {
            assert!(!export.end(Duration::ZERO));
        }
        assert_eq!(client.front.socket.read(&mut [0]).unwrap(), 0);
        assert_eq!(client.memory.word(USED + 2), 0, "the device still has the flush");
    }
}

#[test]
fn an_end_does_not_wait_longer_than_its_grace() {
    let (_dir, export) = export(Arc::new(Late(ram())));
    let _client = waiting(&export);
    assert!(!export.end(Duration::ZERO), "a request is in flight");
    assert!(export.end(PATIENCE));
    assert!(!export.is_connected() && !export.hold().cut());
}

#[test]
fn a_frontend_is_told_that_the_device_has_grown() {
    let ram = ram();
    let (_dir, export) = export(ram.clone());
    let mut client = Client::connect(&export);
    client.set_up(0);
    export.resized();
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(client.ask(message::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]));
    drop(theirs);
    ram.grow(128 << 20).unwrap();
    export.resized();
    let mut header = [0; size_of::<Header>()];
    (&ours).read_exact(&mut header).unwrap();
    let header = Header::read_from_bytes(&header).unwrap();
    assert_eq!((header.request, header.flags, header.size), (2, 1, 0));
    assert_eq!(client.config().capacity.get(), 128 << 11);
    assert_eq!(client.request(request::IN, (128 << 11) - 1, 512, false), (status::OK, 513));
    // One that does not read is not waited for.
    for _ in 0..100_000 {
        export.resized();
    }
}
