//! Images: what devices hold goes to a store, and comes back as devices.

use std::process::{Command, Stdio};

use serde_json::json;

use super::super::images::{self, CACHE};
use super::super::link::Place;
use super::super::server;
use super::super::watch::VERB_MAX;
use super::super::world::{Disk, Kind, May, TAGS};
use super::{Hand, is_bare, root};

impl Hand<'_> {
    /// One of these.
    pub(super) fn images(&mut self) {
        match self.rng.below(10) {
            0..4 => self.push(),
            4..8 => self.pull(),
            8 => {
                if let Some(disk) = self.some(|disk| disk.kind == Kind::Image) {
                    self.ask("trace", &json!({ "name": disk.name }));
                }
            }
            _ => self.prune(),
        }
    }

    fn push(&mut self) {
        let whole = |disk: &Disk| {
            let kinds = [Kind::Ram, Kind::Fork, Kind::Frozen, Kind::Base, Kind::Image];
            kinds.contains(&disk.kind) && is_bare(disk)
        };
        let Some(disk) = self.some(whole) else { return };
        if disk.may_fail() || root(&disk).is_some_and(|root| root.may_fail()) {
            return;
        }
        let at = self.rng.below(TAGS.len() as u64) as usize;
        let world = self.world;
        // Somebody else pushes there.
        let Ok(mut may) = world.tags[at].try_lock() else { return };
        let since = disk.oracle().begin_read();
        let full = self.rng.chance(15);
        let asked = json!({ "name": disk.name, "url": images::url(world, TAGS[at]), "full": full });
        let told = self.ask_of("push", &asked, Some(&disk));
        if told.is_none() && !self.cut_off && !world.dying() {
            return disk.oracle().abandon(since);
        }
        let oracle = disk.taken(since, TAGS[at]);
        let image = told.as_ref().and_then(|told| Some(told["url"].as_str()?.rsplit_once('@')?.1.to_owned()));
        if told.is_some() {
            may.clear();
        }
        may.push(May { image, oracle });
    }

    /// An image as a device: made, or pulled into the cache as well.
    fn pull(&mut self) {
        if self.is_full() {
            return;
        }
        let at = self.rng.below(TAGS.len() as u64) as usize;
        let world = self.world;
        let Ok(mut may) = world.tags[at].try_lock() else { return };
        self.slot.begin("looks at a tag", VERB_MAX);
        match images::settle(world, TAGS[at], &mut may) {
            Ok(true) => {}
            Ok(false) => return,
            Err(why) => return world.fail(why),
        }
        let Some(May { image: Some(image), oracle }) = may.first() else { return };
        let name = self.name('i');
        let (url, image) = (images::url(world, TAGS[at]), image.clone());
        let pulls = self.rng.chance(50);
        let cache =
            if pulls || self.rng.chance(60) { self.path(CACHE).display().to_string() } else { "none".into() };
        let pinned = format!("{url}@{image}");
        let said = if self.rng.chance(30) { &pinned } else { &url };
        let words = |url: &str| format!("{name}=image,url={url},cache={cache}");
        let places = vec![Place::Nbd(self.path(server::NBD))];
        let disk = Disk {
            kept: true,
            words: Some(words(&pinned)),
            image: Some(image),
            made_by: words(said),
            ..Disk::new(&name, Kind::Image, oracle.clone(), places)
        };
        let done = if pulls {
            self.ask("pull", &json!({ "url": said, "name": name, "cache": cache, "publish": "yes" }))
        } else {
            self.ask("create", &json!({ "device": format!("{},publish=yes", words(said)) }))
        };
        // A pull that is ended leaves the device.
        self.cut_off |= done.is_none() && world.dying();
        drop(may);
        if done.is_some() || self.cut_off {
            self.made_all(vec![disk]);
        }
    }

    /// By the program itself, which asks no server.
    fn prune(&mut self) {
        let url = format!("file://{}", self.path(images::STORE).display());
        self.slot.begin("prune", VERB_MAX);
        let mut command = Command::new(&self.world.program);
        command.args(["prune", &url]).stdin(Stdio::null()).env_remove("RUST_LOG");
        match command.output() {
            Ok(output) if output.status.success() => self.world.counts.add("verbs", "prune ok", 1),
            // Before the first push.
            Ok(output) if String::from_utf8_lossy(&output.stderr).contains("there is no tag, so") => {}
            outcome => self.world.fail(format!("prune {url}: {outcome:?}")),
        }
    }
}
