//! Pushes that are killed at each of their requests, before or after the object store executed the request.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use freestone_testkit::effort;
use freestone_testkit::s3::{Server, ServerFault};
use rustix::process::{Pid, kill_process};

use super::network::{serve, with_store};
use super::{content, disk};
use crate::harness::prelude::*;

const BUCKET: &str = "images";
const URL: &str = "s3://images/x";
const TAGGED: &str = "s3://images/x:v1";
/// Upper limit for the requests of a push of this size, which makes far fewer.
const REQUESTS_MAX: usize = 200;
/// Time until a prune: far beyond the grace period of one day, in which untagged objects are kept.
const LATER: Duration = Duration::from_secs(3 * 86_400);

/// Content of the objects in the bucket, by key.
type Objects = BTreeMap<String, Vec<u8>>;

/// An S3 server, a Freestone server to read images, and a directory with the image file to push.
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

    /// Kills the process `asker` at its request `number`, counted from 0; later requests fail. The object store
    /// executes the request before the kill only if `is_done`.
    fn kill_at(&self, number: usize, is_done: bool, asker: &Arc<OnceLock<Pid>>) {
        let (count, asker) = (Arc::new(AtomicUsize::new(0)), Arc::clone(asker));
        let seen = Arc::clone(&count);
        let is_last = move |_: &freestone_testkit::s3::S3Request<'_>| {
            if count.fetch_add(1, SeqCst) != number {
                return false;
            }
            // The request may arrive before the test has recorded the process ID.
            let asker = loop {
                match asker.get() {
                    Some(asker) => break *asker,
                    None => thread::sleep(Duration::from_millis(1)),
                }
            };
            kill_process(asker, Signal::KILL).unwrap();
            true
        };
        // The S3 server evaluates the fault rules in order, for one request at a time.
        self.server
            .add_fault(is_last, if is_done { ServerFault::ResetAfter } else { ServerFault::ResetBefore });
        self.server.add_fault(move |_| seen.load(SeqCst) > number + 1, ServerFault::ResetBefore);
    }

    /// Pushes the image file. Returns true if the push succeeded, false if it was killed at request `number`.
    fn push_until(&self, number: usize, is_done: bool) -> bool {
        let asker = Arc::new(OnceLock::new());
        self.kill_at(number, is_done, &asker);
        let mut command = with_store(&self.server, freestone(self.dir.path()));
        command.args(["push", "d=file,path=disk.img,readonly=yes", TAGGED]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        asker.set(Pid::from_child(&child)).unwrap();
        let output = child.wait_with_output().unwrap();
        self.server.cut_connections();
        self.server.clear_faults();
        let printed = String::from_utf8(output.stderr).unwrap();
        assert!(matches!(output.status.code(), Some(0) | None) && printed.is_empty(), "{number}: {printed}");
        output.status.success()
    }

    /// Pushes the image file. The number is never reached, so the push is not killed.
    fn push(&self) {
        assert!(self.push_until(usize::MAX - 1, false));
    }

    /// Pushes the image file. Returns the number of requests of the push.
    fn push_counted(&self) -> usize {
        let count = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&count);
        let counts = move |_: &freestone_testkit::s3::S3Request<'_>| {
            count.fetch_add(1, SeqCst);
            false
        };
        self.server.add_fault(counts, ServerFault::ResetBefore);
        self.push();
        seen.load(SeqCst)
    }

    /// Returns the content of the tagged image as a client reads it, or None if the tag does not exist.
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

    /// Prunes the image store long after the grace period. Returns the remaining objects.
    fn pruned(&self) -> Objects {
        self.server.set_time(Some(SystemTime::now() + LATER));
        let (code, _, err) =
            finish(with_store(&self.server, freestone(self.dir.path())).args(["prune", URL]));
        self.server.set_time(None);
        let objects = self.objects();
        // If no image store exists yet, the bucket contains at most the object that tests conditional requests.
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

    /// Replaces the content of the bucket by these objects.
    fn put(&self, objects: &Objects) {
        self.server.create_bucket(BUCKET);
        for (key, bytes) in objects {
            self.server.set_object(BUCKET, key, bytes);
        }
    }
}

/// Returns the number of objects of each kind. Keys differ between image stores, because they depend on the salt of the
/// store.
fn object_kinds(objects: &Objects) -> BTreeMap<&str, usize> {
    let mut sorts = BTreeMap::new();
    for key in objects.keys() {
        let sort = key.strip_prefix("x/").unwrap().split('/').next().unwrap();
        *sorts.entry(sort).or_default() += 1;
    }
    sorts
}

/// Pushes `new` to an image store with the objects `before`, and kills each push at another request. The tag has the
/// content `old` before, and `old` or `new` after each push.
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
        // The last requests change the tag, so both rounds test them. Of the other requests each round tests a
        // different part.
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
                // The next push reuses the chunks that were sent. A prune after it leaves the same objects as after an
                // uninterrupted push.
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
                // An image store without a tag is not pruned. The next push sets the tag.
                stage.push();
                assert_eq!(object_kinds(&stage.pruned()), object_kinds(&clean), "{number}");
            }
        }
    }
    // At least one killed push had changed the tag.
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
