//! Memory that an operation frees can be used by all devices of the family as soon as the effect of
//! the operation is visible.

use std::sync::Barrier;
use std::thread;

use freestone::device::{Blocking, Flags};
use freestone::ram::{Config, Family, Ram};
use freestone_testkit::Rng;

const PAGE: usize = 4096;
const LIMIT_BYTES: u64 = 1 << 20;
const PAGES: u64 = 512;
const ROUNDS: u64 = 400;

/// Writes incompressible pages until the memory limit is reached.
fn fill(ram: &Ram, rng: &mut Rng) {
    let mut page = [0; PAGE];
    for at in 0..PAGES {
        rng.fill(&mut page);
        if ram.write_at(at * PAGE as u64, &page, Flags::empty()).is_err() {
            return;
        }
    }
    panic!("the limit of the pool is none");
}

/// A thread sees that a disk was rewound, and writes to it. The memory of the old content must be
/// usable by then.
#[test]
fn rewind_frees_memory_before_it_is_visible() {
    let family = Family::new(Config { mem_limit: LIMIT_BYTES, ..Config::default() }).unwrap();
    let ram = family.ram(PAGES * PAGE as u64).unwrap();
    let (full, written) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                full.wait();
                ram.rewind().unwrap();
                written.wait();
            }
        });
        let mut rng = Rng::new(1);
        let mut refused = 0;
        for _ in 0..ROUNDS {
            fill(&ram, &mut rng);
            full.wait();
            let mut page = [1; PAGE];
            while page != [0; PAGE] {
                ram.read_at(0, &mut page).unwrap();
            }
            rng.fill(&mut page);
            // The result is asserted after the loop. A panic inside the loop would leave the other
            // thread waiting at the barrier forever.
            refused += u32::from(ram.write_at(0, &page, Flags::empty()).is_err());
            written.wait();
            ram.rewind().unwrap();
        }
        assert_eq!(refused, 0, "of {ROUNDS} writes");
    });
}
