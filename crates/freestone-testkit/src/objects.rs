//! An in-memory object store with a settable clock and fault injection.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use freestone_sim::sync::{Arc, Mutex, MutexGuard, PoisonError};
use freestone_sim::thread;
use freestone_sim::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use freestone_store::objects::{Fault, Head, Listed, Objects, Read, Result, Until, Version, When};

/// Operation of an object store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// Read an object.
    Get,
    /// Write an object.
    Put,
    /// Query an object's metadata.
    Head,
    /// List objects.
    List,
    /// Delete an object.
    Delete,
}

/// A request, as passed to the fault rule.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// Operation.
    pub method: Method,
    /// Key of the object, or prefix of a list.
    pub key: &'a str,
    /// Number of requests before this one.
    pub number: u64,
}

/// Effect of a fault rule on a request.
#[derive(Debug, Clone)]
pub enum Effect {
    /// No fault.
    Pass,
    /// Fails without an effect.
    Fail(Fault),
    /// Takes effect, but fails.
    FailAfter(Fault),
    /// Takes effect after this time.
    Late(Duration),
    /// Neither completes nor takes effect.
    Hang,
    /// Flips a bit of this byte of the data read.
    Flip(usize),
    /// Truncates the data read to this length, or a list to this number of keys.
    Cut(usize),
    /// Omits this key from a list.
    Omit(&'static str),
}

type Rule = Arc<dyn Fn(Call<'_>) -> Effect + Send + Sync>;

struct Object {
    bytes: Arc<Vec<u8>>,
    modified: SystemTime,
    version: u64,
}

/// Time of the store's clock at its creation, since the Unix epoch.
const BEGIN: Duration = Duration::from_secs(1_700_000_000);

struct State {
    objects: BTreeMap<String, Object>,
    counts: HashMap<Method, u64>,
    gets: HashMap<String, u64>,
    versions: u64,
    begun: Instant,
    /// Offset of the clock to the real time passed.
    ahead: Duration,
}

/// Settings and counters of one client of a store.
#[derive(Default)]
struct ClientState {
    calls: u64,
    rule: Option<Rule>,
    /// Conditional deletes are not supported.
    deletes_always: bool,
}

/// An in-memory object store, as seen by one client.
pub struct Memory {
    state: Arc<Mutex<State>>,
    client: Mutex<ClientState>,
}

impl Default for Memory {
    fn default() -> Self {
        let state = State {
            objects: BTreeMap::new(),
            counts: HashMap::new(),
            gets: HashMap::new(),
            versions: 0,
            begun: Instant::now(),
            ahead: Duration::ZERO,
        };
        Self::of(Arc::new(Mutex::new(state)))
    }
}

impl Memory {
    fn of(state: Arc<Mutex<State>>) -> Self {
        Self { state, client: Mutex::new(ClientState::default()) }
    }

    /// Returns another client of the same objects, without fault rules.
    #[must_use]
    pub fn beside(&self) -> Self {
        Self::of(Arc::clone(&self.state))
    }

    fn client(&self) -> MutexGuard<'_, ClientState> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the fault rule for all further requests.
    ///
    /// A rule that uses the store needs its own client ([`beside`](Self::beside)): one that holds this client would
    /// keep it alive forever.
    pub fn rule(&self, rule: impl Fn(Call<'_>) -> Effect + Send + Sync + 'static) {
        self.client().rule = Some(Arc::new(rule));
    }

    /// Disables conditional deletes, as in S3.
    pub fn delete_always(&self) {
        self.client().deletes_always = true;
    }

    /// Removes the fault rule.
    pub fn heal(&self) {
        self.client().rule = None;
    }

    /// Advances the clock of the store for all clients.
    pub fn pass(&self, time: Duration) {
        self.lock().ahead += time;
    }

    /// Returns the number of requests of an operation.
    pub fn count(&self, method: Method) -> u64 {
        self.lock().counts.get(&method).copied().unwrap_or(0)
    }

    /// Returns the number of reads per object.
    pub fn gets(&self) -> HashMap<String, u64> {
        self.lock().gets.clone()
    }

    /// Returns the number of requests of this client.
    pub fn calls(&self) -> u64 {
        self.client().calls
    }

    /// Returns the keys with a prefix, and the sizes of their objects in bytes.
    pub fn under(&self, prefix: &str) -> BTreeMap<String, u64> {
        let state = self.lock();
        let under = state.objects.iter().filter(|(key, _)| key.starts_with(prefix));
        under.map(|(key, object)| (key.clone(), object.bytes.len() as u64)).collect()
    }

    /// Changes the content of an object without a request. The object is removed if `change`
    /// returns false.
    pub fn tamper(&self, key: &str, change: impl FnOnce(&mut Vec<u8>) -> bool) {
        let mut state = self.lock();
        let Some(object) = state.objects.get_mut(key) else { panic!("{key} is not there") };
        let mut bytes = object.bytes.to_vec();
        if change(&mut bytes) {
            object.bytes = Arc::new(bytes);
        } else {
            state.objects.remove(key);
        }
    }

    /// Removes all objects.
    pub fn empty(&self) {
        self.lock().objects.clear();
    }

    /// Counts a request and applies the fault rule before it takes effect.
    fn begin(&self, method: Method, key: &str, until: Until<'_>) -> Result<Effect> {
        until.check()?;
        let (rule, call) = {
            let mut state = self.lock();
            *state.counts.entry(method).or_default() += 1;
            if method == Method::Get {
                *state.gets.entry(key.to_owned()).or_default() += 1;
            }
            drop(state);
            let mut client = self.client();
            let number = client.calls;
            client.calls += 1;
            (client.rule.clone(), Call { method, key, number })
        };
        let effect = rule.map_or(Effect::Pass, |rule| rule(call));
        match &effect {
            Effect::Fail(fault) => return Err(fault.clone()),
            Effect::Late(time) => wait(until.at_most(*time)).or_else(|fault| match fault {
                Fault::Late => until.check(),
                fault => Err(fault),
            })?,
            Effect::Hang => wait(until)?,
            _ => {}
        }
        Ok(effect)
    }
}

/// Waits until the call's deadline or cancellation.
fn wait(until: Until<'_>) -> Result<()> {
    loop {
        until.check()?;
        thread::sleep(Duration::from_millis(1));
    }
}

fn ended<T>(effect: &Effect, done: T) -> Result<T> {
    match effect {
        Effect::FailAfter(fault) => Err(fault.clone()),
        _ => Ok(done),
    }
}

impl State {
    fn passed(&self) -> Duration {
        self.begun.elapsed() + self.ahead
    }

    fn now(&self) -> SystemTime {
        // Whole seconds, as in HTTP.
        UNIX_EPOCH + Duration::from_secs((BEGIN + self.passed()).as_secs())
    }
}

fn version(object: &Object) -> Version {
    Version(object.version.to_string())
}

impl Objects for Memory {
    fn url(&self) -> &'static str {
        "memory:"
    }

    fn get(&self, key: &str, part: Option<Range<u64>>, most: u64, until: Until<'_>) -> Result<Read> {
        let effect = self.begin(Method::Get, key, until)?;
        let (bytes, version) = {
            let state = self.lock();
            let object = state.objects.get(key).ok_or(Fault::NotFound)?;
            (Arc::clone(&object.bytes), version(object))
        };
        let part = part.unwrap_or(0..bytes.len() as u64);
        let end = part.end.min(bytes.len() as u64);
        let mut read = bytes[part.start.min(end) as usize..end as usize].to_vec();
        if read.len() as u64 > most {
            return Err(Fault::TooLong(most));
        }
        match effect {
            Effect::Flip(at) if !read.is_empty() => {
                let at = at % read.len();
                read[at] ^= 0x10;
            }
            Effect::Cut(at) => read.truncate(at),
            _ => {}
        }
        ended(&effect, Read { bytes: read, version: Some(version) })
    }

    fn put(&self, key: &str, bytes: &[u8], when: When<'_>, until: Until<'_>) -> Result<Option<Version>> {
        let effect = self.begin(Method::Put, key, until)?;
        let mut state = self.lock();
        let before = state.objects.get(key).map(version);
        let holds = match when {
            When::Always => true,
            When::Absent => before.is_none(),
            When::Unchanged(read) => before.as_ref() == Some(read),
        };
        if !holds {
            return Err(Fault::Condition);
        }
        state.versions += 1;
        let object =
            Object { bytes: Arc::new(bytes.to_vec()), modified: state.now(), version: state.versions };
        let version = version(&object);
        state.objects.insert(key.to_owned(), object);
        ended(&effect, Some(version))
    }

    fn head(&self, key: &str, until: Until<'_>) -> Result<Head> {
        let effect = self.begin(Method::Head, key, until)?;
        let state = self.lock();
        let object = state.objects.get(key).ok_or(Fault::NotFound)?;
        let head = Head {
            bytes: object.bytes.len() as u64,
            modified: object.modified,
            version: Some(version(object)),
        };
        ended(&effect, head)
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed) -> bool, until: Until<'_>) -> Result<()> {
        let effect = self.begin(Method::List, prefix, until)?;
        let listed: Vec<Listed> = {
            let state = self.lock();
            let under = state.objects.iter().filter(|(key, _)| key.starts_with(prefix));
            let listed = |(key, object): (&String, &Object)| Listed {
                key: key.clone(),
                bytes: object.bytes.len() as u64,
                modified: object.modified,
            };
            under.map(listed).collect()
        };
        let most = if let Effect::Cut(at) = effect { at } else { usize::MAX };
        for listed in listed.into_iter().take(most) {
            if matches!(effect, Effect::Omit(key) if key == listed.key) {
                continue;
            }
            if !each(listed) {
                return Ok(());
            }
        }
        if most < usize::MAX {
            Err(Fault::Transient("the list was cut off".into()))
        } else {
            ended(&effect, ())
        }
    }

    fn delete(&self, key: &str, until: Until<'_>) -> Result<()> {
        let effect = self.begin(Method::Delete, key, until)?;
        self.lock().objects.remove(key);
        ended(&effect, ())
    }

    fn delete_unchanged(&self, key: &str, read: &Version, until: Until<'_>) -> Result<()> {
        if self.client().deletes_always {
            return Err(Fault::Unsupported("no conditions".to_owned()));
        }
        let effect = self.begin(Method::Delete, key, until)?;
        let mut state = self.lock();
        if state.objects.get(key).map(version).as_ref() != Some(read) {
            return Err(Fault::Condition);
        }
        state.objects.remove(key);
        ended(&effect, ())
    }

    fn uptime(&self) -> Duration {
        self.lock().passed()
    }
}
