use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use serde_json::value::to_raw_value;

use super::{Asked, Errno, Fault, Jobs, Kind, Outcome, Progress, THREADS_MAX, WAITING_MAX, Which};

fn of(name: &str) -> Which {
    Which { name: Some(name.to_owned()), ..Which::default() }
}

#[test]
fn one_at_a_time_and_shown_while_it_runs() {
    let jobs = Jobs::default();
    let job = jobs.begin("f", "delta save", Kind::ALONE).unwrap();
    assert!(job.at(1, 2));
    let shown = Progress { verb: "delta save".into(), done_bytes: 1, total_bytes: 2, job: 1 };
    assert_eq!(jobs.show("f"), Some(shown));
    let second = jobs.begin("f", "merge", Kind::ALONE).err().unwrap().message;
    assert_eq!(second, "f: delta save is running there");
    assert!(jobs.begin_on(&["h", "f"], "delta save", Kind::ALONE).is_err());
    assert!(jobs.begin("f", "compact", Kind::BESIDE).is_ok());
    assert!(jobs.begin("g", "merge", Kind::ALONE).is_ok());
    drop(job);
    assert_eq!(jobs.show("f"), None);
    assert!(jobs.begin("f", "merge", Kind::ALONE).is_ok());
    assert!(jobs.all(&Which::default()).is_empty());
}

#[test]
fn what_is_cancelled_is_told_and_the_rest_goes_on() {
    let jobs = Jobs::default();
    let one = jobs.begin("a", "save", Kind::ALONE).unwrap();
    let other = jobs.begin("a", "compact", Kind::BESIDE).unwrap();
    let last = jobs.begin("b", "remove", Kind::WHOLE_BESIDE).unwrap();
    let only = Which { verb: Some("save".to_owned()), ..of("a") };
    assert_eq!(jobs.cancel(&only).unwrap().len(), 1);
    assert!(one.is_over() && !other.is_over());
    let said = one.cancelled("f is as it was");
    assert!(said.is(Errno::ECANCELED));
    assert_eq!(said.message, "a: save: cancelled, because that was asked for; f is as it was");
    assert_eq!(jobs.cancel(&of("b")).unwrap_err().message, "b: remove cannot be taken back; it goes on");
    assert!(jobs.cancel(&of("c")).unwrap().is_empty());
    jobs.end_all();
    assert!(other.is_over() && !last.is_over());
}

#[test]
fn in_the_background_the_end_is_remembered() {
    let jobs = Arc::new(Jobs::default());
    let run = |outcome: Result<&str, Fault>, begins: bool| {
        let inside = Arc::clone(&jobs);
        let outcome = outcome.map(|text| to_raw_value(text).unwrap());
        let told = jobs.run(asked("r", move || {
            drop(begins.then(|| inside.begin("r", "save", Kind::ALONE).unwrap()));
            outcome
        }));
        jobs.wait_ended(Duration::from_secs(60));
        told.map(|begun| begun.get().to_owned())
    };
    assert_eq!(run(Ok("well"), true).unwrap(), r#"{"job":1,"name":"r","verb":"save"}"#);
    run(Err(Fault::failed(Errno::EIO, "r: no")), true).unwrap();
    run(Err(Fault::failed(Errno::ECANCELED, "r: ended")), true).unwrap();
    assert_eq!(run(Err(Fault::failed(Errno::EIO, "r: no")), false).unwrap_err().message, "r: no");
    let all = jobs.all(&of("r"));
    let states: Vec<_> = all.iter().map(|shown| (shown.job, shown.state.as_str())).collect();
    assert_eq!(states, [(1, "finished"), (2, "failed"), (3, "cancelled")]);
    assert_eq!(all[0].result.as_ref().unwrap().get(), "\"well\"");
    assert_eq!(all[1].error.as_ref().unwrap().message, "r: no");
}

fn asked(name: &str, run: impl FnOnce() -> Outcome + Send + 'static) -> Asked {
    Asked { name: name.into(), verb: "save".into(), tag: None, bytes: 8, run: Box::new(run) }
}

/// So many verbs `name` that hold on until they hear something, or nobody can say anything more.
fn held(jobs: &Arc<Jobs>, name: &'static str, count: usize) -> Vec<mpsc::Sender<()>> {
    let hold = |_| {
        let (go, hears) = mpsc::channel();
        let inside = Arc::clone(jobs);
        let told = jobs.run(asked(name, move || {
            let _job = inside.begin(name, "save", Kind::BESIDE)?;
            let _ = hears.recv();
            Ok(to_raw_value("held").unwrap())
        }));
        told.unwrap();
        go
    };
    (0..count).map(hold).collect()
}

fn states(jobs: &Jobs, name: &str) -> Vec<String> {
    jobs.all(&of(name)).into_iter().map(|shown| shown.state).collect()
}

fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn one_too_many_waits_until_another_has_ended() {
    let jobs = Arc::new(Jobs::default());
    let mut running = held(&jobs, "a", THREADS_MAX);
    let told = jobs.run(asked("b", || Ok(to_raw_value("b").unwrap()))).unwrap();
    assert_eq!(told.get(), r#"{"job":65,"name":"b","verb":"save","state":"waiting"}"#);
    let later = held(&jobs, "c", 1);
    assert_eq!((states(&jobs, "b"), states(&jobs, "c")), (vec!["waiting".into()], vec!["waiting".into()]));
    assert_eq!(jobs.show("b"), None);
    // One that has ended lets both begin, as the first of them ends at once.
    drop(running.pop());
    until(|| states(&jobs, "c") == ["running"]);
    let ended = jobs.all(&of("b")).pop().unwrap();
    assert_eq!((ended.job, ended.state.as_str(), ended.result.unwrap().get()), (65, "finished", "\"b\""));
    // It is the job that waited.
    assert_eq!(jobs.all(&of("c"))[0].job, 66);
    drop((running, later));
    jobs.wait_ended(Duration::from_secs(60));
    assert_eq!(states(&jobs, "c"), ["finished"]);
}

#[test]
fn what_waits_is_cancelled_and_ends_with_the_server() {
    let jobs = Arc::new(Jobs::default());
    let running = held(&jobs, "a", THREADS_MAX);
    let begins = || asked("b", || panic!("it was cancelled"));
    jobs.run(begins()).unwrap();
    let told = jobs.cancel(&of("b")).unwrap();
    assert_eq!((told.len(), told[0].state.as_str()), (1, "cancelled"));
    let why = told[0].error.clone().unwrap().message;
    assert_eq!(why, "b: save: cancelled, because that was asked for; it had not begun");
    assert!(jobs.cancel(&of("b")).unwrap().is_empty());
    jobs.run(begins()).unwrap();
    jobs.end_all();
    assert_eq!(states(&jobs, "b"), ["cancelled", "cancelled"]);
    let late = jobs.run(begins()).unwrap_err();
    assert_eq!(late.message, "b: save: cancelled, because the server is ending; it had not begun");
    drop(running);
    jobs.wait_ended(Duration::from_secs(60));
    assert_eq!(jobs.all(&of("a")).len(), THREADS_MAX);
}

#[test]
fn so_many_wait_and_so_many_bytes() {
    let jobs = Arc::new(Jobs::default());
    let running = held(&jobs, "a", THREADS_MAX);
    let big = || Asked { bytes: 9 << 20, ..asked("b", || Err(Fault::failed(Errno::EIO, "b: no"))) };
    jobs.run(big()).unwrap();
    assert!(jobs.run(big()).unwrap_err().is(Errno::EBUSY));
    // What is gone makes room.
    jobs.cancel(&of("b")).unwrap();
    jobs.run(big()).unwrap();
    let rest = held(&jobs, "c", WAITING_MAX - 1);
    let many = jobs.run(asked("d", || panic!("there is no room"))).unwrap_err();
    let why = "d: save: 64 verbs run in the background, and as many as may (1024, and 16M of requests) \
               wait for their turn";
    assert_eq!((many.message.as_str(), many.is(Errno::EBUSY)), (why, true));
    drop((running, rest));
    jobs.wait_ended(Duration::from_secs(60));
    // All of them came to their end, and all is remembered.
    assert_eq!(states(&jobs, "b"), ["cancelled", "failed"]);
    let finished = |name| states(&jobs, name).iter().filter(|state| *state == "finished").count();
    assert_eq!((finished("a"), finished("c")), (THREADS_MAX, WAITING_MAX - 1));
}

#[test]
fn a_panic_ends_one_verb_and_no_thread() {
    let jobs = Arc::new(Jobs::default());
    let running = held(&jobs, "a", THREADS_MAX);
    jobs.run(asked("b", || panic!("as it is to"))).unwrap();
    jobs.run(asked("c", || Ok(to_raw_value("c").unwrap()))).unwrap();
    drop(running);
    jobs.wait_ended(Duration::from_secs(60));
    assert_eq!((states(&jobs, "b"), states(&jobs, "c")), (vec!["failed".into()], vec!["finished".into()]));
}
