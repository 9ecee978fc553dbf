//! Clients of published devices. The completion of each of their requests is judged.
//!
//! The misbehaving clients ([`bad`], [`bad_machine`]) run beside the judged ones. The rounds and mode `lives` start the
//! threads of clients.

pub mod bad;
pub mod bad_machine;
mod session;

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};

use freestone_testkit::Rng;

use super::transport::protocol::ConnectionError;
use super::transport::{Address, Connection};
use super::watch::{REQUEST_MAX, WatchedThread};
use super::world::requests::{Request, WaitingMachine};
use super::world::{Disk, Kind, World};
use crate::oracle::Durability;
use session::{SentRequests, Session, end_requests};

pub fn run(world: &World, slot: &WatchedThread, mut rng: Rng) {
    while !world.is_stopped() {
        if !connect_once(world, slot, &mut rng) {
            std::thread::yield_now();
        }
    }
}

/// Makes one connection to a random device and uses it. Returns false if no device is published.
pub fn connect_once(world: &World, slot: &WatchedThread, rng: &mut Rng) -> bool {
    let disks = world.disks(|disk| !disk.addresses().is_empty());
    if disks.is_empty() {
        return false;
    }
    let any = &disks[rng.below(disks.len() as u64) as usize];
    let disk = disks.iter().find(|disk| rng.chance(50) && world.has_waiting_machine(disk)).unwrap_or(any);
    // Some connections read the whole device, so that lost data is found reliably.
    let purpose = if rng.chance(15) { Purpose::Sweep } else { Purpose::Random };
    use_device(world, slot, disk, rng, purpose);
    slot.end();
    true
}

/// Reads and judges the whole content of all published devices, one after the other.
pub fn read_all_devices(world: &World) {
    let slot = world.watch.slot("sweep".into());
    let mut rng = Rng::new(world.next_number());
    for disk in world.disks(|disk| !disk.addresses().is_empty()) {
        use_device(world, &slot, &disk, &mut rng, Purpose::Sweep);
    }
    slot.end();
}

#[derive(Clone, Copy)]
enum Purpose {
    Random,
    /// The client reads the whole device.
    Sweep,
}

fn use_device(world: &World, slot: &WatchedThread, disk: &Arc<Disk>, rng: &mut Rng, purpose: Purpose) {
    let mark = disk.mark();
    let addresses = disk.addresses();
    if addresses.is_empty() {
        return;
    }
    let any = rng.below(addresses.len() as u64) as usize;
    // Prefer a vhost-user socket if a machine waits to connect again with requests in flight.
    let machine_address = world
        .has_waiting_machine(disk)
        .then(|| addresses.iter().find(|at| matches!(at, Address::Machine(_))));
    let place = machine_address.flatten().unwrap_or(&addresses[any]);
    slot.begin(format!("{}: connects at {place:?}", disk.name), REQUEST_MAX);
    // A power cut waits until no client holds this gate.
    let _gate_guard = disk.gate.read().unwrap_or_else(PoisonError::into_inner);
    if disk.addresses().is_empty() {
        return;
    }
    let own = (disk.kind == Kind::Template).then(|| {
        let base = disk.parent.as_ref().expect("a template has a base");
        std::sync::Mutex::new(base.oracle().snapshot(&disk.name, Durability::Completed))
    });
    let (link, sent_requests) = match connect(world, disk, place, rng) {
        Ok(connected) => connected,
        Err(error) => {
            if !world.is_server_ending() && !disk.may_have_ended(mark) {
                world.fail(format!("{}: a client cannot connect at {place:?}: {error:?}", disk.name));
            }
            return;
        }
    };
    let mut session = Session { world, slot, disk, mark, link, sent_requests, own };
    // If a verb ends connections, the device may already have lost power while the oracle does not
    // know it.
    let outcome = if disk.may_have_ended(mark) {
        Err(ConnectionError::Ended("a verb ends connections".into()))
    } else {
        world.counts.add("clients", session.link.kind(), 1);
        session.check_size().and_then(|()| session.wait()).and_then(|()| match purpose {
            Purpose::Random => session.send_random_requests(rng),
            Purpose::Sweep => session.read_device(),
        })
    };
    if outcome.is_err() {
        session.hang_up();
    }
    let sent_requests = session.end_requests();
    let link = session.link;
    match outcome {
        Ok(()) => link.leave(),
        Err(ConnectionError::Ended(why)) => {
            if !world.is_server_ending() && !disk.may_have_ended(mark) {
                world.fail(format!("{}: the server ended a judged connection: {why}", disk.name));
            }
            // If a machine connects again, the server completes its requests in flight.
            if let Connection::Machine(driver) = link
                && driver.can_reconnect()
            {
                world.add_waiting_machine(WaitingMachine {
                    disk: disk.name.clone(),
                    client: driver,
                    sent_requests,
                });
            }
        }
        Err(ConnectionError::Protocol(why)) => world.fail(format!("{}: {why}", disk.name)),
        Err(ConnectionError::Refused(kind, why)) => {
            world.fail(format!("{}: refused after the handshake: {kind:x} {why}", disk.name));
        }
    }
}

/// Opens a new connection, or reconnects a waiting machine. Returns the connection and its requests
/// in flight.
fn connect(
    world: &World,
    disk: &Disk,
    place: &Address,
    rng: &mut Rng,
) -> Result<(Connection, SentRequests), ConnectionError> {
    let Address::Machine(path) = place else {
        return Ok((Connection::connect(place, &disk.name, rng)?, HashMap::new()));
    };
    let Some(WaitingMachine { client: mut driver, sent_requests, .. }) =
        world.take_waiting_machine(&disk.name)
    else {
        return Ok((Connection::connect(place, &disk.name, rng)?, HashMap::new()));
    };
    // From here on, the server may execute any of the machine's requests.
    let mut oracle = disk.oracle();
    let begin = |(cookie, request): (u64, Request)| {
        let token = request.intent.begin(&mut oracle);
        (cookie, (request, token))
    };
    let sent_requests: SentRequests = sent_requests.into_iter().map(begin).collect();
    drop(oracle);
    if let Err(error) = driver.reconnect(path) {
        // The number of requests that the server has completed is unknown, so this machine gives
        // up, once the server executes none of them.
        driver.hang_up();
        end_requests(&mut disk.oracle(), sent_requests);
        return Err(error);
    }
    world.counts.add("clients", "vhost-user, again", 1);
    world.counts.add("clients", "requests done again or for the first time", sent_requests.len() as u64);
    Ok((Connection::Machine(driver), sent_requests))
}
