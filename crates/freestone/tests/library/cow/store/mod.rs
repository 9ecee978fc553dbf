//! The exception store by itself: layout, order, power cuts, group commit, bad input.

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

/// The smallest chunk: 256 entries an area.
const CHUNK: u64 = 4096;
/// Long enough for anything that comes at all.
const SOON: Duration = Duration::from_secs(20);

/// An origin that has every chunk that a test names.
fn origin() -> Geometry {
    Geometry { size: 1 << 40, ..Model::new(1 << 20, 512).geometry() }
}

fn open(cow: Arc<dyn Device>) -> (Arc<Store>, Exceptions) {
    Store::open(cow, StoreKind::Persistent, Some(CHUNK), &origin()).expect("the store opens")
}

/// Hands a copy in and gives what its outcome will come through.
fn commit(store: &Arc<Store>, place: Allocated, old: u64) -> Receiver<Result<(), Invalid>> {
    let (tx, rx) = mpsc::channel();
    store.commit(place, old, Ok(()), move |outcome| {
        let _ = tx.send(outcome);
    });
    rx
}

/// Preserves one chunk and waits until that is durable.
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
    let answers: Vec<_> = places.into_iter().map(|(old, place)| commit(store, place, old)).collect();
    for answer in answers {
        assert_eq!(answer.recv_timeout(SOON), Ok(Ok(())));
    }
    news
}
