//! The exception store without snapshots: layout, order of writes, power cuts, group commit, and
//! invalid metadata.

mod bad_input;
mod behaviour;
mod crash;
mod disk;
mod groups;
mod layout;
mod merge;
mod metadata;

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use freestone_core::device::{Device, Geometry};
use freestone_cow::cow::StoreKind;
use freestone_cow::cow::store::{Allocated, Exceptions, Invalid, Store};
use freestone_testkit::Model;

/// The smallest chunk, in bytes. An area of this size has 256 entries.
const CHUNK: u64 = 4096;
/// Deadline for any completion.
const SOON: Duration = Duration::from_secs(20);

/// Returns the geometry of an origin that is large enough for all chunk numbers of the tests.
fn origin() -> Geometry {
    Geometry { size: 1 << 40, ..Model::new(1 << 20, 512).geometry() }
}

fn open(cow: Arc<dyn Device>) -> (Arc<Store>, Exceptions) {
    Store::open(cow, StoreKind::Persistent, Some(CHUNK), &origin()).expect("the store opens")
}

/// Commits a copy of the origin chunk `old`. Returns the receiver of its result.
fn commit(store: &Arc<Store>, place: Allocated, old: u64) -> Receiver<Result<(), Invalid>> {
    let (tx, rx) = mpsc::channel();
    store.commit(place, old, Ok(()), move |outcome| {
        let _ = tx.send(outcome);
    });
    rx
}

/// Preserves the origin chunk `old` and waits until the exception is durable. Returns the chunk of
/// its copy on the COW device.
fn preserve(store: &Arc<Store>, old: u64) -> u64 {
    let place = store.allocate().expect("there is room");
    let new = place.chunk();
    assert_eq!(commit(store, place, old).recv_timeout(SOON), Ok(Ok(())));
    new
}

/// Preserves many origin chunks as one group, in this order. Returns the pairs of origin chunk and
/// chunk of the copy.
fn preserve_all(store: &Arc<Store>, olds: impl IntoIterator<Item = u64>) -> Vec<(u64, u64)> {
    let places: Vec<_> =
        olds.into_iter().map(|old| (old, store.allocate().expect("there is room"))).collect();
    let news: Vec<_> = places.iter().map(|(old, place)| (*old, place.chunk())).collect();
    let completions: Vec<_> = places.into_iter().map(|(old, place)| commit(store, place, old)).collect();
    for completion in completions {
        assert_eq!(completion.recv_timeout(SOON), Ok(Ok(())));
    }
    news
}
