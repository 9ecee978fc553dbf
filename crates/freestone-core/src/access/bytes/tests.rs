use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use super::Bytes;
use crate::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Op, Request, Result,
    TryResult,
};
use crate::sync::{Arc, Mutex, thread};
use crate::work_queue::Task;

const BLOCK: usize = 512;

/// A memory device that executes all requests inline, or if `slow` is set all on new threads.
struct Memory {
    data: Mutex<Vec<u8>>,
    padding: u32,
    slow: AtomicBool,
    /// All requests that were started, in order.
    log: Mutex<Vec<Request>>,
    /// If set, submitted requests are held in this list.
    held: Mutex<Option<Vec<Task>>>,
}

impl Memory {
    fn new(blocks: usize) -> Arc<Self> {
        Self::padded(blocks, 0)
    }

    fn padded(blocks: usize, padding: u32) -> Arc<Self> {
        Arc::new(Self {
            data: Mutex::new(vec![0xEE; blocks * BLOCK]),
            padding,
            slow: AtomicBool::new(false),
            log: Mutex::default(),
            held: Mutex::new(None),
        })
    }

    fn slow(self: &Arc<Self>) -> Arc<Self> {
        self.slow.store(true, Ordering::SeqCst);
        Arc::clone(self)
    }

    fn execute(&self, request: &Request, buffer: Buffer<'_>) {
        let range = request.offset as usize..(request.offset + request.len) as usize;
        let mut data = self.data.lock();
        match buffer {
            Buffer::Read(out) => out.copy_from_slice(&data[range]),
            Buffer::Write(from) => data[range].copy_from_slice(from),
            Buffer::None => data[range].fill(0),
        }
    }
}

/// The device interface to the test's memory.
struct MemoryDevice(Arc<Memory>);

impl Device for MemoryDevice {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.0.data.lock().len() as u64,
            padding: self.0.padding,
            logical_block: BLOCK as u32,
            physical_block: 4096,
            io_min: 4096,
            io_opt: 4096,
            max_request: 0,
            discard_granularity: BLOCK as u32,
            fast_zeroes: true,
            volatile_cache: false,
            volatile_media: true,
            rotational: false,
            read_only: false,
            ignores_data: false,
            zones: None,
        }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        if self.0.slow.load(Ordering::SeqCst) {
            return Ok(TryResult::WouldBlock);
        }
        self.0.log.lock().push(*request);
        self.0.execute(request, buffer);
        Ok(TryResult::Done)
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        if let Err(error) = request.check(&self.geometry()) {
            return done.complete(Err(error), buffer);
        }
        self.0.log.lock().push(request);
        let memory = Arc::clone(&self.0);
        let work = move || {
            memory.execute(&request, Buffer::rest(request.op, &mut buffer, 0));
            done.complete(Ok(()), buffer);
        };
        match &mut *self.0.held.lock() {
            Some(held) => held.push(Box::new(work)),
            None => drop(thread::spawn(work)),
        }
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        assert_eq!((offset | len) % BLOCK as u64, 0, "the range consists of whole blocks");
        for at in (offset..offset + len).step_by(BLOCK) {
            let kind =
                if (at / BLOCK as u64).is_multiple_of(2) { ExtentKind::Data } else { ExtentKind::Hole };
            if !row(Extent { offset: at, len: BLOCK as u64, kind }) {
                return Ok(at + BLOCK as u64 - offset);
            }
        }
        Ok(len)
    }
}

fn user(memory: &Arc<Memory>) -> Bytes {
    Bytes::new(Arc::new(MemoryDevice(Arc::clone(memory))))
}

/// Starts a request as a connection does: tries the request, and submits the rest.
fn begin(bytes: &mut Bytes, request: Request, data: &[u8]) -> mpsc::Receiver<Result<IoBuf>> {
    let (tx, rx) = mpsc::channel();
    let mut out = vec![0; if request.op == Op::Read { request.len as usize } else { 0 }];
    let mut rest = request;
    loop {
        let at = (request.len - rest.len) as usize;
        let buffer = match request.op {
            Op::Read => Buffer::Read(&mut out[at..]),
            Op::Write => Buffer::Write(&data[at..]),
            _ => Buffer::None,
        };
        match bytes.try_io(&rest, buffer) {
            Ok(TryResult::Done) => tx.send(IoBuf::copy_of(&out)).unwrap(),
            Ok(TryResult::Partly(n)) => {
                rest = rest.rest(n);
                continue;
            }
            Ok(TryResult::WouldBlock) => {
                let buffer = match request.op {
                    Op::Read => IoBuf::zeroed(request.len as usize),
                    Op::Write => IoBuf::copy_of(&data[at..]),
                    _ => Ok(IoBuf::empty()),
                };
                let request = if request.op == Op::Read { request } else { rest };
                let done = Completion::new(move |outcome, buffer| drop(tx.send(outcome.map(|()| buffer))));
                bytes.submit(request, buffer.unwrap(), done);
            }
            Err(error) => tx.send(Err(error)).unwrap(),
        }
        return rx;
    }
}

fn run(bytes: &mut Bytes, request: Request, data: &[u8]) -> Result<IoBuf> {
    begin(bytes, request, data).recv_timeout(Duration::from_secs(60)).expect("a completion")
}

#[test]
fn random_byte_ranges_match_model() {
    for slow in [false, true] {
        let memory = Memory::padded(40, 100);
        memory.slow.store(slow, Ordering::SeqCst);
        let mut bytes = user(&memory);
        let size = 40 * BLOCK - 100;
        assert_eq!((bytes.geometry().size, bytes.geometry().logical_block), (size as u64, 1));
        let mut model = vec![0xEE; size];
        let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
        let mut below = |most: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as usize % most
        };
        for round in 0..2000_u32 {
            let offset = below(size);
            let len = 1 + below((size - offset).min(if round % 4 == 0 { 9000 } else { 700 }));
            let range = offset..offset + len;
            let request = Request::new(
                [Op::Read, Op::Write, Op::Write, Op::WriteZeroes, Op::Discard][below(5)],
                offset as u64,
                len as u64,
            );
            let data: Vec<u8> = (0..len).map(|i| (round as usize * 31 + i) as u8).collect();
            let got = run(&mut bytes, request, if request.op == Op::Write { &data } else { &[] }).unwrap();
            match request.op {
                Op::Read => assert!(got[..] == model[range], "{request:?}"),
                Op::Write => model[range].copy_from_slice(&data),
                Op::WriteZeroes => model[range].fill(0),
                // A discard skips the partial blocks at both ends of its range.
                _ => {
                    let (from, to) = (offset.next_multiple_of(BLOCK), (offset + len) / BLOCK * BLOCK);
                    if from < to {
                        model[from..to].fill(0);
                    }
                }
            }
        }
        let all = run(&mut bytes, Request::read(0, size as u64), &[]).unwrap();
        assert!(all[..] == model);
        assert!(memory.data.lock()[size..] == [0xEE; 100], "the padding is unchanged");
        for (offset, len, error) in [(0, 0, Error::Misaligned), (1, size as u64, Error::OutOfRange)] {
            assert_eq!(run(&mut bytes, Request::read(offset, len), &[]).unwrap_err(), error);
            let (tx, rx) = mpsc::channel();
            let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
            bytes.submit(Request::new(Op::WriteZeroes, offset, len), IoBuf::empty(), done);
            assert_eq!(rx.recv().unwrap(), Err(error));
        }
    }
}

/// Users write neighbouring bytes of a block. Other users write whole blocks that overlap a partial write. No
/// byte is lost.
#[test]
fn concurrent_neighbouring_writes_lose_no_byte() {
    for slow in [false, true] {
        let memory = if slow { Memory::new(4).slow() } else { Memory::new(4) };
        let device: Arc<dyn Device> = Arc::new(MemoryDevice(Arc::clone(&memory)));
        let rounds = if slow { 300 } else { 5000_u32 };
        thread::scope(|scope| {
            for at in 0..3 {
                let mut bytes = Bytes::new(Arc::clone(&device));
                scope.spawn(move || {
                    for round in 0..rounds {
                        let wanted = [round as u8; 1];
                        run(&mut bytes, Request::write(100 + at, 1), &wanted).unwrap();
                        let found = run(&mut bytes, Request::read(100 + at, 1), &[]).unwrap();
                        assert_eq!(found[..], wanted, "byte {at} in round {round}");
                    }
                });
            }
            let mut bytes = Bytes::new(Arc::clone(&device));
            scope.spawn(move || {
                for round in 0..rounds {
                    run(&mut bytes, Request::write(700, 1), &[round as u8]).unwrap();
                }
            });
            let mut bytes = Bytes::new(Arc::clone(&device));
            scope.spawn(move || {
                for round in 0..rounds {
                    let wanted = [round as u8; 2 * BLOCK];
                    run(&mut bytes, Request::write(BLOCK as u64, wanted.len() as u64), &wanted).unwrap();
                    let mut found = run(&mut bytes, Request::read(512, 1024), &[]).unwrap();
                    found[700 - 512] = round as u8;
                    assert!(found[..] == wanted, "whole blocks in round {round}");
                }
            });
        });
        let data = memory.data.lock();
        assert!(data[..100].iter().chain(&data[103..512]).all(|byte| *byte == 0xEE));
    }
}

#[test]
fn hung_write_blocks_only_its_own_blocks() {
    let memory = Memory::new(8).slow();
    let device: Arc<dyn Device> = Arc::new(MemoryDevice(Arc::clone(&memory)));
    let (mut first, mut second) = (Bytes::new(Arc::clone(&device)), Bytes::new(device));
    *memory.held.lock() = Some(Vec::new());
    let hangs = begin(&mut first, Request::write(0, 512), &[1; 512]);
    let hung = memory.held.lock().take().unwrap();
    assert_eq!(hung.len(), 1);
    let waits = begin(&mut second, Request::write(5, 2), &[2; 2]);
    let behind = begin(&mut first, Request::write(0, 512), &[3; 512]);
    run(&mut second, Request::write(600, 1), &[4]).unwrap();
    assert!(waits.try_recv().is_err() && behind.try_recv().is_err());
    for work in hung {
        work();
    }
    for answer in [hangs, waits, behind] {
        answer.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    }
    // The writes ran in order of arrival, so the last one determines the content.
    assert_eq!(memory.data.lock()[..8], [3; 8]);
}

/// A [`Bytes`] is dropped while its request waits for the device, as after a simulated power loss: the
/// request's next piece must not reach the device.
#[test]
fn dropped_user_starts_no_further_piece() {
    let memory = Memory::new(8).slow();
    *memory.held.lock() = Some(Vec::new());
    let mut bytes = user(&memory);
    let part = begin(&mut bytes, Request::write(10, 1030), &[1; 1030]);
    let whole = begin(&mut bytes, Request::write(0, 512), &[2; 512]);
    let read = memory.held.lock().take().unwrap();
    assert_eq!(*memory.log.lock(), [Request::read(0, 512)]);
    drop(bytes);
    for work in read {
        work();
    }
    assert_eq!(part.recv().unwrap().unwrap_err(), Error::Gone);
    assert_eq!(whole.recv().unwrap().unwrap_err(), Error::Gone);
    assert_eq!(memory.log.lock().len(), 1);
    assert!(memory.data.lock().iter().all(|byte| *byte == 0xEE));
}

#[test]
fn fua_is_kept_and_extents_are_cut_to_range() {
    let memory = Memory::new(8);
    let mut bytes = user(&memory);
    run(&mut bytes, Request::write(1, 1024).with(Flags::FUA), &[1; 1024]).unwrap();
    let writes: Vec<_> = memory.log.lock().iter().filter(|r| r.op == Op::Write).copied().collect();
    let fua = |offset, len| Request::write(offset, len).with(Flags::FUA);
    assert_eq!(writes, [fua(0, 512), fua(512, 512), fua(1024, 512)]);
    let zeroes = Request::new(Op::WriteZeroes, 1, 600).with(Flags::MAY_FREE);
    memory.log.lock().clear();
    run(&mut bytes, zeroes, &[]).unwrap();
    assert!(memory.log.lock().iter().all(|r| r.op != Op::WriteZeroes), "the range has no whole block");

    let mut rows = Vec::new();
    let described = bytes.extents(500, 600, &mut |row| {
        rows.push((row.offset, row.len, row.kind));
        true
    });
    assert_eq!(described, Ok(600));
    let (data, hole) = (ExtentKind::Data, ExtentKind::Hole);
    assert_eq!(rows, [(500, 12, data), (512, 512, hole), (1024, 76, data)]);
    assert_eq!(bytes.extents(500, 600, &mut |_| false), Ok(12));
    assert_eq!(bytes.extents(4000, 97, &mut |_| true), Err(Error::OutOfRange));
}
