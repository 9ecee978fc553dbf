//! Checks that several threads can use one device: private regions, and shared blocks that must
//! never be torn or stale.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use freestone_core::device::{Device, Flags, Op, Request};

use super::driver::{Data, Driver, SubmitMode};
use super::{CheckResult, Options, Violation, ensure};

const CHECK: &str = "concurrent";
/// Number of blocks that each have one writer and are read by all threads.
const SHARED_BLOCKS: u64 = 8;
/// Number of blocks, after the shared ones, that all threads write.
const CONTENDED_BLOCKS: u64 = 8;
/// Maximum size in bytes of each thread's private region.
const OWN_BYTES: u64 = 256 << 10;

/// Progress of the writes to the shared and contended blocks, known to all threads.
struct Board {
    block: u64,
    /// Number of bytes of a block that are read and written atomically.
    whole: u64,
    /// Last stamp whose write has started, and last stamp whose write has completed, per shared
    /// block. Only the block's writer advances them.
    begun: Vec<AtomicU64>,
    answered: Vec<AtomicU64>,
    /// Number of writes to the contended blocks that have started, per thread.
    contended: Vec<AtomicU64>,
    failed: AtomicBool,
}

/// Writes and reads on several threads. Each thread has a private region, which must behave as if
/// no other thread existed. Each thread also owns some shared blocks, which it stamps with
/// increasing numbers while the others read them.
///
/// Every shared block (or [`Options::atomic_bytes`] bytes of it) must contain exactly one stamp,
/// not older than the last one completed before the read started. All threads also write the
/// contended blocks; each of these must always contain exactly one of the writes.
pub fn check_concurrent(device: &dyn Device, options: &Options) -> CheckResult {
    let geometry = device.geometry();
    let block = u64::from(geometry.logical_block);
    let shared = (SHARED_BLOCKS + CONTENDED_BLOCKS) * block;
    let threads = u64::from(options.threads.max(2));
    let own = (geometry.size.saturating_sub(shared) / threads / block * block).min(OWN_BYTES);
    ensure!(own >= block, CHECK, "the suite needs a device of more than {} blocks", shared / block + threads);

    let mut driver = Driver::new(device, options, CHECK, 5);
    driver.run_ok(SubmitMode::Try, Request::new(Op::WriteZeroes, 0, shared), Data::None)?;
    let counters = |n: u64| (0..n).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
    let board = Board {
        block,
        whole: options.atomic_bytes.min(block),
        begun: counters(SHARED_BLOCKS),
        answered: counters(SHARED_BLOCKS),
        contended: counters(threads),
        failed: AtomicBool::new(false),
    };
    let outcomes: Vec<CheckResult> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|me| {
                let board = &board;
                scope.spawn(move || {
                    let outcome = worker(device, options, board, me, threads, shared + me * own, own);
                    if outcome.is_err() {
                        board.failed.store(true, Ordering::SeqCst);
                    }
                    outcome
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| {
                worker.join().unwrap_or_else(|_| {
                    Err(Violation { check: CHECK, message: "a thread panicked in the device".into() })
                })
            })
            .collect()
    });
    outcomes.into_iter().collect()
}

fn worker(
    device: &dyn Device,
    options: &Options,
    board: &Board,
    me: u64,
    threads: u64,
    own_at: u64,
    own_len: u64,
) -> CheckResult {
    let mut driver = Driver::new(device, options, CHECK, 100 + me);
    let mut own = vec![0; own_len as usize];
    driver.run_ok(SubmitMode::Submit, Request::new(Op::WriteZeroes, own_at, own_len), Data::None)?;
    for _ in 0..options.thread_rounds {
        if board.failed.load(Ordering::SeqCst) {
            return Ok(());
        }
        let mode = SubmitMode::ALL[driver.rng.below(3) as usize];
        match driver.rng.below(10) {
            0..3 => stamp(&mut driver, board, mode, me, threads)?,
            3..5 => write_contended(&mut driver, board, mode, me)?,
            5..7 => inspect(&mut driver, board, mode)?,
            7..9 => own_region(&mut driver, mode, own_at, &mut own)?,
            _ => driver.run_ok(mode, Request::flush(), Data::None)?,
        }
    }
    driver.compare(SubmitMode::Try, own_at, &own, "work of several threads on regions of their own")
}

/// Returns the 64-bit word that fills a block with this stamp. The word is unique per stamp and
/// block, and zero for stamp 0.
fn word(block: u64, stamp: u64) -> u64 {
    if stamp == 0 { 0 } else { (block << 48) | stamp }
}

/// Writes the next stamp to one of the blocks that this thread owns.
fn stamp(driver: &mut Driver<'_>, board: &Board, mode: SubmitMode, me: u64, threads: u64) -> CheckResult {
    // Blocks are assigned round-robin; with more threads than blocks, some threads own none.
    let mine = (SHARED_BLOCKS + threads - 1 - me) / threads;
    if mine == 0 {
        return Ok(());
    }
    let at = me + driver.rng.below(mine) * threads;
    let stamp = board.begun[at as usize].fetch_add(1, Ordering::SeqCst) + 1;
    let data: Vec<u8> = (0..board.block / 8).flat_map(|_| word(at, stamp).to_le_bytes()).collect();
    let mut flags = Flags::empty();
    flags.set(Flags::FUA, driver.rng.chance(5));
    let request = Request::write(at * board.block, board.block).with(flags);
    driver.run_ok(mode, request, Data::Out(&data))?;
    board.answered[at as usize].store(stamp, Ordering::SeqCst);
    Ok(())
}

/// Reads some shared blocks. Each must contain one stamp, not older than the last one completed
/// before the read.
fn inspect(driver: &mut Driver<'_>, board: &Board, mode: SubmitMode) -> CheckResult {
    let first = driver.rng.below(SHARED_BLOCKS);
    let count = 1 + driver.rng.below(SHARED_BLOCKS - first);
    let floor: Vec<u64> = board.answered.iter().map(|n| n.load(Ordering::SeqCst)).collect();
    let data = driver.read(mode, first * board.block, count * board.block)?;
    if !driver.options.stores_data {
        ensure!(data.iter().all(|&b| b == 0), CHECK, "a device that discards writes returned data");
        return Ok(());
    }
    for (from, bytes) in (0..).step_by(board.whole as usize).zip(data.chunks(board.whole as usize)) {
        let at = first + from / board.block;
        let mut words = bytes.chunks(8).map(|w| u64::from_le_bytes(w.try_into().unwrap_or_default()));
        let found = words.next().unwrap_or_default();
        ensure!(
            words.all(|w| w == found),
            CHECK,
            "shared block {at} was read torn: it begins with stamp {found:#x} and changes within the block"
        );
        let stamp = found & ((1 << 48) - 1);
        ensure!(found == word(at, stamp), CHECK, "shared block {at} holds {found:#x}, of another block");
        let (low, high) = (floor[at as usize], board.begun[at as usize].load(Ordering::SeqCst));
        ensure!(
            (low..=high).contains(&stamp),
            CHECK,
            "shared block {at} was read with stamp {stamp}; {low} completed before the read, {high} had begun by its end"
        );
    }
    Ok(())
}

/// Writes some of the contended blocks, then reads and checks them.
fn write_contended(driver: &mut Driver<'_>, board: &Board, mode: SubmitMode, me: u64) -> CheckResult {
    let first = driver.rng.below(CONTENDED_BLOCKS);
    let count = 1 + driver.rng.below(CONTENDED_BLOCKS - first);
    let round = board.contended[me as usize].fetch_add(1, Ordering::SeqCst) + 1;
    let mark = ((me + 1) << 32) | round;
    let data: Vec<u8> = (0..count * board.block / 8).flat_map(|_| mark.to_le_bytes()).collect();
    let at = (SHARED_BLOCKS + first) * board.block;
    driver.run_ok(mode, Request::write(at, count * board.block), Data::Out(&data))?;
    let found = driver.read(mode, at, count * board.block)?;
    if !driver.options.stores_data {
        return Ok(());
    }
    for bytes in found.chunks(board.whole as usize) {
        let word = u64::from_le_bytes(bytes[..8].try_into().unwrap_or_default());
        ensure!(
            bytes.chunks(8).all(|w| w == word.to_le_bytes()),
            CHECK,
            "a block that several threads write was read torn: it begins with {word:#x} and changes within the block"
        );
        let (thread, round) = ((word >> 32).wrapping_sub(1) as usize, word & 0xffff_ffff);
        let begun = board.contended.get(thread).map(|n| n.load(Ordering::SeqCst));
        ensure!(
            begun.is_some_and(|begun| (1..=begun).contains(&round)),
            CHECK,
            "a block that several threads write holds {word:#x}, which none of them wrote"
        );
        // The block may contain another thread's write, but not an earlier write of this thread.
        ensure!(
            thread as u64 != me || round == board.contended[me as usize].load(Ordering::SeqCst),
            CHECK,
            "a block holds this thread's write {round}, which was overwritten"
        );
    }
    Ok(())
}

/// Runs one random operation on this thread's private region, and checks the content.
fn own_region(driver: &mut Driver<'_>, mode: SubmitMode, base: u64, own: &mut [u8]) -> CheckResult {
    let block = u64::from(driver.device.geometry().logical_block);
    let all = own.len() as u64 / block;
    let start = driver.rng.below(all);
    let blocks = 1 + driver.rng.below((all - start).min(64));
    let (at, len) = (start * block, blocks * block);
    let range = at as usize..(at + len) as usize;
    match driver.rng.below(4) {
        0 => {
            own[range].fill(0);
            driver.run_ok(mode, Request::new(Op::WriteZeroes, base + at, len), Data::None)
        }
        1 => driver.compare(mode, base + at, &own[range], "writes of this thread alone"),
        _ => {
            let mut data = vec![0; len as usize];
            driver.rng.content(&mut data);
            driver.run_ok(mode, Request::write(base + at, len), Data::Out(&data))?;
            if driver.options.stores_data {
                own[range].copy_from_slice(&data);
            }
            Ok(())
        }
    }
}
