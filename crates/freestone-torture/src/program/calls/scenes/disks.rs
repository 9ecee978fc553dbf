//! Scenes of snapshots, zones, image stores, and files that verbs write.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde_json::json;

use super::super::life::{Answer, Life};
use super::super::model::{Lifetime, Model, Presence};
use super::{MIB, one_kept, write_file};
use crate::oracle::{Fill, Kind as Writing, Outcome, WriteToken};

/// Age that files are given before a prune, well beyond its grace period.
const AGE: Duration = Duration::from_secs(10 * 24 * 3600);

/// Prepares a file device with a snapshot whose COW device is a file.
pub fn with_snapshot(dir: &Path, model: &mut Model) -> Vec<&'static str> {
    model.add("d", MIB, Lifetime::Permanent);
    let content = model.fill_file("d", MIB);
    write_file(dir, "d.img", &content);
    let snapshot = model.add_over("s", "d", Lifetime::Permanent);
    (snapshot.is_writable, snapshot.is_fragile) = (false, true);
    vec!["d=file,path=./d.img", "s=snapshot,origin=d,cow=./s.cow,cow_size=4M,store=P,chunk_size=4K"]
}

pub fn write_origin(life: &mut Life<'_>) {
    life.write("d", 0..64, Fill::Text);
    life.flush("d");
}

/// Writes to an origin, so that chunks are copied for the first time, and takes another snapshot.
pub fn copies(life: &mut Life<'_>) {
    life.server.arm();
    life.write("d", 100..200, Fill::Noise);
    life.flush("d");
    let snapshot = life.model.add_over("s2", "d", Lifetime::Permanent);
    (snapshot.is_writable, snapshot.is_fragile) = (false, true);
    let device = "s2=snapshot,origin=d,cow=./s2.cow,cow_size=4M,store=P,chunk_size=4K,publish=yes";
    life.create_device("s2", "create", &json!({ "device": device }));
    life.write("d", 96..300, Fill::Text);
    life.flush("d");
    life.read_all("s");
    life.read_all("s2");
    life.remove("s2");
}

pub fn merge(life: &mut Life<'_>) {
    life.server.arm();
    life.write("d", 100..200, Fill::Noise);
    // The snapshot has the content with which the file was filled, so a merge writes that content to the origin.
    let disk = life.model.disk("d");
    let token = disk.oracle.begin_write(disk.filled_by, 0..disk.shown, Writing::Write);
    let merged = life.ask("merge", &json!({ "name": "s", "into_origin": true, "force": true }));
    end_write(life, "d", token, &merged);
    life.read_all("d");
    // A merged snapshot has the content of its origin, so it is no longer checked on its own.
    let snapshot = life.model.disk("s");
    (snapshot.uses_server_address, snapshot.is_visible) = (false, false);
    life.write("d", 300..320, Fill::Text);
    life.flush("d");
}

/// Records the end of a write that a verb made to a device, according to the answer to the verb.
fn end_write(life: &mut Life<'_>, name: &str, token: WriteToken, answer: &Answer) {
    let is_done = matches!(answer, Answer::Done(_));
    let outcome = if is_done { Outcome::Done { fua: true } } else { Outcome::Failed };
    life.model.disk(name).oracle.end(token, outcome);
}

/// Prepares a file device with zones, and a plain file device.
pub fn with_zones(dir: &Path, model: &mut Model) -> Vec<&'static str> {
    model.add("d", MIB, Lifetime::Permanent);
    let content = model.fill_file("d", MIB);
    write_file(dir, "d.img", &content);
    let zoned = model.add("z", MIB, Lifetime::Permanent);
    (zoned.is_writable, zoned.is_fragile, zoned.shown) = (false, true, 0);
    vec!["z=file,path=./z.img,size=1M,zoned=1,zone_size=256K", "d=file,path=./d.img"]
}

pub fn write_zone(life: &mut Life<'_>) {
    append(life, 0..64);
}

/// Writes at the write pointer of the first zone, if its position is known, and flushes. After a crash the write
/// pointer is at or beyond its position at the last flush.
fn append(life: &mut Life<'_>, sectors: std::ops::Range<u64>) {
    let is_known = life.model.disk("z").shown == sectors.start;
    if is_known && life.write("z", sectors.clone(), Fill::Text) && life.flush("z") {
        life.model.disk("z").shown = sectors.end;
    }
}

/// Writes to zones and flushes, and starts and ends a recording.
pub fn zones(life: &mut Life<'_>) {
    life.server.arm();
    append(life, 64..128);
    append(life, 128..200);
    life.model.add("r", MIB, Lifetime::Temporary);
    life.create_device("r", "create", &json!({ "device": "r=ram,disksize=1M,record=./r.log,publish=yes" }));
    life.write("r", 0..64, Fill::Noise);
    life.flush("r");
    life.remove("r");
    life.write("d", 0..64, Fill::Text);
    life.flush("d");
}

/// Prepares a saved RAM disk that is pushed to an image store in a directory.
pub fn with_store(_: &Path, model: &mut Model) -> Vec<&'static str> {
    model.add("kept", MIB, Lifetime::Saved);
    vec!["kept=ram,disksize=1M,keep=yes"]
}

fn url(life: &Life<'_>) -> String {
    format!("file://{}:t", life.run_dir.dir.join("store").display())
}

pub fn push_first(life: &mut Life<'_>) {
    life.write("kept", 0..1000, Fill::Noise);
    let url = url(life);
    life.ask("push", &json!({ "name": "kept", "url": url }));
    for name in ["i", "next"] {
        life.model.add_over(name, "kept", Lifetime::Permanent).is_writable = false;
    }
    life.create_device(
        "i",
        "create",
        &json!({ "device": format!("i=image,url={url},cache=none,publish=yes") }),
    );
    // The device for the image to which the tag will refer does not exist yet.
    life.model.disk("next").presence = Presence::No;
}

/// Pushes the device a second time, and opens the new image of the tag as a device.
pub fn push(life: &mut Life<'_>) {
    life.server.arm();
    let Some((id, sectors)) = life.write_id("kept", 100..600, Fill::Noise) else { return };
    let url = url(life);
    let token = life.model.disk("next").oracle.begin_write(id, sectors, Writing::Write);
    let pushed = life.ask("push", &json!({ "name": "kept", "url": url }));
    end_write(life, "next", token, &pushed);
    life.create_device(
        "next",
        "create",
        &json!({ "device": format!("next=image,url={url},cache=none,publish=yes") }),
    );
    life.read_all("next");
    life.read_all("i");
}

pub fn pull(life: &mut Life<'_>) {
    life.server.arm();
    let cache = life.run_dir.dir.join("cache");
    let disk = life.model.add_over("p", "i", Lifetime::Permanent);
    disk.is_writable = false;
    life.create_device(
        "p",
        "pull",
        &json!({ "url": url(life), "name": "p", "cache": cache, "publish": "yes" }),
    );
    life.read_all("p");
    life.read_all("p");
}

/// Pushes a second image, removes its tag, and makes its files old enough to be pruned.
pub fn push_and_forget(life: &mut Life<'_>) {
    push_first(life);
    life.write("kept", 1000..1900, Fill::Noise);
    let gone = format!("{}-gone", url(life));
    life.ask("push", &json!({ "name": "kept", "url": gone }));
    life.run(&["images", url(life).trim_end_matches(":t"), "--untag", "t-gone"]);
    backdate_files(&life.run_dir.dir.join("store"));
}

/// Sets back the modification time of all files below a directory by `AGE`.
fn backdate_files(dir: &Path) {
    for entry in fs::read_dir(dir).expect("a push has made it").flatten() {
        let path = entry.path();
        if path.is_dir() {
            backdate_files(&path);
        } else {
            let file = File::open(&path).expect("nobody else removes it");
            file.set_modified(SystemTime::now() - AGE).expect("it is this user's");
        }
    }
}

/// Prunes the image store with the program, then again without failing calls.
pub fn prune(life: &mut Life<'_>) {
    let store = url(life).trim_end_matches(":t").to_owned();
    life.run(&["prune", &store]);
    let again = Command::new(life.run_dir.program).args(["prune", &store]).output().expect("it ran just now");
    let manifests = fs::read_dir(life.run_dir.dir.join("store/manifests")).map_or(0, Iterator::count);
    if !again.status.success() || manifests != 1 {
        let said = String::from_utf8_lossy(&again.stderr);
        life.findings
            .push(format!("prune, repeated: {}, {manifests} manifests are left: {said}", again.status));
    }
    life.read_all("i");
    life.create_device(
        "next",
        "create",
        &json!({ "device": format!("next=image,url={store}:t,cache=none,publish=yes") }),
    );
    life.read_all("next");
}

/// Name of a file that lists one device, for `apply`.
const WANTED: &str = "wanted.toml";

/// Prepares a saved device, and a device file for `apply`.
pub fn kept_and_wanted(dir: &Path, model: &mut Model) -> Vec<&'static str> {
    let wanted = b"[[device]]\nname = \"e\"\nkind = \"null\"\nsize = \"1M\"\npublish = false\n";
    write_file(dir, WANTED, wanted);
    one_kept(dir, model)
}

/// Runs verbs that write and read files.
pub fn files(life: &mut Life<'_>) {
    life.server.arm();
    let file = life.run_dir.dir.join("kept.saved");
    life.ask("save", &json!({ "names": ["kept"], "file": file }));
    life.model.add("back", 2 * MIB, Lifetime::Temporary).uses_server_address = false;
    life.model.disk("back").is_visible = false;
    if file.exists() {
        life.create_device("back", "restore", &json!({ "file": file, "name": "back" }));
    } else {
        life.model.disk("back").presence = Presence::No;
    }
    let wanted = life.run_dir.dir.join(WANTED);
    life.model.add("e", MIB, Lifetime::Temporary).uses_server_address = false;
    life.model.disk("e").is_visible = false;
    life.create_device("e", "apply", &json!({ "file": wanted }));
}
