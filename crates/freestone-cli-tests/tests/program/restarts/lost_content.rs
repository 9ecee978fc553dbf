//! Kept content that is damaged, was not saved, or belongs to a base that has changed.

use super::kept::{content, row};
use super::{GOLDEN, Mounted, image, serve};
use crate::harness::prelude::*;

#[test]
fn unreadable_kept_content_is_listed_as_missing() {
    let server =
        serve(tempfile::tempdir().unwrap(), &["disk=ram,disksize=16M,keep=yes", "null=null,size=1M"]);
    qemu_io(&uri(&server, "disk"), &["write -P 1 0 4M"]);
    let dir = server.end();
    let [file] = &content(dir.path())[..] else { panic!("one file") };
    let whole = fs::read(file).unwrap();
    let mut damaged = whole.clone();
    damaged[40] ^= 1;
    fs::write(file, &damaged).unwrap();
    let file = file.clone();
    let server = serve(dir, &[]);
    let list = server.json(&["list"]);
    assert_eq!((list["devices"].as_array().unwrap().len(), &list["missing"][0]["name"]), (1, &"disk".into()));
    assert!(list["missing"][0]["why"].as_str().unwrap().starts_with("content is damaged: "), "{list}");
    let dir = server.end();
    assert_eq!(fs::read(&file).unwrap(), damaged);
    fs::write(&file, &whole).unwrap();
    let server = serve(dir, &[]);
    // The previous server did not open the damaged disk, so at its end it did not overwrite the
    // content.
    qemu_io(&uri(&server, "disk"), &["read -P 1 0 4M"]);
    // A truncated content file also makes the disk missing.
    let dir = server.kill();
    fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    let server = serve(dir, &[]);
    assert_eq!(server.json(&["list"])["missing"][0]["name"], "disk");
}

/// A damaged block of a content file loses only the pages in the block, and later saves succeed.
#[test]
fn damaged_kept_block_loses_only_its_pages() {
    let server = serve(tempfile::tempdir().unwrap(), &["disk=ram,disksize=16M,keep=yes"]);
    let noise = noise(2, 4 << 20);
    let write = |server: &Serve, at: &str| {
        let from = server.path("noise");
        fs::write(&from, &noise).unwrap();
        qemu_io(&uri(server, "disk"), &[format!("write -s {} {at} 4M", from.display())]);
    };
    write(&server, "0");
    let dir = server.end();
    let [file] = &content(dir.path())[..] else { panic!("one file") };
    let mut damaged = fs::read(file).unwrap();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    fs::write(file, &damaged).unwrap();
    let server = serve(dir, &["--save-every", "1s"]);
    let lost = |server: &Serve| server.json(&["stat", "disk"])["keep"]["lost_pages"].as_u64();
    wait_until("the damage is found", || lost(&server).is_some());
    let pages = lost(&server);
    // 4 MiB of new data are enough for the server to merge the content files into one new file.
    write(&server, "8M");
    wait_until("all is saved anew", || {
        let files = content(server.dir.path());
        files.len() == 1 && files[0].ends_with("0000000002.whole")
    });
    qemu_io(&uri(&server, "disk"), &["write -P 5 14M 64k"]);
    assert_eq!(lost(&server), pages);
    let server = serve(server.end(), &[]);
    qemu_io(&uri(&server, "disk"), &["read -P 5 14M 64k"]);
    assert!(Raw::connect(&server, "disk").read(8 << 20, 4 << 20).unwrap() == noise);
    wait_until("what was lost is known again", || lost(&server) == pages);
}

/// Two images are equal, and one is missing at a start. The kept content of each fork stays with
/// its own image.
#[test]
fn forks_of_equal_images_are_not_mixed_up() {
    let server = serve(image(1 << 20), &[GOLDEN]);
    fs::copy(server.path("golden.img"), server.path("twin.img")).unwrap();
    server.text(&["create", "twin=file,path=twin.img,readonly=yes"]);
    let home = format!("unix:{}", server.path("nbd").display());
    server.text(&["fork", "golden", "job", "keep=yes", "--nbd", &home]);
    server.text(&["fork", "twin", "other", "keep=yes", "--nbd", &home]);
    for (name, byte) in [("job", 1), ("other", 2)] {
        qemu_io(&uri(&server, name), &[format!("write -P {byte} 0 64k")]);
    }
    let dir = server.end();
    let (image, away) = (dir.path().join("golden.img"), dir.path().join("away.img"));
    fs::rename(&image, &away).unwrap();
    let server = serve(dir, &["--save-every", "1s"]);
    let missing = server.json(&["list"])["missing"].clone();
    assert_eq!((&missing[0]["name"], &missing[1]["name"]), (&"golden".into(), &"job".into()), "{missing}");
    qemu_io(&uri(&server, "other"), &["write -P 3 0 64k"]);
    wait_until("it is saved", || server.json(&["stat", "other"])["keep"]["unsaved_bytes"] == 0);
    let dir = server.end();
    fs::rename(&away, &image).unwrap();
    let server = serve(dir, &[]);
    for (name, byte) in [("job", 1), ("other", 3)] {
        qemu_io(&uri(&server, name), &[format!("read -P {byte} 0 64k"), "read -P 7 64k 64k".to_owned()]);
    }
    let family = |name: &str| server.json(&["stat", name])["family"]["layers"].clone();
    assert_eq!((family("job"), family("other")), (1.into(), 1.into()));
}

/// The size, modification time and inode of the base's file are kept with the fork. If they
/// changed, the fork is withheld (not published after the start).
#[test]
fn base_changed_between_servers_withholds_its_fork() {
    let server = serve(image(1 << 20), &[GOLDEN]);
    let home = format!("unix:{}", server.path("nbd").display());
    server.text(&["fork", "golden", "job", "keep=yes", "--nbd", &home]);
    server.text(&["fork", "golden", "loose", "on_data_loss=empty", "--nbd", &home]);
    qemu_io(&uri(&server, "job"), &["write -P 5 64k 64k"]);
    let dir = server.end();
    let base = dir.path().join("golden.img");
    let file = fs::File::options().write(true).open(&base).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    let server = serve(dir, &[]);
    let found = row(&server, "job");
    assert_eq!((&found["withheld"], &found["content_of"]), (&Value::Bool(true), &Value::Null), "{found}");
    let changed = found["changed"].clone();
    assert_eq!(changed["how"], "modified while no server ran");
    assert_eq!(changed["file"], base.display().to_string());
    let why =
        format!("job: has a base that changed while no server ran ({}), and is withheld", base.display());
    assert!(server.startup_output.contains(&why), "{}", server.startup_output);
    assert_eq!(server.json(&["stat", "job"])["generation"], 2);
    assert_eq!(row(&server, "loose")["changed"], Value::Null, "nothing of it was kept");
    // The fork stays withheld over restarts until `publish`.
    let server = serve(server.end(), &[]);
    let found = row(&server, "job");
    assert_eq!((&found["withheld"], &found["changed"]), (&Value::Bool(true), &changed), "{found}");
    assert_eq!(server.json(&["stat", "job"])["generation"], 2);
    server.text(&["publish", "job"]);
    qemu_io(&uri(&server, "job"), &["read -P 7 0 64k", "read -P 5 64k 64k"]);
    let dir = server.end();
    let server = serve(dir, &[]);
    let found = row(&server, "job");
    assert_eq!((&found["withheld"], &found["changed"]), (&Value::Null, &Value::Null), "{found}");
    // A copy with the same content replaces the file of the base.
    let dir = server.end();
    let base = dir.path().join("golden.img");
    fs::copy(&base, dir.path().join("copy.img")).unwrap();
    fs::rename(dir.path().join("copy.img"), &base).unwrap();
    let server = serve(dir, &[]);
    assert_eq!(row(&server, "job")["withheld"], true);
}

#[test]
fn shutdown_refused_if_the_save_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = Mounted::with_size(dir.path().join("state"), "4M");
    let server = serve(dir, &["disk=ram,disksize=16M,keep=yes"]);
    fs::write(server.path("noise"), noise(3, 6 << 20)).unwrap();
    qemu_io(&uri(&server, "disk"), &[&format!("write -s {} 0 6M", server.path("noise").display())]);
    let why = server.refused(1, &["shutdown"]);
    assert!(why.starts_with("disk: the next save needs about 6"), "{why}");
    assert!(why.ends_with(" are free; --force ends the server all the same"), "{why}");
    server.text(&["shutdown", "--force"]);
    let (code, dir) = server.wait();
    assert_eq!(code, Some(1));
    assert!(content(dir.path()).is_empty());
    let server = serve(dir, &[]);
    assert_eq!(row(&server, "disk")["withheld"], true);
    drop((server.end(), mounted));
}

#[test]
fn save_timeout_ends_with_status_1_and_withholds() {
    let server =
        serve(tempfile::tempdir().unwrap(), &["disk=ram,disksize=64M,keep=yes", "--save-timeout", "0s"]);
    qemu_io(&uri(&server, "disk"), &["write -P 1 0 4M"]);
    server.signal(rustix::process::Signal::TERM);
    let (code, dir) = server.wait();
    assert_eq!(code, Some(1));
    assert_eq!(row(&serve(dir, &[]), "disk")["withheld"], true);
}
