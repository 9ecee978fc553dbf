//! Fault rules on zones: zone operations, appends, and writes at the write pointer.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use freestone_core::device::zoned::{Zone, ZoneCondition, ZoneOp};
use freestone_core::device::{Blocking, Device, Error, Flags, IoBuf, Request, Result, Zoned};
use freestone_drive::faults::Faults;
use freestone_testkit::{DeferPolicy, DeferringDevice, ModelZoned, TestDevice, ZonedConfig};

use crate::faults::support::{BLOCK, PATIENCE, faults, fired, read, rules, submit, take_durable, write};

const ZONE: u64 = 256 << 10;
/// Byte offset of the first sequential zone. The zone before it is conventional.
const FIRST: u64 = ZONE;

fn model() -> Arc<dyn Device> {
    Arc::new(ModelZoned::new(ZonedConfig {
        zone_size: ZONE,
        zone_capacity: ZONE,
        nr_zones: 6,
        conventional: 1,
        max_open: 0,
        max_active: 0,
    }))
}

/// Returns the fault layer over zones that complete inline, and over zones that do not.
fn devices(text: &str) -> [Faults; 2] {
    let deferred = Arc::new(DeferringDevice::new(model(), DeferPolicy::Always, 1));
    [faults(model(), text), faults(deferred, text)]
}

fn zones(device: &dyn Zoned) -> Vec<Zone> {
    let mut all = Vec::new();
    device
        .report(0, &mut |zone| {
            all.push(zone);
            true
        })
        .unwrap();
    all
}

fn zone(device: &dyn Zoned, offset: u64) -> Zone {
    zones(device).into_iter().find(|zone| zone.start == offset).unwrap()
}

/// Appends like an export: tries inline, and submits the append if it would block.
fn append(device: &Faults, offset: u64, data: &[u8], flags: Flags) -> Result<u64> {
    match device.try_append(offset, data, flags)? {
        Some(at) => Ok(at),
        None => submit_append(device, offset, data, flags).recv_timeout(PATIENCE).expect("it is answered"),
    }
}

fn submit_append(device: &Faults, offset: u64, data: &[u8], flags: Flags) -> mpsc::Receiver<Result<u64>> {
    let (tx, rx) = mpsc::channel();
    let done = Box::new(move |outcome| tx.send(outcome).unwrap_or_default());
    device.submit_append(offset, IoBuf::copy_of(data).unwrap(), flags, done);
    rx
}

#[test]
fn zone_operations_fail() {
    for (name, op) in [
        ("open", ZoneOp::Open),
        ("close", ZoneOp::Close),
        ("finish", ZoneOp::Finish),
        ("reset", ZoneOp::Reset),
    ] {
        for faults in devices(&format!("{name} error=EIO nth=1; all error=ENOSPC at=512K+4K")) {
            write(&faults, FIRST, 1, BLOCK).unwrap();
            let before = zones(&faults);
            assert_eq!(faults.zone_op(op, FIRST), Err(Error::Media), "{name}");
            // Only the zone at 512 KiB overlaps the range of the rule. An operation on the zone
            // fails although only a part of the zone overlaps.
            assert_eq!(faults.zone_op(op, 2 * ZONE), Err(Error::Media), "{name}: the first error");
            assert_eq!(faults.zone_op(op, 2 * ZONE), Err(Error::NoSpace), "{name}");
            assert_eq!(zones(&faults), before, "{name}: nothing is done");
            assert_eq!(faults.zone_op(op, FIRST), Ok(()), "{name}, the second time");
            assert_eq!(fired(&faults), [2, 2]);
            // Operations that the device under the fault layer refuses do not count as requests.
            assert!(faults.zone_op(op, FIRST + 4096).is_err());
            assert!(faults.zone_op(op, 6 * ZONE).is_err());
            assert_eq!(fired(&faults), [2, 2]);
        }
    }
}

#[test]
fn reset_all_counts_as_one_reset() {
    for faults in devices("reset error=EIO times=1 at=1M+4K") {
        write(&faults, FIRST, 1, BLOCK).unwrap();
        assert_eq!(faults.reset_all(), Err(Error::Media));
        assert_eq!(zone(&faults, FIRST).condition, ZoneCondition::ImplicitOpen);
        assert_eq!(faults.reset_all(), Ok(()));
        assert_eq!(zone(&faults, FIRST).condition, ZoneCondition::Empty);
    }
}

#[test]
fn delayed_zone_operations_block_the_caller() {
    for faults in devices("open delay=50ms; finish hang; reset hang") {
        let begin = Instant::now();
        faults.zone_op(ZoneOp::Open, FIRST).unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(50));
        thread::scope(|scope| {
            let finish = scope.spawn(|| faults.zone_op(ZoneOp::Finish, FIRST));
            let begin = Instant::now();
            while faults.hung_requests() == 0 {
                assert!(begin.elapsed() < PATIENCE);
                thread::yield_now();
            }
            assert_eq!(zone(&faults, FIRST).condition, ZoneCondition::Full, "it is done at once");
            assert!(!finish.is_finished());
            assert_eq!(faults.release(), 1);
            assert_eq!(finish.join().unwrap(), Ok(()));
            let reset = scope.spawn(|| faults.reset_all());
            while faults.hung_requests() == 0 {
                assert!(begin.elapsed() < PATIENCE);
                thread::yield_now();
            }
            faults.close();
            assert_eq!(reset.join().unwrap(), Err(Error::Gone));
        });
    }
}

#[test]
fn appends_fail_hang_and_are_delayed() {
    for faults in devices("append error=ENOSPC nth=2; append hang at=512K+4K; append delay=50ms at=768K+4K") {
        let data = [1; BLOCK];
        assert_eq!(append(&faults, FIRST, &data, Flags::empty()), Ok(FIRST));
        assert_eq!(append(&faults, FIRST, &data, Flags::empty()), Err(Error::NoSpace));
        assert_eq!(append(&faults, FIRST, &data, Flags::empty()), Ok(FIRST + 4096), "nothing was written");
        let hanging = submit_append(&faults, 2 * ZONE, &data, Flags::empty());
        // A conventional zone refuses appends. The device under the fault layer checks that.
        assert_eq!(append(&faults, 0, &data, Flags::empty()), Err(Error::ZoneCondition));
        assert_eq!(append(&faults, FIRST + 4096, &data, Flags::empty()), Err(Error::Misaligned));
        let begin = Instant::now();
        while faults.hung_requests() == 0 {
            assert!(begin.elapsed() < PATIENCE);
            thread::yield_now();
        }
        assert_eq!(hanging.try_recv(), Err(mpsc::TryRecvError::Empty));
        assert_eq!(faults.release(), 1);
        assert_eq!(hanging.recv_timeout(PATIENCE), Ok(Ok(2 * ZONE)));
        let begin = Instant::now();
        assert_eq!(append(&faults, 3 * ZONE, &data, Flags::empty()), Ok(3 * ZONE));
        assert!(begin.elapsed() >= Duration::from_millis(50));
        let last = submit_append(&faults, 2 * ZONE, &data, Flags::empty());
        drop(faults);
        assert_eq!(last.recv_timeout(PATIENCE), Ok(Err(Error::Gone)));
    }
}

/// Writes or appends four blocks, filled with byte 2, at the start of the first sequential zone.
fn store(faults: &Faults, by_append: bool) {
    let data = [2; 4 * BLOCK];
    if by_append {
        assert_eq!(append(faults, FIRST, &data, Flags::empty()), Ok(FIRST));
    } else {
        faults.write_at(FIRST, &data, Flags::empty()).unwrap();
    }
    assert_eq!(zone(faults, FIRST).write_pointer, FIRST + 4 * 4096, "the write pointer moves");
    // The next write at the moved write pointer succeeds.
    faults.set(rules(""), None);
    write(faults, FIRST + 4 * 4096, 3, BLOCK).unwrap();
    assert_eq!(read(faults, FIRST + 4 * 4096, BLOCK), [3; BLOCK]);
}

#[test]
fn lost_data_at_write_pointer_reads_as_zeroes() {
    for (operation, by_append) in [("write", false), ("append", true)] {
        for faults in devices(&format!("{operation} lost")) {
            store(&faults, by_append);
            assert_eq!(read(&faults, FIRST, 4 * BLOCK), [0; 4 * BLOCK]);
        }
        for faults in devices(&format!("{operation} torn=512")) {
            store(&faults, by_append);
            let found = read(&faults, FIRST, 4 * BLOCK);
            assert!(found.chunks(512).all(|unit| unit == [0; 512] || unit == [2; 512]));
            assert!(found.contains(&0) && found.contains(&2));
        }
        for faults in devices(&format!("{operation} rot")) {
            store(&faults, by_append);
            let found = read(&faults, FIRST, 4 * BLOCK);
            assert_eq!(found.iter().map(|byte| (byte ^ 2).count_ones()).sum::<u32>(), 1);
        }
        for faults in devices(&format!("{operation} misdirected")) {
            // A misdirected write skips zones that have no space.
            for full in [2, 3] {
                faults.zone_op(ZoneOp::Finish, full * ZONE).unwrap();
            }
            store(&faults, by_append);
            assert_eq!(read(&faults, FIRST, 4 * BLOCK), [0; 4 * BLOCK]);
            let begin = Instant::now();
            let strayed = loop {
                let mut others = zones(&faults).into_iter().filter(|zone| zone.start >= 4 * ZONE);
                if let Some(zone) = others.find(|zone| zone.condition == ZoneCondition::ImplicitOpen) {
                    break zone;
                }
                assert!(begin.elapsed() < PATIENCE, "no zone got the data");
            };
            assert_eq!(strayed.write_pointer, strayed.start + 4 * 4096);
            assert_eq!(read(&faults, strayed.start, 4 * BLOCK), [2; 4 * BLOCK]);
        }
    }
}

#[test]
fn conventional_zones_are_like_plain_devices() {
    for faults in devices("write misdirected nth=1; write lost nth=2; write torn=4K nth=3") {
        write(&faults, 0, 2, BLOCK).unwrap();
        let found = read(&faults, 0, ZONE as usize);
        let place = found.iter().position(|byte| *byte == 2).expect("it is in its zone");
        assert_ne!(place, 0);
        write(&faults, 0, 3, BLOCK).unwrap();
        faults.set(rules("write torn=4K nth=1; read stale nth=2"), None);
        write(&faults, 0, 4, 8 * BLOCK).unwrap();
        let found = read(&faults, 0, 8 * BLOCK);
        assert!(found.contains(&4) && !found.contains(&3));
        assert!(!read(&faults, 0, 8 * BLOCK).contains(&4), "stale");
    }
}

#[test]
fn appends_lose_their_fua() {
    let recorder = Arc::new(TestDevice::over(model()));
    let faults = faults(recorder.clone(), "append lie nth=2");
    for durable in [1, 0, 1] {
        append(&faults, FIRST, &[1; BLOCK], Flags::FUA).unwrap();
        assert_eq!(take_durable(&recorder), durable);
    }
}

#[test]
fn delayed_writes_to_a_zone_keep_their_order() {
    for faults in devices("write delay=20ms chance=50%; write hang chance=10%; write torn=512 nth=9") {
        let mut completions: Vec<_> = (0..32)
            .map(|at| submit(&faults, Request::write(FIRST + at * 4096, 4096), &[at as u8; BLOCK]))
            .collect();
        let begin = Instant::now();
        while !completions.is_empty() {
            faults.release();
            completions.retain(|completion| {
                completion.poll().inspect(|outcome| assert_eq!(*outcome, Ok(()))).is_none()
            });
            assert!(begin.elapsed() < PATIENCE, "a write is not answered");
            thread::yield_now();
        }
        let found = read(&faults, FIRST, 32 * BLOCK);
        assert!(
            found.chunks(BLOCK).enumerate().all(|(at, block)| block.iter().all(|byte| *byte == at as u8))
        );
    }
}
