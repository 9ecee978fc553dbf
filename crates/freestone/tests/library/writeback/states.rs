//! `block_state` and `debug_stat`: the state of each page, and the counts of waits.

use std::sync::mpsc;
use std::time::Duration;

use freestone::codec::{Algorithm, Params};
use freestone::device::{Completion, Device, IoBuf, Op, Request};
use freestone::ram::{BlockState, Config, IdleSelection, RecompressOptions, Secondary, Writeback};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk};

use crate::writeback::disk::{Disk, LAYOUTS, LONG, MIB, PAGE, content, noise};

fn states(disk: &Disk, first: u64, end: u64) -> Vec<BlockState> {
    let mut states = Vec::new();
    let next = disk.ram.block_state(first, end, &mut |state| {
        states.push(state);
        true
    });
    assert_eq!(next, end.min(disk.ram.geometry().size / PAGE));
    states
}

fn flags(disk: &Disk) -> Vec<(u64, String)> {
    states(disk, 0, 100).iter().map(|state| (state.index, state.flags())).collect()
}

fn of(expected: &[(u64, &str)]) -> Vec<(u64, String)> {
    expected.iter().map(|(index, flags)| (*index, (*flags).to_owned())).collect()
}

#[test]
fn block_state_has_the_kernels_flags() {
    for packed in LAYOUTS {
        let zstd = Some(Secondary { algorithm: Algorithm::Zstd, params: Params::default() });
        let config =
            Config { disksize: 64 * MIB, recomp_algorithms: [zstd, None, None], ..Config::default() };
        let disk = Disk::new(config, FaultyDisk::new(MIB as usize, PAGE as u32), packed);
        // Page 2 has zeroes, page 3 a pattern of 64 bits, and page 9 noise.
        for (page, kind) in [(2, 0), (3, 2), (9, 5)] {
            disk.write(page, &content(kind, page, PAGE as usize));
        }
        // Text followed by repeated bytes. lz4 compresses only the repeated half, and zstd also
        // compresses the text.
        for page in [5, 11] {
            disk.write(page, &[content(3, page, 2048), vec![b'x'; 2048]].concat());
        }
        let fresh = [(2, "s....."), (3, "s....."), (5, "......"), (9, "..h..."), (11, "......")];
        assert_eq!(flags(&disk), of(&fresh));
        disk.ram.mark_idle(IdleSelection::All);
        assert_eq!(flags(&disk)[2..], of(&[(5, "...i.."), (9, "..hi.."), (11, "...i..")]));
        disk.read(5, 1).unwrap();
        disk.ram.recompress(&RecompressOptions::default()).unwrap();
        assert_eq!(flags(&disk)[2..], of(&[(5, "....r."), (9, "..h..n"), (11, "....r.")]), "packed {packed}");
        disk.ram.writeback(&Writeback::Pages(vec![9..=11])).unwrap();
        // In the kernel's layout, evicted pages are uncompressed.
        let there = if packed { [(9, ".wh..n"), (11, ".w..r.")] } else { [(9, ".w...n"), (11, ".w....")] };
        assert_eq!(flags(&disk)[3..], of(&there), "packed {packed}");
        let accessed: Vec<_> = states(&disk, 0, 100).iter().map(|state| state.accessed.is_some()).collect();
        assert_eq!(accessed, [true, true, true, false, false]);
        let boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime).tv_sec.unsigned_abs();
        let at = states(&disk, 5, 6)[0].accessed.unwrap();
        assert!(
            at <= Duration::from_secs(boot + 1) && at + LONG > Duration::from_secs(boot),
            "{at:?}, {boot}"
        );
        // Queries a range that ends before page 9. Then queries all pages in several parts, each of
        // which continues where the previous one ended.
        assert_eq!(states(&disk, 3, 9).iter().map(|state| state.index).collect::<Vec<_>>(), [3, 5]);
        assert_eq!(states(&disk, 12, 1 << 40), []);
        let (mut from, mut seen) = (0, Vec::new());
        while from < 100 {
            from = disk.ram.block_state(from, 100, &mut |state| {
                seen.push(state.index);
                false
            });
        }
        assert_eq!(seen, [2, 3, 5, 9, 11]);
    }
}

#[test]
fn limit_waits_and_discards_in_flight_are_counted() {
    for packed in LAYOUTS {
        let config = Config { disksize: 24 * MIB, mem_limit: 2 * MIB, ..Config::default() };
        let disk = Disk::new(config, FaultyDisk::new((7000 * PAGE) as usize, PAGE as u32), packed);
        disk.write(0, &noise(0, 256));
        assert_eq!(disk.ram.debug_stat().writestall, 0);
        disk.backing.fault(
            Some(Op::Write),
            FaultSchedule::Always,
            FaultEffect::Delay(Duration::from_millis(2)),
        );
        (0..3000).for_each(|page| disk.write(page, &noise(page, 1)));
        let stat = disk.ram.debug_stat();
        assert!(stat.writestall > 0 && stat.miss_free == 0, "{stat:?}");
        disk.backing.heal();

        let spilled = |state: &BlockState| state.written_back;
        let page = states(&disk, 0, 3000).into_iter().find(spilled).unwrap().index;
        disk.backing.fault(Some(Op::Read), FaultSchedule::Always, FaultEffect::Hang);
        let (tx, rx) = mpsc::channel();
        for request in [Request::read(page * PAGE, PAGE), Request::new(Op::Discard, page * PAGE, PAGE)] {
            let tx = tx.clone();
            let buffer = if request.op == Op::Read { PAGE as usize } else { 0 };
            let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
            disk.ram.submit(request, IoBuf::zeroed(buffer).unwrap(), done);
            if request.op == Op::Read {
                disk.backing.wait_held(1);
            }
        }
        assert_eq!(states(&disk, page, page + 1)[0].flags(), ".w....");
        disk.backing.heal();
        (0..2).for_each(|_| rx.recv_timeout(LONG).unwrap().unwrap());
        assert_eq!(disk.ram.debug_stat().miss_free, 1);
        disk.ram.reset().unwrap();
        assert_eq!(disk.ram.debug_stat(), freestone::ram::DebugStat::default());
    }
}
