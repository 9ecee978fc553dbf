//! Pushes killed at each of their requests, before and after the store executed the request.

use std::collections::BTreeMap;
use std::fs;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, SystemTime};

use freestone_testkit::effort;
use freestone_testkit::s3::{Server, Trouble};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::network::{serve, with_store};
use super::{content, disk};
use crate::harness::{Serve, finish, freestone};

const BUCKET: &str = "images";
const URL: &str = "s3://images/x";
const TAGGED: &str = "s3://images/x:v1";
/// A push of this size makes far fewer requests.
const REQUESTS_MAX: usize = 200;
/// Far beyond the grace of one day.
const LATER: Duration = Duration::from_secs(3 * 86_400);

/// Objects in the bucket.
type Objects = BTreeMap<String, Vec<u8>>;

/// A store, a file to push, and a server of devices to read images.
struct Stage {
    server: Server,
    reader: Serve,
    dir: TempDir,
}

impl Stage {
    fn new() -> Self {
        let (server, cache) = (Server::start(&[BUCKET]), tempfile::tempdir().unwrap());
        let reader = serve(&server, cache.path(), &["r=ram,disksize=1M"]);
        Self { server, reader, dir: tempfile::tempdir().unwrap() }
    }

    fn write(&self, image: &[u8]) {
        fs::write(self.dir.path().join("disk.img"), image).unwrap();
    }

    /// Makes request `number`, counted from 0, kill the process that sent it. Later requests fail.
    fn kill_at(&self, number: usize, is_done: bool, asker: &Arc<OnceLock<Pid>>) {
        let (count, asker) = (Arc::new(AtomicUsize::new(0)), Arc::clone(asker));
        let seen = Arc::clone(&count);
        let is_last = move |_: &freestone_testkit::s3::Asked<'_>| {
            if count.fetch_add(1, SeqCst) != number {
                return false;
            }
            // The request may arrive before the process number is noted.
            let asker = loop {
                match asker.get() {
                    Some(asker) => break *asker,
                    None => thread::sleep(Duration::from_millis(1)),
                }
            };
            kill_process(asker, Signal::KILL).unwrap();
            true
        };
        // Rules are evaluated in order, for one request at a time.
        self.server.trouble(is_last, if is_done { Trouble::ResetAfter } else { Trouble::ResetBefore });
        self.server.trouble(move |_| seen.load(SeqCst) > number + 1, Trouble::ResetBefore);
    }

    /// Pushes. Returns false if the push was killed at request `number`.
    fn push_until(&self, number: usize, is_done: bool) -> bool {
        let asker = Arc::new(OnceLock::new());
        self.kill_at(number, is_done, &asker);
        let mut command = with_store(&self.server, freestone(self.dir.path()));
        command.args(["push", "d=file,path=disk.img,readonly=yes", TAGGED]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        asker.set(Pid::from_raw(child.id().cast_signed()).unwrap()).unwrap();
        let output = child.wait_with_output().unwrap();
        self.server.cut_connections();
        self.server.no_troubles();
        let printed = String::from_utf8(output.stderr).unwrap();
        assert!(matches!(output.status.code(), Some(0) | None) && printed.is_empty(), "{number}: {printed}");
        output.status.success()
    }

    /// Pushes without interference.
    fn push(&self) {
        assert!(self.push_until(usize::MAX - 1, false));
    }

    /// Pushes and returns the number of requests.
    fn push_counted(&self) -> usize {
        let count = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&count);
        let counts = move |_: &freestone_testkit::s3::Asked<'_>| {
            count.fetch_add(1, SeqCst);
            false
        };
        self.server.trouble(counts, Trouble::ResetBefore);
        self.push();
        seen.load(SeqCst)
    }

    /// Returns the whole image of the tag as clients read it, or None.
    fn image(&self) -> Option<Vec<u8>> {
        let device = format!("i=image,url={TAGGED},cache=none");
        let nbd = format!("unix:{}", self.reader.path("nbd").display());
        let (code, _, err) = self.reader.run_verb(&["create", &device]);
        if code != 0 {
            let is_none =
                ["there is no tag v1", "there is no store of images"].iter().any(|why| err.contains(why));
            assert!(is_none, "{err}");
            return None;
        }
        self.reader.text(&["publish", "i", "--nbd", &nbd]);
        let held = content(&self.reader, "i");
        self.reader.text(&["remove", "i"]);
        Some(held)
    }

    /// Prunes long after the grace. Returns the remaining objects.
    fn pruned(&self) -> Objects {
        self.server.set_time(Some(SystemTime::now() + LATER));
        let (code, _, err) =
            finish(with_store(&self.server, freestone(self.dir.path())).args(["prune", URL]));
        self.server.set_time(None);
        let objects = self.objects();
        // Before the store exists, it has only the object that tests conditional requests.
        let is_none = objects.len() < 2
            && objects.keys().all(|key| key.starts_with("x/clocks/"))
            && err.contains("there is no store of images");
        assert!(code == 0 || is_none || err.contains("there is no tag, so nothing was deleted"), "{err}");
        objects
    }

    fn objects(&self) -> Objects {
        let keys = self.server.keys(BUCKET).into_iter();
        keys.map(|key| (key.clone(), self.server.object(BUCKET, &key).unwrap())).collect()
    }

    /// Makes these the only objects in the bucket.
    fn put(&self, objects: &Objects) {
        self.server.make_bucket(BUCKET);
        for (key, bytes) in objects {
            self.server.set_object(BUCKET, key, bytes);
        }
    }
}

/// Returns the number of objects of each kind, which is the same in any store. Names depend on the store's salt.
fn object_kinds(objects: &Objects) -> BTreeMap<&str, usize> {
    let mut sorts = BTreeMap::new();
    for key in objects.keys() {
        let sort = key.strip_prefix("x/").unwrap().split('/').next().unwrap();
        *sorts.entry(sort).or_default() += 1;
    }
    sorts
}

/// Kills pushes of `new` to a store with the objects `before`, in which the tag shows `old`.
fn kill_at_each_request(stage: &Stage, before: &Objects, old: Option<&[u8]>, new: &[u8]) {
    let left_of_old = || {
        stage.put(before);
        stage.pruned()
    };
    let left_of_old = old.map(|_| left_of_old());
    stage.put(before);
    stage.write(new);
    let requests = stage.push_counted();
    assert!((9..REQUESTS_MAX).contains(&requests), "a push made {requests} requests");
    assert!(stage.image().as_deref() == Some(new));
    let clean = stage.pruned();
    let mut shown_new = 0;
    for is_done in [false, true] {
        // The last requests change the tag. The two rounds take different ones of the others.
        let first = if is_done { 3 } else { 0 };
        let is_met = |number: &usize| effort(number % 6 == first || number + 3 > requests, true);
        for number in (0..REQUESTS_MAX).filter(is_met) {
            stage.put(before);
            if stage.push_until(number, is_done) {
                assert!(number > 8, "it made only {number} requests");
                break;
            }
            let shown = stage.image();
            let is_new = shown.as_deref() == Some(new);
            shown_new += usize::from(is_new);
            assert!(
                is_new || shown.as_deref() == old,
                "{number} {is_done}: neither the old image nor the new one"
            );
            if is_done {
                // The next push reuses what was sent, and a prune leaves nothing over.
                stage.push();
                assert!(stage.image().as_deref() == Some(new), "{number}");
                assert_eq!(object_kinds(&stage.pruned()), object_kinds(&clean), "{number}");
                continue;
            }
            let left = stage.pruned();
            assert!(stage.image() == shown, "{number}: a prune took what was needed");
            if is_new {
                assert_eq!(object_kinds(&left), object_kinds(&clean), "{number}");
            } else if let Some(of_old) = &left_of_old {
                assert!(left == *of_old, "{number}: {:?}", object_kinds(&left));
            } else {
                // Without a tag nothing is deleted; the next push sets one.
                stage.push();
                assert_eq!(object_kinds(&stage.pruned()), object_kinds(&clean), "{number}");
            }
        }
    }
    // The request that changes the tag was tested, too.
    assert!(shown_new > 0);
}

#[test]
fn killed_first_push_leaves_no_partial_image() {
    let stage = Stage::new();
    kill_at_each_request(&stage, &Objects::new(), None, &disk(2));
}

#[test]
fn killed_push_over_image_leaves_old_or_new() {
    let stage = Stage::new();
    let old = disk(2);
    stage.write(&old);
    stage.push();
    let before = stage.objects();
    let mut new = old.clone();
    new[1 << 20..][..64 << 10].fill(7);
    kill_at_each_request(&stage, &before, Some(&old), &new);
}
