//! Removal of old tags from an image store by `prune --keep-last` and `--keep-within`.

use freestone_testkit::s3::Server;

use super::network::with_store;
use super::{Bucket, disk, push, with_disk};
use crate::harness::prelude::*;

const SOURCE: &str = "d=file,path=disk.img,readonly=yes";

/// Returns an image store with the tag `golden` and the tags `nightly-1` to `nightly-3`, and the
/// directory of the pushed file.
fn nightlies() -> (Bucket, tempfile::TempDir) {
    let (bucket, dir) = (Bucket::new(), with_disk(1));
    for (mib, tag) in [(1, "golden"), (2, "nightly-1"), (3, "nightly-2"), (4, "nightly-3")] {
        fs::write(dir.path().join("disk.img"), disk(mib)).unwrap();
        push(dir.path(), SOURCE, &bucket.tag(tag));
    }
    (bucket, dir)
}

fn prune(dir: &Path, bucket: &Bucket, more: &[&str]) -> String {
    let (code, out, err) = finish(freestone(dir).args(["prune", &bucket.url()]).args(more));
    assert_eq!((code, err.as_str()), (0, ""), "{more:?}");
    out
}

fn tags(dir: &Path, bucket: &Bucket) -> Vec<String> {
    let (_, out, _) = finish(freestone(dir).args(["images", &bucket.url()]));
    out.lines().skip(1).map(|line| line.split(' ').next().unwrap().to_owned()).collect()
}

/// Returns the text about a tag from each line of `prune` that has one, without the time of the
/// tag.
fn tag_lines(out: &str) -> Vec<String> {
    let of_tag = out.lines().filter_map(|line| line.split_once(": tag ")).map(|(_, message)| message);
    of_tag
        .map(|message| message.split(", ").enumerate().filter(|(at, _)| *at != 1).map(|(_, s)| s).collect())
        .collect()
}

#[test]
fn prune_removes_old_tags_of_pattern() {
    let (bucket, dir) = nightlies();
    let dir = dir.path();
    let rules = ["--keep-last", "1", "--tags", "nightly-*"];
    let out = prune(dir, &bucket, &[&rules[..], &["--dry-run"]].concat());
    assert!(out.contains(": 3 tags match nightly-*, 1 of them kept\n"), "{out}");
    assert_eq!(tag_lines(&out), ["nightly-1would be removed", "nightly-2would be removed"], "{out}");
    assert!(out.contains("4 images (2 without a tag) in "), "{out}");
    assert!(out.contains(", that no tag needs are kept for the grace of 24h, the first until 20"), "{out}");
    assert_eq!(tags(dir, &bucket).len(), 4);
    let out = prune(dir, &bucket, &rules);
    assert_eq!(tag_lines(&out), ["nightly-1removed", "nightly-2removed"], "{out}");
    assert_eq!(tags(dir, &bucket), ["golden", "nightly-3"]);
    // If there are no tags to remove, `prune` with retention rules works like a plain prune.
    let out = prune(dir, &bucket, &[&rules[..], &["--json"]].concat());
    let out: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&out["kept_tags"], &out["removed_tags"]), (&json!(["nightly-3"]), &json!([])), "{out}");
    assert_eq!((&out["images"], &out["untagged_images"], &out["deleted"]), (&4.into(), &2.into(), &0.into()));
    let plain: Value = serde_json::from_str(&prune(dir, &bucket, &["--json"])).unwrap();
    assert_eq!(plain.get("kept_tags"), None, "{plain}");
}

#[test]
fn prune_keeps_tags_within_time() {
    let (bucket, dir) = nightlies();
    let dir = dir.path();
    let out = prune(dir, &bucket, &["--keep-within", "30d"]);
    assert!(out.contains(": 4 tags, 4 of them kept\n") && tag_lines(&out).is_empty(), "{out}");
    thread::sleep(Duration::from_secs(3));
    let none = refused(dir, 1, &["prune", &bucket.url(), "--keep-within", "1s"]);
    assert!(
        none.contains("the rules keep none of the 4 tags that they apply to, so none was removed"),
        "{none}"
    );
    push(dir, SOURCE, &bucket.tag("nightly-4"));
    prune(dir, &bucket, &["--keep-within", "2s", "--keep-last", "2"]);
    assert_eq!(tags(dir, &bucket), ["nightly-3", "nightly-4"]);
}

/// Removing tags also works on S3, which has no conditional deletion.
#[test]
fn prune_removes_old_tags_from_s3() {
    let (server, dir) = (Server::start(&["images"]), with_disk(1));
    let run = |args: &[&str]| {
        let (code, out, err) = finish(with_store(&server, freestone(dir.path())).args(args));
        assert_eq!((code, err.as_str()), (0, ""), "{args:?}");
        out
    };
    for tag in ["golden", "n-1", "n-2"] {
        run(&["push", SOURCE, &format!("s3://images/x:{tag}")]);
    }
    let out = run(&["prune", "s3://images/x", "--tags", "n-?", "--keep-last", "1"]);
    assert_eq!(tag_lines(&out), ["n-1removed"], "{out}");
    let tags = server.keys("images").into_iter().filter(|key| key.starts_with("x/tags/"));
    assert_eq!(tags.collect::<Vec<_>>(), ["x/tags/golden", "x/tags/n-2"]);
}

#[test]
fn invalid_retention_rules_are_refused() {
    let (bucket, dir) = nightlies();
    let refuse = |args: &[&str]| {
        let (code, out, err) = finish(freestone(dir.path()).args(["prune", &bucket.url()]).args(args));
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}");
        err
    };
    assert!(refuse(&["--keep-last", "0"]).contains("0 is not in 1.."), "{}", refuse(&["--keep-last", "0"]));
    assert!(refuse(&["--keep-within", "0d"]).contains("must be at least 1s"));
    assert!(refuse(&["--keep-within", "30"]).contains("give a unit; 30d?"));
    assert!(refuse(&["--tags", "nightly-*"]).contains("--keep-"));
    assert_eq!(tags(dir.path(), &bucket).len(), 4);
}

#[test]
fn push_of_known_chunks_reports_reuse() {
    let (bucket, dir) = nightlies();
    let (code, out, err) = finish(freestone(dir.path()).args(["push", SOURCE, &bucket.tag("again")]));
    assert_eq!((code, err.as_str()), (0, ""));
    let sent = " differed, 0B sent: the store had all 6 chunks already\n";
    assert!(out.ends_with(sent), "{out}");
}
