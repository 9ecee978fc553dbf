//! The null device with data in plain memory, used by several threads at once.

use std::sync::atomic::{AtomicBool, Ordering};

use freestone::device::{Blocking, Flags};
use freestone::null::{Config, Memory};
use freestone_testkit::Rng;

const MIB: u64 = 1 << 20;

/// Writers fill overlapping ranges, each write with one value in every byte. Another thread
/// discards, frees memory and resets the device. Every block must be uniform.
#[test]
fn no_block_is_torn() {
    const SIZE: u64 = 4 * MIB;
    for block in [512_u64, 4096] {
        let memory = Memory::new(Config::plain(SIZE, block as u32)).unwrap();
        let stop = AtomicBool::new(false);
        let range = |rng: &mut Rng, most: u64| {
            let len = (1 + rng.below(most / block)) * block;
            (rng.below((SIZE - len) / block + 1) * block, len)
        };
        std::thread::scope(|scope| {
            let (memory, stop) = (&memory, &stop);
            for n in 0..3 {
                scope.spawn(move || {
                    let mut rng = Rng::new(100 + n);
                    let mut data = vec![0; 300 << 10];
                    for _ in 0..1500 {
                        let (offset, len) = range(&mut rng, 300 << 10);
                        data[..len as usize].fill(rng.word() as u8);
                        memory.write_at(offset, &data[..len as usize], Flags::empty()).unwrap();
                    }
                    stop.store(true, Ordering::SeqCst);
                });
            }
            scope.spawn(move || {
                let mut rng = Rng::new(7);
                while !stop.load(Ordering::SeqCst) {
                    let (offset, len) = range(&mut rng, 1 << 20);
                    match rng.below(100) {
                        0 => memory.reset().unwrap(),
                        1..50 => memory.discard(offset, len).unwrap(),
                        _ => memory.write_zeroes(offset, len, Flags::empty()).unwrap(),
                    }
                }
            });
            for n in 0..2 {
                scope.spawn(move || {
                    let mut rng = Rng::new(200 + n);
                    let mut out = vec![0; 300 << 10];
                    while !stop.load(Ordering::SeqCst) {
                        let (offset, len) = range(&mut rng, 300 << 10);
                        memory.read_at(offset, &mut out[..len as usize]).unwrap();
                        for block in out[..len as usize].chunks(block as usize) {
                            assert_eq!(block[1..], block[..block.len() - 1], "a torn block");
                        }
                    }
                });
            }
        });
    }
}
