//! loom models: whole blocks and parts of them, written side by side.
//!
//! The block is one atomic word of two halves, read and written with Relaxed: nothing but the
//! protocol orders those who change it.

use loom::thread;

use super::holds::{Holds, Range, User};
use crate::sync::{Arc, AtomicU64, Ordering};

const BLOCK: Range = Range { start: 0, end: 512, part: false };
const HALF_BITS: u32 = 32;

/// What waits is named by whom it belongs to.
#[derive(Default)]
struct Shared {
    holds: Holds<Writer>,
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
    /// Writes this to both halves.
    Whole(u32),
    /// Writes this to the lower or the upper half.
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
                // Relaxed: it is the protocol that is to order those who change the block.
                block.0.store(value << HALF_BITS | value, Ordering::Relaxed);
            }
            Self::Half(value, half) => {
                let shift = half * HALF_BITS;
                // Relaxed: as above.
                let old = block.0.load(Ordering::Relaxed) & !(u64::from(u32::MAX) << shift);
                block.0.store(old | u64::from(value) << shift, Ordering::Relaxed);
            }
        }
    }
}

impl Shared {
    /// What holds the block writes, and so does everybody whom that lets go on.
    fn write_held(&self, writer: Writer) {
        let mut ready = vec![writer];
        while let Some(writer) = ready.pop() {
            writer.write(&self.block);
            ready.extend(self.holds.release(writer.range()));
        }
    }

    fn hold(&self, writer: Writer) {
        if writer.range().part {
            self.holds.announce();
        }
        if let Some(writer) = self.holds.hold_or_wait(writer.range(), writer) {
            self.write_held(writer);
        }
    }

    /// As a connection's thread does.
    fn write_at_once(&self, user: &mut User, writer: Writer) {
        if user.mark(&self.holds) {
            writer.write(&self.block);
            user.unmark();
        } else {
            self.hold(writer);
        }
    }

    fn halves(&self) -> (u32, u32) {
        // Relaxed: the threads have been joined.
        let block = self.block.0.load(Ordering::Relaxed);
        (block as u32, (block >> HALF_BITS) as u32)
    }
}

/// A whole write at once beside a part: the upper half is never lost.
#[test]
fn a_write_at_once_and_a_part() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let mut user = shared.holds.user();
        let other = Arc::clone(&shared);
        let part = thread::spawn(move || other.hold(Writer::Half(2, 0)));
        shared.write_at_once(&mut user, Writer::Whole(1));
        part.join().unwrap();
        assert!(matches!(shared.halves(), (1 | 2, 1)), "{:?}", shared.halves());
        assert!(shared.holds.is_idle());
    });
}

/// The same with a write that the device does later, and a second one at once when that is over.
#[test]
fn a_write_later_and_a_part() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let mut user = shared.holds.user();
        let other = Arc::clone(&shared);
        let part = thread::spawn(move || other.hold(Writer::Half(2, 1)));
        shared.hold(Writer::Whole(1));
        part.join().unwrap();
        assert!(matches!(shared.halves(), (1, 1 | 2)), "{:?}", shared.halves());
        shared.write_at_once(&mut user, Writer::Whole(3));
        assert_eq!(shared.halves(), (3, 3));
        assert!(shared.holds.is_idle());
    });
}

/// Two parts of one block: neither is lost.
#[test]
fn two_parts() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let other = Arc::clone(&shared);
        let part = thread::spawn(move || other.hold(Writer::Half(1, 1)));
        shared.hold(Writer::Half(2, 0));
        part.join().unwrap();
        assert_eq!(shared.halves(), (2, 1));
        assert!(shared.holds.is_idle());
    });
}
