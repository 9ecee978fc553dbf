//! Files that other programs change while the file device uses them: truncated, grown, full, or
//! punched. Also, devices that are dropped under load.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use freestone::device::{
    Blocking, Buffer, Completion, Device, Error, ExtentKind, Flags, IoBuf, Op, Request, TryResult,
};
use freestone::file::{Config, Direct, Engine, File};
use freestone_testkit::effort;

const SIZE: u64 = 1 << 20;
const MODES: [(Direct, Engine); 4] = [
    (Direct::Off, Engine::IoUring),
    (Direct::On, Engine::IoUring),
    (Direct::Off, Engine::Threads),
    (Direct::On, Engine::Threads),
];

fn fresh(dir: &Path, (direct, engine): (Direct, Engine)) -> (File, PathBuf) {
    let path = dir.join(format!("{direct:?}-{engine:?}.img"));
    let config = Config { size: Some(SIZE), direct, engine, ..Config::new(&path) };
    (File::open(&config).unwrap(), path)
}

fn set_len(path: &Path, len: u64) {
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
}

#[test]
fn truncated_file_loses_only_its_end() {
    let dir = tempfile::tempdir().unwrap();
    for mode in MODES {
        let (file, path) = fresh(dir.path(), mode);
        let block = u64::from(file.geometry().logical_block);
        file.write_at(0, &vec![7; SIZE as usize], Flags::empty()).unwrap();
        // The file now ends in the middle of a block.
        let real = SIZE / 2 + 100;
        set_len(&path, real);
        assert_eq!(file.refresh(), Ok(SIZE), "a device never shrinks");

        let mut one = vec![0; block as usize];
        let mut all = vec![0; SIZE as usize];
        for at in [SIZE - block, SIZE / 2 + block, SIZE / 2] {
            assert_eq!(file.read_at(at, &mut one), Err(Error::Media), "{mode:?} at {at}");
            assert_eq!(file.write_at(at, &one, Flags::empty()), Err(Error::Media));
            assert_eq!(file.write_at(at, &one, Flags::FUA), Err(Error::Media));
            assert_eq!(file.write_zeroes(at, block, Flags::empty()), Err(Error::Media));
            assert_eq!(file.write_zeroes(at, block, Flags::MAY_FREE), Err(Error::Media));
            assert_eq!(file.discard(at, block), Err(Error::Media));
        }
        assert_eq!(file.read_at(0, &mut all), Err(Error::Media));
        assert_eq!(file.write_at(0, &all, Flags::empty()), Err(Error::Media));
        assert_eq!(file.extents(SIZE - block, block, &mut |_| true), Err(Error::Media));
        assert_eq!(file.extents(SIZE, block, &mut |_| true), Err(Error::OutOfRange));
        assert_eq!(fs::metadata(&path).unwrap().len(), real, "nothing may extend the file again");

        // Blocks before the new end of the file stay usable.
        file.read_at(SIZE / 2 - block, &mut one).unwrap();
        assert_eq!(one, vec![7; block as usize]);
        file.write_at(0, &vec![9; block as usize], Flags::FUA).unwrap();
        file.flush().unwrap();
        file.read_at(0, &mut one).unwrap();
        assert_eq!(one, vec![9; block as usize]);
        assert!(file.extents(0, SIZE, &mut |_| true).unwrap() <= real);

        set_len(&path, SIZE);
        file.read_at(SIZE - block, &mut one).unwrap();
        assert_eq!(one, vec![0; block as usize]);
        file.write_at(SIZE - block, &vec![5; block as usize], Flags::empty()).unwrap();

        set_len(&path, 0);
        assert_eq!(file.read_at(0, &mut one), Err(Error::Media));
        assert_eq!(file.write_at(0, &one, Flags::empty()), Err(Error::Media));
        file.flush().unwrap();
    }
}

#[test]
fn grown_file_is_detected() {
    let dir = tempfile::tempdir().unwrap();
    for mode in MODES {
        let (file, path) = fresh(dir.path(), mode);
        let mut one = vec![1; 4096];
        assert_eq!(file.read_at(SIZE, &mut one), Err(Error::OutOfRange));

        // The request that needs the new size detects it. A partial block at the end of the file
        // does not count.
        set_len(&path, 2 * SIZE + 100);
        assert_eq!(file.geometry().size, SIZE);
        file.read_at(SIZE, &mut one).unwrap();
        assert_eq!((one, file.geometry().size), (vec![0; 4096], 2 * SIZE));

        set_len(&path, 3 * SIZE);
        file.write_at(3 * SIZE - 4096, &[3; 4096], Flags::empty()).unwrap();
        assert_eq!(file.geometry().size, 3 * SIZE);

        // Extents, a write below the old end, a flush, and `refresh` also detect a grown file.
        set_len(&path, 4 * SIZE);
        file.extents(3 * SIZE, SIZE, &mut |_| true).unwrap();
        assert_eq!(file.geometry().size, 4 * SIZE);
        set_len(&path, 5 * SIZE);
        file.write_at(0, &[3; 4096], Flags::empty()).unwrap();
        assert_eq!(file.geometry().size, 5 * SIZE);
        set_len(&path, 6 * SIZE);
        file.flush().unwrap();
        assert_eq!(file.geometry().size, 6 * SIZE);
        set_len(&path, 7 * SIZE);
        assert_eq!(file.refresh(), Ok(7 * SIZE));
    }
}

#[test]
fn discard_and_zeroes_free_and_keep_space() {
    let dir = tempfile::tempdir().unwrap();
    for mode in MODES {
        let (file, path) = fresh(dir.path(), mode);
        let used = || {
            file.flush().unwrap();
            fs::metadata(&path).unwrap().blocks() * 512
        };
        let data = vec![7; SIZE as usize];
        let write = || file.write_at(0, &data, Flags::empty()).unwrap();
        write();
        assert!(used() >= SIZE, "{mode:?}: {} bytes used", used());
        file.discard(0, SIZE / 2).unwrap();
        assert!(used() <= SIZE / 2 + 65536, "{mode:?}: {} bytes used after a discard of half", used());

        let mut rows = Vec::new();
        let described = file.extents(0, SIZE, &mut |row| {
            rows.push((row.kind, row.offset, row.len));
            true
        });
        assert_eq!(described, Ok(SIZE));
        assert_eq!(rows, [(ExtentKind::Hole, 0, SIZE / 2), (ExtentKind::Data, SIZE / 2, SIZE / 2)]);

        write();
        file.write_zeroes(0, SIZE, Flags::MAY_FREE | Flags::FUA).unwrap();
        assert!(used() <= 65536, "{mode:?}: {} bytes used after zeroing that may free", used());
        write();
        file.write_zeroes(0, SIZE, Flags::empty()).unwrap();
        assert!(used() >= SIZE, "{mode:?}: {} bytes used after zeroing that may not free", used());
        let mut found = vec![1; SIZE as usize];
        file.read_at(0, &mut found).unwrap();
        assert!(found.iter().all(|&b| b == 0));
    }
}

/// A tmpfs with a size limit, unmounted when dropped.
struct Mount(tempfile::TempDir);

impl Mount {
    fn new(size: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new(freestone_testkit::tools::find("mount"));
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(dir.path());
        match mount.output() {
            Ok(out) if out.status.success() => Some(Self(dir)),
            failed => {
                let ci = std::env::var_os("CI").is_some_and(|ci| ci == "true");
                assert!(!ci, "CI must be able to mount a tmpfs: {failed:?}");
                println!("cannot mount a tmpfs, a full file system is not tested here: {failed:?}");
                None
            }
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ =
            Command::new(freestone_testkit::tools::find("umount")).arg("--lazy").arg(self.0.path()).status();
    }
}

#[test]
fn full_file_system_fails_with_no_space() {
    let Some(mount) = Mount::new("256k") else { return };
    for engine in [Engine::IoUring, Engine::Threads] {
        let path = mount.0.path().join("file.img");
        let config = Config { size: Some(SIZE), engine, ..Config::new(&path) };
        let file = File::open(&config).unwrap();
        file.write_at(0, &[1; 4096], Flags::empty()).unwrap();
        assert_eq!(file.write_at(0, &vec![2; SIZE as usize], Flags::empty()), Err(Error::NoSpace));
        // tmpfs cannot zero a range without freeing it. So write zeroes becomes a write of zeroes,
        // which needs space as well.
        assert_eq!(file.write_zeroes(0, SIZE, Flags::empty()), Err(Error::NoSpace));
        // Each block has its old or its new content, and a discard frees space.
        let mut block = [0; 512];
        file.read_at(0, &mut block).unwrap();
        assert!([0, 1, 2].iter().any(|&b| block == [b; 512]));
        file.discard(0, SIZE).unwrap();
        file.write_at(SIZE - 4096, &[3; 4096], Flags::empty()).unwrap();
        file.read_at(SIZE - 512, &mut block).unwrap();
        assert_eq!(block, [3; 512]);
        drop(file);
        fs::remove_file(path).unwrap();
    }
}

#[test]
fn only_cached_reads_complete_inline() {
    let dir = tempfile::tempdir().unwrap();
    let mut out = vec![0; 8192];
    let (file, _) = fresh(dir.path(), (Direct::Off, Engine::IoUring));
    file.write_at(0, &[4; 8192], Flags::empty()).unwrap();
    assert_eq!(file.try_io(&Request::read(0, 8192), Buffer::Read(&mut out)), Ok(TryResult::Done));
    assert_eq!(out, [4; 8192]);
    assert_eq!(file.try_io(&Request::write(0, 8192), Buffer::Write(&out)), Ok(TryResult::WouldBlock));
    assert_eq!(file.try_io(&Request::flush(), Buffer::None), Ok(TryResult::WouldBlock));

    // A long inline read returns after a part, so that the caller can serve other requests.
    file.write_at(0, &vec![4; SIZE as usize], Flags::empty()).unwrap();
    let mut out = vec![0; SIZE as usize];
    let tried = file.try_io(&Request::read(0, SIZE), Buffer::Read(&mut out));
    assert!(matches!(tried, Ok(TryResult::Partly(n)) if n < SIZE), "{tried:?}");

    let (file, _) = fresh(dir.path(), (Direct::On, Engine::IoUring));
    assert_eq!(
        file.try_io(&Request::read(0, 8192), Buffer::Read(&mut out[..8192])),
        Ok(TryResult::WouldBlock)
    );
}

/// Concurrent reads and writes of the same range. No block may be torn.
#[test]
fn overlapping_reads_and_writes_are_never_torn() {
    const LEN: usize = 64 << 10;
    let dir = tempfile::tempdir().unwrap();
    // The data is allocated in advance, so that the threads do little besides I/O.
    let marks = [1_u8, 2, 3, 4];
    let data = marks.map(|mark| vec![mark; LEN]);
    for mode in MODES {
        let (file, _) = fresh(dir.path(), mode);
        file.write_at(0, &data[0], Flags::empty()).unwrap();
        let until = Instant::now() + Duration::from_millis(effort(100, 300));
        std::thread::scope(|scope| {
            for mine in data.chunks(2) {
                let file = &file;
                scope.spawn(move || {
                    for data in mine.iter().cycle().take_while(|_| Instant::now() < until) {
                        file.write_at(0, data, Flags::empty()).unwrap();
                    }
                });
            }
            let mut out = vec![0; LEN];
            while Instant::now() < until {
                file.read_at(0, &mut out).unwrap();
                let size = file.geometry().logical_block as usize;
                for (i, block) in out.chunks(size).enumerate() {
                    let whole = data.iter().any(|data| block == &data[..size]);
                    assert!(whole, "{mode:?}: block {i} is torn");
                }
            }
        });
    }
}

#[test]
fn requests_in_flight_complete_after_drop() {
    let dir = tempfile::tempdir().unwrap();
    for mode in MODES {
        let (file, path) = fresh(dir.path(), mode);
        let (tx, rx) = mpsc::channel();
        // Submits more requests than the ring accepts at once. Many of them overlap.
        let count = 1000;
        for i in 0..count {
            let request = Request::write(i % 50 * 4096, 4096);
            let data = IoBuf::copy_of(&[i as u8; 4096]).unwrap();
            let tx = tx.clone();
            file.submit(request, data, Completion::new(move |outcome, _| tx.send((i, outcome)).unwrap()));
        }
        drop(file);
        let mut order = vec![None; 50];
        for _ in 0..count {
            let (i, outcome) = rx.try_recv().expect("answered before the drop returned");
            assert_eq!(outcome, Ok(()));
            // With io_uring, overlapping requests complete in the order of submission. Worker
            // threads may report completions in another order.
            let before = order[i as usize % 50].replace(i);
            assert!(mode.1 == Engine::Threads || before < Some(i));
        }
        let content = fs::read(path).unwrap();
        for (block, bytes) in content.chunks(4096).take(50).enumerate() {
            assert_eq!(bytes, [(count - 50 + block as u64) as u8; 4096]);
        }
    }
}

#[test]
fn last_reference_may_drop_in_a_completion() {
    let dir = tempfile::tempdir().unwrap();
    for mode in MODES {
        let (file, path) = fresh(dir.path(), mode);
        let file = Arc::new(file);
        let (tx, rx) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        let last = Arc::clone(&file);
        let done = Completion::new(move |outcome, _| {
            wait.recv().unwrap();
            drop(last);
            tx.send(outcome).unwrap();
        });
        file.submit(Request::read(0, 4096), IoBuf::zeroed(4096).unwrap(), done);
        drop(file);
        go.send(()).unwrap();
        assert_eq!(rx.recv_timeout(Duration::from_secs(20)), Ok(Ok(())));
        // The device's thread ends by itself, because a completion dropped the last reference, and
        // releases the lock.
        let opened = (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(2));
            File::open(&Config::new(&path)).is_ok()
        });
        assert!(opened, "{mode:?}: the device did not end");
    }
}

#[test]
fn panicking_completion_affects_no_other_request() {
    let dir = tempfile::tempdir().unwrap();
    for mode in MODES {
        let (file, _) = fresh(dir.path(), mode);
        for _ in 0..8 {
            let done = Completion::new(|_, _| panic!("on purpose"));
            file.submit(Request::new(Op::Flush, 0, 0), IoBuf::empty(), done);
        }
        file.write_at(0, &[1; 4096], Flags::FUA).unwrap();
    }
}

#[test]
fn buffer_of_wrong_length_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (file, _) = fresh(dir.path(), MODES[0]);
    for (request, len) in [(Request::read(0, 8192), 4096), (Request::write(0, 4096), 0)] {
        let (tx, rx) = mpsc::channel();
        let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
        file.submit(request, IoBuf::zeroed(len).unwrap(), done);
        assert_eq!(rx.recv(), Ok(Err(Error::Misaligned)));
    }
}
