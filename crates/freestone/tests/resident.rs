//! A null device frees the memory of discarded data. The test is alone in its program, because all
//! pools are shared memory, which is measured for the whole process.

use freestone::device::{Blocking, Flags};
use freestone::null::{Config, Memory};

const MIB: u64 = 1 << 20;

fn fill(memory: &Memory, bytes: u64) {
    let data = vec![7; MIB as usize];
    (0..bytes / MIB).for_each(|n| memory.write_at(n * MIB, &data, Flags::empty()).unwrap());
}

/// Returns the resident shared memory of this process in bytes, which includes memfds.
fn resident_shared() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn discard_and_reset_free_memory() {
    const DATA: u64 = 256 * MIB;
    const SLACK: u64 = 4 * MIB;
    let memory = Memory::new(Config::plain(1 << 30, 4096)).unwrap();
    fill(&memory, DATA);
    assert!((DATA..DATA + SLACK).contains(&memory.used_bytes()), "{}", memory.used_bytes());
    assert!(resident_shared() >= DATA);

    // The pool keeps some free pages, so writing the discarded range again uses no additional
    // memory.
    memory.discard(0, 8 * MIB).unwrap();
    assert!((DATA..DATA + SLACK).contains(&memory.used_bytes()), "{}", memory.used_bytes());
    fill(&memory, 8 * MIB);
    assert!((DATA..DATA + SLACK).contains(&memory.used_bytes()), "{}", memory.used_bytes());

    memory.discard(0, DATA).unwrap();
    assert!(memory.used_bytes() < 16 * MIB + SLACK, "{}", memory.used_bytes());
    assert!(resident_shared() < DATA / 2, "{} bytes are still resident", resident_shared());
    let mut out = vec![1; MIB as usize];
    memory.read_at(100 * MIB, &mut out).unwrap();
    assert!(out.iter().all(|&byte| byte == 0));

    // Zeroes half of the data with MAY_FREE, which frees its pages.
    fill(&memory, DATA);
    memory.write_zeroes(DATA / 2, DATA / 2, Flags::MAY_FREE).unwrap();
    assert!(memory.used_bytes() < DATA / 2 + DATA / 16 + 16 * MIB + SLACK, "{}", memory.used_bytes());

    // Write zeroes without MAY_FREE allocates pages for the zeroes.
    memory.write_zeroes(0, DATA / 2, Flags::empty()).unwrap();
    assert!(memory.used_bytes() >= DATA / 2);
    memory.read_at(100 * MIB, &mut out).unwrap();
    assert!(out.iter().all(|&byte| byte == 0));

    memory.reset().unwrap();
    assert!(memory.used_bytes() < MIB);
    assert!(resident_shared() < DATA / 2);
}
