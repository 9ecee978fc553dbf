//! The contract of a device, as it comes through a virtual machine's queues.
#![expect(unsafe_code)]
// UNSAFETY: looks into the client's buffers, of which the client gives the address.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blkio::{Blkio, Blkioq, Completion as Answered, ReqFlags};
use freestone_core::budget::{self, Budget};
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result, Tried,
};
use freestone_drive::null::{self, Memory};
use freestone_ram::ram::{Config, Ram};
use freestone_testkit::{Deferred, Policy, conformance};
use freestone_vhost_user::{Export, Options};
use tempfile::TempDir;

const SIZE: u64 = 16 << 20;
const QUEUES: usize = 3;
const MAX_IO: usize = 256 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

/// A device that a client without a machine uses through all its queues, one request at a time in
/// each.
struct Through {
    inner: Arc<dyn Device>,
    queues: Vec<Mutex<mpsc::Sender<Job>>>,
    next: AtomicUsize,
    threads: Vec<JoinHandle<()>>,
    _client: Mutex<Blkio>,
    _export: Export,
    _dir: TempDir,
}

struct Job {
    request: Request,
    buffer: IoBuf,
    done: Completion,
}

impl Through {
    fn new(inner: Arc<dyn Device>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v");
        let options = Options::new(Budget::new(budget::DEFAULT_BYTES));
        let export = Export::new(&path, "disk", Arc::clone(&inner), options).unwrap();
        let mut client = Blkio::new("virtio-blk-vhost-user").unwrap();
        client.set_str("path", path.to_str().unwrap()).unwrap();
        client.connect().unwrap();
        assert_eq!(client.get_u64("capacity").unwrap(), inner.geometry().size);
        client.set_i32("num-queues", QUEUES as i32).unwrap();
        let started = client.start().unwrap();
        let memory = client.alloc_mem_region(QUEUES * MAX_IO).unwrap();
        client.map_mem_region(&memory).unwrap();
        let (mut queues, mut threads) = (Vec::new(), Vec::new());
        for (i, queue) in started.queues.into_iter().enumerate() {
            let (sender, jobs) = mpsc::channel();
            queues.push(Mutex::new(sender));
            let buffer = memory.addr + i * MAX_IO;
            threads.push(thread::spawn(move || serve(queue, buffer, &jobs)));
        }
        Self {
            inner,
            queues,
            next: AtomicUsize::new(0),
            threads,
            _client: Mutex::new(client),
            _export: export,
            _dir: dir,
        }
    }
}

impl Drop for Through {
    fn drop(&mut self) {
        self.queues.clear();
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

fn serve(mut queue: Blkioq, buffer: usize, jobs: &mpsc::Receiver<Job>) {
    for Job { request, buffer: mut data, done } in jobs {
        // SAFETY: this part of the client's memory is this queue's, and nothing is in flight.
        let memory = unsafe {
            std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<u8>(buffer), MAX_IO)
        };
        let (at, len, none) = (request.offset, request.len, ReqFlags::empty());
        match request.op {
            Op::Read => queue.read(at, memory.as_mut_ptr(), len as usize, 0, none),
            Op::Write => {
                memory[..data.len()].copy_from_slice(&data);
                queue.write(at, memory.as_ptr(), len as usize, 0, none);
            }
            Op::Flush => queue.flush(0, none),
            Op::Discard => queue.discard(at, len, 0, none),
            Op::WriteZeroes => {
                let keep = if request.flags.contains(Flags::MAY_FREE) { none } else { ReqFlags::NO_UNMAP };
                queue.write_zeroes(at, len, 0, keep);
            }
        }
        let mut outcome = finish(&mut queue);
        if outcome.is_ok() && request.flags.contains(Flags::FUA) {
            // virtio has none.
            queue.flush(0, none);
            outcome = finish(&mut queue);
        }
        if outcome.is_ok() && request.op == Op::Read {
            data.copy_from_slice(&memory[..len as usize]);
        }
        done.complete(outcome, data);
    }
}

fn finish(queue: &mut Blkioq) -> Result<()> {
    let mut answered = [const { MaybeUninit::<Answered>::uninit() }];
    let mut patience = PATIENCE;
    let done = queue.do_io(&mut answered, 1, Some(&mut patience), None).unwrap();
    assert_eq!(done, 1, "no answer");
    // SAFETY: the client has filled in as many as it says.
    let ret = unsafe { answered[0].assume_init_ref() }.ret;
    if ret == 0 { Ok(()) } else { Err(Error::Media) }
}

impl Device for Through {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn try_io(&self, request: &Request, _: Buffer<'_>) -> Result<Tried> {
        request.check(&self.geometry())?;
        Ok(Tried::WouldBlock)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if let Err(error) = request.check(&self.geometry()) {
            return done.complete(Err(error), buffer);
        }
        // Relaxed: any queue will do.
        let queue = &self.queues[self.next.fetch_add(1, Ordering::Relaxed) % QUEUES];
        queue.lock().unwrap().send(Job { request, buffer, done }).unwrap();
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.inner.extents(offset, len, row)
    }
}

fn check(name: &str, make: &dyn Fn() -> Arc<dyn Device>) {
    let options = conformance::Options {
        max_io: MAX_IO as u64,
        rounds: 100,
        thread_rounds: 100,
        // The machine's sectors are smaller than the pages of these devices.
        whole: 512,
        ..conformance::Options::default()
    };
    conformance::check(name, &|| Arc::new(Through::new(make())), options);
}

#[test]
fn ram() {
    check("ram", &|| Arc::new(Ram::new(Config { disksize: SIZE, ..Config::default() }).unwrap()));
}

#[test]
fn memory() {
    check("memory", &|| Arc::new(Memory::new(null::Config::plain(SIZE, 512)).unwrap()));
}

#[test]
fn devices_that_answer_in_another_order() {
    check("deferred", &|| {
        let memory = Memory::new(null::Config::plain(SIZE, 512)).unwrap();
        Arc::new(Deferred::new(Arc::new(memory), Policy::Sometimes(50), 7))
    });
}
