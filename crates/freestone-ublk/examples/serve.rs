//! Serves a RAM disk as a block device, for tests in a kernel with the driver (`lab/ublk.sh`).
//!
//! ```text
//! serve MIB [QUEUES]    serves a disk, and prints its path when it is ready
//!                       SIGTERM ends it within GRACE seconds (default 5); prints "ended" or "let go"
//!                       SIGUSR1 doubles its size; prints "grown" or the error
//!                       SIGUSR2 makes it stop answering requests
//! serve clean           removes devices that were left behind, and prints their ids
//! ```

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use freestone_core::budget::{Budget, DEFAULT_BYTES};
use freestone_core::device::{Buffer, Completion, Device, IoBuf, Request, Result, TryResult, forward_device};
use freestone_ram::ram::{Config, Ram};
use freestone_ublk::{Export, Options, remove_stale_devices};
use signal_hook::consts::{SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

/// A disk that can stop answering requests.
struct Disk {
    ram: Ram,
    is_silent: AtomicBool,
}

impl Device for Disk {
    forward_device!(|disk| disk.ram => geometry, extents; prefetch: none, zoned: none, changes: none);
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        if self.is_silent.load(Ordering::SeqCst) {
            return Ok(TryResult::WouldBlock);
        }
        self.ram.try_io(request, buffer)
    }
    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if self.is_silent.load(Ordering::SeqCst) {
            // Behaves like a disk that hangs forever: the request never completes.
            std::mem::forget((buffer, done));
            return;
        }
        self.ram.submit(request, buffer, done);
    }
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_writer(std::io::stderr).init();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [size, queues @ ..] = &args[..] else { return Err("usage: serve MIB [QUEUES] | serve clean".into()) };
    if size == "clean" {
        for id in remove_stale_devices()? {
            println!("{id}");
        }
        return Ok(());
    }
    let size = size.parse::<u64>()? << 20;
    let queues = queues.first().map_or(Ok(0), |queues| queues.parse())?;
    let grace = std::env::var("GRACE").map_or(Ok(5.0), |grace| grace.parse())?;
    // Install the signal handlers before other threads start.
    let mut signals = Signals::new([SIGTERM, SIGUSR1, SIGUSR2])?;
    let ram = Ram::new(Config { disksize: size, ..Config::default() })?;
    let disk = Arc::new(Disk { ram, is_silent: AtomicBool::new(false) });
    let options = Options { queues, ..Options::new(Budget::new(DEFAULT_BYTES)) };
    let export = Export::new("serve", Arc::clone(&disk) as Arc<dyn Device>, options)?;
    println!("{}", export.path().display());
    for signal in &mut signals {
        match signal {
            SIGUSR1 => {
                disk.ram.grow(disk.geometry().size * 2)?;
                match export.resize() {
                    Ok(()) => println!("grown"),
                    Err(error) => println!("{error}"),
                }
            }
            SIGUSR2 => disk.is_silent.store(true, Ordering::SeqCst),
            _ => break,
        }
    }
    let ended = export.shutdown(Duration::from_secs_f64(grace));
    println!("{}", if ended { "ended" } else { "let go" });
    Ok(())
}
