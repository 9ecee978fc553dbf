//! Whole exports over a driver of our own.

mod unprivileged;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use freestone_core::budget::Budget;
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, Failures, Geometry, IoBuf, Op, Request, Result, Tried,
};
use freestone_core::plug::Plug;
use freestone_core::workers::Workers;
use freestone_ram::ram::{Config, Ram};
use rustix::io::Errno;

use crate::abi::{attr, control, feature, op, op_flag, param, state};
use crate::control::mark;
use crate::export::{Export, InUse, MAX_REQUEST_BYTES, Options, ResizeError};
use crate::fake::{Driver, ID, PATIENCE};
use crate::keeper::{START_DEADLINE, StartError};
use crate::ours;

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

/// What a test's device does with a request that it was given.
type Act = Box<dyn Fn(&Arc<Ram>, Request, IoBuf, Completion) + Send + Sync>;

/// A device that does so many bytes at once, and the rest as a test says.
struct Odd {
    ram: Arc<Ram>,
    at_once: u64,
    act: Act,
}

impl Odd {
    fn new(
        at_once: u64,
        act: impl Fn(&Arc<Ram>, Request, IoBuf, Completion) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { ram: ram(), at_once, act: Box::new(act) })
    }

    /// Answers on another thread, soon.
    fn late(at_once: u64) -> Arc<Self> {
        Self::new(at_once, |ram, request, buffer, done| {
            let ram = Arc::clone(ram);
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(5));
                ram.submit(request, buffer, done);
            });
        })
    }
}

impl Device for Odd {
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..self.ram.geometry() }
    }
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        request.check(&self.geometry())?;
        let n = self.at_once;
        if n == 0 || request.len <= n || !request.offset.is_multiple_of(2 * n) {
            return Ok(Tried::WouldBlock);
        }
        let (part, bytes) = (Request { len: n, ..*request }, n as usize);
        let tried = match buffer {
            Buffer::Read(out) => self.ram.try_io(&part, Buffer::Read(&mut out[..bytes]))?,
            Buffer::Write(data) => self.ram.try_io(&part, Buffer::Write(&data[..bytes]))?,
            Buffer::None => self.ram.try_io(&part, Buffer::None)?,
        };
        assert_eq!(tried, Tried::Done);
        Ok(Tried::Partly(n))
    }
    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        (self.act)(&self.ram, request, buffer, done);
    }
    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.ram.extents(offset, len, row)
    }
}

/// What a device was given.
type Kept = Arc<Mutex<Vec<(IoBuf, Completion)>>>;

/// A device that keeps it.
fn silent() -> (Arc<Odd>, Kept) {
    let kept = Kept::default();
    let keep = Arc::clone(&kept);
    (Odd::new(0, move |_, _, buffer, done| keep.lock().unwrap().push((buffer, done))), kept)
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 512) as u8 ^ (at % 251) as u8 ^ seed).collect()
}

fn until(is_so: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "it never is");
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
fn a_disk_is_read_and_written_and_goes() {
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
    assert!(export.end(PATIENCE) && export.end(Duration::ZERO));
    assert!(driver.state().info.is_none() && !export.is_connected());
    let log = driver.state().log.clone();
    assert!(log.ends_with(&[control::STOP_DEV, control::DEL_DEV_ASYNC]));
}

#[test]
fn a_device_that_answers_late_is_waited_for() {
    let (driver, export) = export(Odd::late(0));
    let attrs = driver.state().params.unwrap().basic.attrs;
    assert_eq!(attrs, attr::VOLATILE_CACHE | attr::FUA);
    round_trip(&driver);
    assert!(export.end(PATIENCE));
}

#[test]
fn what_is_done_in_part_is_done_to_the_end() {
    let (driver, _export) = export(Odd::late(4096));
    let data = pattern(9, 64 << 10);
    assert_eq!(driver.io(WRITE, 0, 128, &data).0, 64 << 10);
    assert_eq!(driver.io(READ, 0, 128, &[]), (64 << 10, data));
}

#[test]
fn many_tags_at_once_and_two_queues() {
    let driver = Driver::default();
    let export = start(&driver, Odd::late(0), Options { queues: 9, ..options() });
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
    assert!(export.end(PATIENCE));
}

#[test]
fn what_is_no_request_is_refused_and_the_tag_lives_on() {
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
fn a_read_only_one_takes_no_writes() {
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
fn another_buffer_is_no_data() {
    // With half the length, with all of it but too small for what comes next, and with none.
    for capacity in [2048, 4096, 0] {
        let device = Odd::new(0, move |_, _, _, done| {
            done.complete(Ok(()), IoBuf::zeroed(capacity).unwrap());
        });
        let (driver, export) = export(device);
        assert_eq!(driver.io(READ, 0, 8, &[]).0, EIO, "{capacity}");
        assert_eq!(driver.io(WRITE, 0, 8, &[1; 4096]).0, 4096);
        // The tag has a buffer for the largest request all the same.
        let largest = vec![7; MAX_REQUEST_BYTES as usize];
        assert_eq!(driver.io(WRITE, 0, MAX_REQUEST_BYTES / 512, &largest).0, largest.len() as i32);
        assert!(export.end(PATIENCE));
    }
}

#[test]
fn a_completion_that_is_dropped_and_errors_are_told() {
    let device = Odd::new(0, |_, request, buffer, done| match request.op {
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
fn answers_that_come_together_take_few_system_calls() {
    const REQUESTS: u64 = 4000;
    // It answers all that it has, on another thread, when that is 32.
    let kept: Arc<Mutex<Vec<(Request, IoBuf, Completion)>>> = Arc::default();
    let device = Odd::new(0, move |ram, request, buffer, done| {
        let mut have = kept.lock().unwrap();
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
fn a_device_that_never_answers_holds_nobody_up() {
    let (device, kept) = silent();
    let (driver, export) = export(device);
    let tickets: Vec<_> = (0..3).map(|at| driver.submit(0, READ, at * 8, 8, &[])).collect();
    until(|| kept.lock().unwrap().len() == 3);
    let began = Instant::now();
    assert!(!export.end(Duration::from_millis(50)));
    assert!(began.elapsed() < PATIENCE / 2);
    for ticket in tickets {
        assert_eq!(driver.wait(0, ticket).0, EIO);
    }
    // The kernel has let go of it; the device is let go of when it answers.
    driver.wait_for(|state| state.info.is_none().then_some(()));
    assert!(!export.end(Duration::ZERO));
    for (buffer, done) in std::mem::take(&mut *kept.lock().unwrap()) {
        done.complete(Ok(()), buffer);
    }
    assert!(export.end(PATIENCE));
}

#[test]
fn a_device_that_is_silent_at_the_start_is_given_up() {
    let (device, kept) = silent();
    let driver = Driver::default();
    driver.state().scans = true;
    // The queue itself is there much sooner.
    let (deadline, options) = (Duration::from_secs(2), Options { depth: 1, ..options() });
    let started = Export::with(Arc::new(driver.clone()), deadline, "disk", device, options);
    assert!(matches!(started, Err(StartError::Deadline)));
    driver.wait_for(|state| state.info.is_none().then_some(()));
    assert_eq!(kept.lock().unwrap().len(), 1);
}

#[test]
fn each_step_that_fails_undoes_those_before() {
    let device: Arc<dyn Device> = ram();
    for command in [control::GET_FEATURES, control::ADD_DEV, control::SET_PARAMS, control::START_DEV] {
        let driver = Driver::default();
        driver.state().refused.insert(command, Errno::BUSY);
        let started =
            Export::with(Arc::new(driver.clone()), START_DEADLINE, "disk", Arc::clone(&device), options());
        let Err(StartError::Control(error)) = started else { panic!("{started:?}") };
        assert_eq!(error.errno, Errno::BUSY);
        assert_eq!(driver.has_come(control::DEL_DEV_ASYNC), driver.has_come(control::SET_PARAMS));
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
    assert!(matches!(refuse(control::GET_FEATURES, Errno::OPNOTSUPP), StartError::TooOld));
    assert!(matches!(refuse(control::GET_FEATURES, Errno::PERM), StartError::Denied));
    assert!(matches!(with(&|driver| driver.state().no_node = true), StartError::Node { .. }));
    assert!(matches!(with(&|driver| driver.state().no_fetch = true), StartError::Queue(_)));
    let old = with(&|driver| driver.state().lacks = feature::CMD_IOCTL_ENCODE);
    assert!(matches!(old, StartError::TooOld));
}

#[test]
fn an_older_driver_is_asked_for_no_more_than_it_has() {
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
    assert_eq!(export.try_end(PATIENCE), Err(InUse));
    driver.state().claimed = false;
    assert_eq!(export.try_end(PATIENCE), Ok(true));
    assert!(driver.has_come(control::DEL_DEV) && !driver.has_come(control::TRY_STOP_DEV));
}

#[test]
fn what_is_in_use_stays_unless_it_is_meant() {
    let (driver, export) = export(ram());
    driver.state().claimed = true;
    assert_eq!(export.try_end(PATIENCE), Err(InUse));
    round_trip(&driver);
    driver.state().claimed = false;
    assert_eq!(export.try_end(PATIENCE), Ok(true));
    assert_eq!(export.try_end(PATIENCE), Ok(true));
}

/// A device that grows.
struct Grows(Arc<Ram>, AtomicUsize);

impl Device for Grows {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.1.load(Ordering::SeqCst) as u64, ..self.0.geometry() }
    }
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
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
fn growth_is_told() {
    let device = Arc::new(Grows(ram(), AtomicUsize::new(1 << 20)));
    let (driver, export) = export(Arc::clone(&device) as Arc<dyn Device>);
    assert_eq!(driver.state().sectors, 2048);
    assert_eq!(driver.io(READ, 2048, 8, &[]).0, -22);
    device.1.store(2 << 20, Ordering::SeqCst);
    export.resize().unwrap();
    assert_eq!(driver.state().sectors, 4096);
    assert_eq!(driver.io(READ, 2048, 8, &[]).0, 4096);
    export.begin_to_end();
    assert!(matches!(export.resize(), Err(ResizeError::Gone)));
}

#[test]
fn what_is_held_waits_and_what_is_cut_fails() {
    let (device, kept) = silent();
    let (driver, export) = export(device);
    let cut = driver.submit(0, WRITE, 0, 8, &[1; 4096]);
    until(|| kept.lock().unwrap().len() == 1);
    let held = export.hold();
    assert!(!held.wait_gone(Instant::now() + Duration::from_millis(30)), "the device has it");
    assert!(held.cut());
    assert_eq!(driver.wait(0, cut).0, EIO);
    let later = driver.submit(0, READ, 0, 8, &[]);
    // What the device says now is heard by nobody.
    let (buffer, done) = kept.lock().unwrap().pop().unwrap();
    done.complete(Ok(()), buffer);
    assert!(held.wait_gone(Instant::now() + PATIENCE));
    export.replace(ram(), Arc::default());
    assert!(!driver.is_done(0, later));
    drop(held);
    assert_eq!(driver.wait(0, later), (4096, vec![0; 4096]));
    round_trip(&driver);
    assert!(export.end(PATIENCE));
}

#[test]
fn an_end_while_requests_are_held_does_not_wait_for_that() {
    let (driver, export) = export(ram());
    let held = export.hold();
    let waits = driver.submit(0, READ, 0, 8, &[]);
    assert!(export.end(Duration::from_millis(20)) || driver.state().info.is_none());
    assert_eq!(driver.wait(0, waits).0, EIO);
    drop(held);
    assert!(export.end(PATIENCE));
}

#[test]
fn who_finds_no_bytes_waits_for_them() {
    // 56 MiB are for large ones: a queue may have 32 in flight.
    let budget = Budget::new(0);
    let (device, kept) = silent();
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
        until(|| !kept.lock().unwrap().is_empty());
        most = most.max(budget.bytes().1);
        for (buffer, done) in std::mem::take(&mut *kept.lock().unwrap()) {
            answered += 1;
            done.complete(Ok(()), buffer);
        }
    }
    for (lane, ticket) in tickets {
        assert_eq!(driver.wait(lane, ticket).0, MAX_REQUEST_BYTES as i32);
    }
    assert!(most > 0 && most <= 64 << 20, "{most}");
    assert!(export.end(PATIENCE));
    assert_eq!(budget.bytes().1, 0);
}

#[test]
fn dear_requests_are_done_by_workers() {
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
fn a_pause_loses_nothing() {
    let (driver, _export) = export(ram());
    let data = pattern(3, 256 << 10);
    assert_eq!(driver.io(WRITE, 0, 512, &data).0, data.len() as i32);
    std::thread::sleep(crate::queue::IDLE + Duration::from_millis(300));
    assert_eq!(driver.io(READ, 0, 512, &[]), (data.len() as i32, data));
    round_trip(&driver);
}

#[test]
fn a_device_that_somebody_else_stops_is_let_go_of() {
    let (driver, export) = export(ram());
    let header = crate::abi::CtrlCmd::new(ID, 0);
    crate::kernel::Kernel::command(&driver, control::STOP_DEV, header, &mut []).unwrap();
    driver.wait_for(|state| state.info.is_none().then_some(()));
    assert!(export.end(PATIENCE));
}

#[test]
fn what_was_left_behind_is_removed() {
    let driver = Driver::default();
    let export = start(&driver, ram(), options());
    assert_eq!(ours::remove(driver.clone()).unwrap(), [0; 0], "it is served");
    assert!(export.end(PATIENCE));
    let mut info = crate::abi::DevInfo { dev_id: ID, state: state::DEAD, ..Default::default() };
    driver.state().info = Some(info);
    assert_eq!(ours::remove(driver.clone()).unwrap(), [0; 0], "it is not ours");
    // Beyond what a process can have as its number.
    info.ublksrv_flags = mark(0x7fff_fffe);
    driver.state().info = Some(info);
    assert_eq!(ours::remove(driver.clone()).unwrap(), [ID]);
    assert!(driver.state().info.is_none());
    driver.state().refused.insert(control::GET_DEV_INFO2, Errno::IO);
    driver.state().info = Some(info);
    assert!(ours::remove(driver).is_err());
}
