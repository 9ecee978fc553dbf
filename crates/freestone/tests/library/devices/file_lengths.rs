//! Files that end inside a block, and empty files.

use std::fs;
use std::sync::Arc;

use freestone::device::{Blocking as _, Device as _, Error, ExtentKind, Flags};
use freestone::file::{Config, Direct, Engine, File, SetupError};
use freestone_testkit::conformance::{self, Options};

fn padded(path: &std::path::Path, engine: Engine) -> Config {
    Config { padded: true, engine, direct: Direct::Off, ..Config::new(path) }
}

#[test]
fn writes_end_at_the_end_of_the_file() {
    for engine in [Engine::IoUring, Engine::Threads] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("odd.img");
        let mut wanted: Vec<u8> = (0..5000_u32).map(|i| (i % 251) as u8 + 1).collect();
        fs::write(&path, &wanted).unwrap();
        let file = File::open(&padded(&path, engine)).unwrap();
        let geometry = file.geometry();
        assert_eq!((geometry.size, geometry.padding, geometry.logical_block), (5120, 120, 512));
        let mut found = vec![9; 5120];
        file.read_at(0, &mut found).unwrap();
        assert!(found[..5000] == wanted && found[5000..] == [0; 120]);
        file.write_at(4608, &[7; 512], Flags::FUA).unwrap();
        file.write_zeroes(4608, 512, Flags::empty()).unwrap();
        file.write_at(4096, &[8; 512], Flags::empty()).unwrap();
        file.flush().unwrap();
        wanted[4096..4608].fill(8);
        wanted[4608..].fill(0);
        assert!(fs::read(&path).unwrap() == wanted);
        let mut described = 0;
        file.extents(0, 5120, &mut |row| {
            assert!(row.len % 512 == 0 && row.offset == described);
            described += row.len;
            true
        })
        .unwrap();
        assert_eq!(described, 5120);
        // The file grows, first within its last block and then beyond it.
        for len in [5100, 6000_u64] {
            let grown = fs::File::options().write(true).open(&path).unwrap();
            grown.set_len(len).unwrap();
            let size = len.next_multiple_of(512);
            assert_eq!(file.refresh(), Ok(size));
            assert_eq!(u64::from(file.geometry().padding), size - len);
        }
        file.write_at(5632, &[3; 512], Flags::empty()).unwrap();
        assert_eq!(fs::read(&path).unwrap()[5632..], [3; 368]);
        // The device reports an error and does not extend a truncated file again.
        fs::File::options().write(true).open(&path).unwrap().set_len(5700).unwrap();
        assert_eq!(file.write_at(5632, &[4; 512], Flags::empty()), Err(Error::Media));
        assert_eq!(fs::metadata(&path).unwrap().len(), 5700);
    }
}

#[test]
fn empty_file_is_a_device_of_size_zero() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("empty.img");
    fs::write(&path, b"").unwrap();
    let file = File::open(&padded(&path, Engine::Auto)).unwrap();
    assert_eq!((file.geometry().size, file.geometry().padding), (0, 0));
    assert_eq!(file.read_at(0, &mut [0; 512]), Err(Error::OutOfRange));
    file.flush().unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(1).unwrap();
    let mut block = [9; 512];
    file.read_at(0, &mut block).unwrap();
    assert_eq!(block, [0; 512]);
    assert_eq!(file.extents(0, 512, &mut |row| row.kind == ExtentKind::Data), Ok(512));
    drop(file);
    // Without padding, such a file is refused, because direct I/O and devices that store data need
    // whole blocks.
    for config in [Config { direct: Direct::On, ..padded(&path, Engine::Auto) }, Config::new(&path)] {
        assert!(matches!(File::open(&config), Err(SetupError::Size { .. } | SetupError::Direct { .. })));
    }
}

#[test]
fn padded_file_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let count = std::cell::Cell::new(0);
    let make = || {
        count.set(count.get() + 1);
        let path = dir.path().join(count.get().to_string());
        let config = Config { size: Some(2 << 20), ..padded(&path, Engine::Auto) };
        Arc::new(File::open(&config).unwrap()) as Arc<dyn freestone::device::Device>
    };
    let options =
        Options { rounds: 60, window: 1 << 20, max_io: 512 << 10, thread_rounds: 80, ..Options::default() };
    conformance::check("a file of any length", &make, options);
}
