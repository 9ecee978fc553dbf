//! Groups of a family that is adopted from another process.
//!
//! The words of pages show which groups are in memory, which are on the backing device, and how many users each
//! has. Pieces and places of other groups are free, whatever their headers state.

use std::sync::Arc;

use super::header::Header;
use super::{GROUP_SLOTS, Groups, Numbers, PIECES_MAX, bytes_in, charged_bytes, counter, group_of, place_in};
use freestone_core::device::Result;
use freestone_core::slot::{LEAF_SLOTS, Table, Word};
use freestone_spill::layout::Place;
use freestone_spill::store::Store;

/// Largest number of users of a kind. A group has fewer pages.
const USERS_MAX: u8 = u8::MAX / 2;

/// Users of each group in memory and on the device, by number.
pub(in crate::ram) struct GroupUsers(Vec<(u8, u8)>);

/// The tables of groups contradict the words of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ram) struct DamagedGroup(pub u64);

impl GroupUsers {
    /// Returns the groups in the table `pieces`, without users.
    pub fn new(pieces: &Table) -> Self {
        let groups = pieces.leaves_in_order() * LEAF_SLOTS / GROUP_SLOTS;
        Self(vec![(0, 0); groups as usize])
    }

    /// Counts a page with this word, which is in a group.
    pub fn count(&mut self, word: Word) -> std::result::Result<(), DamagedGroup> {
        let damaged = DamagedGroup(group_of(word));
        let users = usize::try_from(damaged.0).ok().and_then(|group| self.0.get_mut(group));
        let (in_memory, on_device) = users.ok_or(damaged)?;
        let count = if word.is_grouped() { in_memory } else { on_device };
        *count = Some(*count + 1).filter(|count| *count <= USERS_MAX).ok_or(damaged)?;
        Ok(())
    }

    /// Stores the users in the headers, and empties the slots of pieces that no page uses.
    pub fn settle(&self, pieces: &Table, places: &Table) -> std::result::Result<(), DamagedGroup> {
        for (group, &(in_memory, on_device)) in (0..).zip(&self.0) {
            let first = group * GROUP_SLOTS;
            let leaf = pieces.leaf(first).ok_or(DamagedGroup(group))?;
            let guard = leaf.lock(first);
            let header = Header {
                in_memory: in_memory.into(),
                on_device: on_device.into(),
                ..Header::of(guard.word())
            };
            let of_pieces = |count: u32| first + 1..=first + u64::from(count);
            let is_in_memory = (1..=PIECES_MAX as u32).contains(&header.pieces)
                && of_pieces(header.pieces).all(|slot| leaf.peek(slot).object().is_some());
            let is_on_device = place_in(places, group).is_some();
            if in_memory > 0 && !is_in_memory || on_device > 0 && !is_on_device {
                return Err(DamagedGroup(group));
            }
            guard.publish(header.word());
            for slot in of_pieces(PIECES_MAX as u32) {
                let is_used = in_memory > 0 && of_pieces(header.pieces).contains(&slot);
                if !is_used && leaf.peek(slot) != Word::EMPTY {
                    leaf.lock(slot).publish(Word::EMPTY);
                }
            }
        }
        Ok(())
    }

    /// Returns the places of the groups on the backing device.
    pub fn places<'p>(&self, places: &'p Table) -> impl Iterator<Item = Place> + use<'_, 'p> {
        let on_device = (0..).zip(&self.0).filter(|(_, (_, on_device))| *on_device > 0);
        on_device.filter_map(|(group, _)| place_in(places, group))
    }
}

impl Groups {
    /// Takes over tables that were [settled](GroupUsers::settle).
    pub fn adopt(
        pieces: Table,
        places: Table,
        store: Option<Arc<Store>>,
        users: &GroupUsers,
    ) -> Result<Self> {
        let place_leaves = places.leaves_in_order();
        let groups = Self::with(pieces, places, store)?;
        let mut free = Vec::new();
        for (group, &(in_memory, on_device)) in (0..).zip(&users.0) {
            if in_memory == 0 && on_device == 0 {
                free.push(group);
                continue;
            }
            groups.counters.add(counter::GROUPS, 1);
            groups.counters.add(counter::PAGES, in_memory.into());
            if on_device > 0 {
                groups.count_spilled(on_device.into());
            }
            if in_memory > 0
                && let Some(leaf) = groups.pieces.leaf(group * GROUP_SLOTS)
            {
                let pieces = Header::of(leaf.peek(group * GROUP_SLOTS)).pieces;
                groups.counters.add(counter::BYTES, charged_bytes(bytes_in(leaf, group, pieces)) as i64);
            }
        }
        // The lowest numbers are used first.
        free.reverse();
        *groups.numbers.lock() = Numbers { free, next: users.0.len() as u64, place_leaves };
        Ok(groups)
    }
}
