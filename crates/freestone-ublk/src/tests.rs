//! Tests of complete exports over the fake driver.

mod unprivileged;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use freestone_core::budget::Budget;
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, Failures, Geometry, IoBuf, Op, Request, Result, TryResult,
};
use freestone_core::plug::Plug;
use freestone_core::workers::Workers;
use freestone_ram::ram::{Config, Ram};
use rustix::io::Errno;

use crate::abi::{attr, control, feature, op, op_flag, param, state};
use crate::control::mark;
use crate::device_thread::{START_DEADLINE, StartError};
use crate::export::{Export, InUse, MAX_REQUEST_BYTES, Options, ResizeError};
use crate::fake::{Driver, ID, PATIENCE};
use crate::stale_devices;

const READ: u32 = op::READ as u32;
const WRITE: u32 = op::WRITE as u32;
const EIO: i32 = -5;
const SIZE: u64 = 64 << 20;

fn ram() -> Arc<Ram> {
    Arc::new(Ram::new(Config { disksize: SIZE, ..Config::default() }).unwrap())
}

fn options() -> Options {
    Options { queues: 1, ..Options::new(Budget::new(0)) }
}

fn start(driver: &Driver, device: Arc<dyn Device>, options: Options) -> Export {
    Export::with(Arc::new(driver.clone()), START_DEADLINE, "disk", device, options).unwrap()
}

fn export(device: Arc<dyn Device>) -> (Driver, Export) {
    let driver = Driver::default();
    let export = start(&driver, device, options());
    (driver, export)
}

/// The function that a test device calls for each submitted request.
type SubmitFn = Box<dyn Fn(&Arc<Ram>, Request, IoBuf, Completion) + Send + Sync>;

/// A device that tries `inline_bytes` bytes inline and passes the rest to `submit`.
struct PartialDevice {
    ram: Arc<Ram>,
    inline_bytes: u64,
    submit: SubmitFn,
}

impl PartialDevice {
    fn new(
        inline_bytes: u64,
        submit: impl Fn(&Arc<Ram>, Request, IoBuf, Completion) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { ram: ram(), inline_bytes, submit: Box::new(submit) })
    }

    /// Returns a device that completes submitted requests on another thread after a delay.
    fn delayed(inline_bytes: u64) -> Arc<Self> {
        Self::new(inline_bytes, |ram, request, buffer, done| {
            let ram = Arc::clone(ram);
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(5));
                ram.submit(request, buffer, done);
            });
        })
    }
}

impl Device for PartialDevice {
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..self.ram.geometry() }
    }
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        let n = self.inline_bytes;
        if n == 0 || request.len <= n || !request.offset.is_multiple_of(2 * n) {
            return Ok(TryResult::WouldBlock);
        }
        let (part, bytes) = (Request { len: n, ..*request }, n as usize);
        let tried = match buffer {
            Buffer::Read(out) => self.ram.try_io(&part, Buffer::Read(&mut out[..bytes]))?,
            Buffer::Write(data) => self.ram.try_io(&part, Buffer::Write(&data[..bytes]))?,
            Buffer::None => self.ram.try_io(&part, Buffer::None)?,
        };
        assert_eq!(tried, TryResult::Done);
        Ok(TryResult::Partly(n))
    }
    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        (self.submit)(&self.ram, request, buffer, done);
    }
    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.ram.extents(offset, len, row)
    }
}

/// Requests that a device has received and not completed.
type HeldRequests = Arc<Mutex<Vec<(IoBuf, Completion)>>>;

/// Returns a device that never completes requests, and the requests it has received.
fn silent() -> (Arc<PartialDevice>, HeldRequests) {
    let held_requests = HeldRequests::default();
    let keep = Arc::clone(&held_requests);
    (
        PartialDevice::new(0, move |_, _, buffer, done| keep.lock().unwrap().push((buffer, done))),
        held_requests,
    )
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 512) as u8 ^ (at % 251) as u8 ^ seed).collect()
}

fn wait_until(condition: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "timed out waiting for a condition");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn round_trip(driver: &Driver) {
    for (seed, sectors) in [(1, 8), (2, 1), (3, 1024), (4, 7)] {
        let data = pattern(seed, sectors * 512);
        assert_eq!(driver.io(WRITE, 16, sectors as u32, &data).0, data.len() as i32);
        assert_eq!(driver.io(READ, 16, sectors as u32, &[]), (data.len() as i32, data));
    }
    let data = pattern(5, 8192);
    assert_eq!(driver.io(WRITE | op_flag::FUA, 0, 16, &data).0, 8192);
    assert_eq!(driver.io(op::FLUSH.into(), 0, 0, &[]).0, 0);
    assert_eq!(driver.io(op::WRITE_ZEROES.into(), 0, 8, &[]).0, 0);
    assert_eq!(driver.io(READ, 0, 8, &[]), (4096, vec![0; 4096]));
    assert_eq!(driver.io(READ, 8, 8, &[]), (4096, data[4096..].to_vec()));
    assert_eq!(driver.io(op::DISCARD.into(), 8, 8, &[]).0, 0);
}

#[test]
fn disk_serves_requests_until_end() {
    let (driver, export) = export(ram());
    assert_eq!((export.id(), export.name(), export.is_read_only()), (ID, "disk", false));
    assert_eq!(export.path().to_str(), Some("/dev/ublkb7"));
    {
        let state = driver.state();
        let params = state.params.unwrap();
        assert_eq!((params.basic.dev_sectors, params.types), (SIZE / 512, param::BASIC | param::DISCARD));
        let info = state.info.unwrap();
        assert_eq!((info.queue_depth, info.max_io_buf_bytes), (128, MAX_REQUEST_BYTES));
    }
    round_trip(&driver);
    assert!(export.shutdown(PATIENCE) && export.shutdown(Duration::ZERO));
    assert!(driver.state().info.is_none() && !export.is_connected());
    let log = driver.state().log.clone();
    assert!(log.ends_with(&[control::STOP_DEV, control::DEL_DEV_ASYNC]));
}

#[test]
fn delayed_completions_reach_the_client() {
    let (driver, export) = export(PartialDevice::delayed(0));
    let attrs = driver.state().params.unwrap().basic.attrs;
    assert_eq!(attrs, attr::VOLATILE_CACHE | attr::FUA);
    round_trip(&driver);
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn partial_request_is_completed() {
    let (driver, _export) = export(PartialDevice::delayed(4096));
    let data = pattern(9, 64 << 10);
    assert_eq!(driver.io(WRITE, 0, 128, &data).0, 64 << 10);
    assert_eq!(driver.io(READ, 0, 128, &[]), (64 << 10, data));
}

#[test]
fn two_queues_serve_many_tags() {
    let driver = Driver::default();
    let export = start(&driver, PartialDevice::delayed(0), Options { queues: 9, ..options() });
    assert_eq!(driver.state().lanes.len(), 2, "as the driver grants");
    let mut wanted = Vec::new();
    for number in 0..600_u64 {
        let (lane, data) = ((number % 2) as usize, pattern(number as u8, 4096));
        wanted.push((lane, driver.submit(lane, WRITE, number * 8, 8, &data), data));
    }
    for (lane, ticket, _) in &wanted {
        assert_eq!(driver.wait(*lane, *ticket).0, 4096);
    }
    for (number, (_, _, data)) in wanted.into_iter().enumerate() {
        assert_eq!(driver.io(READ, number as u64 * 8, 8, &[]), (4096, data));
    }
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn invalid_request_fails_and_tag_is_reused() {
    let failures = Arc::<Failures>::default();
    let driver = Driver::default();
    let options = Options { depth: 1, failures: Arc::clone(&failures), ..options() };
    let _export = start(&driver, ram(), options);
    let code = |op_flags, sector, sectors| driver.io(op_flags, sector, sectors, &[]).0;
    for op in [4, 10, 13, 18, 200] {
        assert_eq!(code(op, 0, 8), -95, "{op}");
    }
    assert_eq!(code(READ, 0, 0), -22);
    assert_eq!(code(READ, 0, MAX_REQUEST_BYTES / 512 + 1), -22);
    assert_eq!(code(READ, SIZE / 512, 8), -22);
    assert_eq!(code(op::DISCARD.into(), SIZE / 512 - 8, 9), -22);
    assert_eq!(code(WRITE, u64::MAX / 512, 8), -22);
    assert_eq!(code(op::WRITE_ZEROES.into(), u64::MAX - 1, 8), -22);
    assert_eq!(code(READ, SIZE / 512 - 8, 8), 4096);
    assert_eq!(failures.counts().map(|(_, count)| count).sum::<u64>(), 3);
}

#[test]
fn read_only_export_refuses_writes() {
    let driver = Driver::default();
    let export = start(&driver, ram(), Options { read_only: true, ..options() });
    assert!(export.is_read_only());
    let params = driver.state().params.unwrap();
    assert_eq!((params.basic.attrs, params.types), (attr::READ_ONLY, param::BASIC));
    assert_eq!(driver.io(WRITE, 0, 8, &[1; 4096]).0, -1);
    assert_eq!(driver.io(op::WRITE_ZEROES.into(), 0, 8, &[]).0, -1);
    assert_eq!(driver.io(READ, 0, 8, &[]), (4096, vec![0; 4096]));
}

#[test]
fn wrong_buffer_from_device_fails_read() {
    // Capacities of the returned buffer: half the length, the full length but too little for the
    // next request, and none.
    for capacity in [2048, 4096, 0] {
        let device = PartialDevice::new(0, move |_, _, _, done| {
            done.complete(Ok(()), IoBuf::zeroed(capacity).unwrap());
        });
        let (driver, export) = export(device);
        assert_eq!(driver.io(READ, 0, 8, &[]).0, EIO, "{capacity}");
        assert_eq!(driver.io(WRITE, 0, 8, &[1; 4096]).0, 4096);
        // The tag must have a buffer for the largest request again.
        let largest = vec![7; MAX_REQUEST_BYTES as usize];
        assert_eq!(driver.io(WRITE, 0, MAX_REQUEST_BYTES / 512, &largest).0, largest.len() as i32);
        assert!(export.shutdown(PATIENCE));
    }
}

#[test]
fn dropped_completion_and_errors_fail_request() {
    let device = PartialDevice::new(0, |_, request, buffer, done| match request.op {
        Op::Read => drop(done),
        Op::Write => done.complete(Err(Error::NoSpace), buffer),
        _ => done.complete(Err(Error::Media), buffer),
    });
    let (driver, _export) = export(device);
    assert_eq!(driver.io(READ, 0, 8, &[]).0, -108);
    assert_eq!(driver.io(WRITE, 0, 8, &[0; 4096]).0, -28);
    assert_eq!(driver.io(op::FLUSH.into(), 0, 0, &[]).0, EIO);
}

#[test]
fn small_requests_take_few_system_calls() {
    const DEPTH: usize = 32;
    const REQUESTS: u64 = 20_000;
    let driver = Driver::default();
    let export = start(&driver, ram(), Options { depth: DEPTH as u16, ..options() });
    let before = driver.state().lanes[0].enters;
    let requests = (0..REQUESTS).map(|number| (READ, number % 1000 * 8, 8));
    let tickets = driver.submit_all(0, requests);
    for ticket in tickets {
        assert_eq!(driver.wait(0, ticket).0, 4096);
    }
    let enters = driver.state().lanes[0].enters - before;
    let each = enters as f64 / REQUESTS as f64;
    assert!(each <= 0.1, "{each} calls a request");
    drop(export);
}

#[test]
fn batched_completions_take_few_system_calls() {
    const REQUESTS: u64 = 4000;
    // The device completes its requests on another thread once it has 32.
    let held_requests: Arc<Mutex<Vec<(Request, IoBuf, Completion)>>> = Arc::default();
    let device = PartialDevice::new(0, move |ram, request, buffer, done| {
        let mut have = held_requests.lock().unwrap();
        have.push((request, buffer, done));
        if have.len() < 32 {
            return;
        }
        let (all, ram) = (std::mem::take(&mut *have), Arc::clone(ram));
        std::thread::spawn(move || {
            let _plug = Plug::start();
            for (request, buffer, done) in all {
                ram.submit(request, buffer, done);
            }
        });
    });
    let driver = Driver::default();
    let _export = start(&driver, device, Options { depth: 32, ..options() });
    let before = driver.state().lanes[0].enters;
    let tickets = driver.submit_all(0, (0..REQUESTS).map(|number| (READ, number % 1000 * 8, 8)));
    for ticket in tickets {
        assert_eq!(driver.wait(0, ticket).0, 4096);
    }
    let each = (driver.state().lanes[0].enters - before) as f64 / REQUESTS as f64;
    assert!(each <= 0.1, "{each} calls a request");
}

#[test]
fn end_fails_requests_of_hung_device() {
    let (device, held_requests) = silent();
    let (driver, export) = export(device);
    let tickets: Vec<_> = (0..3).map(|at| driver.submit(0, READ, at * 8, 8, &[])).collect();
    wait_until(|| held_requests.lock().unwrap().len() == 3);
    let began = Instant::now();
    assert!(!export.shutdown(Duration::from_millis(50)));
    assert!(began.elapsed() < PATIENCE / 2);
    for ticket in tickets {
        assert_eq!(driver.wait(0, ticket).0, EIO);
    }
    // The kernel has removed the device; the device thread ends when the device completes.
    driver.wait_for(|state| state.info.is_none().then_some(()));
    assert!(!export.shutdown(Duration::ZERO));
    for (buffer, done) in std::mem::take(&mut *held_requests.lock().unwrap()) {
        done.complete(Ok(()), buffer);
    }
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn start_with_hung_device_times_out() {
    let (device, held_requests) = silent();
    let driver = Driver::default();
    driver.state().scans = true;
    // The deadline is long enough for the queue to start.
    let (deadline, options) = (Duration::from_secs(2), Options { depth: 1, ..options() });
    let started = Export::with(Arc::new(driver.clone()), deadline, "disk", device, options);
    assert!(matches!(started, Err(StartError::Deadline)));
    driver.wait_for(|state| state.info.is_none().then_some(()));
    assert_eq!(held_requests.lock().unwrap().len(), 1);
}

#[test]
fn failed_start_removes_device() {
    let device: Arc<dyn Device> = ram();
    for command in [control::GET_FEATURES, control::ADD_DEV, control::SET_PARAMS, control::START_DEV] {
        let driver = Driver::default();
        driver.state().refused.insert(command, Errno::BUSY);
        let started =
            Export::with(Arc::new(driver.clone()), START_DEADLINE, "disk", Arc::clone(&device), options());
        let Err(StartError::Control(error)) = started else { panic!("{started:?}") };
        assert_eq!(error.errno, Errno::BUSY);
        assert_eq!(driver.has_received(control::DEL_DEV_ASYNC), driver.has_received(control::SET_PARAMS));
        let state = driver.state();
        assert!(state.info.is_none() && state.lanes.iter().all(|lane| !lane.is_open));
    }
    let with = |set: &dyn Fn(&Driver)| {
        let driver = Driver::default();
        set(&driver);
        let device = Arc::clone(&device);
        let error = Export::with(Arc::new(driver.clone()), START_DEADLINE, "disk", device, options());
        assert!(driver.state().info.is_none());
        error.unwrap_err()
    };
    let error = with(&|driver| driver.state().is_absent = true);
    assert!(error.to_string().contains("modprobe ublk_drv"), "{error}");
    let refuse = |command, errno| {
        with(&move |driver: &Driver| {
            driver.state().refused.insert(command, errno);
        })
    };
    assert!(matches!(refuse(control::GET_FEATURES, Errno::OPNOTSUPP), StartError::DriverTooOld));
    assert!(matches!(refuse(control::GET_FEATURES, Errno::PERM), StartError::PermissionDenied));
    assert!(matches!(with(&|driver| driver.state().no_node = true), StartError::Node { .. }));
    assert!(matches!(with(&|driver| driver.state().no_fetch = true), StartError::Queue(_)));
    let old = with(&|driver| driver.state().lacks = feature::CMD_IOCTL_ENCODE);
    assert!(matches!(old, StartError::DriverTooOld));
}

#[test]
fn older_driver_works_without_new_features() {
    let driver = Driver::default();
    {
        let mut state = driver.state();
        state.lacks = feature::UPDATE_SIZE | feature::SAFE_STOP_DEV;
        state.refused.insert(control::DEL_DEV_ASYNC, Errno::OPNOTSUPP);
    }
    let export = start(&driver, ram(), options());
    assert!(matches!(export.resize(), Err(ResizeError::Unsupported)));
    driver.state().claimed = true;
    assert!(export.is_connected());
    assert_eq!(export.try_shutdown(PATIENCE), Err(InUse));
    driver.state().claimed = false;
    assert_eq!(export.try_shutdown(PATIENCE), Ok(true));
    assert!(driver.has_received(control::DEL_DEV) && !driver.has_received(control::TRY_STOP_DEV));
}

#[test]
fn try_end_fails_while_device_is_in_use() {
    let (driver, export) = export(ram());
    driver.state().claimed = true;
    assert_eq!(export.try_shutdown(PATIENCE), Err(InUse));
    round_trip(&driver);
    driver.state().claimed = false;
    assert_eq!(export.try_shutdown(PATIENCE), Ok(true));
    assert_eq!(export.try_shutdown(PATIENCE), Ok(true));
}

#[test]
fn claim_keeps_others_out_until_it_ends() {
    let (driver, export) = export(ram());
    let claim = export.claim().unwrap();
    // Copied first, because the driver locks its state to complete requests of the export.
    let is_claimed = driver.state().claimed;
    assert!(is_claimed && export.is_connected());
    round_trip(&driver);
    claim.drop_cache().unwrap();
    let (is_claimed, cache_drops) = {
        let state = driver.state();
        (state.claimed, state.cache_drops)
    };
    assert_eq!((is_claimed, cache_drops), (false, 1));
    drop(export.claim().unwrap());
    assert!(!export.is_connected());
}

#[test]
fn claim_of_a_mounted_disk_names_the_mount() {
    let (driver, export) = export(ram());
    driver.state().claimed = true;
    let message = || export.claim().err().unwrap().to_string();
    assert!(message().starts_with("/dev/ublkb7 is mounted or in use"), "{}", message());
    driver.state().mounted_at = Some("/mnt".into());
    assert_eq!(message(), "/dev/ublkb7 is mounted at /mnt");
    driver.state().claimed = false;
}

struct GrowingDevice(Arc<Ram>, AtomicUsize);

impl Device for GrowingDevice {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.1.load(Ordering::SeqCst) as u64, ..self.0.geometry() }
    }
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        self.0.try_io(request, buffer)
    }
    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.0.submit(request, buffer, done);
    }
    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.0.extents(offset, len, row)
    }
}

#[test]
fn resize_updates_block_device_size() {
    let device = Arc::new(GrowingDevice(ram(), AtomicUsize::new(1 << 20)));
    let (driver, export) = export(Arc::clone(&device) as Arc<dyn Device>);
    assert_eq!(driver.state().sectors, 2048);
    assert_eq!(driver.io(READ, 2048, 8, &[]).0, -22);
    device.1.store(2 << 20, Ordering::SeqCst);
    export.resize().unwrap();
    assert_eq!(driver.state().sectors, 4096);
    assert_eq!(driver.io(READ, 2048, 8, &[]).0, 4096);
    export.begin_shutdown();
    assert!(matches!(export.resize(), Err(ResizeError::Gone)));
}

#[test]
fn cut_fails_requests_and_hold_delays_new_ones() {
    let (device, held_requests) = silent();
    let (driver, export) = export(device);
    let cut = driver.submit(0, WRITE, 0, 8, &[1; 4096]);
    wait_until(|| held_requests.lock().unwrap().len() == 1);
    let held = export.hold();
    assert!(!held.wait_idle(Instant::now() + Duration::from_millis(30)), "the device has it");
    assert!(held.fail_requests());
    assert_eq!(driver.wait(0, cut).0, EIO);
    let later = driver.submit(0, READ, 0, 8, &[]);
    // The device's late completion must be ignored.
    let (buffer, done) = held_requests.lock().unwrap().pop().unwrap();
    done.complete(Ok(()), buffer);
    assert!(held.wait_idle(Instant::now() + PATIENCE));
    export.replace(ram(), Arc::default());
    assert!(!driver.is_done(0, later));
    drop(held);
    assert_eq!(driver.wait(0, later), (4096, vec![0; 4096]));
    round_trip(&driver);
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn end_during_hold_fails_held_requests() {
    let (driver, export) = export(ram());
    let held = export.hold();
    let waits = driver.submit(0, READ, 0, 8, &[]);
    assert!(export.shutdown(Duration::from_millis(20)) || driver.state().info.is_none());
    assert_eq!(driver.wait(0, waits).0, EIO);
    drop(held);
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn requests_above_budget_wait() {
    // The smallest budget has 56 MiB for large requests; each queue may have 32 MiB in flight.
    let budget = Budget::new(0);
    let (device, held_requests) = silent();
    let driver = Driver::default();
    let options = Options { depth: 128, queues: 2, ..Options::new(Arc::clone(&budget)) };
    let export = start(&driver, device, options);
    let sectors = MAX_REQUEST_BYTES / 512;
    let tickets: Vec<_> = (0..2)
        .flat_map(|lane| {
            let requests = (0..100).map(|at| (READ, at % 64 * u64::from(sectors), sectors));
            driver.submit_all(lane, requests).into_iter().map(move |ticket| (lane, ticket))
        })
        .collect();
    let mut most = 0;
    let mut answered = 0;
    while answered < tickets.len() {
        wait_until(|| !held_requests.lock().unwrap().is_empty());
        most = most.max(budget.bytes().1);
        for (buffer, done) in std::mem::take(&mut *held_requests.lock().unwrap()) {
            answered += 1;
            done.complete(Ok(()), buffer);
        }
    }
    for (lane, ticket) in tickets {
        assert_eq!(driver.wait(lane, ticket).0, MAX_REQUEST_BYTES as i32);
    }
    assert!(most > 0 && most <= 64 << 20, "{most}");
    assert!(export.shutdown(PATIENCE));
    assert_eq!(budget.bytes().1, 0);
}

#[test]
fn workers_run_large_requests() {
    let driver = Driver::default();
    let _export = start(&driver, ram(), Options { workers: Workers::new(4), ..options() });
    let len = MAX_REQUEST_BYTES as usize;
    for round in 0..4_u8 {
        let data: Vec<_> = (0..8_u8).map(|at| pattern(at ^ round, len)).collect();
        let sector = |at: usize| (at * len / 512) as u64;
        let sectors = (len / 512) as u32;
        let tickets: Vec<_> =
            (0..8).map(|at| driver.submit(0, WRITE, sector(at), sectors, &data[at])).collect();
        for ticket in tickets {
            assert_eq!(driver.wait(0, ticket).0, len as i32);
        }
        let tickets = driver.submit_all(0, (0..8).map(|at| (READ, sector(at), sectors)));
        for (at, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(driver.wait(0, ticket).1, data[at]);
        }
    }
}

#[test]
fn idle_buffer_release_keeps_data() {
    let (driver, _export) = export(ram());
    let data = pattern(3, 256 << 10);
    assert_eq!(driver.io(WRITE, 0, 512, &data).0, data.len() as i32);
    std::thread::sleep(crate::queue::IDLE + Duration::from_millis(300));
    assert_eq!(driver.io(READ, 0, 512, &[]), (data.len() as i32, data));
    round_trip(&driver);
}

#[test]
fn external_stop_ends_export() {
    let (driver, export) = export(ram());
    let header = crate::abi::CtrlCmd::new(ID, 0);
    crate::kernel::Kernel::command(&driver, control::STOP_DEV, header, &mut []).unwrap();
    driver.wait_for(|state| state.info.is_none().then_some(()));
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn abandoned_device_is_removed() {
    let driver = Driver::default();
    let export = start(&driver, ram(), options());
    assert_eq!(stale_devices::remove(driver.clone()).unwrap(), [0; 0], "it is served");
    assert!(export.shutdown(PATIENCE));
    let mut info = crate::abi::DevInfo { dev_id: ID, state: state::DEAD, ..Default::default() };
    driver.state().info = Some(info);
    assert_eq!(stale_devices::remove(driver.clone()).unwrap(), [0; 0], "it is not ours");
    // A process id that no process can have.
    info.ublksrv_flags = mark(0x7fff_fffe);
    driver.state().info = Some(info);
    assert_eq!(stale_devices::remove(driver.clone()).unwrap(), [ID]);
    assert!(driver.state().info.is_none());
    driver.state().refused.insert(control::GET_DEV_INFO2, Errno::IO);
    driver.state().info = Some(info);
    assert!(stale_devices::remove(driver).is_err());
}
