//! Unsupported or unsafe qcow2 images are refused. The error names the image and the reason.

use std::fs;
use std::path::{Path, PathBuf};

use freestone::qcow2::{Config, Fault, Image, SetupError};
use freestone_testkit::effort;

use super::tools::{Dir, content, same};

fn fault(path: impl AsRef<Path>) -> Fault {
    let path = path.as_ref();
    match Image::open(&Config::new(path)) {
        Err(error @ SetupError::Image { .. }) => {
            let text = error.to_string();
            assert!(text.contains(path.parent().unwrap().to_str().unwrap()), "{text}");
            let SetupError::Image { fault, .. } = error else { unreachable!() };
            fault
        }
        other => panic!("{other:?}"),
    }
}

/// Returns the path of a copy of an image in which these bytes are changed at these offsets.
fn changed(dir: &Dir, of: &str, changes: &[(usize, &[u8])]) -> PathBuf {
    let mut bytes = fs::read(dir.path(of)).unwrap();
    for (at, new) in changes {
        bytes[*at..*at + new.len()].copy_from_slice(new);
    }
    fs::write(dir.path("changed"), bytes).unwrap();
    dir.path("changed")
}

#[test]
fn unsupported_image_error_names_the_feature() {
    let dir = Dir::new();
    dir.img("create -f qcow2 image 10M");
    dir.img("create -f qcow2 -o extended_l2=on,cluster_size=16k subclusters 1M");
    let small = changed(&dir, "subclusters", &[(23, &[13])]);
    assert!(matches!(fault(small), Fault::Corrupt(_)), "subclusters of less than a sector");
    assert_eq!(fault(changed(&dir, "image", &[(35, &[2])])), Fault::Encrypted("LUKS"));
    // qemu-img measures the machine's speed for seconds before it encrypts, so a quick run omits
    // this.
    if effort(false, true) {
        dir.luks("luks");
        assert_eq!(fault(dir.path("luks")), Fault::Encrypted("LUKS"));
    }
    assert_eq!(fault(changed(&dir, "image", &[(35, &[1])])), Fault::Encrypted("AES"));
    assert_eq!(fault(changed(&dir, "image", &[(4, &[0, 0, 0, 4])])), Fault::Version(4));
    assert_eq!(fault(changed(&dir, "image", &[(4, &[0, 0, 0, 1])])), Fault::Version(1));
    assert_eq!(fault(changed(&dir, "image", &[(0, b"RAW!")])), Fault::NotQcow2);
    // Sets two unknown feature bits. The image's table of feature names has neither bit 5 nor bit
    // 62, so the error shows their numbers.
    let Fault::Features(names) = fault(changed(&dir, "image", &[(72, &[0x40]), (79, &[1 << 5])])) else {
        panic!()
    };
    assert_eq!(names, "bit 5, bit 62");
    // Changes the first row of qemu's table of feature names, so that the row names bit 40.
    let bytes = fs::read(dir.path("image")).unwrap();
    let row = bytes.windows(11).position(|part| part == b"\0\0dirty bit\0"[..11].as_ref()).unwrap();
    let Fault::Features(names) = fault(changed(&dir, "image", &[(row + 1, &[40]), (74, &[1])])) else {
        panic!()
    };
    assert_eq!(names, "dirty bit (bit 40)");
    assert_eq!(fault(changed(&dir, "image", &[(79, &[8]), (104, &[7])])), Fault::Compression(7));
    assert!(matches!(fault(changed(&dir, "image", &[(104, &[1])])), Fault::Corrupt(_)));
    assert_eq!(fault(changed(&dir, "image", &[(24, &[0; 8])])), Fault::Empty);
    assert!(matches!(fault(changed(&dir, "image", &[(24, &[0x7f, 0xff])])), Fault::TooLarge(_)));
    assert!(matches!(fault(changed(&dir, "image", &[(24, &[0, 0x10])])), Fault::TooLarge(_)));
    // Impossible headers: a size that needs a larger L1 table, clusters of 4 GiB, an unaligned L1
    // table or one beyond the file's end. Also a header that is too short.
    for change in [(27, &[1][..]), (23, &[32]), (40, &[0, 0, 1]), (46, &[2]), (100, &[0, 0, 0, 8])] {
        assert!(matches!(fault(changed(&dir, "image", &[change])), Fault::Corrupt(_)), "{change:?}");
    }
    fs::write(dir.path("text"), b"This is no image. ".repeat(100)).unwrap();
    assert_eq!(fault(dir.path("text")), Fault::NotQcow2);
    for (name, bytes) in [("empty", &b""[..]), ("tiny", b"QFI\xfb")] {
        fs::write(dir.path(name), bytes).unwrap();
        let error = Image::open(&Config::new(dir.path(name))).unwrap_err();
        assert!(matches!(error, SetupError::File(_)), "{error}");
    }
    let error = Image::open(&Config::new(dir.path("missing"))).unwrap_err();
    assert!(error.to_string().contains("missing"), "{error}");
}

#[test]
fn backing_names_that_are_not_local_files() {
    let dir = Dir::new();
    let over = |name: &str, format: &str| {
        dir.run("qemu-img", &["create", "-q", "-u", "-f", "qcow2", "-b", name, "-F", format, "image", "1M"]);
        dir.path("image")
    };
    let relative = r#"json:{"driver":"raw","file":{"driver":"file","filename":"base"}}"#;
    for name in ["nbd://localhost:1/x", "json:{\"driver\":\"file\"}", relative, "ssh://host/file", "base:1"] {
        let path = over(name, "raw");
        assert_eq!(fault(path), Fault::Name { what: "backing file", name: name.to_owned() });
    }
    assert_eq!(fault(over("base", "vmdk")), Fault::BackingFormat("vmdk".to_owned()));
    let error = Image::open(&Config::new(over("base", "raw"))).unwrap_err().to_string();
    assert!(error.contains("base"), "{error}");
    // A colon after a slash is part of the file name, and so is a colon in the text after "file:".
    let content = content(1 << 20, 1);
    for (file, name) in [("a:b", "./a:b"), ("plain", "file:plain")] {
        fs::write(dir.path(file), &content).unwrap();
        over(name, "raw");
        same(&dir.open("image"), &content, name);
    }
    // Names as libvirt and oVirt write them. The format inside the name takes precedence.
    let path = dir.path("a:b").display().to_string();
    for name in [
        format!(r#"json:{{"driver":"raw","file":{{"driver":"file","filename":"{path}"}}}}"#),
        format!(r#"json:{{"file.driver":"file","file.filename":"{path}","driver":"raw"}}"#),
        format!(r#"json:{{"driver":"file","filename":"{path}"}}"#),
    ] {
        over(&name, "qcow2");
        same(&dir.open("image"), &content, &name);
    }
}

/// A chain of backing files is refused if it has more than 64 files, or contains a file that names
/// itself.
#[test]
fn endless_chain_is_refused() {
    let dir = Dir::new();
    let create = |name: &str, backing: &str| {
        dir.run("qemu-img", &["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", "qcow2", name, "1M"]);
    };
    create("self", "./self");
    assert_eq!(fault(dir.path("self")), Fault::TooDeep(64));
    create("a", "b");
    create("b", "a");
    assert_eq!(fault(dir.path("a")), Fault::TooDeep(64));
    dir.img("create -q -f qcow2 0 1M");
    dir.io("0", &["write -P 77 0 1M"]);
    for i in 1..=64 {
        create(&i.to_string(), &(i - 1).to_string());
    }
    same(&dir.open("63"), &vec![77; 1 << 20], "64 files");
    assert_eq!(fault(dir.path("64")), Fault::TooDeep(64));
}

/// Like qemu, the reader ignores refcounts that may be wrong. The reader also opens an image marked
/// as corrupt, and reads its remaining content.
#[test]
fn dirty_and_corrupt_images_are_read() {
    let dir = Dir::new();
    let content = content(1 << 20, 2);
    fs::write(dir.path("raw"), &content).unwrap();
    dir.img("convert -f raw -O qcow2 raw image");
    for bits in [1, 2, 3] {
        let path = changed(&dir, "image", &[(79, &[bits])]);
        same(&Image::open(&Config::new(path)).unwrap(), &content, "marked image");
    }
}
