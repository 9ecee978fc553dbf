//! Deltas of forks: saved as qcow2 overlays that qemu accepts, and applied to another fork with the
//! same result.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use freestone::device::{Blocking as _, Device, Flags, Op, Request};
use freestone::qcow2::Format;
use freestone::qcow2::delta::{self, ApplyReport, ChangedRange, DeltaError, SaveReport};
use freestone_testkit::{Model, Rng};

use super::tools::{Dir, content, same};

const CLUSTER: usize = 64 << 10;
/// Size in bytes of a base, which ends inside a cluster.
const SIZE: usize = (3 << 20) + 3 * 4096;

/// Returns a directory that contains a base as a raw file and as an image, and the content of the
/// base.
fn with_base(seed: u64) -> (Dir, Vec<u8>) {
    let dir = Dir::new();
    let base = content(SIZE, seed);
    fs::write(dir.path("base.raw"), &base).unwrap();
    dir.img("convert -f raw -O qcow2 -c base.raw base.qcow2");
    (dir, base)
}

/// Sends `times` random writes, write zeroes and discards to the fork.
fn change_randomly(fork: &Model, seed: u64, times: u64) {
    let mut rng = Rng::new(seed);
    let block = u64::from(fork.geometry().logical_block);
    let blocks = fork.geometry().size / block;
    for _ in 0..times {
        let first = rng.below(blocks);
        let len = (1 + rng.below((blocks - first).min(100))) * block;
        match rng.below(4) {
            0 => fork.run(Request::new(Op::Discard, first * block, len)).unwrap(),
            1 => fork.write_zeroes(first * block, len, Flags::empty()).unwrap(),
            _ => {
                let mut data = vec![0; len as usize];
                rng.fill(&mut data);
                fork.write_at(first * block, &data, Flags::empty()).unwrap();
            }
        }
    }
}

fn save(fork: &Model, base: &Path, format: Format, to: &Path) -> Result<SaveReport, DeltaError> {
    let mut last = (0, 0);
    let saved = delta::save(fork, base, format, to, &mut |done, total| {
        assert!(done >= last.0 && done <= total, "{done} of {total} after {last:?}");
        last = (done, total);
    });
    if let Ok(saved) = &saved {
        assert_eq!(last, (saved.changes.bytes, saved.changes.bytes));
        assert_eq!(fs::metadata(to).unwrap().len(), saved.file_bytes);
    }
    saved
}

/// Returns the number of clusters with a changed block, and the number of those that read as
/// zeroes.
fn clusters(fork: &Model) -> (u64, u64) {
    let block = fork.geometry().logical_block as usize;
    let (own, content) = (fork.own(), fork.content());
    let mut found = (0, 0);
    for (own, data) in own.chunks(CLUSTER / block).zip(content.chunks(CLUSTER)) {
        if own.contains(&true) {
            found.0 += 1;
            found.1 += u64::from(data.iter().all(|&byte| byte == 0));
        }
    }
    found
}

/// Returns the number of bytes that the overlay itself contains, according to `qemu-img map`.
fn mapped(dir: &Dir, name: &str) -> u64 {
    let json = dir.img(&format!("map --output=json {name}"));
    let field = |row: &str, name: &str| {
        let at = row.find(&format!("\"{name}\": ")).unwrap_or_else(|| panic!("{row}")) + name.len() + 4;
        row[at..].chars().take_while(char::is_ascii_digit).collect::<String>().parse::<u64>().unwrap()
    };
    json.split('}')
        .filter(|row| row.contains("\"start\""))
        .filter(|row| field(row, "depth") == 0)
        .map(|row| field(row, "length"))
        .sum()
}

/// Checks a saved delta with qemu's tools, with this crate's reader, and by applying it to another
/// fork.
fn check_accepted(dir: &Dir, fork: &Model, base: &[u8], name: &str, base_name: &str, saved: &SaveReport) {
    let content = fork.content();
    dir.img(&format!("check -f qcow2 {name}"));
    fs::write(dir.path("expected"), &content).unwrap();
    dir.img(&format!("compare -f qcow2 -F raw {name} expected"));
    let (touched, zeroes) = clusters(fork);
    assert_eq!((saved.data_clusters, saved.zero_clusters), (touched - zeroes, zeroes), "{name}");
    let info = dir.img(&format!("info {name}"));
    assert!(info.contains(&format!("backing file: {base_name}")), "{info}");
    same(&dir.open(name), &content, name);

    let block = fork.geometry().logical_block;
    let other = Model::fork(base, content.len(), block);
    let mut steps = Vec::new();
    let base_path = dir.path(base_name);
    let applied = delta::apply(&dir.path(name), &other, Some(&base_path), &mut |done, total| {
        steps.push((done, total));
    });
    let applied = applied.unwrap();
    assert_eq!(other.content(), content, "{name}");
    // Applying the delta changes no cluster that the fork did not change.
    let per_cluster = CLUSTER / block as usize;
    for (mine, theirs) in other.own().chunks(per_cluster).zip(fork.own().chunks(per_cluster)) {
        assert_eq!(mine.contains(&true), theirs.contains(&true));
    }
    let total = applied.data_bytes + applied.zero_bytes;
    assert_eq!((steps.first(), steps.last()), (Some(&(0, total)), Some(&(total, total))));
    assert!(steps.is_sorted());
    let own_bytes: u64 = mapped(dir, name);
    assert_eq!(own_bytes, total, "{name}");
}

#[test]
fn delta_is_saved_checked_and_applied() {
    for (seed, block, times) in [(1, 4096, 1), (2, 4096, 12), (3, 512, 30), (4, 4096, 200)] {
        let (dir, base) = with_base(seed);
        for (format, base_name) in [(Format::Raw, "base.raw"), (Format::Qcow2, "base.qcow2")] {
            let fork = Model::fork(&base, SIZE, block);
            change_randomly(&fork, seed, times);
            let name = format!("{base_name}.delta");
            let saved = save(&fork, &dir.path(base_name), format, &dir.path(&name)).unwrap();
            check_accepted(&dir, &fork, &base, &name, base_name, &saved);
            let own = fork.own().iter().filter(|&&own| own).count() as u64 * u64::from(block);
            assert_eq!(saved.changes.bytes, own);
        }
        // No temporary file is left in the directory.
        let names = fs::read_dir(dir.all()).unwrap();
        let left = names
            .filter(|name| name.as_ref().unwrap().file_name().to_string_lossy().starts_with(".freestone"));
        assert_eq!(left.count(), 0);
    }
}

/// A delta is a normal qcow2 image: qemu writes to the delta and commits it to its base.
#[test]
fn qemu_writes_and_commits_a_delta() {
    let (dir, base) = with_base(13);
    let fork = Model::fork(&base, SIZE, 4096);
    change_randomly(&fork, 13, 20);
    save(&fork, &dir.path("base.raw"), Format::Raw, &dir.path("delta")).unwrap();
    let mut content = fork.content();
    for (at, len, byte) in [(0, 100 << 10, 1), (1 << 20, 4096, 2), (SIZE - 8192, 8192, 3)] {
        dir.io("delta", &[&format!("write -P {byte} {at} {len}")]);
        content[at..at + len].fill(byte);
    }
    dir.img("check -f qcow2 delta");
    same(&dir.open("delta"), &content, "written on");
    dir.img("commit -f qcow2 delta");
    assert!(fs::read(dir.path("base.raw")).unwrap() == content);
}

#[test]
fn empty_and_full_delta() {
    let (dir, base) = with_base(5);
    let fork = Model::fork(&base, SIZE, 4096);
    let saved = save(&fork, &dir.path("base.raw"), Format::Raw, &dir.path("none")).unwrap();
    assert_eq!((saved.data_clusters, saved.zero_clusters, saved.changes.extents), (0, 0, 0));
    check_accepted(&dir, &fork, &base, "none", "base.raw", &saved);
    fork.write_at(0, &content(SIZE, 50), Flags::empty()).unwrap();
    let saved = save(&fork, &dir.path("base.raw"), Format::Raw, &dir.path("all")).unwrap();
    assert_eq!((saved.changes.extents, saved.changes.bytes), (1, SIZE as u64));
    check_accepted(&dir, &fork, &base, "all", "base.raw", &saved);
    fork.discard(0, SIZE as u64).unwrap();
    let saved = save(&fork, &dir.path("base.raw"), Format::Raw, &dir.path("zero")).unwrap();
    assert_eq!((saved.data_clusters, saved.changes.zero_bytes), (0, SIZE as u64));
    assert!(saved.file_bytes < 8 * CLUSTER as u64, "{saved:?}");
    check_accepted(&dir, &fork, &base, "zero", "base.raw", &saved);
}

/// Writes the content of a fork to a file and leaves holes for zeroes.
fn write_sparse(fork: &Model, path: &Path) {
    let file = fs::File::create(path).unwrap();
    let size = fork.geometry().size;
    file.set_len(size).unwrap();
    let mut part = vec![0; 1 << 20];
    for at in (0..size).step_by(1 << 20) {
        let part = &mut part[..(size - at).min(1 << 20) as usize];
        fork.read_at(at, part).unwrap();
        if part.iter().any(|&byte| byte != 0) {
            std::os::unix::fs::FileExt::write_all_at(&file, part, at).unwrap();
        }
    }
}

/// A delta of a fork that is larger than its base. The range beyond the base's end reads as zeroes.
#[test]
fn larger_than_the_base() {
    let (dir, base) = with_base(6);
    let fork = Model::fork(&base, 600 << 20, 4096);
    change_randomly(&fork, 6, 20);
    // The write is so far away that the overlay needs another L2 table.
    fork.write_at(599 << 20, &[8; 8192], Flags::empty()).unwrap();
    let saved = save(&fork, &dir.path("base.raw"), Format::Raw, &dir.path("delta")).unwrap();
    dir.img("check -f qcow2 delta");
    write_sparse(&fork, &dir.path("expected"));
    dir.img("compare -f qcow2 -F raw delta expected");
    assert!(saved.file_bytes < 64 << 20, "{saved:?}");
    let other = Model::fork(&base, 600 << 20, 512);
    delta::apply(&dir.path("delta"), &other, None, &mut |_, _| {}).unwrap();
    for at in (0..600 << 20).step_by(1 << 20) {
        let (mut mine, mut theirs) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        fork.read_at(at, &mut mine).unwrap();
        other.read_at(at, &mut theirs).unwrap();
        assert!(mine == theirs, "{at}");
    }
    // Applying the delta to a fork that is too small fails and changes nothing.
    let small = Model::fork(&base, SIZE, 4096);
    let error = delta::apply(&dir.path("delta"), &small, None, &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("629145600 bytes"), "{error}");
    assert!(!small.own().contains(&true));
}

#[test]
fn show_reports_changed_extents() {
    let fork = Model::fork(&vec![7; 1 << 20], 1 << 20, 4096);
    assert_eq!(delta::for_each_change(&fork, &mut |_| panic!("no row is due")).unwrap().extents, 0);
    // Two adjacent changes are one extent, although a part is zeroes. A third change is far away.
    fork.write_at(8192, &[1; 4096], Flags::empty()).unwrap();
    fork.discard(12288, 4096).unwrap();
    fork.write_at(1 << 19, &vec![2; 512 << 10], Flags::empty()).unwrap();
    let mut rows: Vec<ChangedRange> = Vec::new();
    let summary = delta::for_each_change(&fork, &mut |row| {
        match rows.last_mut() {
            Some(last) if last.offset + last.len == row.offset && last.zero == row.zero => {
                last.len += row.len;
            }
            _ => rows.push(row),
        }
        true
    })
    .unwrap();
    assert_eq!((summary.extents, summary.bytes, summary.zero_bytes), (2, 8192 + (512 << 10), 4096));
    assert_eq!(
        rows,
        [
            ChangedRange { offset: 8192, len: 4096, zero: false },
            ChangedRange { offset: 12288, len: 4096, zero: true },
            ChangedRange { offset: 1 << 19, len: 512 << 10, zero: false },
        ]
    );
    let mut count = 0;
    delta::for_each_change(&fork, &mut |_| {
        count += 1;
        count < 2
    })
    .unwrap();
    assert_eq!(count, 2);
    let whole = delta::for_each_change(&Model::new(4096, 4096), &mut |_| true);
    assert!(matches!(whole, Err(DeltaError::NoChanges)));
}

/// A delta in another directory names its base by an absolute path. A delta in the directory of its
/// base uses a relative path.
#[test]
fn base_path_is_relative_or_absolute() {
    let (dir, base) = with_base(7);
    fs::create_dir(dir.path("there")).unwrap();
    fs::copy(dir.path("base.raw"), dir.path("a:b")).unwrap();
    let fork = Model::fork(&base, SIZE, 4096);
    change_randomly(&fork, 7, 5);
    save(&fork, &dir.path("base.raw"), Format::Raw, &dir.path("there/delta")).unwrap();
    let info = dir.img("info there/delta");
    assert!(info.contains(&format!("backing file: {}", dir.path("base.raw").display())), "{info}");
    same(&dir.open("there/delta"), &fork.content(), "absolute");
    // The base is named by a symbolic link to a file with a colon in its name.
    std::os::unix::fs::symlink(dir.path("a:b"), dir.path("there/link")).unwrap();
    save(&fork, &dir.path("there/link"), Format::Raw, &dir.path("delta")).unwrap();
    dir.img("check delta");
    same(&dir.open("delta"), &fork.content(), "with a colon");
    fs::rename(dir.path("a:b"), dir.path("there/a:b")).unwrap();
    fs::rename(dir.path("delta"), dir.path("there/delta")).unwrap();
    same(&dir.open("there/delta"), &fork.content(), "moved");
    let mode = fs::metadata(dir.path("there/delta")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn save_refuses_to_destroy() {
    let (dir, base) = with_base(8);
    dir.img("create -q -f qcow2 -b base.qcow2 -F qcow2 middle");
    fs::create_dir(dir.path("directory")).unwrap();
    std::os::unix::fs::symlink(dir.path("base.raw"), dir.path("link")).unwrap();
    let fork = Model::fork(&base, SIZE, 4096);
    change_randomly(&fork, 8, 5);
    let before = fs::read(dir.path("base.raw")).unwrap();
    for (base, format, to, word) in [
        ("base.raw", Format::Raw, "base.raw", "take the place of the base"),
        ("base.raw", Format::Raw, "link", "take the place of the base"),
        ("middle", Format::Qcow2, "base.qcow2", "take the place of the base"),
        ("base.raw", Format::Raw, "directory", "not a regular file"),
        ("base.raw", Format::Raw, "no/such/directory", "cannot be written"),
        ("none", Format::Raw, "delta", "cannot be the base"),
        ("base.raw", Format::Qcow2, "delta", "is not a qcow2 image"),
    ] {
        let error = save(&fork, &dir.path(base), format, &dir.path(to)).unwrap_err().to_string();
        assert!(error.contains(word), "{base} to {to}: {error}");
    }
    assert!(fs::read(dir.path("base.raw")).unwrap() == before);
    assert!(!dir.path("delta").exists());
    let error = delta::save(
        &Model::new(4096, 4096),
        &dir.path("base.raw"),
        Format::Raw,
        &dir.path("delta"),
        &mut |_, _| {},
    );
    assert!(matches!(error, Err(DeltaError::NoChanges)));
}

/// Overlays that qemu writes can be applied too, including those with compressed clusters.
#[test]
fn overlays_of_qemu_are_applied() {
    let (dir, base) = with_base(9);
    for kind in ["", "-o compat=0.10", "-o cluster_size=4k", "-o compression_type=zstd"] {
        dir.img(&format!("create -q -f qcow2 {kind} -b base.raw -F raw over"));
        dir.io(
            "over",
            &["write -P 5 100k 900", "write -P 6 1M 512k", "discard 2M 128k", "write -z 2500k 64k"],
        );
        if !kind.contains("0.10") {
            dir.io("over", &["write -c -P 7 1920k 64k"]);
        }
        let expected = dir.raw("over");
        let fork = Model::fork(&base, SIZE, 512);
        let applied = delta::apply(&dir.path("over"), &fork, Some(&dir.path("base.raw")), &mut |_, _| {});
        assert!(applied.unwrap().data_bytes > 0);
        assert!(fork.content() == expected, "{kind}");
    }
    // The clusters of this overlay are smaller than the blocks of the device.
    dir.img("create -q -f qcow2 -o cluster_size=512 -b base.raw -F raw small");
    let fork = Model::fork(&base, SIZE, 4096);
    let error = delta::apply(&dir.path("small"), &fork, None, &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("blocks of 4096"), "{error}");
}

#[test]
fn apply_refuses_before_it_writes() {
    let (dir, base) = with_base(10);
    let fork = Model::fork(&base, SIZE, 4096);
    change_randomly(&fork, 10, 40);
    save(&fork, &dir.path("base.raw"), Format::Raw, &dir.path("delta")).unwrap();
    let target = Model::fork(&base, SIZE, 4096);
    let refused = |name: &str, base: Option<&str>, word: &str| {
        let base = base.map(|base| dir.path(base));
        let error = delta::apply(&dir.path(name), &target, base.as_deref(), &mut |_, _| {}).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(word) && !matches!(error, DeltaError::Apply { .. }), "{name}: {text}");
        assert!(!target.own().contains(&true), "{name}");
    };
    refused("delta", Some("base.qcow2"), "its base is");
    refused("delta", Some("none"), "its base is");
    refused("base.qcow2", None, "stands alone");
    refused("base.raw", None, "is not a qcow2 image");
    refused("none", None, "none");
    let sound = fs::read(dir.path("delta")).unwrap();
    // Truncates the delta in its first kilobytes, in the middle, just before its L1 table and
    // inside that table. The refcounts follow, which a reader does not need.
    let l1 = u64::from_be_bytes(sound[40..48].try_into().unwrap()) as usize;
    for len in [600, 65536, l1 / 2, l1 - 1, l1, l1 + 7] {
        fs::write(dir.path("cut"), &sound[..len]).unwrap();
        refused("cut", None, "cut");
    }
    let spoiled = |at: usize, bytes: &[u8], word: &str| {
        let mut mutant = sound.clone();
        mutant[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(dir.path("spoiled"), mutant).unwrap();
        refused("spoiled", None, word);
    };
    spoiled(79, &[2], "marked as corrupt");
    spoiled(79, &[32], "bit 5");
    // Changes an L1 entry to point to the L1 table, beyond the end of the file, or to an unaligned
    // offset.
    spoiled(l1, &(l1 as u64).to_be_bytes(), "overlap");
    spoiled(l1, &(1_u64 << 40).to_be_bytes(), "beyond the end");
    spoiled(l1, &(65536_u64 + 512).to_be_bytes(), "damaged");
    // Changes an L2 entry to point to the data of another entry, to the L1 table, or to an offset
    // that cannot be read.
    let l2 = (u64::from_be_bytes(sound[l1..l1 + 8].try_into().unwrap()) & !(1 << 63)) as usize;
    let entry = |index: usize| &sound[l2 + 8 * index..l2 + 8 * index + 8];
    let data: Vec<usize> = (0..SIZE / CLUSTER).filter(|&index| entry(index)[0] == 0x80).collect();
    assert!(data.len() > 2, "{data:?}");
    spoiled(l2 + 8 * data[1], entry(data[0]), "overlaps");
    spoiled(l2 + 8 * data[1], &(l1 as u64).to_be_bytes(), "overlaps");
    spoiled(l2 + 8 * data[1], &(1_u64 << 50).to_be_bytes(), "cannot be read");
    spoiled(l2 + 8 * data[1], &(65536_u64 + 512).to_be_bytes(), "cannot be read");
    // A delta cannot be applied to a read-only device.
    let device = Model::read_only(base.clone(), 4096);
    let error = delta::apply(&dir.path("delta"), &device, None, &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, DeltaError::NotWritable(_)), "{error}");
    // The undamaged delta can still be applied, because refused deltas have not changed the device.
    let applied = delta::apply(&dir.path("delta"), &target, Some(&dir.path("base.raw")), &mut |_, _| {});
    assert_ne!(applied.unwrap(), ApplyReport::default());
    assert!(target.content() == fork.content());
}

/// Randomly damaged deltas are refused, or applied with partly wrong content, but never cause a
/// panic.
#[test]
fn damaged_deltas() {
    let (dir, base) = with_base(11);
    let fork = Model::fork(&base, SIZE, 4096);
    change_randomly(&fork, 11, 10);
    save(&fork, &dir.path("base.raw"), Format::Raw, &dir.path("delta")).unwrap();
    let sound = fs::read(dir.path("delta")).unwrap();
    let l1 = u64::from_be_bytes(sound[40..48].try_into().unwrap()) as usize;
    let mut rng = Rng::new(12);
    let mut refused = 0;
    for _ in 0..150 {
        let mut mutant = sound.clone();
        for _ in 0..=rng.below(4) {
            let reach = [144, CLUSTER, mutant.len()][rng.below(3) as usize] as u64;
            let near = [0, l1 - CLUSTER][rng.below(2) as usize];
            let at =
                near + rng.below(reach.min((mutant.len() - near) as u64).min(SIZE as u64 / 512)) as usize;
            mutant[at] = rng.below(256) as u8;
        }
        fs::write(dir.path("mutant"), &mutant).unwrap();
        let target = Model::fork(&base, SIZE, 4096);
        if let Err(error) = delta::apply(&dir.path("mutant"), &target, None, &mut |_, _| {}) {
            refused += 1;
            assert!(!target.own().contains(&true), "{error}");
        }
    }
    assert!(refused > 20, "{refused}");
}
