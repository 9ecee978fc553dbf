//! Tests of the features that a driver accepts, and of the durability of its writes.

use freestone_core::device::{Flags, Op};

use super::*;

/// Returns a device with a volatile cache.
fn cached() -> Arc<TestDevice<Ram>> {
    Arc::new(TestDevice::over(ram()).shaped(|geometry| geometry.volatile_cache = true))
}

/// Returns true if the last write had FUA.
fn was_durable(device: &TestDevice<Ram>) -> bool {
    device.requests(Op::Write).last().is_some_and(|write| write.flags.contains(Flags::FUA))
}

/// Sets the configuration byte that switches write-back. Returns true if the server accepted it.
fn set_writeback(client: &mut Client, on: u8) -> bool {
    let part = ConfigPart { offset: 32, size: 1, flags: 0 };
    client.ask(message::SET_CONFIG, &[part.as_bytes(), &[on]].concat(), &[])
}

#[test]
fn driver_without_flush_writes_through() {
    let device = cached();
    let (_dir, export) = export(device.clone());
    let all = feature::FLUSH | feature::CONFIG_WCE;
    // The features that the driver does not accept, the value it writes to the configuration, and
    // true if its writes must be durable.
    for (without, writeback, durable) in [
        (0, None, false),
        (0, Some(0), true),
        (0, Some(1), false),
        (feature::FLUSH, None, true),
        (feature::FLUSH, Some(1), true),
        (all, Some(1), true),
        (u64::MAX, None, true),
    ] {
        let mut client = Client::connect(&export);
        assert_eq!(client.config().writeback, 1, "as for a driver that accepts FLUSH");
        client.set_up(without);
        if let Some(on) = writeback {
            assert!(set_writeback(&mut client, on));
        }
        assert_eq!(client.request(request::OUT, 0, 512, false), (status::OK, 1));
        assert_eq!(was_durable(&device), durable, "without {without:#x}, writeback {writeback:?}");
        assert_eq!(client.config().writeback, u8::from(!durable));
    }
}

#[test]
fn reset_driver_that_accepts_nothing_writes_through() {
    let device = cached();
    let (_dir, export) = export(device.clone());
    let mut client = Client::connect(&export);
    assert!(!export.has_driver());
    client.set_up(0);
    assert!(export.is_connected() && export.has_driver());
    assert!(client.ask(message::RESET_DEVICE, &[], &[]));
    assert!(!export.has_driver());
    assert!(client.ask(message::SET_FEATURES, &0_u64.to_ne_bytes(), &[]));
    client.put(USED, &[0; 4]);
    client.put(AVAIL, &[0; 4]);
    (client.next, client.seen) = (0, 0);
    client.start(0);
    assert_eq!(client.request(request::OUT, 0, 512, false), (status::OK, 1));
    assert!(was_durable(&device));
}
