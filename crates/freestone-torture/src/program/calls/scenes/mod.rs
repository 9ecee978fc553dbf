//! The scenes: the devices of a server, and the script during which the server's system calls are
//! numbered and fail.

mod disks;

use std::fs;
use std::path::Path;

use serde_json::json;

use super::life::Life;
use super::model::{Lifetime, Model};
use super::trace::Arm;
use crate::oracle::Fill;

const MIB: u64 = 1 << 20;
const MIB_SECTORS: u64 = MIB / 512;

pub struct Scene {
    pub name: &'static str,
    /// Creates files and the model. Returns the device arguments of the first server.
    pub prepare: fn(&Path, &mut Model) -> Vec<&'static str>,
    /// Writes the initial content through the first server, before calls are numbered.
    pub settle: fn(&mut Life<'_>),
    /// Arguments of all servers after the first, and options of the first.
    pub words: &'static [&'static str],
    pub arm: Arm,
    /// The script. With [`Arm::Later`] the script itself calls `arm`.
    pub script: fn(&mut Life<'_>),
}

const STATE: &[&str] = &["--state", "state"];

/// All scenes of the sweep, in the order in which they run.
pub const SCENES: &[Scene] = &[
    Scene {
        name: "start",
        prepare: all_kinds,
        settle: fill_all,
        words: STATE,
        arm: Arm::AtStart,
        script: use_all,
    },
    Scene {
        name: "verbs",
        prepare: all_kinds,
        settle: fill_all,
        words: STATE,
        arm: Arm::Later,
        script: verbs,
    },
    Scene {
        name: "end",
        prepare: all_kinds,
        settle: fill_all,
        words: STATE,
        arm: Arm::Later,
        script: change_all,
    },
    Scene {
        name: "saves",
        prepare: one_kept,
        settle: fill_kept,
        words: &["--state", "state", "--save-every", "1s"],
        arm: Arm::Later,
        script: saves,
    },
    Scene {
        name: "snapshots",
        prepare: disks::with_snapshot,
        settle: disks::write_origin,
        words: STATE,
        arm: Arm::Later,
        script: disks::copies,
    },
    Scene {
        name: "merge",
        prepare: disks::with_snapshot,
        settle: disks::write_origin,
        words: STATE,
        arm: Arm::Later,
        script: disks::merge,
    },
    Scene {
        name: "zones",
        prepare: disks::with_zones,
        settle: disks::write_zone,
        words: STATE,
        arm: Arm::Later,
        script: disks::zones,
    },
    Scene {
        name: "store",
        prepare: disks::with_store,
        settle: disks::push_first,
        words: STATE,
        arm: Arm::Later,
        script: disks::push,
    },
    Scene {
        name: "pull",
        prepare: disks::with_store,
        settle: disks::push_first,
        words: STATE,
        arm: Arm::Later,
        script: disks::pull,
    },
    Scene {
        name: "prune",
        prepare: disks::with_store,
        settle: disks::push_and_forget,
        words: STATE,
        arm: Arm::Never,
        script: disks::prune,
    },
    Scene {
        name: "files",
        prepare: disks::kept_and_wanted,
        settle: fill_kept,
        words: STATE,
        arm: Arm::Later,
        script: disks::files,
    },
    Scene {
        name: "rewrite",
        prepare: one_file,
        settle: nothing,
        words: STATE,
        arm: Arm::Later,
        script: rewrite,
    },
];

fn write_file(dir: &Path, name: &str, content: &[u8]) {
    fs::write(dir.join(name), content).expect("the directory of a run is writable");
}

/// Prepares a device for each [`Lifetime`](super::model::Lifetime) of content.
fn all_kinds(dir: &Path, model: &mut Model) -> Vec<&'static str> {
    fs::create_dir(dir.join("exports")).expect("the directory of a run is writable");
    for name in ["g", "d"] {
        model.add(name, MIB, Lifetime::Permanent);
        let content = model.fill_file(name, MIB);
        write_file(dir, &format!("{name}.img"), &content);
    }
    model.disk("g").is_writable = false;
    model.add("kept", 2 * MIB, Lifetime::Saved);
    model.add_over("job", "g", Lifetime::Saved);
    model.add("plain", MIB, Lifetime::Temporary);
    vec![
        "g=file,path=./g.img,readonly=yes",
        "d=file,path=./d.img",
        "kept=ram,disksize=2M,keep=yes",
        "job=fork,base=g,keep=yes",
        "plain=ram,disksize=1M",
    ]
}

fn fill_all(life: &mut Life<'_>) {
    life.write("kept", 0..1000, Fill::Text);
    life.write("job", 100..300, Fill::Noise);
    life.write("d", 500..600, Fill::Noise);
    let at = format!("unix:{}", life.run_dir.dir.join("exports/g.sock").display());
    life.ask("publish", &json!({ "name": "g", "nbd": at }));
}

fn use_all(life: &mut Life<'_>) {
    for name in ["g", "d", "kept", "job"] {
        life.read_all(name);
    }
    change_some(life);
}

fn change_some(life: &mut Life<'_>) {
    life.write("kept", 200..400, Fill::Noise);
    life.write("job", 0..64, Fill::Text);
    life.write("d", 0..64, Fill::Text);
    life.flush("d");
}

fn change_all(life: &mut Life<'_>) {
    change_some(life);
    life.server.arm();
}

fn verbs(life: &mut Life<'_>) {
    life.server.arm();
    life.model.add("n", MIB, Lifetime::Temporary);
    life.create_device("n", "create", &json!({ "device": "n=null,size=1M,memory_backed=1,publish=yes" }));
    life.model.add("new", MIB, Lifetime::Permanent);
    life.create_device("new", "create", &json!({ "device": "new=file,path=./new.img,size=1M,publish=yes" }));
    life.write("new", 0..64, Fill::Text);
    life.flush("new");
    life.model.add("more", MIB, Lifetime::Saved);
    life.create_device("more", "create", &json!({ "device": "more=ram,disksize=1M,keep=yes,publish=yes" }));
    life.write("more", 0..64, Fill::Text);
    life.model.add_over("trial", "g", Lifetime::Temporary).uses_server_address = false;
    life.model.disk("trial").is_visible = false;
    life.create_device("trial", "fork", &json!({ "base": "g", "name": "trial" }));
    life.ask("set", &json!({ "name": "kept", "attrs": { "mem_limit": "8M" } }));
    let at = format!("unix:{}", life.run_dir.dir.join("exports/t.sock").display());
    life.ask("publish", &json!({ "name": "trial", "nbd": at }));
    life.ask("unpublish", &json!({ "name": "trial" }));
    life.remove("trial");
    life.remove("n");
    change_some(life);
}

fn one_kept(_: &Path, model: &mut Model) -> Vec<&'static str> {
    model.add("kept", 2 * MIB, Lifetime::Saved);
    vec!["kept=ram,disksize=2M,keep=yes"]
}

fn fill_kept(life: &mut Life<'_>) {
    life.write("kept", 0..MIB_SECTORS, Fill::Noise);
}

/// Writes an increment of saved content that is merged at once, then another one at the end.
fn saves(life: &mut Life<'_>) {
    life.server.arm();
    life.write("kept", 0..MIB_SECTORS * 3 / 4, Fill::Noise);
    life.wait_saved("kept");
    life.write("kept", 100..200, Fill::Noise);
}

fn one_file(dir: &Path, model: &mut Model) -> Vec<&'static str> {
    model.add("d", MIB, Lifetime::Permanent);
    let content = model.fill_file("d", MIB);
    write_file(dir, "d.img", &content);
    vec!["d=file,path=./d.img"]
}

fn nothing(_: &mut Life<'_>) {}

/// Runs verbs until the log of the state directory is about to be rewritten, then a few more.
fn rewrite(life: &mut Life<'_>) {
    const REWRITE_BYTES: u64 = 4 << 20;
    // Many distant bad-block ranges make the device arguments long, so that few verbs fill the log.
    let blocks: Vec<String> =
        (0..500_u64).map(|at| (1 << 32) + 16 * at).map(|at| format!("+{at}-{}", at + 1)).collect();
    let big = format!("big=null,size=4T,badblocks={}", blocks.join(";"));
    let log = life.run_dir.dir.join("state/topology");
    let bytes = || fs::metadata(&log).map_or(0, |file| file.len());
    while bytes() + 2 * (big.len() as u64) < REWRITE_BYTES && life.findings.is_empty() {
        life.ask("create", &json!({ "device": big }));
        life.ask("remove", &json!({ "name": "big" }));
    }
    life.server.arm();
    life.model.add("big", 4 << 40, Lifetime::Temporary).uses_server_address = false;
    for _ in 0..3 {
        life.create_device("big", "create", &json!({ "device": big }));
        life.remove("big");
    }
    life.model.add("precious", MIB, Lifetime::Permanent);
    life.create_device(
        "precious",
        "create",
        &json!({ "device": "precious=file,path=./p.img,size=1M,publish=yes" }),
    );
    life.write("precious", 0..64, Fill::Text);
    life.remove("d");
}
