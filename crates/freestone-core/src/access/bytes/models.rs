//! loom models: concurrent writes of whole and partial blocks.
//!
//! The block is modelled as one atomic word of two halves, accessed with Relaxed, so that only the protocol
//! orders the writers.

use loom::thread;

use super::range_locks::{Range, RangeLocks, User};
use crate::sync::{Arc, AtomicU64, Ordering};

const BLOCK: Range = Range { start: 0, end: 512, part: false };
const HALF_BITS: u32 = 32;

/// A device of one block. Waiting tasks are the writers themselves.
#[derive(Default)]
struct Shared {
    locks: RangeLocks<Writer>,
    block: Block,
}

struct Block(AtomicU64);

impl Default for Block {
    fn default() -> Self {
        Self(AtomicU64::new(0))
    }
}

#[derive(Debug, Clone, Copy)]
enum Writer {
    /// Writes the value to both halves.
    Whole(u32),
    /// Writes the value (first field) to the half given by the second field: 0 is the lower, 1 the upper.
    Half(u32, u32),
}

impl Writer {
    const fn range(self) -> Range {
        Range { part: matches!(self, Self::Half(..)), ..BLOCK }
    }

    fn write(self, block: &Block) {
        match self {
            Self::Whole(value) => {
                let value = u64::from(value);
                // Relaxed: the protocol must order the writers.
                block.0.store(value << HALF_BITS | value, Ordering::Relaxed);
            }
            Self::Half(value, half) => {
                let shift = half * HALF_BITS;
                // Relaxed: the protocol must order the writers.
                let old = block.0.load(Ordering::Relaxed) & !(u64::from(u32::MAX) << shift);
                block.0.store(old | u64::from(value) << shift, Ordering::Relaxed);
            }
        }
    }
}

impl Shared {
    /// Writes with the range locked, and runs the waiting writers whose ranges the unlock admits.
    fn write_held(&self, writer: Writer) {
        let mut ready = vec![writer];
        while let Some(writer) = ready.pop() {
            writer.write(&self.block);
            ready.extend(self.locks.release(writer.range()));
        }
    }

    fn hold(&self, writer: Writer) {
        if writer.range().part {
            self.locks.announce();
        }
        if let Some(writer) = self.locks.lock_or_wait(writer.range(), writer) {
            self.write_held(writer);
        }
    }

    /// Writes inline, as the thread of a connection does.
    fn write_inline(&self, user: &mut User, writer: Writer) {
        if user.mark(&self.locks) {
            writer.write(&self.block);
            user.unmark();
        } else {
            self.hold(writer);
        }
    }

    fn halves(&self) -> (u32, u32) {
        // Relaxed: the threads were joined.
        let block = self.block.0.load(Ordering::Relaxed);
        (block as u32, (block >> HALF_BITS) as u32)
    }
}

/// An inline write of the whole block, concurrent with a partial write to the lower half. The upper half is
/// never lost.
#[test]
fn inline_whole_and_partial_write() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let mut user = shared.locks.user();
        let other = Arc::clone(&shared);
        let part = thread::spawn(move || other.hold(Writer::Half(2, 0)));
        shared.write_inline(&mut user, Writer::Whole(1));
        part.join().unwrap();
        assert!(matches!(shared.halves(), (1 | 2, 1)), "{:?}", shared.halves());
        assert!(shared.locks.is_idle());
    });
}

/// A submitted write of the whole block, concurrent with a partial write, and an inline write after both.
#[test]
fn submitted_whole_and_partial_write() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let mut user = shared.locks.user();
        let other = Arc::clone(&shared);
        let part = thread::spawn(move || other.hold(Writer::Half(2, 1)));
        shared.hold(Writer::Whole(1));
        part.join().unwrap();
        assert!(matches!(shared.halves(), (1, 1 | 2)), "{:?}", shared.halves());
        shared.write_inline(&mut user, Writer::Whole(3));
        assert_eq!(shared.halves(), (3, 3));
        assert!(shared.locks.is_idle());
    });
}

/// Two concurrent partial writes to one block: neither write is lost.
#[test]
fn two_partial_writes() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let other = Arc::clone(&shared);
        let part = thread::spawn(move || other.hold(Writer::Half(1, 1)));
        shared.hold(Writer::Half(2, 0));
        part.join().unwrap();
        assert_eq!(shared.halves(), (2, 1));
        assert!(shared.locks.is_idle());
    });
}
