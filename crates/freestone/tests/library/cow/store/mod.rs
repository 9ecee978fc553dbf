//! The exception store by itself: layout, order, power cuts, group commit, invalid input.

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

use freestone::cow::StoreKind;
use freestone::cow::store::{Allocated, Exceptions, Invalid, Store};
use freestone::device::{Device, Geometry};
use freestone_testkit::Model;

/// The smallest chunk: 256 entries in an area.
const CHUNK: u64 = 4096;
/// Deadline for any completion.
const SOON: Duration = Duration::from_secs(20);

/// Returns the geometry of an origin that is larger than any chunk number of the tests.
fn origin() -> Geometry {
    Geometry { size: 1 << 40, ..Model::new(1 << 20, 512).geometry() }
}

fn open(cow: Arc<dyn Device>) -> (Arc<Store>, Exceptions) {
    Store::open(cow, StoreKind::Persistent, Some(CHUNK), &origin()).expect("the store opens")
}

/// Commits a copy. Returns the receiver of its result.
fn commit(store: &Arc<Store>, place: Allocated, old: u64) -> Receiver<Result<(), Invalid>> {
    let (tx, rx) = mpsc::channel();
    store.commit(place, old, Ok(()), move |outcome| {
        let _ = tx.send(outcome);
    });
    rx
}

/// Preserves one chunk and waits until the exception is durable.
fn preserve(store: &Arc<Store>, old: u64) -> u64 {
    let place = store.allocate().expect("there is room");
    let new = place.chunk();
    assert_eq!(commit(store, place, old).recv_timeout(SOON), Ok(Ok(())));
    new
}

/// Preserves many chunks as one group, in this order.
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
