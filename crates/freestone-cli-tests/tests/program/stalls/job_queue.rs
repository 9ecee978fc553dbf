//! More background jobs than may run at the same time: the server queues the others.

use super::Control;
use super::disks::Disk;
use super::long_verbs::{SLOW_WRITES, serve_with_slow_backing};
use crate::harness::prelude::*;

/// Starts as many background jobs as may run at the same time. The disk is so slow that they do not
/// finish. Returns their job numbers.
fn fill_all(serve: &Serve, disk: &Disk) -> Vec<u64> {
    disk.hang(SLOW_WRITES);
    let begin = || {
        let params = json!({ "name": "r", "type": "huge", "background": true });
        let begun = Control::of(serve).ok("writeback", &params);
        assert_eq!(begun.get("state"), None, "{begun}");
        begun["job"].as_u64().unwrap()
    };
    (0..64).map(|_| begin()).collect()
}

fn state(serve: &Serve, job: u64) -> Value {
    serve.json(&["jobs"])["jobs"]
        .as_array()
        .unwrap()
        .iter()
        .find(|shown| shown["job"] == job)
        .map_or(Value::Null, |shown| shown["state"].clone())
}

#[test]
fn queued_job_starts_when_another_ends() {
    let disk = Disk::of("64M");
    let serve = serve_with_slow_backing(&disk, 32 * MIB);
    // A save in the foreground is a job too, here job 1.
    serve.text(&["save", "r", "before.saved"]);
    let running = fill_all(&serve, &disk);
    // Requests with invalid parameters fail at once. Other errors are reported when the job runs.
    let usage = serve.refused(2, &["writeback", "r", "huges", "--background"]);
    assert!(usage.contains("huges"), "{usage}");
    assert_eq!(
        serve.text(&["compact", "gone", "--background"]),
        "gone: compact is queued as background job 66\n"
    );
    let reply = serve.json(&["save", "r", "r.saved", "--background"]);
    assert_eq!(reply, json!({ "job": 67, "name": "r", "verb": "save", "state": "waiting" }));
    let reply = serve.json(&["remove", "r", "--background"]);
    assert_eq!((&reply["state"], reply.get("connections_ended")), (&json!("waiting"), None));
    serve.text(&["restore", "before.saved", "back", "--background"]);
    let lines = serve.text(&["jobs"]);
    assert!(lines.contains("job 67: r: save: waiting in the background, "), "{lines}");
    let before = serve.path("before.saved");
    assert!(lines.contains(&format!("job 69: {}: restore: waiting", before.display())), "{lines}");
    let file = serve.path("r.saved");
    // `stat` of a device shows the progress of its running job, not its queued jobs.
    assert_eq!(serve.json(&["stat", "r"])["progress"]["verb"], "writeback");
    // Verbs in the foreground are not queued, so they run although the limit of background jobs is
    // reached.
    serve.text(&["create", "s=ram,disksize=1M"]);
    serve.text(&["compact", "s"]);
    // A removal can be cancelled while it is queued, but not while it runs.
    assert_eq!(serve.text(&["cancel", "r", "remove"]), "job 68: r: remove: cancelled before it started\n");
    let why = "r: remove: cancelled: requested by a client; it had not started";
    assert_eq!(serve.refused(1, &["wait", "--job", "68"]), why);
    assert_eq!(
        serve.refused(1, &["wait", "--job", "67", "--timeout", "1ms"]).split(';').next(),
        Some("job 67: has not ended")
    );
    assert!(!file.exists() && running.iter().all(|job| state(&serve, *job) == "running"));
    // When a job ends, the next queued job starts. That job fails at once, so the save after it
    // starts too.
    serve.text(&["cancel", "--job", "65"]);
    assert_eq!(serve.refused(1, &["wait", "--job", "66"]), "gone: no such device");
    wait_until("it does not begin", || state(&serve, 67) != "waiting");
    disk.heal();
    assert_eq!(serve.json(&["wait", "--job", "67"])["result"]["names"][0], "r");
    assert_eq!(serve.json(&["wait", "--job", "69"])["result"]["devices"][0]["name"], "back");
    for job in &running[..63] {
        serve.text(&["wait", "--job", &job.to_string()]);
    }
    assert!(fs::metadata(file).unwrap().len() > 0);
    assert!(serve.text(&["compact", "r", "--background"]).contains("runs as background job 71"));
}

#[test]
fn shutdown_does_not_wait_for_queued_jobs() {
    let disk = Disk::of("64M");
    let serve = serve_with_slow_backing(&disk, 32 * MIB);
    fill_all(&serve, &disk);
    for number in 0..10 {
        serve.text(&["save", "r", &format!("{number}.saved"), "--background"]);
    }
    let start = Instant::now();
    let dir = serve.end();
    assert!(start.elapsed() < ANSWER_MAX);
    let saved = fs::read_dir(dir.path()).unwrap();
    assert_eq!(saved.filter(|row| row.as_ref().unwrap().path().extension().is_some()).count(), 0);
}
