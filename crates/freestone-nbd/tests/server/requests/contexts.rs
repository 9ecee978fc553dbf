//! Tests of metadata contexts: listing, selection, and block status with one or both contexts.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use crate::common::prelude::*;
use freestone_nbd::MAX_DESCRIPTORS;

const MIB: u64 = 1 << 20;
const ALLOCATION: &str = "base:allocation";
const CHANGED: &str = "freestone:changed";
const PAGE: u64 = 4096;

fn fork(size: u64) -> Arc<MemDevice> {
    let device = MemDevice::new(size);
    device.forked.store(true, SeqCst);
    device
}

/// Returns a client in the transmission phase of "disk" that has selected these contexts.
fn enter(fixture: &Fixture, contexts: &[&str]) -> Client {
    let mut client = fixture.connect();
    client.greet(3);
    client.agree(Headers::Structured);
    let set = client.set_contexts("disk", contexts);
    assert_eq!(set.len(), contexts.len(), "{set:?}");
    client.go("disk");
    client
}

#[test]
fn contexts_listed_and_selected_by_query() {
    let fixture = Fixture::serving(&fork(MIB));
    fixture.publish("plain", &MemDevice::new(MIB));
    let mut client = fixture.connect();
    client.greet(3);
    client.agree(Headers::Structured);
    let mut ask = |kind: u32, name: &str, queries: &[&str]| {
        let mut replies = client.option(kind, &context_data(name, queries));
        assert_eq!(replies.pop().unwrap().kind, ACK);
        assert!(replies.iter().all(|reply| reply.kind == META_CONTEXT));
        replies.into_iter().map(|reply| reply.data).collect::<Vec<_>>()
    };
    let told = |id: u8, name: &str| [&[0, 0, 0, id], name.as_bytes()].concat();
    let both = [told(0, ALLOCATION), told(0, CHANGED)];
    assert_eq!(ask(LIST_META_CONTEXT, "disk", &[]), both);
    assert_eq!(ask(LIST_META_CONTEXT, "disk", &["freestone:", "base:"]), both);
    assert_eq!(ask(LIST_META_CONTEXT, "disk", &["freestone:"]), both[1..]);
    assert_eq!(ask(LIST_META_CONTEXT, "disk", &[CHANGED, "freestone:", "x:"]), both[1..]);
    assert!(
        ask(LIST_META_CONTEXT, "disk", &["freestone", "freestone:change", "freestone:changed ", ":"])
            .is_empty()
    );
    // Only a fork offers the context `freestone:changed`.
    assert_eq!(ask(LIST_META_CONTEXT, "plain", &[]), both[..1]);
    assert!(ask(LIST_META_CONTEXT, "plain", &["freestone:", CHANGED]).is_empty());
    assert!(ask(SET_META_CONTEXT, "plain", &[CHANGED]).is_empty());
    // Selection ignores wildcards and duplicates, and gives each context its own identifier.
    assert!(ask(SET_META_CONTEXT, "disk", &["freestone:", "base:"]).is_empty());
    assert_eq!(ask(SET_META_CONTEXT, "disk", &[CHANGED, CHANGED]), [told(2, CHANGED)]);
    assert_eq!(
        ask(SET_META_CONTEXT, "disk", &[CHANGED, ALLOCATION]),
        [told(1, ALLOCATION), told(2, CHANGED)]
    );
}

#[test]
fn block_status_has_one_chunk_per_context() {
    let device = fork(MIB);
    let fixture = Fixture::serving(&device);
    let mut both = enter(&fixture, &[ALLOCATION, CHANGED]);
    let mut changed = enter(&fixture, &[CHANGED]);
    let mut allocation = enter(&fixture, &[ALLOCATION]);
    let all = MIB;
    assert_eq!(both.statuses(0, 0, all), Ok(vec![(1, vec![(all, 3)]), (2, vec![(all, 0)])]));
    assert_eq!(both.write(0, 4096, &[1; 4096]), 0);
    assert_eq!(both.run(0, WRITE_ZEROES, 8192, PAGE), 0);
    assert_eq!(both.run(0, TRIM, 5 * 4096, PAGE), 0);
    let holes = vec![(PAGE, 3), (PAGE, 0), (all - 2 * PAGE, 3)];
    let own = vec![(PAGE, 0), (2 * PAGE, 1), (2 * PAGE, 0), (PAGE, 1), (all - 6 * PAGE, 0)];
    assert_eq!(both.statuses(0, 0, all), Ok(vec![(1, holes.clone()), (2, own.clone())]));
    assert_eq!(changed.statuses(0, 0, all), Ok(vec![(2, own)]));
    assert_eq!(allocation.statuses(0, 0, all), Ok(vec![(1, holes)]));
    // A query within a page, and a query with REQ_ONE, which returns one extent of each context.
    assert_eq!(changed.statuses(0, 8192 - 512, 1024), Ok(vec![(2, vec![(1024, 1)])]));
    assert_eq!(
        both.statuses(REQ_ONE, 4096, 4 * PAGE),
        Ok(vec![(1, vec![(PAGE, 0)]), (2, vec![(2 * PAGE, 1)])])
    );
    // The DONE flag is set only on the last chunk of a reply. The next chunk belongs to another reply.
    let first = both.ask(0, BLOCK_STATUS, 0, PAGE);
    let second = both.ask(REQ_ONE, BLOCK_STATUS, 0, PAGE);
    let chunks: Vec<_> = (0..4).map(|_| both.chunk()).collect();
    let wanted = [(first, false, 1), (first, true, 2), (second, false, 1), (second, true, 2)];
    for (chunk, wanted) in chunks.iter().zip(wanted) {
        let Chunk::Status { cookie, done, context, .. } = chunk else { panic!("{chunk:?}") };
        assert_eq!((*cookie, *done, *context), wanted);
    }
    fixture.server.unpublish("disk", true).unwrap();
}

#[test]
fn block_status_error_in_one_context_fails_reply() {
    let device = fork(MIB);
    let fixture = Fixture::serving(&device);
    let mut both = enter(&fixture, &[ALLOCATION, CHANGED]);
    for (bad, error) in [(4096, 5), (4097, ESHUTDOWN)] {
        device.bad_byte.store(bad, SeqCst);
        assert_eq!(both.statuses(0, 4096, PAGE), Err(error));
        assert_eq!(both.statuses(0, 0, PAGE).unwrap().len(), 2);
    }
    assert_eq!(both.statuses(0, MIB, PAGE), Err(EINVAL));
    assert_eq!(both.statuses(0, 0, 0), Err(EINVAL));
    // Block status fails if the device no longer reports changes.
    device.forked.store(false, SeqCst);
    assert_eq!(both.statuses(0, 0, PAGE), Err(EINVAL));
    assert_eq!(both.read(0, 512), Ok(vec![0; 512]));
    both.disconnect();
}

#[test]
fn descriptors_are_limited_in_each_context() {
    let pages = 2 * MAX_DESCRIPTORS as u64 + 2;
    let device = fork(pages * 4096);
    for page in (0..pages).step_by(2) {
        device.fill(page * 4096, &[1; 4096]);
    }
    let fixture = Fixture::serving(&device);
    let mut both = enter(&fixture, &[ALLOCATION, CHANGED]);
    // The client requests many replies at once, so that they reach the end of the reply buffer.
    let cookies: Vec<_> = (0..20).map(|_| both.ask(0, BLOCK_STATUS, 0, pages * 4096)).collect();
    for wanted in cookies {
        for (id, flags) in [(1, [0, 3]), (2, [1, 0])] {
            let chunk = both.chunk();
            let Chunk::Status { cookie, context, extents, done } = chunk else { panic!("{chunk:?}") };
            assert_eq!((cookie, context, done), (wanted, id, id == 2));
            assert_eq!(extents.len(), MAX_DESCRIPTORS);
            assert!(extents.chunks(2).all(|pair| pair == [(PAGE, flags[0]), (PAGE, flags[1])]));
        }
    }
    both.disconnect();
    fixture.assert_no_connections();
}
