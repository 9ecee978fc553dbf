//! Damaged qcow2 images cause an error or wrong data, but never a panic, a hang or a lost request.

use std::fs;
use std::path::Path;

use freestone::device::{Device, Error};
use freestone::qcow2::{Config, Image};
use freestone_testkit::{Rng, effort};

use super::tools::{Dir, content, read, submit};

const SIZE: usize = 1 << 20;
/// Size in bytes of disks that are read thousands of times.
const SMALL: usize = 192 << 10;

/// Opens an image and reads all of it, inline and submitted, and reads its extents. Returns true if
/// the image opened.
fn read_damaged(path: &Path, what: &str) -> bool {
    let image = match Image::open(&Config::new(path)) {
        Ok(image) => image,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    let size = image.geometry().size;
    // A damaged size may be huge, so the test reads only the start and the end.
    let part = size.min(SMALL as u64) / 512 * 512;
    for offset in [0, size - part] {
        let mut completions = Vec::new();
        for at in (0..part).step_by(64 << 10) {
            let len = (part - at).min(64 << 10);
            completions.push(submit(&image, offset + at, len));
        }
        for completion in completions {
            let completion = completion.recv_timeout(std::time::Duration::from_secs(60)).expect(what);
            // A dropped request would complete with `Gone`. A panic in the reader drops requests.
            assert!(matches!(&completion, Ok(_) | Err(Error::Media)), "{what}: {:?}", completion.err());
        }
        let tried = read(&image, offset, part.min(128 << 10), true);
        assert!(matches!(&tried, Ok(_) | Err(Error::Media)), "{what}: {:?}", tried.err());
        let mut described = 0;
        while described < part {
            match image.extents(offset + described, part - described, &mut |_| true) {
                Ok(0) => panic!("{what}: nothing described"),
                Ok(n) => described += n,
                Err(Error::Media) => break,
                Err(error) => panic!("{what}: {error}"),
            }
        }
    }
    true
}

fn images(dir: &Dir) -> Vec<String> {
    fs::write(dir.path("raw"), content(SMALL, 1)).unwrap();
    let kinds = [
        "-o cluster_size=512",
        "-c -o cluster_size=4k",
        "-c -o compression_type=zstd,cluster_size=16k",
        "-c -o compat=0.10",
    ];
    let mut names = Vec::new();
    for (i, kind) in kinds.iter().enumerate() {
        names.push(format!("{i}.qcow2"));
        dir.img(&format!("convert -f raw -O qcow2 {kind} raw {i}.qcow2"));
    }
    dir.img("create -q -f qcow2 -b 1.qcow2 -F qcow2 over.qcow2");
    dir.io("over.qcow2", &["write -P 3 20k 60k", "write -z 120k 30k"]);
    dir.img("create -q -f qcow2 -o extended_l2=on,cluster_size=16k -b 1.qcow2 -F qcow2 parts.qcow2");
    dir.io("parts.qcow2", &["write -P 3 1k 30k", "write -z 33k 3k"]);
    names.extend(["over.qcow2".to_owned(), "parts.qcow2".to_owned()]);
    names
}

/// Damages every byte of the header with several values.
#[test]
fn damaged_headers() {
    let dir = Dir::new();
    let mut opened = 0;
    for name in images(&dir) {
        let sound = fs::read(dir.path(&name)).unwrap();
        // Fields of the header have four or eight bytes, so a quick run tests every third byte.
        for at in (0..144).step_by(effort(3, 1)) {
            for value in [0xff, sound[at] ^ 1 << (at % 8)] {
                let mut bytes = sound.clone();
                bytes[at] = value;
                fs::write(dir.path("mutant"), &bytes).unwrap();
                opened += u32::from(read_damaged(&dir.path("mutant"), &format!("{name}: {value} at {at}")));
            }
        }
    }
    // Images open despite a change of a field that a reader does not need, and most changes are of
    // this kind.
    assert!(opened > 250, "{opened}");
}

/// Random damage in metadata, tables and compressed data, and truncation of the file to any length.
#[test]
fn damaged_bodies() {
    Dir::both().iter().zip(2..).for_each(|(dir, seed)| damage_in(dir, seed));
}

fn damage_in(dir: &Dir, seed: u64) {
    let mut rng = Rng::new(seed);
    for name in images(dir) {
        let sound = fs::read(dir.path(&name)).unwrap();
        for round in 0..effort(20, 60) {
            let mut bytes = sound.clone();
            for _ in 0..=rng.below(64) {
                // Most tables are at the start of the file, so most damage goes there.
                let reach = [bytes.len(), 4096, 0x30000][rng.below(3) as usize].min(bytes.len());
                let at = 104 + rng.below(reach as u64 - 104) as usize;
                bytes[at] = rng.below(256) as u8;
            }
            fs::write(dir.path("mutant"), &bytes).unwrap();
            read_damaged(&dir.path("mutant"), &format!("{name}, round {round}"));
        }
        for round in 0..25 {
            let len = rng.below(sound.len() as u64) as usize;
            fs::write(dir.path("mutant"), &sound[..len]).unwrap();
            read_damaged(&dir.path("mutant"), &format!("{name}, {len} bytes, round {round}"));
        }
    }
}

/// A cluster beyond the end of a truncated file is an error, and does not read as zeroes.
#[test]
fn lost_clusters_are_errors() {
    let dir = Dir::new();
    fs::write(dir.path("raw"), vec![1; SIZE]).unwrap();
    for kind in ["", "-c"] {
        dir.img(&format!("convert -f raw -O qcow2 {kind} raw image"));
        let sound = fs::read(dir.path("image")).unwrap();
        assert!(read(&dir.open("image"), 0, SIZE as u64, true).is_ok());
        let used = sound.iter().rposition(|&byte| byte != 0).unwrap();
        let cut = if kind.is_empty() { used + 1 - 3 * 65536 } else { used - 20 };
        fs::write(dir.path("image"), &sound[..cut]).unwrap();
        let image = dir.open("image");
        assert_eq!(read(&image, 0, SIZE as u64, true).err(), Some(Error::Media));
        assert_eq!(read(&image, 0, SIZE as u64, false).err(), Some(Error::Media));
        // Other clusters are intact. Which clusters are lost varies, because qemu-img writes
        // several at once, in any order.
        let clusters = (0..SIZE as u64).step_by(65536).map(|at| read(&image, at, 65536, false));
        let (sound, lost): (Vec<_>, Vec<_>) = clusters.partition(Result::is_ok);
        assert!((1..=3).contains(&lost.len()), "{kind}: {} of {} are lost", lost.len(), sound.len());
        assert!(sound.iter().flatten().all(|data| data.iter().all(|&byte| byte == 1)), "{kind}");
        assert!(lost.iter().all(|completion| completion == &Err(Error::Media)), "{kind}");
    }
}
