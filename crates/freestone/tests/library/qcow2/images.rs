//! Images of every kind that qemu-img creates are read, and their content is compared.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use freestone::device::{Device, ExtentKind};
use freestone::qcow2::{Config, Fault, Image, SetupError, is_qcow2};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::effort;

use super::tools::{Dir, content, read, same};

/// Size of an image in bytes. The image ends inside a cluster, and with small clusters it needs
/// several L2 tables.
const SIZE: usize = (5 << 20) + 7 * 512;

/// Size in bytes of the image of each kind in `KINDS`. With clusters of 4 KiB, the image needs more
/// than one L2 table.
const KIND_SIZE: usize = (5 << 19) + 7 * 512;

/// Options of `qemu-img convert`, one set for each kind of image.
const KINDS: [&str; 19] = [
    "-o compat=0.10",
    "-o compat=0.10,cluster_size=4096",
    "-c -o compat=0.10",
    "-c -o compat=0.10,cluster_size=512",
    "-o compat=1.1",
    "-o cluster_size=512",
    "-o cluster_size=1024,refcount_bits=1",
    "-o cluster_size=16k,refcount_bits=64",
    "-o cluster_size=2M",
    "-o lazy_refcounts=on",
    "-o preallocation=metadata",
    "-o preallocation=falloc",
    "-o preallocation=full,cluster_size=4k",
    "-c",
    "-c -o cluster_size=512",
    "-c -o cluster_size=2M",
    "-c -o compression_type=zstd",
    "-c -o compression_type=zstd,cluster_size=4k",
    "-c -o compression_type=zstd,cluster_size=2M",
];

#[test]
fn every_kind_reads_back() {
    let expected = content(KIND_SIZE, 1);
    for (place, dir) in Dir::both().into_iter().enumerate() {
        fs::write(dir.path("raw"), &expected).unwrap();
        for (i, kind) in KINDS.iter().enumerate() {
            // A quick run tests each kind in only one of the two directories.
            if i % 2 != place % 2 && effort(true, false) {
                continue;
            }
            dir.img(&format!("convert -f raw -O qcow2 {kind} raw {i}.qcow2"));
            let name = format!("{i}.qcow2");
            same(&dir.open(&name), &expected, kind);
            // Reads the image again with an empty page cache, so that reads do not complete inline.
            dir.drop_page_cache();
            same(&dir.open(&name), &expected, kind);
        }
    }
}

/// Images with subclusters: parts of each cluster are data, zeroes, or from the backing file.
#[test]
fn extended_l2_images_read_back() {
    let expected = content(KIND_SIZE, 5);
    for dir in Dir::both() {
        fs::write(dir.path("raw"), &expected).unwrap();
        for kind in ["cluster_size=16k", "cluster_size=64k", "cluster_size=2M"] {
            let create = format!("create -q -f qcow2 -o extended_l2=on,{kind} -b raw -F raw over.qcow2");
            dir.img(&create);
            dir.io(
                "over.qcow2",
                &[
                    "write -P 3 512 512",
                    "write -P 4 20k 2k",
                    "write -z 24k 8k",
                    "write -P 5 100k 300k",
                    "write -z 150k 70k",
                    "discard 1M 192k",
                    "write -P 6 1100k 1k",
                    "write -P 7 2M 17k",
                ],
            );
            let shown = dir.raw("over.qcow2");
            assert!(shown != expected);
            same(&dir.open("over.qcow2"), &shown, kind);
            dir.drop_page_cache();
            same(&dir.open("over.qcow2"), &shown, kind);
            let options = format!("-o extended_l2=on,{kind}");
            for (name, how) in [("whole.qcow2", options.clone()), ("packed.qcow2", format!("-c {options}"))] {
                dir.img(&format!("convert -f raw -O qcow2 {how} raw {name}"));
                same(&dir.open(name), &expected, &how);
            }
        }
        let options = "extended_l2=on,data_file=clusters,data_file_raw=off";
        dir.img(&format!("convert -f raw -O qcow2 -o {options} raw apart.qcow2"));
        dir.io("apart.qcow2", &["write -z 24k 8k", "write -P 9 26k 2k"]);
        let shown = dir.raw("apart.qcow2");
        same(&dir.open("apart.qcow2"), &shown, options);
    }
}

#[test]
fn images_conform() {
    let kinds = ["-o compat=0.10", "-c", "-c -o compression_type=zstd,cluster_size=4k", "-o extended_l2=on"];
    for dir in Dir::both() {
        fs::write(dir.path("raw"), content(SIZE, 2)).unwrap();
        for (i, kind) in kinds.iter().enumerate() {
            let name = format!("{i}.qcow2");
            dir.img(&format!("convert -f raw -O qcow2 {kind} raw {name}"));
            let options = Options { seed: i as u64, rounds: 60, ..Options::default() };
            conformance::check(kind, &|| Arc::new(dir.open(&name)) as Arc<dyn Device>, options);
        }
    }
}

#[test]
fn external_data_files() {
    let dir = Dir::new();
    let expected = content(SIZE, 3);
    fs::write(dir.path("raw"), &expected).unwrap();
    for (i, kind) in ["", ",data_file_raw=on"].iter().enumerate() {
        let name = format!("{i}.qcow2");
        let data = dir.path(&format!("{i}.data"));
        // A relative name of the data file is relative to the directory of the image.
        let option = format!("data_file={i}.data{kind}");
        dir.img(&format!("convert -f raw -O qcow2 -o {option} raw {name}"));
        let image = dir.open(&name);
        same(&image, &expected, kind);
        assert_eq!(image.files(), [dir.path(&name), data]);
        let alone = Image::open(&Config { standalone: true, ..Config::new(dir.path(&name)) });
        assert!(
            matches!(alone, Err(SetupError::Image { fault: Fault::NotStandalone { .. }, .. })),
            "{alone:?}"
        );
    }
}

/// Chains of overlays with different sizes and cluster sizes, in several directories. Parts of the
/// overlays are zeroed or discarded.
#[test]
fn chains() {
    Dir::both().iter().for_each(chain_in);
}

fn chain_in(dir: &Dir) {
    fs::create_dir(dir.path("below")).unwrap();
    // A raw base that ends inside a sector is extended with zeroes, as in qemu.
    let mut base = content(3 << 20, 4);
    base.truncate((3 << 20) - 100);
    fs::write(dir.path("below/base"), &base).unwrap();
    let below = dir.path("below");
    let run = |args: &str| {
        let mut words = vec!["qemu-img"];
        words.extend(args.split_whitespace());
        let out =
            std::process::Command::new(words[0]).args(&words[1..]).current_dir(&below).output().unwrap();
        assert!(out.status.success(), "{args}: {}", String::from_utf8_lossy(&out.stderr));
    };
    run("create -f qcow2 -b base -F raw 1.qcow2");
    dir.io("below/1.qcow2", &["write -P 17 100k 300k", "write -z 1M 64k", "write -z -u 1200k 128k"]);
    // Overlay 2 is smaller than its base. Beyond the end of overlay 2, overlay 3 reads zeroes, not
    // the data of the base.
    run("create -f qcow2 -o cluster_size=4k -b 1.qcow2 -F qcow2 2.qcow2 2M");
    dir.io("below/2.qcow2", &["write -P 33 150k 5k", "write -P 0 160k 512", "discard 320k 64k"]);
    // Overlay 3 is larger than its base, and names the base by an absolute path.
    let name = dir.path("below/2.qcow2").display().to_string();
    dir.img(&format!("create -f qcow2 -o compat=0.10,cluster_size=512 -b {name} -F qcow2 3.qcow2 5M"));
    dir.io("3.qcow2", &["write -P 66 2040k 20k", "write -P 7 4M 1k"]);
    // The top overlay has compressed clusters.
    dir.img("create -f qcow2 -o compression_type=zstd -b 3.qcow2 -F qcow2 4.qcow2");
    dir.io("4.qcow2", &["write -c -P 99 64k 64k", "write -z 3M 1M"]);
    for name in ["below/1.qcow2", "below/2.qcow2", "3.qcow2", "4.qcow2"] {
        same(&dir.open(name), &dir.raw(name), name);
    }
    for name in ["3.qcow2", "4.qcow2"] {
        let expected = dir.raw(name);
        dir.drop_page_cache();
        same(&dir.open(name), &expected, name);
    }
    let image = dir.open("4.qcow2");
    assert_eq!(image.files().len(), 5);
    assert_eq!(image.geometry().size, 5 << 20);
    let alone = Image::open(&Config { standalone: true, ..Config::new(dir.path("4.qcow2")) });
    let text = alone.unwrap_err().to_string();
    assert!(text.contains("4.qcow2") && text.contains("3.qcow2") && text.contains("stands alone"), "{text}");
    let options = Options { seed: 4, rounds: 60, ..Options::default() };
    conformance::check("chain", &|| Arc::new(dir.open("4.qcow2")) as Arc<dyn Device>, options);
}

/// If an image does not name the format of its backing file, the reader detects the format.
#[test]
fn formats_are_probed() {
    let dir = Dir::new();
    let expected = content(1 << 20, 5);
    fs::write(dir.path("base.raw"), &expected).unwrap();
    dir.img("convert -f raw -O qcow2 -c base.raw base.qcow2");
    assert!(is_qcow2(&dir.path("base.qcow2")).unwrap() && !is_qcow2(&dir.path("base.raw")).unwrap());
    fs::write(dir.path("short"), b"Q").unwrap();
    assert!(!is_qcow2(&dir.path("short")).unwrap() && is_qcow2(&dir.path("none")).is_err());
    for format in ["raw", "qcow2"] {
        let name = format!("over-{format}");
        dir.img(&format!("create -f qcow2 -b base.{format} -F {format} {name}"));
        // qemu-img no longer creates images without a backing format. So the test changes the type
        // of the header extension to an unknown one.
        let mut bytes = fs::read(dir.path(&name)).unwrap();
        let at = bytes.windows(4).position(|four| four == 0xe279_2aca_u32.to_be_bytes()).unwrap();
        bytes[at] = 0x11;
        fs::write(dir.path(&name), bytes).unwrap();
        same(&dir.open(&name), &expected, format);
    }
}

/// The reader ignores internal snapshots and reads the current content.
#[test]
fn internal_snapshots_are_ignored() {
    let dir = Dir::new();
    fs::write(dir.path("raw"), content(SIZE, 6)).unwrap();
    dir.img("convert -f raw -O qcow2 raw image");
    dir.img("snapshot -c first image");
    dir.io("image", &["write -P 1 0 1M", "write -z 2M 1M"]);
    dir.img("snapshot -c second image");
    dir.io("image", &["write -P 2 512k 1M"]);
    same(&dir.open("image"), &dir.raw("image"), "image with snapshots");
}

/// A file may end anywhere inside its last cluster, or have bytes behind the last cluster.
#[test]
fn truncated_last_cluster_is_read() {
    let dir = Dir::new();
    let mut expected = vec![0; 1 << 20];
    // Content that compresses to an odd number of bytes.
    expected[1000..200_000].copy_from_slice(&content(200_000, 7)[1000..]);
    fs::write(dir.path("raw"), &expected).unwrap();
    for kind in ["-c", "-c -o compression_type=zstd", ""] {
        dir.img(&format!("convert -f raw -O qcow2 {kind} raw image"));
        let whole = fs::read(dir.path("image")).unwrap();
        let last = whole.iter().rposition(|&byte| byte != 0).unwrap();
        let mut longer = whole.clone();
        longer.extend([0x55; 777]);
        // Truncates the file a few bytes after its last non-zero byte, because zeroes behind that
        // byte may still be compressed data.
        for bytes in [&whole[..(last + 5).min(whole.len())], &whole[..(last + 100).min(whole.len())], &longer]
        {
            fs::write(dir.path("image"), bytes).unwrap();
            same(&dir.open("image"), &expected, kind);
        }
    }
}

/// An image with clusters smaller than a block, on a disk with blocks of 4 KiB and direct I/O.
#[test]
fn on_block_devices() {
    let dir = Dir::new();
    let expected = content(3 << 20, 8);
    fs::write(dir.path("raw"), &expected).unwrap();
    dir.img("convert -f raw -O qcow2 -c -o cluster_size=1k raw image");
    // The file has whole blocks and unused space at its end, like a logical volume.
    fs::OpenOptions::new().write(true).open(dir.path("image")).unwrap().set_len(8 << 20).unwrap();
    let Some(disk) = Disk::over(&dir.path("image")) else { return };
    same(&Image::open(&Config::new(&disk.0)).unwrap(), &expected, "image on a disk");
    let disk = Disk::over(&dir.path("raw")).unwrap();
    let name = &disk.0;
    dir.img(&format!("create -q -f qcow2 -o cluster_size=512 -b {name} -F raw over 4M"));
    dir.io("over", &["write -P 8 1536 512", "write -P 9 1M 5k"]);
    same(&dir.open("over"), &dir.raw("over"), "image over a disk");
}

/// A loop device over a file, detached when dropped.
struct Disk(String);

impl Disk {
    fn over(path: &Path) -> Option<Self> {
        let out = Command::new(freestone_testkit::tools::find("losetup"))
            .args(["--find", "--show", "--sector-size", "4096"])
            .arg(path)
            .output();
        match out {
            Ok(out) if out.status.success() => {
                Some(Self(String::from_utf8(out.stdout).unwrap().trim().to_owned()))
            }
            failed => {
                let on_ci = std::env::var_os("CI").is_some_and(|ci| ci == "true");
                assert!(!on_ci, "CI must be able to set up loop devices: {failed:?}");
                println!("cannot set up a loop device, images on disks are not tested here: {failed:?}");
                None
            }
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new(freestone_testkit::tools::find("losetup")).arg("--detach").arg(&self.0).status();
    }
}

/// An image of 16 TiB with little data opens fast, reports its extents fast, and can be read
/// anywhere.
#[test]
fn huge_sparse_image() {
    let dir = Dir::new();
    dir.img("create -f qcow2 image 16T");
    dir.io("image", &["write -P 5 9T 64k", "write -z 10T 1M", "write -P 6 17179869120k 64k"]);
    let image = dir.open("image");
    let size = image.geometry().size;
    assert_eq!(size, 16 << 40);
    assert_eq!(read(&image, 9 << 40, 65536, true).unwrap(), vec![5; 65536]);
    assert_eq!(read(&image, size - 65536, 65536, false).unwrap(), vec![6; 65536]);
    assert_eq!(read(&image, 3 << 40, 1 << 20, true).unwrap(), vec![0; 1 << 20]);
    let mut rows = Vec::new();
    let mut at = 0;
    let mut calls = 0;
    while at < size {
        at += image
            .extents(at, size - at, &mut |row| {
                rows.push(row);
                true
            })
            .unwrap();
        calls += 1;
    }
    assert!(calls < 1000, "{calls}");
    let data: Vec<_> = rows.iter().filter(|row| row.kind == ExtentKind::Data).collect();
    assert_eq!(
        data.iter().map(|row| (row.offset, row.len)).collect::<Vec<_>>(),
        [(9 << 40, 65536), (size - 65536, 65536)]
    );
}

/// Extents of an image with holes of a raw base, zero clusters, compressed clusters, and unwritten
/// clusters.
#[test]
fn extents_match_clusters() {
    let dir = Dir::new();
    let file = fs::File::create(dir.path("base")).unwrap();
    file.set_len(2 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &vec![9; 65536], 1 << 20).unwrap();
    file.sync_all().unwrap();
    dir.img("create -f qcow2 -b base -F raw image 3M");
    // The first zero cluster keeps its allocated space, the second one has none.
    dir.io("image", &["write -P 1 64k 64k", "write -P 1 128k 64k", "write -z 128k 64k", "write -z 256k 64k"]);
    dir.io("image", &["write -c -P 3 512k 64k"]);
    let image = dir.open("image");
    let mut rows = Vec::new();
    let described = image.extents(0, 3 << 20, &mut |row| {
        rows.push((row.offset >> 10, row.len >> 10, row.kind));
        true
    });
    assert_eq!(described, Ok(3 << 20));
    assert_eq!(
        rows,
        [
            (0, 64, ExtentKind::Hole),
            (64, 64, ExtentKind::Data),
            (128, 64, ExtentKind::Zero),
            (192, 320, ExtentKind::Hole),
            (512, 64, ExtentKind::Data),
            (576, 448, ExtentKind::Hole),
            (1024, 64, ExtentKind::Data),
            (1088, 1984, ExtentKind::Hole),
        ]
    );
}
