//! Scenes of snapshots, zones, stores of images and files that verbs write.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde_json::json;

use super::super::life::{Answer, Life};
use super::super::model::{Lasts, Model, Presence};
use super::{MIB, one_kept, write_file};
use crate::oracle::{Fill, Kind as Writing, Outcome, WriteToken};

/// Time after which a prune deletes what no tag refers to.
const AGE: Duration = Duration::from_secs(10 * 24 * 3600);

/// A file with a snapshot whose copies are in a file.
pub fn with_snapshot(dir: &Path, model: &mut Model) -> Vec<&'static str> {
    model.add("d", MIB, Lasts::Always);
    let content = model.fill_file("d", MIB);
    write_file(dir, "d.img", &content);
    let snapshot = model.add_over("s", "d", Lasts::Always);
    (snapshot.is_writable, snapshot.is_fragile) = (false, true);
    vec!["d=file,path=./d.img", "s=snapshot,origin=d,cow=./s.cow,cow_size=4M,store=P,chunk_size=4K"]
}

pub fn write_origin(life: &mut Life<'_>) {
    life.write("d", 0..64, Fill::Text);
    life.flush("d");
}

/// First writes to an origin, and another snapshot of it.
pub fn copies(life: &mut Life<'_>) {
    life.server.arm();
    life.write("d", 100..200, Fill::Noise);
    life.flush("d");
    let snapshot = life.model.add_over("s2", "d", Lasts::Always);
    (snapshot.is_writable, snapshot.is_fragile) = (false, true);
    let device = "s2=snapshot,origin=d,cow=./s2.cow,cow_size=4M,store=P,chunk_size=4K,publish=yes";
    life.make("s2", "create", &json!({ "device": device }));
    life.write("d", 96..300, Fill::Text);
    life.flush("d");
    life.read_all("s");
    life.read_all("s2");
    life.remove("s2");
}

/// A snapshot that is merged into its origin.
pub fn merge(life: &mut Life<'_>) {
    life.server.arm();
    life.write("d", 100..200, Fill::Noise);
    // The snapshot shows what the file was filled with.
    let disk = life.model.disk("d");
    let token = disk.oracle.begin_write(disk.filled_by, 0..disk.shown, Writing::Write);
    let merged = life.ask("merge", &json!({ "name": "s", "into_origin": true, "force": true }));
    end_write(life, "d", token, &merged);
    life.read_all("d");
    // A snapshot that is merged shows what its origin holds.
    let snapshot = life.model.disk("s");
    (snapshot.is_home, snapshot.is_seen) = (false, false);
    life.write("d", 300..320, Fill::Text);
    life.flush("d");
}

/// Ends a write to a device that a verb has made.
fn end_write(life: &mut Life<'_>, name: &str, token: WriteToken, answer: &Answer) {
    let is_done = matches!(answer, Answer::Done(_));
    let outcome = if is_done { Outcome::Done { fua: true } } else { Outcome::Failed };
    life.model.disk(name).oracle.end(token, outcome);
}

/// A file with zones, and one that is recorded.
pub fn with_zones(dir: &Path, model: &mut Model) -> Vec<&'static str> {
    model.add("d", MIB, Lasts::Always);
    let content = model.fill_file("d", MIB);
    write_file(dir, "d.img", &content);
    let zoned = model.add("z", MIB, Lasts::Always);
    (zoned.is_writable, zoned.is_fragile, zoned.shown) = (false, true, 0);
    vec!["z=file,path=./z.img,size=1M,zoned=1,zone_size=256K", "d=file,path=./d.img"]
}

pub fn write_zone(life: &mut Life<'_>) {
    append(life, 0..64);
}

/// Writes at the write pointer of the first zone, as far as that is known, and flushes. After a crash the
/// write pointer is at or beyond its value at the last flush.
fn append(life: &mut Life<'_>, sectors: std::ops::Range<u64>) {
    let is_known = life.model.disk("z").shown == sectors.start;
    if is_known && life.write("z", sectors.clone(), Fill::Text) && life.flush("z") {
        life.model.disk("z").shown = sectors.end;
    }
}

/// Writes of a zone and their flushes, and a recording that begins and ends.
pub fn zones(life: &mut Life<'_>) {
    life.server.arm();
    append(life, 64..128);
    append(life, 128..200);
    life.model.add("r", MIB, Lasts::Never);
    life.make("r", "create", &json!({ "device": "r=ram,disksize=1M,record=./r.log,publish=yes" }));
    life.write("r", 0..64, Fill::Noise);
    life.flush("r");
    life.remove("r");
    life.write("d", 0..64, Fill::Text);
    life.flush("d");
}

/// A disk that is pushed to a store that is a directory.
pub fn with_store(_: &Path, model: &mut Model) -> Vec<&'static str> {
    model.add("kept", MIB, Lasts::Saved);
    vec!["kept=ram,disksize=1M,keep=yes"]
}

fn url(life: &Life<'_>) -> String {
    format!("file://{}:t", life.place.dir.join("store").display())
}

pub fn push_first(life: &mut Life<'_>) {
    life.write("kept", 0..1000, Fill::Noise);
    let url = url(life);
    life.ask("push", &json!({ "name": "kept", "url": url }));
    for name in ["i", "next"] {
        life.model.add_over(name, "kept", Lasts::Always).is_writable = false;
    }
    life.make("i", "create", &json!({ "device": format!("i=image,url={url},cache=none,publish=yes") }));
    // What the tag says later is made a device then.
    life.model.disk("next").presence = Presence::No;
}

/// A second push, and the image that the tag has then.
pub fn push(life: &mut Life<'_>) {
    life.server.arm();
    let Some((id, sectors)) = life.write_id("kept", 100..600, Fill::Noise) else { return };
    let url = url(life);
    let token = life.model.disk("next").oracle.begin_write(id, sectors, Writing::Write);
    let pushed = life.ask("push", &json!({ "name": "kept", "url": url }));
    end_write(life, "next", token, &pushed);
    life.make("next", "create", &json!({ "device": format!("next=image,url={url},cache=none,publish=yes") }));
    life.read_all("next");
    life.read_all("i");
}

/// The image of the tag comes into a cache.
pub fn pull(life: &mut Life<'_>) {
    life.server.arm();
    let cache = life.place.dir.join("cache");
    let disk = life.model.add_over("p", "i", Lasts::Always);
    disk.is_writable = false;
    life.make("p", "pull", &json!({ "url": url(life), "name": "p", "cache": cache, "publish": "yes" }));
    life.read_all("p");
    life.read_all("p");
}

/// A second image whose tag is removed, and which is old enough to be deleted.
pub fn push_and_forget(life: &mut Life<'_>) {
    push_first(life);
    life.write("kept", 1000..1900, Fill::Noise);
    let gone = format!("{}-gone", url(life));
    life.ask("push", &json!({ "name": "kept", "url": gone }));
    life.run(&["images", url(life).trim_end_matches(":t"), "--untag", "t-gone"]);
    age(&life.place.dir.join("store"));
}

/// Sets back the time of modification of all files below a directory.
fn age(dir: &Path) {
    for entry in fs::read_dir(dir).expect("a push has made it").flatten() {
        let path = entry.path();
        if path.is_dir() {
            age(&path);
        } else {
            let file = File::open(&path).expect("nobody else removes it");
            file.set_modified(SystemTime::now() - AGE).expect("it is this user's");
        }
    }
}

/// A prune by the program, which is repeated without a failure.
pub fn prune(life: &mut Life<'_>) {
    let store = url(life).trim_end_matches(":t").to_owned();
    life.run(&["prune", &store]);
    let again = Command::new(life.place.program).args(["prune", &store]).output().expect("it ran just now");
    let manifests = fs::read_dir(life.place.dir.join("store/manifests")).map_or(0, Iterator::count);
    if !again.status.success() || manifests != 1 {
        let said = String::from_utf8_lossy(&again.stderr);
        life.findings
            .push(format!("prune, repeated: {}, {manifests} manifests are left: {said}", again.status));
    }
    life.read_all("i");
    life.make(
        "next",
        "create",
        &json!({ "device": format!("next=image,url={store}:t,cache=none,publish=yes") }),
    );
    life.read_all("next");
}

/// A file that lists a device.
const WANTED: &str = "wanted.toml";

/// A kept device, and a file for `apply`.
pub fn kept_and_wanted(dir: &Path, model: &mut Model) -> Vec<&'static str> {
    let wanted = b"[[device]]\nname = \"e\"\nkind = \"null\"\nsize = \"1M\"\npublish = false\n";
    write_file(dir, WANTED, wanted);
    one_kept(dir, model)
}

/// Files that verbs write and read.
pub fn files(life: &mut Life<'_>) {
    life.server.arm();
    let file = life.place.dir.join("kept.saved");
    life.ask("save", &json!({ "names": ["kept"], "file": file }));
    life.model.add("back", 2 * MIB, Lasts::Never).is_home = false;
    life.model.disk("back").is_seen = false;
    if file.exists() {
        life.make("back", "restore", &json!({ "file": file, "name": "back" }));
    } else {
        life.model.disk("back").presence = Presence::No;
    }
    let wanted = life.place.dir.join(WANTED);
    life.model.add("e", MIB, Lasts::Never).is_home = false;
    life.model.disk("e").is_seen = false;
    life.make("e", "apply", &json!({ "file": wanted }));
}
