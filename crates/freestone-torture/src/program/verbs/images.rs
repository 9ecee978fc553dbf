//! Verbs that push devices to the image store, and verbs that create devices from images.

use std::process::{Command, Stdio};

use serde_json::json;

use super::{VerbThread, has_no_volatile_cache, root};
use crate::program::server;
use crate::program::setup::images::{self, CACHE};
use crate::program::transport::Address;
use crate::program::watch::VERB_MAX;
use crate::program::world::{Disk, Kind, PossibleImage, TAGS};

impl VerbThread<'_> {
    pub(super) fn images(&mut self) {
        match self.rng.below(10) {
            0..4 => self.push(),
            4..8 => self.pull(),
            8 => {
                if let Some(disk) = self.choose(|disk| disk.kind == Kind::Image) {
                    self.ask("trace", &json!({ "name": disk.name }));
                }
            }
            _ => self.prune(),
        }
    }

    fn push(&mut self) {
        let whole = |disk: &Disk| {
            let kinds = [Kind::Ram, Kind::Fork, Kind::Frozen, Kind::Base, Kind::Image];
            kinds.contains(&disk.kind) && has_no_volatile_cache(disk)
        };
        let Some(disk) = self.choose(whole) else { return };
        if disk.may_fail() || root(&disk).is_some_and(|root| root.may_fail()) {
            return;
        }
        let at = self.rng.below(TAGS.len() as u64) as usize;
        let world = self.world;
        // Another thread may be pushing to this tag now; then do nothing.
        let Ok(mut may) = world.tags[at].try_lock() else { return };
        let since = disk.oracle().begin_read();
        let full = self.rng.chance(15);
        let params = json!({ "name": disk.name, "url": images::url(world, TAGS[at]), "full": full });
        let answer = self.ask_about("push", &params, Some(&disk));
        if answer.is_none() && !self.interrupted && !world.is_server_ending() {
            return disk.oracle().abandon(since);
        }
        let oracle = disk.snapshot_since(since, TAGS[at]);
        let image =
            answer.as_ref().and_then(|answer| Some(answer["url"].as_str()?.rsplit_once('@')?.1.to_owned()));
        if answer.is_some() {
            may.clear();
        }
        may.push(PossibleImage { image, oracle });
    }

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
        let Some(PossibleImage { image: Some(image), oracle }) = may.first() else { return };
        let name = self.name('i');
        let (url, image) = (images::url(world, TAGS[at]), image.clone());
        let pulls = self.rng.chance(50);
        let cache =
            if pulls || self.rng.chance(60) { self.path(CACHE).display().to_string() } else { "none".into() };
        let pinned = format!("{url}@{image}");
        let said = if self.rng.chance(30) { &pinned } else { &url };
        let device_args = |url: &str| format!("{name}=image,url={url},cache={cache}");
        let places = vec![Address::Nbd(self.path(server::NBD))];
        let disk = Disk {
            survives_restart: true,
            device_args: Some(device_args(&pinned)),
            image: Some(image),
            created_by: device_args(said),
            ..Disk::new(&name, Kind::Image, oracle.clone(), places)
        };
        let done = if pulls {
            self.ask("pull", &json!({ "url": said, "name": name, "cache": cache, "publish": "yes" }))
        } else {
            self.ask("create", &json!({ "device": format!("{},publish=yes", device_args(said)) }))
        };
        // A pull that is cut off may have created the device.
        self.interrupted |= done.is_none() && world.is_server_ending();
        drop(may);
        if done.is_some() || self.interrupted {
            self.add_all_created(vec![disk]);
        }
    }

    /// Prunes the image store with the program directly, without a server.
    fn prune(&mut self) {
        let url = format!("file://{}", self.path(images::STORE).display());
        self.slot.begin("prune", VERB_MAX);
        let mut command = Command::new(&self.world.program);
        command.args(["prune", &url]).stdin(Stdio::null()).env_remove("RUST_LOG");
        match command.output() {
            Ok(output) if output.status.success() => self.world.counts.add("verbs", "prune ok", 1),
            // The prune is refused as long as no push has set a tag.
            Ok(output) if String::from_utf8_lossy(&output.stderr).contains("there is no tag, so") => {}
            outcome => self.world.fail(format!("prune {url}: {outcome:?}")),
        }
    }
}
