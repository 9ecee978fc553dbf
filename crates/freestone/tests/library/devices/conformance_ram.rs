//! The compressed RAM disk passes the conformance suite.

use std::sync::Arc;

use freestone::codec::Algorithm;
use freestone::device::Device;
use freestone::ram::{Config, Ram};
use freestone_testkit::conformance;
use freestone_testkit::{DeferPolicy, DeferringDevice};

use crate::devices::conformance_options;

fn ram(comp_algorithm: Algorithm) -> Ram {
    Ram::new(Config { disksize: 24 << 20, comp_algorithm, ..Config::default() }).unwrap()
}

#[test]
fn every_algorithm_conforms() {
    let options = conformance_options();
    for algorithm in Algorithm::ALL {
        conformance::check(algorithm.name(), &|| Arc::new(ram(algorithm)), options);
    }
}

#[test]
fn ram_disk_below_deferring_device_conforms() {
    let make = || -> Arc<dyn Device> {
        Arc::new(DeferringDevice::new(Arc::new(ram(Algorithm::Lz4)), DeferPolicy::Sometimes(30), 5))
    };
    conformance::check("deferred lz4", &make, conformance_options());
}

#[test]
fn growing_ram_disk_conforms() {
    let disk = ram(Algorithm::Lz4);
    conformance::check_grown(&disk, &conformance_options(), &|| disk.grow(40 << 20).unwrap()).unwrap();
}

#[test]
fn ram_disk_conforms_during_pool_compaction() {
    let disk = ram(Algorithm::Lz4);
    std::thread::scope(|scope| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let compactor = disk.clone();
        scope.spawn(move || {
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                compactor.compact();
            }
        });
        conformance::check(
            "lz4 under compaction",
            &|| {
                disk.reset().unwrap();
                Arc::new(disk.clone())
            },
            conformance_options(),
        );
        drop(stop);
    });
}
