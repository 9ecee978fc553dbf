use super::*;

fn content(object: &[u8]) -> CopyContent<'_> {
    CopyContent { header_owner: 7, algorithm: 1, object }
}

fn copy(unit: u64) -> CleanCopy {
    CleanCopy { unit, stored: 3, pages: 1 }
}

#[test]
fn take_requires_same_content() {
    let copies = CleanCopies::default();
    let slot = (1, 2);
    let others = [
        CopyContent { header_owner: 8, ..content(b"abc") },
        CopyContent { algorithm: 0, ..content(b"abc") },
        content(b"abd"),
        content(b"abcd"),
    ];
    for other in others {
        assert_eq!(copies.insert(slot, copy(5), content(b"abc"), 0), []);
        assert_eq!(copies.take(slot, other), Some(Err(copy(5))));
        assert_eq!(copies.take(slot, content(b"abc")), None, "a copy is given away once");
    }
    assert_eq!(copies.insert(slot, copy(5), content(b"abc"), 0), []);
    assert_eq!(copies.take((1, 3), content(b"abc")), None);
    assert_eq!(copies.take((2, 2), content(b"abc")), None);
    assert_eq!(copies.take(slot, content(b"abc")), Some(Ok(copy(5))));
}

#[test]
fn insert_returns_former_and_oldest_copies() {
    let copies = CleanCopies::default();
    assert_eq!(copies.insert((0, 0), copy(1), content(b"abc"), 0), []);
    assert_eq!(copies.insert((0, 0), copy(2), content(b"abc"), 0), [copy(1)]);
    for slot in 1..COPIES_MIN {
        assert_eq!(copies.insert((0, slot), copy(slot + 2), content(b"abc"), 0), []);
    }
    assert_eq!(copies.insert((1, 0), copy(0), content(b"abc"), 0), [copy(2)], "the oldest copy leaves");
    assert_eq!(copies.take_oldest(2), [copy(3), copy(4)]);
    let of_table: Vec<_> = copies.take_table(1).collect();
    assert_eq!(of_table, [copy(0)]);
    assert_eq!(copies.take_table(1).count(), 0);
    assert_eq!(copies.take_oldest(usize::MAX).len() as u64, COPIES_MIN - 3);
    assert_eq!(copies.state.lock().len, 0);
}

/// Pages that are read back and evicted in turns must not make the list of ages grow.
#[test]
fn ages_are_bounded() {
    let copies = CleanCopies::default();
    for round in 0..10 * COPIES_MIN {
        let slot = (0, round % 3);
        assert_eq!(copies.insert(slot, copy(round), content(b"abc"), 0), []);
        assert_eq!(copies.take(slot, content(b"abc")), Some(Ok(copy(round))));
    }
    assert!(copies.state.lock().ages.len() as u64 <= COPIES_MIN + 1);
    assert!(copies.bytes() < 1 << 20);
}

#[test]
fn sweep_removes_stale_copies_only() {
    let copies = CleanCopies::default();
    for slot in 0..10 {
        copies.insert((0, slot), copy(slot), content(b"abc"), 0);
    }
    let odd = |_, slot: u64, stored| stored == 3 && slot % 2 == 1;
    assert_eq!(copies.sweep(4, odd), [copy(0), copy(2)]);
    assert_eq!(copies.take_oldest(1), [copy(4)], "copies that were looked at are the youngest");
    assert_eq!(copies.sweep(100, odd), [copy(6), copy(8)]);
    assert_eq!(copies.take_oldest(100), [copy(5), copy(7), copy(9), copy(1), copy(3)]);
}
