//! Tests that a read of cold pages reads each page of the base once, and neighbouring pages with
//! one request.

use std::sync::{Arc, Mutex, mpsc};

use crate::ram::{Config, Family, ForkConfig, Ram};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{
    self, Blocking, Buffer, Completion, Device, Extent, ExtentKind, Flags, Geometry, IoBuf, Request,
    TryResult,
};

const PAGE: u64 = PAGE_BYTES as u64;
/// Size of the base in bytes: the base ends within a page.
const SIZE: u64 = 64 * PAGE + 512;

/// A base whose reads always wait. Records the requests.
#[derive(Default)]
struct Cold {
    tried: Mutex<usize>,
    asked: Mutex<Vec<(u64, u64)>>,
}

impl Device for Cold {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: SIZE,
            read_only: true,
            ..Ram::new(Config { disksize: PAGE, ..Config::default() }).unwrap().geometry()
        }
    }

    fn try_io(&self, _: &Request, _: Buffer<'_>) -> device::Result<TryResult> {
        *self.tried.lock().unwrap() += 1;
        Ok(TryResult::WouldBlock)
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        self.asked.lock().unwrap().push((request.offset, request.len));
        for (at, byte) in (request.offset..).zip(buffer.iter_mut()) {
            *byte = content(at);
        }
        done.complete(Ok(()), buffer);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> device::Result<u64> {
        row(Extent { offset, len, kind: ExtentKind::Data });
        Ok(len)
    }
}

fn content(at: u64) -> u8 {
    if at < SIZE { (at / 512) as u8 | 1 } else { 0 }
}

fn read(fork: &Ram, offset: u64, len: u64) -> Vec<u8> {
    let (sender, result) = mpsc::channel();
    let done =
        Completion::new(move |outcome: device::Result<()>, buffer| sender.send((outcome, buffer)).unwrap());
    // Fill the buffer: its previous content must not be returned.
    let buffer = IoBuf::copy_of(&vec![0xEE; len as usize]).unwrap();
    fork.submit(Request::read(offset, len), buffer, done);
    let (outcome, buffer) = result.recv().unwrap();
    outcome.unwrap();
    buffer.to_vec()
}

#[test]
fn read_of_cold_pages_submits_one_request() {
    let base = Arc::new(Cold::default());
    let family = Family::new(Config::default()).unwrap();
    let config = ForkConfig { size: Some(80 * PAGE), ..ForkConfig::default() };
    let fork = family.fork(Arc::clone(&base) as _, &config).unwrap();
    let check = |offset: u64, len: u64, own: &[u64], asked: &[(u64, u64)]| {
        base.asked.lock().unwrap().clear();
        *base.tried.lock().unwrap() = 0;
        let bytes = read(&fork, offset, len);
        for (at, byte) in (offset..).zip(bytes) {
            let expected = if own.contains(&(at / PAGE)) { 0x77 } else { content(at) };
            assert_eq!(byte, expected, "at {at} of {len} from {offset}");
        }
        assert_eq!(*base.asked.lock().unwrap(), asked, "{len} from {offset}");
        // `try_io` of the base is called once per request, not again for the rest of the pages.
        assert_eq!(*base.tried.lock().unwrap(), asked.len(), "{len} from {offset}");
    };
    check(3 * PAGE, PAGE, &[], &[(3 * PAGE, PAGE)]);
    // Reads of parts of pages read whole pages of the base.
    check(3 * PAGE + 512, 1024, &[], &[(3 * PAGE, PAGE)]);
    check(PAGE + 512, 4 * PAGE, &[], &[(PAGE, 5 * PAGE)]);
    // Bytes beyond the base's end are not requested, and read as zeroes.
    check(62 * PAGE, 10 * PAGE, &[], &[(62 * PAGE, 2 * PAGE + 512)]);
    fork.write_at(8 * PAGE, &[0x77; PAGE_BYTES], Flags::empty()).unwrap();
    check(6 * PAGE, 5 * PAGE, &[8], &[(6 * PAGE, 2 * PAGE), (9 * PAGE, 2 * PAGE)]);
    check(8 * PAGE, 2 * PAGE, &[8], &[(9 * PAGE, PAGE)]);
}
