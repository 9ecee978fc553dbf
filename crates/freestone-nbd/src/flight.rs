//! Requests that a device took over.

use freestone_core::device::{IoBuf, Request, Result};

use crate::errno::{Action, Failure};
use crate::headers::Tag;

/// Parts of requests of one connection that a device may hold at once. At this bound the connection
/// reads no more.
pub const MAX_IN_FLIGHT: usize = 256;
/// Bytes of their buffers, and of large replies that are not sent yet. One request may have as much
/// on its own.
pub const MAX_IN_FLIGHT_BYTES: usize = 32 << 20;

/// The outcome of a submitted part.
#[derive(Debug)]
pub struct Finished {
    /// Index of its [`Operation`].
    pub slot: usize,
    /// The part.
    pub request: Request,
    /// Bytes of the part's data.
    pub len: usize,
    /// Bytes that the part was charged with: its data, and what parts of blocks need beside it.
    pub charge: usize,
    /// What the device says.
    pub outcome: Result<()>,
    /// Its buffer.
    pub buffer: IoBuf,
}

/// A request that was not answered at once.
#[derive(Debug)]
pub struct Operation {
    /// What its reply repeats of the request.
    pub tag: Tag,
    /// How its errors are mapped.
    pub action: Action,
    /// Whether its reply carries data.
    pub is_read: bool,
    /// Parts that the device holds.
    pub parts: usize,
    /// More parts may follow.
    pub open: bool,
    /// It is a window of a large simple reply, which the request at hand waits for.
    pub window: bool,
    /// The first failure of a part.
    pub failure: Option<Failure>,
}

/// The operations of one connection.
#[derive(Debug, Default)]
pub struct Operations {
    slots: Vec<Option<Operation>>,
    free: Vec<usize>,
    /// Parts that the device holds, over all operations.
    pub in_flight: usize,
    /// Bytes they are charged with, and those of buffers that are being filled.
    pub charged: usize,
}

impl Operations {
    /// Starts an operation.
    pub fn open(&mut self, tag: Tag, action: Action, is_read: bool) -> usize {
        let operation =
            Operation { tag, action, is_read, parts: 0, open: true, window: false, failure: None };
        if let Some(slot) = self.free.pop() {
            self.slots[slot] = Some(operation);
            slot
        } else {
            self.slots.push(Some(operation));
            self.slots.len() - 1
        }
    }

    /// The operation at `slot`, which is in use as long as it is open or has parts.
    pub fn get(&mut self, slot: usize) -> &mut Operation {
        self.slots[slot].as_mut().expect("a slot stays in use until its operation has ended")
    }

    /// Removes the operation at `slot` where it has ended.
    pub fn take_ended(&mut self, slot: usize) -> Option<Operation> {
        let operation = self.slots[slot].take_if(|operation| !operation.open && operation.parts == 0)?;
        self.free.push(slot);
        Some(operation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_used_again_when_the_last_part_is_back() {
        let mut operations = Operations::default();
        let tag = |cookie| Tag { cookie, offset: 0 };
        let first = operations.open(tag(1), Action::Plain, true);
        let second = operations.open(tag(2), Action::Store, false);
        operations.get(first).parts = 1;
        assert!(operations.take_ended(first).is_none());
        operations.get(first).open = false;
        assert!(operations.take_ended(first).is_none());
        operations.get(first).parts = 0;
        assert_eq!(operations.take_ended(first).unwrap().tag.cookie, 1);
        assert!(operations.take_ended(first).is_none());
        assert_eq!(operations.open(tag(3), Action::Plain, true), first);
        assert_eq!(operations.get(second).tag.cookie, 2);
    }
}
