//! Judges the state after a server's life in which calls failed: starts two more servers without failing calls.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::fault::End;
use super::life::{Answer, Life, RunDir};
use super::model::{Lifetime, Model, Presence};
use super::trace::Arm;
use crate::oracle::{Durability, Fill, Oracle};
use crate::program::server;

/// Name of a null device that is created and removed to check that verbs work.
const PROBE: &str = "probe";

#[derive(Debug, Default)]
struct DeviceList {
    /// The withheld flag (content not restored, so not served) of each device, by name.
    devices: BTreeMap<String, bool>,
    missing: BTreeSet<String>,
}

/// Updates which devices clients find at the server's address. If `is_exact`, a withheld device with saved content is a
/// finding.
pub fn update_visibility(life: &mut Life<'_>, is_exact: bool) {
    let Some(listed) = list(life) else { return };
    let mut withheld = Vec::new();
    for (name, disk) in &mut life.model.disks {
        let is_withheld = listed.devices.get(name).copied();
        disk.is_visible = disk.uses_server_address && is_withheld == Some(false);
        if is_withheld == Some(true) && disk.lifetime == Lifetime::Saved && is_exact {
            withheld.push(name.clone());
        }
    }
    for name in withheld {
        life.findings.push(format!("LOSS: {name} is withheld although the last server has saved it"));
    }
}

fn list(life: &mut Life<'_>) -> Option<DeviceList> {
    let Answer::Done(list) = life.ask("list", &json!({})) else { return None };
    let mut listed = DeviceList::default();
    for device in list["devices"].as_array().into_iter().flatten() {
        let name = device["name"].as_str().unwrap_or_default();
        listed.devices.insert(name.to_owned(), device["withheld"] == true);
    }
    for device in list["missing"].as_array().into_iter().flatten() {
        listed.missing.insert(device["name"].as_str().unwrap_or_default().to_owned());
    }
    Some(listed)
}

/// Starts two servers one after the other and judges their devices. `is_exact`: saved content must be the content at
/// the last end, and no device with saved content may be withheld.
pub fn judge(run_dir: &RunDir<'_>, model: &mut Model, words: &[&str], is_exact: bool) -> Vec<String> {
    let mut findings = Vec::new();
    for (at, is_exact) in [("the next start", is_exact), ("the start after that", true)] {
        let mut life = match Life::start(run_dir, model, words, Arm::Never, None) {
            Ok(life) => life,
            Err((said, ended)) => {
                let log = server::log_tail(&run_dir.dir);
                findings.push(format!("{at} fails with {}: {said}\n{log}", ended.status));
                return findings;
            }
        };
        compare(&mut life, is_exact);
        if life.findings.is_empty() {
            use_all(&mut life);
        }
        let (_, found) = life.end(End::Terminated);
        findings.extend(found.into_iter().map(|what| format!("{at}: {what}")));
        if !findings.is_empty() {
            break;
        }
    }
    findings
}

fn compare(life: &mut Life<'_>, is_exact: bool) {
    let Some(listed) = list(life) else { return };
    let names: Vec<String> = life.model.disks.keys().cloned().collect();
    for name in &names {
        let is_missing = listed.missing.contains(name);
        let is_listed = listed.devices.contains_key(name);
        let disk = life.model.disk(name);
        match (disk.presence, is_listed) {
            _ if is_missing && disk.presence != Presence::No => {
                life.findings.push(format!("LOSS: {name} is missing"));
            }
            (Presence::Yes, false) => life.findings.push(format!("LOSS: {name} is gone")),
            (Presence::No, true) => life.findings.push(format!("LOSS: {name} is back")),
            (Presence::Unknown, true) => disk.presence = Presence::Yes,
            (Presence::Unknown, false) => disk.presence = Presence::No,
            _ => {}
        }
    }
    for name in listed.devices.keys().chain(&listed.missing) {
        if !names.contains(name) {
            life.findings.push(format!("{name} is listed but was never created"));
        }
    }
    for name in names {
        if let Some(&is_withheld) = listed.devices.get(&name) {
            judge_device(life, &name, is_withheld, is_exact);
        }
    }
}

fn judge_device(life: &mut Life<'_>, name: &str, is_withheld: bool, is_exact: bool) {
    let disk = life.model.disk(name);
    match disk.lifetime {
        Lifetime::Permanent if is_withheld => {
            life.findings.push(format!("LOSS: {name} is withheld although its content is in a file"));
        }
        Lifetime::Saved if is_withheld && is_exact => {
            life.findings.push(format!("LOSS: {name} is withheld although the last server has saved it"));
        }
        Lifetime::Saved if is_withheld => disk.oracle.crash(),
        Lifetime::Temporary => {
            let size = disk.oracle.size();
            disk.oracle = Oracle::new(name, size, Durability::Nothing);
        }
        Lifetime::Permanent | Lifetime::Saved => {}
    }
    let disk = life.model.disk(name);
    let (uses_server_address, is_fragile) = (disk.uses_server_address, disk.is_fragile);
    if !uses_server_address || is_fragile && life.is_invalid(name) {
        return;
    }
    life.model.disk(name).is_visible = true;
    if is_withheld {
        life.ask("publish", &json!({ "name": name }));
    }
    life.read_all(name);
}

/// Checks that the server works: writes to and flushes all devices, then creates and removes one.
fn use_all(life: &mut Life<'_>) {
    let names: Vec<String> = life.model.disks.keys().cloned().collect();
    for name in names {
        let disk = life.model.disk(&name);
        if disk.is_writable && disk.uses_server_address && disk.presence == Presence::Yes {
            life.write(&name, 8..16, Fill::Noise);
            life.flush(&name);
        }
    }
    if let Answer::Done(_) = life.ask("create", &json!({ "device": format!("{PROBE}=null,size=1M") })) {
        life.ask("remove", &json!({ "name": PROBE }));
    }
}
