//! Tests with libblkio's virtio driver, an independent vhost-user client.
#![expect(unsafe_code)]
// UNSAFETY: accesses the client's buffers by their addresses.

use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use freestone_core::budget::{self, Budget};
use freestone_ram::ram::{Config, Ram};
use freestone_vhost_user::{Export, Options};

const BLOCK: usize = 4096;
const DISK_BYTES: u64 = 256 << 20;
const DEPTH: usize = 32;

fn export(path: &Path) -> Export {
    let ram = Ram::new(Config { disksize: DISK_BYTES, ..Config::default() }).unwrap();
    Export::new(path, "disk", Arc::new(ram), Options::new(Budget::new(budget::DEFAULT_BYTES))).unwrap()
}

/// Connects a client. Returns the client, its `queues` queues, and a memory region for buffers.
fn connect(path: &Path, queues: i32) -> (Blkio, Vec<Blkioq>, MemoryRegion) {
    let mut client = Blkio::new("virtio-blk-vhost-user").unwrap();
    client.set_str("path", path.to_str().unwrap()).unwrap();
    client.connect().unwrap();
    assert_eq!(client.get_u64("capacity").unwrap(), DISK_BYTES);
    client.set_i32("num-queues", queues).unwrap();
    let started = client.start().unwrap();
    let region = client.alloc_mem_region(queues as usize * DEPTH * BLOCK).unwrap();
    client.map_mem_region(&region).unwrap();
    (client, started.queues, region)
}

/// Waits for `count` requests, and checks that all of them succeeded.
fn finish(queue: &mut Blkioq, count: usize) {
    let mut completions: [MaybeUninit<Completion>; DEPTH] = [const { MaybeUninit::uninit() }; DEPTH];
    let mut timeout = Duration::from_secs(20);
    let done = queue.do_io(&mut completions[..count], count, Some(&mut timeout), None).unwrap();
    assert_eq!(done, count);
    for completion in &completions[..done] {
        // SAFETY: the client has initialized the number of completions that it returned.
        assert_eq!(unsafe { completion.assume_init_ref() }.ret, 0);
    }
}

fn block_at(address: usize) -> &'static mut [u8] {
    // SAFETY: the client's buffers live as long as the client, and no request in flight uses this
    // block.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), BLOCK) }
}

/// Writes the part of the disk that starts at `from`, reads it back, and zeroes half of the part.
fn use_disk(queue: &mut Blkioq, buffers: usize, from: u64) {
    let flags = ReqFlags::empty();
    let at = |i: usize| (from + (i * BLOCK) as u64, buffers + i * BLOCK);
    for round in 0..20_u8 {
        for i in 0..DEPTH {
            let (start, address) = at(i);
            block_at(address).fill(round.wrapping_mul(7) ^ i as u8);
            queue.write(start, std::ptr::with_exposed_provenance(address), BLOCK, i, flags);
        }
        finish(queue, DEPTH);
        queue.flush(0, flags);
        queue.write_zeroes(from, (DEPTH / 4 * BLOCK) as u64, 1, flags);
        queue.discard(from + (DEPTH / 4 * BLOCK) as u64, (DEPTH / 4 * BLOCK) as u64, 2, flags);
        finish(queue, 3);
        for i in 0..DEPTH {
            let (start, address) = at(i);
            block_at(address).fill(0xee);
            queue.read(start, std::ptr::with_exposed_provenance_mut(address), BLOCK, i, flags);
        }
        finish(queue, DEPTH);
        for i in 0..DEPTH {
            let wanted = if i < DEPTH / 2 { 0 } else { round.wrapping_mul(7) ^ i as u8 };
            assert!(block_at(at(i).1).iter().all(|byte| *byte == wanted), "round {round}, block {i}");
        }
    }
}

#[test]
fn threads_use_separate_queues() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("v");
    let export = export(&path);
    let (client, queues, region) = connect(&path, 4);
    std::thread::scope(|scope| {
        for (i, mut queue) in queues.into_iter().enumerate() {
            let buffers = region.addr + i * DEPTH * BLOCK;
            scope.spawn(move || use_disk(&mut queue, buffers, (i as u64) << 24));
        }
    });
    assert!(export.is_connected());
    drop(client);
}

#[test]
fn next_client_reads_data_of_last_client() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("v");
    let _export = export(&path);
    for round in 0..4_u8 {
        let (client, mut queues, region) = connect(&path, 1);
        let queue = &mut queues[0];
        if round > 0 {
            queue.read(0, std::ptr::with_exposed_provenance_mut(region.addr), BLOCK, 0, ReqFlags::empty());
            finish(queue, 1);
            assert!(block_at(region.addr).iter().all(|byte| *byte == round - 1));
        }
        block_at(region.addr).fill(round);
        queue.write(0, std::ptr::with_exposed_provenance(region.addr), BLOCK, 0, ReqFlags::empty());
        finish(queue, 1);
        // The client disconnects with requests in flight.
        for i in 1..DEPTH {
            let address = std::ptr::with_exposed_provenance_mut(region.addr + i * BLOCK);
            queue.read(0, address, BLOCK, i, ReqFlags::empty());
        }
        let _ = queue.do_io(&mut [], 0, None, None);
        drop(queues);
        drop(client);
    }
}
