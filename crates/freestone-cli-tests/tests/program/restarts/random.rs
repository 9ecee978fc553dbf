//! Random verbs of several clients, on a server that ends at random times. After the restart each verb has taken effect
//! completely or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader};
use std::sync::atomic::{AtomicBool, Ordering};

use freestone_testkit::effort;

use super::{image_in, serve};
use crate::harness::prelude::*;

const CLIENTS: usize = 3;

/// State of a pseudorandom number generator.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }
}

/// The properties of a device that the test checks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Device {
    kind: String,
    below: Option<String>,
    mem_limit: Option<String>,
    home: bool,
    exports: BTreeSet<String>,
}

type Devices = BTreeMap<String, Device>;

/// A client of the control socket, with devices of its own.
struct Client {
    number: usize,
    random: Random,
    next: usize,
    devices: Devices,
    /// If the last verb received no reply: the devices as they are if the verb has taken effect.
    after_unanswered: Option<Devices>,
    verbs: usize,
}

impl Client {
    fn name(&mut self) -> String {
        self.next += 1;
        format!("c{}-{}", self.number, self.next)
    }

    fn pick(&mut self, fits: impl Fn(&str, &Device) -> bool) -> Option<String> {
        let names: Vec<_> = self.devices.iter().filter(|(name, device)| fits(name, device)).collect();
        let names: Vec<String> = names.into_iter().map(|(name, _)| name.clone()).collect();
        if names.is_empty() { None } else { Some(names[self.random.below(names.len())].clone()) }
    }

    /// Returns a random verb, its parameters, and the devices after the verb.
    fn verb(&mut self, dir: &Path) -> (&'static str, Value, Devices) {
        let mut then = self.devices.clone();
        let place = |name: &str| format!("unix:{}/{name}.sock", dir.display());
        let many = self.devices.len() > 12;
        loop {
            match self.random.below(9) {
                0 | 1 if !many => {
                    let (name, home) = (self.name(), self.random.below(2) == 0);
                    let on_data_loss = ["", ",on_data_loss=empty"][self.random.below(2)];
                    let device = Device { kind: "ram".into(), home, ..Device::default() };
                    let publish = if home { ",publish=yes" } else { "" };
                    then.insert(name.clone(), device);
                    return (
                        "create",
                        json!({ "device": format!("{name}=ram,disksize=1M{on_data_loss}{publish}") }),
                        then,
                    );
                }
                2 if !many => {
                    let name = self.name();
                    for number in 0..3 {
                        let name = format!("{name}-{number}");
                        let device = Device {
                            kind: "fork".into(),
                            below: Some("golden".into()),
                            exports: [place(&name)].into(),
                            ..Device::default()
                        };
                        then.insert(name, device);
                    }
                    let nbd = place(&format!("{name}-%n"));
                    return ("fork", json!({ "base": "golden", "name": name, "count": 3, "nbd": nbd }), then);
                }
                3 if !many => {
                    let Some(origin) = self.pick(|_, device| device.kind == "ram") else { continue };
                    let name = self.name();
                    let below = Some(origin.clone());
                    then.insert(name.clone(), Device { kind: "snapshot".into(), below, ..Device::default() });
                    return ("snapshot", json!({ "snapshots": [{ "origin": origin, "name": name }] }), then);
                }
                4 => {
                    let Some(name) = self.pick(|_, device| device.kind != "snapshot") else { continue };
                    let limit = format!("{}M", 1 + self.random.below(1000));
                    then.get_mut(&name).unwrap().mem_limit = Some(limit.clone());
                    return ("set", json!({ "name": name, "attrs": { "mem_limit": limit } }), then);
                }
                5 | 6 => {
                    let Some(name) = self.pick(|_, _| true) else { continue };
                    self.next += 1;
                    let at = place(&format!("{name}-at-{}", self.next));
                    then.get_mut(&name).unwrap().exports.insert(at.clone());
                    return ("publish", json!({ "name": name, "nbd": at }), then);
                }
                7 => {
                    let seen = |_: &str, device: &Device| device.home || !device.exports.is_empty();
                    let Some(name) = self.pick(seen) else { continue };
                    let device = then.get_mut(&name).unwrap();
                    (device.home, device.exports) = (false, BTreeSet::new());
                    return ("unpublish", json!({ "name": name }), then);
                }
                8 => {
                    let below: BTreeSet<_> =
                        then.values().filter_map(|device| device.below.clone()).collect();
                    let Some(name) = self.pick(|name, _| !below.contains(name)) else { continue };
                    then.remove(&name);
                    return ("remove", json!({ "name": name }), then);
                }
                _ => {}
            }
        }
    }

    /// Runs at most `most` verbs, until the server ends.
    fn run(&mut self, dir: &Path, most: usize, ends: &AtomicBool) {
        let Ok(stream) = UnixStream::connect(dir.join("control")) else { return };
        let mut answers = BufReader::new(stream.try_clone().unwrap());
        for _ in 0..most {
            let (method, params, then) = self.verb(dir);
            let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
            self.after_unanswered = Some(then.clone());
            let mut answer = String::new();
            let asked = (&stream).write_all(format!("{request}\n").as_bytes());
            if asked.is_err() || answers.read_line(&mut answer).unwrap_or(0) == 0 {
                return;
            }
            // A partial reply is treated like a missing one.
            let Ok(answer) = serde_json::from_str::<Value>(&answer) else { return };
            if answer.get("error").is_some() {
                // An error is only expected while the server is shutting down. Each verb has its own message for this.
                assert!(ends.load(Ordering::SeqCst), "{request}: {answer}");
                self.after_unanswered = None;
                return;
            }
            (self.devices, self.after_unanswered) = (then, None);
            self.verbs += 1;
        }
    }
}

/// Returns the devices of a client that exist on the server.
fn devices_of(serve: &Serve, client: usize) -> Devices {
    let dumped: toml::Table = serve.text(&["dump"]).parse().unwrap();
    let prefix = format!("c{client}-");
    let devices = dumped.get("device").and_then(|all| all.as_array()).into_iter().flatten();
    let own = devices.filter_map(|device| {
        let text = |key: &str| device.get(key).and_then(|value| value.as_str()).map(str::to_owned);
        let name = text("name").filter(|name| name.starts_with(&prefix))?;
        let exports = device.get("export").and_then(|exports| exports.as_array()).into_iter().flatten();
        let known = Device {
            kind: text("kind")?,
            below: text("base").or_else(|| text("origin")),
            mem_limit: text("mem_limit"),
            home: device.get("publish").is_none(),
            exports: exports.filter_map(|export| export["nbd"].as_str().map(str::to_owned)).collect(),
        };
        Some((name, known))
    });
    own.collect()
}

/// Returns the UUIDs of all devices, by device name.
fn uuids(serve: &Serve) -> BTreeMap<String, String> {
    let stat = serve.json(&["stat"]);
    let text = |device: &Value, key: &str| device[key].as_str().unwrap().to_owned();
    stat["devices"].as_array().unwrap().iter().map(|d| (text(d, "name"), text(d, "uuid"))).collect()
}

#[test]
fn restart_has_each_verb_completely_or_not_at_all() {
    let seed = 18;
    let mut random = Random(seed);
    // The state is on a tmpfs, which is faster than a disk and also survives SIGKILL of the server.
    let mut dir: TempDir = image_in(tempfile::tempdir_in("/dev/shm").unwrap(), 1 << 20);
    let mut clients: Vec<Client> = (0..CLIENTS)
        .map(|number| Client {
            number,
            random: Random(seed + 1 + number as u64),
            next: 0,
            devices: Devices::new(),
            after_unanswered: None,
            verbs: 0,
        })
        .collect();
    let (mut kills, mut cut_off, mut done) = (0, [0, 0], 0);
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    while done < effort(600, 2000) {
        let words: &[&str] = if kills == 0 { &["golden=file,path=golden.img,readonly=yes"] } else { &[] };
        let server = serve(dir, words);
        let now = uuids(&server);
        for client in &mut clients {
            let there = devices_of(&server, client.number);
            if there != client.devices {
                let after_unanswered = client.after_unanswered.take();
                assert_eq!(
                    Some(&there),
                    after_unanswered.as_ref(),
                    "kill {kills}; else {:?}",
                    client.devices
                );
                cut_off[1] += 1;
                client.devices = there;
            } else if client.after_unanswered.take().is_some() {
                cut_off[0] += 1;
            }
            for name in client.devices.keys() {
                // Names are never reused, so the UUID of a name must not change.
                assert!(known.get(name).is_none_or(|uuid| *uuid == now[name]), "{name}");
            }
        }
        known = now;
        let micros = random.below(20_000) as u64;
        let at = server.dir.path();
        // A clean shutdown takes longer than a kill, so only one end in 16 is clean.
        let (orderly, ends) = (kills % 16 == 3, AtomicBool::new(false));
        thread::scope(|scope| {
            for client in &mut clients {
                scope.spawn(|| client.run(at, 100, &ends));
            }
            thread::sleep(Duration::from_micros(micros));
            ends.store(orderly, Ordering::SeqCst);
            server.signal(if orderly { Signal::TERM } else { Signal::KILL });
        });
        dir = server.wait().1;
        kills += 1;
        done = clients.iter().map(|client| client.verbs).sum();
    }
    println!(
        "{done} verbs, {kills} kills; of verbs cut off {} were not there, {} were",
        cut_off[0], cut_off[1]
    );
    assert!(kills > 10 && cut_off[0] > 0);
}
