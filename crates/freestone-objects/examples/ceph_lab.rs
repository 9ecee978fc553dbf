//! Tests calls against a real object store for `lab/run-ceph.sh`, and prints the results.
//!
//! ```text
//! ceph_lab calls                   all calls, conditional and not, and refused ones
//! ceph_lab race ROUNDS             exactly one of 8 concurrent conditional writers wins
//! ceph_lab stalled                 calls end at their deadline although the store does not respond
//! ceph_lab load SECONDS            writes and reads with retries, then verifies all objects
//! ```
//!
//! The environment of `lab/ceph.sh` provides the endpoint and the bucket. Exit status: 0, or 1 on failure.

use std::collections::BTreeMap;
use std::env;
use std::error::Error;
use std::fmt::Debug;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use freestone_objects::{Options, open};
use freestone_store::objects::{CallLimits, Fault, Objects, Version, WriteCondition};
use freestone_testkit::Rng;

type Outcome = Result<(), Box<dyn Error>>;

const WRITERS: usize = 8;
/// Timeout of a call under load, shorter than a stall of the object store.
const CALL_TIME: Duration = Duration::from_secs(3);
/// Maximum number of attempts of a writer in a race.
const TRIES_MAX: usize = 20;
/// Longest accepted delay of a call after its deadline.
const LATE: Duration = Duration::from_millis(200);

fn soon() -> CallLimits<'static> {
    CallLimits::within(Duration::from_secs(30))
}

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let number = |word: &str| word.parse::<u64>().unwrap_or_default();
    let outcome = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["calls"] => calls(),
        ["race", rounds] => race(number(rounds)),
        ["stalled"] => stalled(),
        ["load", seconds] => load(Duration::from_secs(number(seconds))),
        _ => Err("calls, race ROUNDS, stalled or load SECONDS".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ceph_lab: {error}");
            ExitCode::FAILURE
        }
    }
}

fn store(below: &str) -> Result<Arc<dyn Objects>, Box<dyn Error>> {
    let bucket = env::var("BUCKET")?;
    Ok(open(&format!("s3://{bucket}/{below}"), &Options::default())?)
}

/// Prints the result of a check. Returns an error if the result is not `wanted`.
fn expect<T: Debug + PartialEq>(what: &str, answer: impl Into<T>, wanted: &T) -> Outcome {
    let answer = answer.into();
    if answer != *wanted {
        return Err(format!("{what}: {answer:?}, not {wanted:?}").into());
    }
    println!("ok   {what}: {answer:?}");
    Ok(())
}

fn keys(store: &dyn Objects, prefix: &str) -> Result<Vec<String>, Fault> {
    let mut keys = Vec::new();
    let mut each = |listed: freestone_store::objects::ListEntry| {
        keys.push(listed.key);
        true
    };
    store.list(prefix, &mut each, soon())?;
    keys.sort();
    Ok(keys)
}

fn calls() -> Outcome {
    let store = store("calls")?;
    let get = |key: &str, part, most| store.get(key, part, most, soon()).map(|read| read.bytes);
    let put = |bytes: &[u8], when| store.put("t", bytes, when, soon());
    expect("get of nothing", get("t", None, 10), &Err(Fault::NotFound))?;
    expect("head of nothing", store.head("t", soon()).err(), &Some(Fault::NotFound))?;
    expect("delete of nothing", store.delete("t", soon()), &Ok(()))?;
    expect("list of nothing", keys(&*store, ""), &Ok(Vec::new()))?;

    let first = put(b"0123456789", WriteCondition::Absent)?.ok_or("no version")?;
    expect("put If-None-Match: *, there", put(b"x", WriteCondition::Absent), &Err(Fault::Condition))?;
    let second = put(b"9876543210", WriteCondition::Unchanged(&first))?.ok_or("no version")?;
    expect("put If-Match, changed", put(b"x", WriteCondition::Unchanged(&first)), &Err(Fault::Condition))?;
    let quoted = Version(format!("\"{}\"", second.0));
    // Informational: some object stores accept versions in quotes.
    println!("     put If-Match with quotes: {:?}", put(b"9876543210", WriteCondition::Unchanged(&quoted)));
    let head = store.head("t", soon())?;
    expect("head", (head.bytes, head.version.as_ref()), &(10, Some(&second)))?;
    let age = SystemTime::now().duration_since(head.modified).unwrap_or_default();
    expect("written just now", age < Duration::from_secs(10), &true)?;
    let read = store.get("t", None, 10, soon())?;
    expect("get", (&read.bytes[..], read.version.as_ref()), &(&b"9876543210"[..], Some(&second)))?;
    expect("get of too much", get("t", None, 9), &Err(Fault::TooLong(9)))?;
    expect("part", get("t", Some(2..4), 2), &Ok(b"76".to_vec()))?;
    expect("part past the end", get("t", Some(8..100), 92), &Ok(b"10".to_vec()))?;
    expect("part behind the end", get("t", Some(10..100), 90), &Ok(Vec::new()))?;
    store.delete("t", soon())?;
    expect("put If-Match, gone", put(b"x", WriteCondition::Unchanged(&second)), &Err(Fault::Condition))?;
    put(b"", WriteCondition::Absent)?;
    expect("get of an empty object", get("t", None, 0), &Ok(Vec::new()))?;

    let mut large = vec![0; 8 << 20];
    Rng::new(1).fill(&mut large);
    store.put("large/a b+%&=~ü", &large, WriteCondition::Absent, soon())?;
    expect("8 MiB", get("large/a b+%&=~ü", None, 8 << 20)? == large, &true)?;
    expect(
        "4 MiB of it",
        get("large/a b+%&=~ü", Some(1 << 20..5 << 20), 4 << 20)? == large[1 << 20..5 << 20],
        &true,
    )?;
    expect("its name", keys(&*store, "large/"), &Ok(vec!["large/a b+%&=~ü".to_owned()]))?;
    let many = thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let store = &store;
                scope.spawn(move || {
                    (0..140).try_for_each(|n| {
                        let key = format!("many/{:04}", n * WRITERS + writer);
                        store.put(&key, b"", WriteCondition::Absent, soon()).map(|_| ())
                    })
                })
            })
            .collect();
        writers.into_iter().try_for_each(|writer| writer.join().expect("a writer panicked"))
    });
    expect("many objects", many, &Ok(()))?;
    expect("a list of more than a page", keys(&*store, "many/")?.len(), &(140 * WRITERS))?;

    let nowhere = open("s3://no-such-bucket/x", &Options::default())?;
    let missing = Fault::Other("the bucket no-such-bucket is not there".to_owned());
    expect("get, no bucket", nowhere.get("x", None, 1, soon()).err(), &Some(missing.clone()))?;
    expect("put, no bucket", nowhere.put("x", b"", WriteCondition::Absent, soon()), &Err(missing.clone()))?;
    expect("list, no bucket", keys(&*nowhere, ""), &Err(missing))?;
    let anonymous = Options { anonymous: true, ..Options::default() };
    let anonymous = open(&format!("s3://{}/calls", env::var("BUCKET")?), &anonymous)?;
    let denied = anonymous.get("t", None, 1, soon()).err();
    let is_denied = matches!(&denied, Some(Fault::Denied(said)) if said.ends_with("403 AccessDenied"));
    expect("get without a key", is_denied, &true)?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("credentials");
    let wrong = format!(
        "[default]\naws_access_key_id={}\naws_secret_access_key=wrong\n",
        env::var("AWS_ACCESS_KEY_ID")?
    );
    std::fs::write(&file, wrong)?;
    let wrong = Options { credentials: Some(file), ..Options::default() };
    let wrong = open(&format!("s3://{}/calls", env::var("BUCKET")?), &wrong)?;
    let denied = wrong.get("t", None, 1, soon()).err();
    let is_denied =
        matches!(&denied, Some(Fault::Denied(said)) if said.ends_with("403 SignatureDoesNotMatch"));
    expect("get with a wrong key", is_denied, &true)?;
    for key in keys(&*store, "")? {
        store.delete(&key, soon())?;
    }
    expect("all is deleted", keys(&*store, ""), &Ok(Vec::new()))
}

/// Number of faults by message. Messages omit variable parts.
#[derive(Default)]
struct Faults(Mutex<BTreeMap<String, u64>>);

impl Faults {
    fn note(&self, call: &str, fault: &Fault) {
        let said = fault.to_string();
        // Strips the endpoint, whose port varies.
        let said =
            said.strip_prefix("127.0.0.1:").map_or(&*said, |rest| rest.trim_start_matches(char::is_numeric));
        *self.0.lock().unwrap().entry(format!("{call}: {said}")).or_default() += 1;
    }

    fn tell(self) -> Outcome {
        for (fault, times) in self.0.into_inner()? {
            println!("     {times:4} times {fault}");
        }
        Ok(())
    }
}

/// Returns content that differs between writers and rounds. Equal content would have equal entity tags, so
/// the condition of two writes could hold.
fn body(round: u64, writer: u8, bytes: usize) -> Vec<u8> {
    let mut body = vec![0; bytes];
    Rng::new(round << 8 | u64::from(writer)).fill(&mut body);
    body
}

fn race(rounds: u64) -> Outcome {
    let store = store("race")?;
    let mut before: Option<Version> = None;
    let (mut most, odd) = (Duration::ZERO, Faults::default());
    for round in 0..rounds {
        // In half of the rounds, the object does not exist at first.
        let bytes = if round % 4 < 2 { 64 } else { 1 << 20 };
        if round % 2 == 0 {
            store.delete("t", soon())?;
            before = None;
        }
        let when = before.as_ref().map_or(WriteCondition::Absent, WriteCondition::Unchanged);
        let winners = Mutex::new(Vec::new());
        let since = Instant::now();
        let others = thread::scope(|scope| {
            let start = |writer: u8| {
                let (store, winners, odd) = (&store, &winners, &odd);
                scope.spawn(move || {
                    let body = body(round, writer, bytes);
                    for _ in 0..TRIES_MAX {
                        match store.put("t", &body, when, soon()) {
                            Ok(version) => {
                                winners.lock().unwrap().push((writer, version));
                                return Ok(());
                            }
                            Err(Fault::Condition) => return Ok(()),
                            // A writer that loses the race may get another error first, and retries.
                            Err(fault @ Fault::Transient(_)) => odd.note("put", &fault),
                            Err(fault) => return Err(fault),
                        }
                    }
                    Err(Fault::TimedOut)
                })
            };
            let writers: Vec<_> = (0..WRITERS as u8).map(start).collect();
            writers.into_iter().try_for_each(|writer| writer.join().expect("a writer panicked"))
        });
        most = most.max(since.elapsed());
        others.map_err(|fault| format!("round {round}, {when:?}: a writer: {fault}"))?;
        let winners = winners.into_inner()?;
        let [(winner, version)] = &winners[..] else {
            return Err(format!("round {round}, {when:?}: {} won", winners.len()).into());
        };
        let read = store.get("t", None, 1 << 20, soon())?;
        if read.bytes != body(round, *winner, bytes) || read.version != *version {
            return Err(format!("round {round}: what is there is not the winner's").into());
        }
        before.clone_from(version);
    }
    odd.tell()?;
    println!("ok   {rounds} rounds of {WRITERS} writers, one winner each; the longest round took {most:.1?}");
    Ok(())
}

type Call<'a> = &'a dyn Fn() -> Result<(), Fault>;

fn stalled() -> Outcome {
    let store = store("stalled")?;
    let time = Duration::from_secs(1);
    let calls: [(&str, Call<'_>); 4] = [
        ("get", &|| store.get("t", None, 1, CallLimits::within(time)).map(|_| ())),
        ("put", &|| store.put("t", b"1", WriteCondition::Absent, CallLimits::within(time)).map(|_| ())),
        ("delete", &|| store.delete("t", CallLimits::within(time))),
        ("list", &|| store.list("", &mut |_| true, CallLimits::within(time))),
    ];
    for (name, call) in calls {
        let since = Instant::now();
        let answer = call();
        let took = since.elapsed();
        if took > time + LATE {
            return Err(format!("{name} took {took:?}").into());
        }
        println!("ok   {name} while nothing answers: {answer:?} after {took:.2?}");
    }
    Ok(())
}

fn content(key: &str) -> Vec<u8> {
    let mut rng = Rng::new(key.bytes().fold(7, |sum: u64, b| sum.wrapping_mul(31) + u64::from(b)));
    let mut bytes = vec![0; rng.below(400_000) as usize + 1];
    rng.fill(&mut bytes);
    bytes
}

/// Writes an object. Retries until two minutes after `end`.
fn written(store: &dyn Objects, key: &str, faults: &Faults, own: &AtomicU64, end: Instant) -> Outcome {
    let bytes = content(key);
    let mut tries = 0;
    loop {
        tries += 1;
        match store.put(key, &bytes, WriteCondition::Absent, CallLimits::within(CALL_TIME)) {
            Ok(_) => return Ok(()),
            // An earlier attempt of this writer succeeded, and the response was lost.
            Err(Fault::Condition) if tries > 1 => {
                own.fetch_add(1, SeqCst);
                return Ok(());
            }
            Err(fault @ (Fault::Transient(_) | Fault::TimedOut)) => faults.note("put", &fault),
            Err(fault) => return Err(format!("put of {key}, try {tries}: {fault}").into()),
        }
        if Instant::now() > end + Duration::from_secs(120) {
            return Err(format!("put of {key}: it never went well").into());
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn load(time: Duration) -> Outcome {
    let store = store("load")?;
    let (faults, own, longest) = (Faults::default(), AtomicU64::new(0), Mutex::new(Duration::ZERO));
    let (count, end) = (AtomicUsize::new(0), Instant::now() + time);
    let failed = Mutex::new(Vec::new());
    let all = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (store, faults, own, longest, count, failed, all) =
                (&store, &faults, &own, &longest, &count, &failed, &all);
            scope.spawn(move || {
                for n in 0.. {
                    if Instant::now() > end {
                        break;
                    }
                    let key = format!("{writer}/{n}");
                    if let Err(error) = written(&**store, &key, faults, own, end) {
                        failed.lock().unwrap().push(error.to_string());
                        break;
                    }
                    count.fetch_add(1, SeqCst);
                    all.lock().unwrap().push(key.clone());
                    let since = Instant::now();
                    match store.get(&key, None, 1 << 20, CallLimits::within(CALL_TIME)) {
                        Ok(read) if read.bytes == content(&key) => {}
                        Ok(_) => failed.lock().unwrap().push(format!("{key}: another content")),
                        Err(fault @ (Fault::Transient(_) | Fault::TimedOut)) => faults.note("get", &fault),
                        Err(fault) => failed.lock().unwrap().push(format!("get of {key}: {fault}")),
                    }
                    let took = since.elapsed();
                    let mut longest = longest.lock().unwrap();
                    *longest = took.max(*longest);
                }
            });
        }
    });
    faults.tell()?;
    if let Some(first) = failed.into_inner()?.first() {
        return Err(first.clone().into());
    }
    let longest = longest.into_inner()?;
    if longest > CALL_TIME + LATE {
        return Err(format!("a get took {longest:?}").into());
    }
    for key in &all.into_inner()? {
        let read = store.get(key, None, 1 << 20, CallLimits::within(Duration::from_secs(60)))?;
        if read.bytes != content(key) {
            return Err(format!("{key}: another content").into());
        }
        store.delete(key, soon())?;
    }
    println!(
        "ok   {} objects written and read again, {} of them by a try whose answer was lost; the longest get took {longest:.2?}",
        count.into_inner(),
        own.into_inner()
    );
    Ok(())
}
