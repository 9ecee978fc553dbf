//! Reads and modifies the entries that a process is about to submit to `io_uring`.
//!
//! The tracer finds the entries in the memory of the process, which is stopped before `io_uring_enter`. An entry that
//! must fail is replaced by a NOP that returns an error (Linux 6.10 or later).

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use libc::pid_t;

/// Offsets at which mmap(2) maps the two parts of a ring: the queues, and the submission entries.
const OFFSET_RING: u64 = 0;
const OFFSET_ENTRIES: u64 = 0x1000_0000;
/// Offsets in bytes in the ring: submission head and tail, and the number of entries minus one.
const HEAD: u64 = 0;
const TAIL: u64 = 4;
const MASK: u64 = 16;
const ENTRY_BYTES: u64 = 64;
/// Maximum number of entries in a ring. A larger number means that the memory is not a ring.
const ENTRIES_MAX: u32 = 1 << 15;
/// `IORING_NOP_INJECT_RESULT`: the NOP returns its length field as the result.
const INJECT_RESULT: u32 = 1;

pub struct Entry {
    address: u64,
    bytes: [u8; ENTRY_BYTES as usize],
}

impl Entry {
    pub fn opcode(&self) -> u8 {
        self.bytes[0]
    }

    pub fn file(&self) -> u64 {
        u32::from_le_bytes(self.part(4)).into()
    }

    fn part(&self, at: usize) -> [u8; 4] {
        self.bytes[at..at + 4].try_into().expect("it is four bytes")
    }

    /// Replaces the entry by a NOP that fails with this errno.
    pub fn fail(&self, pid: pid_t, errno: i32) -> io::Result<()> {
        let mut bytes = [0; ENTRY_BYTES as usize];
        bytes[24..28].copy_from_slice(&(-errno).to_le_bytes());
        bytes[28..32].copy_from_slice(&INJECT_RESULT.to_le_bytes());
        // Keep the user data, by which the process identifies the completion.
        bytes[32..40].copy_from_slice(&self.bytes[32..40]);
        memory(pid)?.write_all_at(&bytes, self.address)
    }

    pub fn shorten(&self, pid: pid_t) -> io::Result<()> {
        let len = (u32::from_le_bytes(self.part(24)) / 2).max(1);
        memory(pid)?.write_all_at(&len.to_le_bytes(), self.address + 24)
    }
}

fn memory(pid: pid_t) -> io::Result<File> {
    File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))
}

/// Returns the submission entries that are queued in the ring with this descriptor.
pub fn read_queued_entries(pid: pid_t, ring: u64) -> io::Result<Vec<Entry>> {
    let inode = fs::metadata(format!("/proc/{pid}/fd/{ring}"))?.ino();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let part = |offset| maps.lines().find_map(|line| start_of(line, inode, offset));
    let (Some(shared), Some(entries)) = (part(OFFSET_RING), part(OFFSET_ENTRIES)) else {
        return Ok(Vec::new());
    };
    let memory = memory(pid)?;
    let number = |at: u64| {
        let mut bytes = [0; 4];
        memory.read_exact_at(&mut bytes, shared + at).map(|()| u32::from_le_bytes(bytes))
    };
    let (head, tail, mask) = (number(HEAD)?, number(TAIL)?, number(MASK)?);
    let queued = tail.wrapping_sub(head);
    if queued > mask.saturating_add(1) || mask >= ENTRIES_MAX {
        return Err(io::Error::other("the ring is laid out otherwise"));
    }
    let entry = |at: u32| {
        // The ring library maps each slot of the queue to the entry with the same number.
        let address = entries + u64::from(head.wrapping_add(at) & mask) * ENTRY_BYTES;
        let mut bytes = [0; ENTRY_BYTES as usize];
        memory.read_exact_at(&mut bytes, address).map(|()| Entry { address, bytes })
    };
    (0..queued).map(entry).collect()
}

/// Returns the start address of the mapping in a line of `/proc/PID/maps`. `None` if the line is for another inode or
/// offset.
fn start_of(line: &str, inode: u64, offset: u64) -> Option<u64> {
    let mut words = line.split_whitespace();
    let (range, _, at, _, of) = (words.next()?, words.next(), words.next()?, words.next(), words.next()?);
    let is_it = u64::from_str_radix(at, 16) == Ok(offset) && of.parse() == Ok(inode);
    is_it.then(|| u64::from_str_radix(range.split_once('-')?.0, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::start_of;

    #[test]
    fn mapping_is_found_by_inode_and_offset() {
        let line = "7f441d16a000-7f441d16c000 rw-s 10000000 00:10 23324       anon_inode:[io_uring]";
        assert_eq!(start_of(line, 23324, 0x1000_0000), Some(0x7f44_1d16_a000));
        assert_eq!(start_of(line, 23324, 0), None);
        assert_eq!(start_of(line, 23325, 0x1000_0000), None);
    }
}
