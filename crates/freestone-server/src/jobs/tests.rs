use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use serde_json::value::to_raw_value;

use super::{
    Errno, JobFilter, JobKind, JobRequest, Jobs, Outcome, Progress, RpcError, THREADS_MAX, WAITING_MAX,
};

fn on(name: &str) -> JobFilter {
    JobFilter { name: Some(name.to_owned()), ..JobFilter::default() }
}

#[test]
fn exclusive_job_blocks_exclusive_jobs_on_its_devices() {
    let jobs = Jobs::default();
    let job = jobs.begin("f", "delta save", JobKind::EXCLUSIVE).unwrap();
    assert!(job.advance(1, 2));
    let progress = Progress { verb: "delta save".into(), done_bytes: 1, total_bytes: 2, job: 1 };
    assert_eq!(jobs.progress_of("f"), Some(progress));
    let second = jobs.begin("f", "merge", JobKind::EXCLUSIVE).err().unwrap().message;
    assert_eq!(second, "f: is in use by delta save (job 1); wait for its end, or cancel it");
    assert!(jobs.begin_on(&["h", "f"], "delta save", JobKind::EXCLUSIVE).is_err());
    assert!(jobs.begin("f", "compact", JobKind::CONCURRENT).is_ok());
    assert!(jobs.begin("g", "merge", JobKind::EXCLUSIVE).is_ok());
    drop(job);
    assert_eq!(jobs.progress_of("f"), None);
    assert!(jobs.begin("f", "merge", JobKind::EXCLUSIVE).is_ok());
    assert!(jobs.list(&JobFilter::default()).is_empty());
}

#[test]
fn cancel_stops_only_matching_cancellable_jobs() {
    let jobs = Jobs::default();
    let save = jobs.begin("a", "save", JobKind::EXCLUSIVE).unwrap();
    let compact = jobs.begin("a", "compact", JobKind::CONCURRENT).unwrap();
    let remove = jobs.begin("b", "remove", JobKind::CONCURRENT_UNCANCELLABLE).unwrap();
    let only = JobFilter { verb: Some("save".to_owned()), ..on("a") };
    assert_eq!(jobs.cancel(&only).unwrap().len(), 1);
    assert!(save.should_stop() && !compact.should_stop());
    let fault = save.cancelled("f is unchanged");
    assert!(fault.has_errno(Errno::ECANCELED));
    assert_eq!(fault.message, "a: save: cancelled: requested by a client; f is unchanged");
    assert_eq!(jobs.cancel(&on("b")).unwrap_err().message, "b: remove cannot be cancelled; it continues");
    assert!(jobs.cancel(&on("c")).unwrap().is_empty());
    jobs.end_all();
    assert!(compact.should_stop() && !remove.should_stop());
}

#[test]
fn history_keeps_outcomes_of_background_jobs() {
    let jobs = Arc::new(Jobs::default());
    let run = |outcome: Result<&str, RpcError>, begins: bool| {
        let inside = Arc::clone(&jobs);
        let outcome = outcome.map(|text| to_raw_value(text).unwrap());
        let response = jobs.run(request("r", move || {
            drop(begins.then(|| inside.begin("r", "save", JobKind::EXCLUSIVE).unwrap()));
            outcome
        }));
        jobs.wait_ended(Duration::from_secs(60));
        response.map(|response| response.get().to_owned())
    };
    assert_eq!(run(Ok("well"), true).unwrap(), r#"{"job":1,"name":"r","verb":"save"}"#);
    run(Err(RpcError::failed(Errno::EIO, "r: no")), true).unwrap();
    run(Err(RpcError::failed(Errno::ECANCELED, "r: ended")), true).unwrap();
    assert_eq!(run(Err(RpcError::failed(Errno::EIO, "r: no")), false).unwrap_err().message, "r: no");
    let all = jobs.list(&on("r"));
    let states: Vec<_> = all.iter().map(|info| (info.job, info.state.as_str())).collect();
    assert_eq!(states, [(1, "finished"), (2, "failed"), (3, "cancelled")]);
    assert_eq!(all[0].result.as_ref().unwrap().get(), "\"well\"");
    assert_eq!(all[1].error.as_ref().unwrap().message, "r: no");
}

fn request(name: &str, run: impl FnOnce() -> Outcome + Send + 'static) -> JobRequest {
    JobRequest { name: name.into(), verb: "save".into(), tag: None, bytes: 8, run: Box::new(run) }
}

/// Starts `count` jobs on `name`. Each runs until its sender sends or is dropped.
fn start_blocked(jobs: &Arc<Jobs>, name: &'static str, count: usize) -> Vec<mpsc::Sender<()>> {
    let start = |_| {
        let (release, released) = mpsc::channel();
        let inside = Arc::clone(jobs);
        let response = jobs.run(request(name, move || {
            let _job = inside.begin(name, "save", JobKind::CONCURRENT)?;
            let _ = released.recv();
            Ok(to_raw_value("released").unwrap())
        }));
        response.unwrap();
        release
    };
    (0..count).map(start).collect()
}

fn states(jobs: &Jobs, name: &str) -> Vec<String> {
    jobs.list(&on(name)).into_iter().map(|info| info.state).collect()
}

fn wait_until(condition: impl Fn() -> bool) {
    while !condition() {
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn job_beyond_the_limit_waits_for_a_thread() {
    let jobs = Arc::new(Jobs::default());
    let mut running = start_blocked(&jobs, "a", THREADS_MAX);
    let response = jobs.run(request("b", || Ok(to_raw_value("b").unwrap()))).unwrap();
    assert_eq!(response.get(), r#"{"job":65,"name":"b","verb":"save","state":"waiting"}"#);
    let later = start_blocked(&jobs, "c", 1);
    assert_eq!((states(&jobs, "b"), states(&jobs, "c")), (vec!["waiting".into()], vec!["waiting".into()]));
    assert_eq!(jobs.progress_of("b"), None);
    // The thread that becomes free runs both jobs, because the job on "b" ends at once.
    drop(running.pop());
    wait_until(|| states(&jobs, "c") == ["running"]);
    let ended = jobs.list(&on("b")).pop().unwrap();
    assert_eq!((ended.job, ended.state.as_str(), ended.result.unwrap().get()), (65, "finished", "\"b\""));
    // The job keeps the number that it had in the queue.
    assert_eq!(jobs.list(&on("c"))[0].job, 66);
    drop((running, later));
    jobs.wait_ended(Duration::from_secs(60));
    assert_eq!(states(&jobs, "c"), ["finished"]);
}

#[test]
fn waiting_jobs_end_on_cancel_and_shutdown() {
    let jobs = Arc::new(Jobs::default());
    let running = start_blocked(&jobs, "a", THREADS_MAX);
    let request_b = || request("b", || panic!("it was cancelled"));
    jobs.run(request_b()).unwrap();
    let cancelled = jobs.cancel(&on("b")).unwrap();
    assert_eq!((cancelled.len(), cancelled[0].state.as_str()), (1, "cancelled"));
    let why = cancelled[0].error.clone().unwrap().message;
    assert_eq!(why, "b: save: cancelled: requested by a client; it had not started");
    assert!(jobs.cancel(&on("b")).unwrap().is_empty());
    jobs.run(request_b()).unwrap();
    jobs.end_all();
    assert_eq!(states(&jobs, "b"), ["cancelled", "cancelled"]);
    let refused = jobs.run(request_b()).unwrap_err();
    assert_eq!(refused.message, "b: save: cancelled: the server is shutting down; it had not started");
    drop(running);
    jobs.wait_ended(Duration::from_secs(60));
    assert_eq!(jobs.list(&on("a")).len(), THREADS_MAX);
}

#[test]
fn queue_limits_jobs_and_bytes() {
    let jobs = Arc::new(Jobs::default());
    let running = start_blocked(&jobs, "a", THREADS_MAX);
    let big = || JobRequest { bytes: 9 << 20, ..request("b", || Err(RpcError::failed(Errno::EIO, "b: no"))) };
    jobs.run(big()).unwrap();
    assert!(jobs.run(big()).unwrap_err().has_errno(Errno::EBUSY));
    // A cancelled job frees its bytes.
    jobs.cancel(&on("b")).unwrap();
    jobs.run(big()).unwrap();
    let rest = start_blocked(&jobs, "c", WAITING_MAX - 1);
    let fault = jobs.run(request("d", || panic!("there is no room"))).unwrap_err();
    let why = "d: save: 64 background jobs are running and the queue is full (limits: 1024 jobs, 16M of \
               requests)";
    assert_eq!((fault.message.as_str(), fault.has_errno(Errno::EBUSY)), (why, true));
    drop((running, rest));
    jobs.wait_ended(Duration::from_secs(60));
    // The history contains all jobs that have ended.
    assert_eq!(states(&jobs, "b"), ["cancelled", "failed"]);
    let finished = |name| states(&jobs, name).iter().filter(|state| *state == "finished").count();
    assert_eq!((finished("a"), finished("c")), (THREADS_MAX, WAITING_MAX - 1));
}

#[test]
fn job_panic_fails_only_that_job() {
    let jobs = Arc::new(Jobs::default());
    let running = start_blocked(&jobs, "a", THREADS_MAX);
    jobs.run(request("b", || panic!("intended"))).unwrap();
    jobs.run(request("c", || Ok(to_raw_value("c").unwrap()))).unwrap();
    drop(running);
    jobs.wait_ended(Duration::from_secs(60));
    assert_eq!((states(&jobs, "b"), states(&jobs, "c")), (vec!["failed".into()], vec!["finished".into()]));
}
