//! Tests of zones over virtio.

use super::*;
use crate::wire::{ZoneDescriptor, ZoneReport};
use freestone_drive::null::{self, Memory};
use freestone_drive::zone::{Config, StateLocation, Zones};

/// Zone types and states, as numbered by VIRTIO.
mod zone_type {
    pub const CONVENTIONAL: u8 = 1;
    pub const SEQUENTIAL_REQUIRED: u8 = 2;
}
mod zone_state {
    pub const NOT_WRITE_POINTER: u8 = 0;
    pub const EMPTY: u8 = 1;
    pub const EXPLICIT_OPEN: u8 = 3;
    pub const CLOSED: u8 = 4;
    pub const FULL: u8 = 14;
}

const ZONE_SECTORS: u64 = 2048;
/// Guest address of the sector number that an append returns.
const SECTOR: u64 = HEADERS + 0x200;

fn zoned() -> Arc<dyn Device> {
    let memory = Memory::new(null::Config::plain(8 << 20, 4096)).unwrap();
    let config = Config {
        zone_size: 1 << 20,
        zone_nr_conv: 1,
        zone_max_open: 2,
        zone_max_active: 2,
        zone_append_max: 64 << 10,
        ..Config::default()
    };
    Arc::new(Zones::new(Arc::new(memory), config, StateLocation::Volatile, None).unwrap())
}

/// Runs `check` on a zoned device, and again with delayed completions.
fn check_devices(check: fn(&mut Client)) {
    for device in [zoned(), delayed(zoned())] {
        let (_dir, export) = export(device);
        let mut client = Client::connect(&export);
        client.set_up(0);
        check(&mut client);
    }
}

impl Client {
    fn append(&mut self, sector: u64, len: u32, room: u32) -> (u8, u32) {
        self.header(request::ZONE_APPEND, sector);
        let (next, write) = (descriptor::NEXT, descriptor::WRITE);
        self.descriptors(
            DESC,
            &[
                (GUEST + HEADERS, 16, next),
                (GUEST + DATA, len, next),
                (GUEST + SECTOR, room, write | next),
                (GUEST + HEADERS + 0x100, 1, write),
            ],
        );
        self.offer(0);
        let len = self.answer();
        let [status] = self.get(HEADERS + 0x100);
        (status, len)
    }

    fn zone_op(&mut self, kind: u32, zone: u64) -> u8 {
        self.request(kind, zone * ZONE_SECTORS, 0, false).0
    }

    /// Reports zones from `sector` on, in at most `len` bytes.
    fn zones(&mut self, sector: u64, len: u32) -> Vec<ZoneDescriptor> {
        let (told, bytes) = self.request(request::ZONE_REPORT, sector, len, false);
        assert_eq!(told, status::OK);
        let report = ZoneReport::read_from_bytes(&self.get::<64>(DATA)).unwrap();
        assert_eq!(u64::from(bytes), 1 + 64 + 64 * report.zones.get());
        (0..report.zones.get())
            .map(|n| ZoneDescriptor::read_from_bytes(&self.get::<64>(DATA + 64 + 64 * n)).unwrap())
            .collect()
    }
}

#[test]
fn config_space_describes_zones() {
    let (_dir, export) = export(zoned());
    let mut client = Client::connect(&export);
    client.set_up(0);
    let features = client.number(message::GET_FEATURES);
    assert_eq!(features & (feature::ZONED | feature::DISCARD | feature::WRITE_ZEROES), feature::ZONED);
    let config = client.config();
    assert_eq!((config.zone_model, config.zone_sectors.get()), (1, ZONE_SECTORS as u32));
    assert_eq!((config.max_open_zones.get(), config.max_active_zones.get()), (2, 2));
    assert_eq!((config.max_append_sectors.get(), config.write_granularity.get()), (128, 4096));
    assert_eq!(config.blk_size.get(), 4096);
}

#[test]
fn writes_and_appends_use_write_pointer() {
    check_devices(|client| {
        let first = ZONE_SECTORS;
        client.put(DATA, &[1; 8192]);
        assert_eq!(client.request(request::OUT, first, 4096, false).0, status::OK);
        assert_eq!(client.request(request::OUT, first, 4096, false).0, status::ZONE_UNALIGNED_WP);
        client.put(DATA, &[2; 8192]);
        assert_eq!(client.append(first, 8192, 8), (status::OK, 9));
        assert_eq!(u64::from_le_bytes(client.get(SECTOR)), first + 8);
        client.put(DATA, &[3; 8192]);
        assert_eq!(client.append(first, 4096, 8), (status::OK, 9));
        assert_eq!(u64::from_le_bytes(client.get(SECTOR)), first + 24);
        assert_eq!(client.request(request::IN, first, 16384, false).0, status::OK);
        let wanted = [&[1; 4096][..], &[2; 8192], &[3; 4096]].concat();
        assert_eq!(client.get::<16384>(DATA)[..], wanted[..]);
        // Appends must start at a sequential zone and must not be too large.
        assert_eq!(client.append(0, 4096, 8).0, status::ZONE_INVALID_CMD);
        assert_eq!(client.append(first + 8, 4096, 8).0, status::ZONE_INVALID_CMD);
        assert_ne!(client.append(first, 128 << 10, 8).0, status::OK);
        assert_ne!(client.append(first, 100, 8).0, status::OK);
        assert_eq!(client.append(first, 4096, 4).0, status::IOERR, "no room for the sector");
        let rows = client.zones(first, 64 + 64);
        assert_eq!(rows[0].write_pointer.get(), first + 32);
    });
}

#[test]
fn zone_operations_change_conditions() {
    check_devices(|client| {
        let rows = client.zones(0, 64 + 64 * 100);
        assert_eq!(rows.len(), 8);
        assert_eq!((rows[0].kind, rows[0].state), (zone_type::CONVENTIONAL, zone_state::NOT_WRITE_POINTER));
        for (n, row) in (0..).zip(&rows[1..]) {
            assert_eq!((row.kind, row.state), (zone_type::SEQUENTIAL_REQUIRED, zone_state::EMPTY));
            let start = (n + 1) * ZONE_SECTORS;
            assert_eq!((row.start.get(), row.capacity.get()), (start, ZONE_SECTORS));
        }
        assert_eq!(client.zones(3 * ZONE_SECTORS + 5, 64 + 64 * 2 + 63)[0].start.get(), 3 * ZONE_SECTORS);
        assert!(client.zones(0, 64).is_empty());
        assert_ne!(client.request(request::ZONE_REPORT, 0, 63, false).0, status::OK);
        assert_eq!(client.request(request::ZONE_REPORT, 1 << 40, 128, false).0, status::ZONE_INVALID_CMD);

        let state = |client: &mut Client, zone: usize| client.zones(0, 64 + 64 * 8)[zone].state;
        assert_eq!(client.zone_op(request::ZONE_OPEN, 1), status::OK);
        assert_eq!(client.zone_op(request::ZONE_OPEN, 2), status::OK);
        assert_eq!(state(client, 2), zone_state::EXPLICIT_OPEN);
        let refused = client.zone_op(request::ZONE_OPEN, 3);
        assert!(matches!(refused, status::ZONE_OPEN_RESOURCE | status::ZONE_ACTIVE_RESOURCE), "{refused}");
        client.put(DATA, &[1; 4096]);
        assert_eq!(client.append(ZONE_SECTORS, 4096, 8).0, status::OK);
        assert_eq!(client.zone_op(request::ZONE_CLOSE, 1), status::OK);
        assert_eq!(state(client, 1), zone_state::CLOSED);
        assert_eq!(client.zone_op(request::ZONE_FINISH, 1), status::OK);
        assert_eq!(state(client, 1), zone_state::FULL);
        assert_eq!(client.append(ZONE_SECTORS, 4096, 8).0, status::ZONE_INVALID_CMD);
        assert_eq!(client.zone_op(request::ZONE_RESET, 1), status::OK);
        assert_eq!(state(client, 1), zone_state::EMPTY);
        assert_eq!(client.zone_op(request::ZONE_RESET, 0), status::ZONE_INVALID_CMD, "conventional");
        assert_eq!(client.request(request::ZONE_RESET, 7, 0, false).0, status::ZONE_INVALID_CMD);
        assert_eq!(client.request(request::ZONE_RESET_ALL, 0, 0, false).0, status::OK);
        assert_eq!(state(client, 2), zone_state::EMPTY);
    });
}

#[test]
fn zone_requests_without_zones_are_unsupported() {
    let (_dir, export) = export(ram());
    let mut client = Client::connect(&export);
    client.set_up(0);
    assert_eq!(client.config().zone_model, 0);
    for kind in [request::ZONE_OPEN, request::ZONE_RESET, request::ZONE_RESET_ALL] {
        assert_eq!(client.request(kind, 0, 0, false).0, status::UNSUPP);
    }
    assert_eq!(client.request(request::ZONE_REPORT, 0, 128, false).0, status::UNSUPP);
    assert_eq!(client.append(0, 4096, 8).0, status::UNSUPP);
    assert_eq!(client.request(request::IN, 0, 512, false).0, status::OK, "it goes on");
}
