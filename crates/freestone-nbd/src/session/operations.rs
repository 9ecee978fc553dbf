//! Operations: requests of a connection that were not completed inline, with their parts in flight.

use crate::wire::errno::{CommandGroup, Failure};
use crate::wire::headers::Tag;

/// A request that was not completed inline.
#[derive(Debug)]
pub struct Operation {
    /// The fields of the request that the reply repeats.
    pub tag: Tag,
    /// The command group, which selects how errors are mapped and counted.
    pub group: CommandGroup,
    pub is_read: bool,
    /// Number of parts in flight.
    pub parts: usize,
    /// Set while more parts of the request may follow.
    pub open: bool,
    /// Set for one window of a large simple reply. The current request waits for the window.
    pub window: bool,
    /// The first failure of a part; `None` if no part has failed.
    pub failure: Option<Failure>,
}

#[derive(Debug, Default)]
pub struct Operations {
    slots: Vec<Option<Operation>>,
    free: Vec<usize>,
    /// Number of parts in flight, over all operations.
    pub in_flight: usize,
    /// Bytes charged for the parts in flight, and for buffers that are being filled.
    pub charged: usize,
}

impl Operations {
    /// Adds an operation and returns its index.
    pub fn open(&mut self, tag: Tag, group: CommandGroup, is_read: bool) -> usize {
        let operation = Operation { tag, group, is_read, parts: 0, open: true, window: false, failure: None };
        if let Some(slot) = self.free.pop() {
            self.slots[slot] = Some(operation);
            slot
        } else {
            self.slots.push(Some(operation));
            self.slots.len() - 1
        }
    }

    /// Returns the operation at `slot`. A slot stays in use while its operation is open or has parts in
    /// flight.
    pub fn get(&mut self, slot: usize) -> &mut Operation {
        self.slots[slot].as_mut().expect("a slot stays in use until its operation has ended")
    }

    /// Removes and returns the operation at `slot`. Returns None if it is open or has parts in flight.
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
    fn operation_slot_is_reused_after_last_part() {
        let mut operations = Operations::default();
        let tag = |cookie| Tag { cookie, offset: 0 };
        let first = operations.open(tag(1), CommandGroup::Plain, true);
        let second = operations.open(tag(2), CommandGroup::Store, false);
        operations.get(first).parts = 1;
        assert!(operations.take_ended(first).is_none());
        operations.get(first).open = false;
        assert!(operations.take_ended(first).is_none());
        operations.get(first).parts = 0;
        assert_eq!(operations.take_ended(first).unwrap().tag.cookie, 1);
        assert!(operations.take_ended(first).is_none());
        assert_eq!(operations.open(tag(3), CommandGroup::Plain, true), first);
        assert_eq!(operations.get(second).tag.cookie, 2);
    }
}
