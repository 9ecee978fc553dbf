//! An in-memory object store with a settable clock and fault injection.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use freestone_core::sync::Mutex;
use freestone_sim::sync::Arc;
use freestone_sim::thread;
use freestone_sim::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use freestone_store::objects::{
    CallLimits, Fault, Head, ListEntry, Objects, Read, Result, Version, WriteCondition,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    Get,
    Put,
    /// Queries the metadata of an object.
    Head,
    List,
    Delete,
}

/// A request to the object store, as passed to the fault rule.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    pub method: Method,
    /// Key of the object, or prefix of the keys to list.
    pub key: &'a str,
    /// Number of requests of this client before this one.
    pub number: u64,
}

/// Effect of the fault rule on a request.
#[derive(Debug, Clone)]
pub enum Effect {
    /// The request is not affected.
    Pass,
    /// The request fails without effect.
    Fail(Fault),
    /// The request takes effect, but fails.
    FailAfter(Fault),
    /// The request takes effect after this time.
    Delay(Duration),
    /// The request neither takes effect nor completes before its deadline.
    Hang,
    /// A read returns data in which one bit of this byte is flipped.
    Flip(usize),
    /// A read returns data truncated to this length in bytes; a list returns at most this number of keys.
    Truncate(usize),
    /// A list omits this key.
    Omit(&'static str),
}

type Rule = Arc<dyn Fn(Call<'_>) -> Effect + Send + Sync>;

struct Object {
    bytes: Arc<Vec<u8>>,
    modified: SystemTime,
    version: u64,
}

/// Time of the store's clock when the store is created, since the Unix epoch.
const BEGIN: Duration = Duration::from_secs(1_700_000_000);

struct State {
    objects: BTreeMap<String, Object>,
    counts: HashMap<Method, u64>,
    gets: HashMap<String, u64>,
    versions: u64,
    created: Instant,
    /// Time by which the clock is ahead of the real time passed since the creation.
    clock_offset: Duration,
}

/// Settings and counters of one client of an object store.
#[derive(Default)]
struct ClientState {
    calls: u64,
    rule: Option<Rule>,
    /// Conditional deletes fail as unsupported.
    no_conditional_delete: bool,
}

/// An in-memory object store, accessed as one client. Several clients can share the objects.
pub struct MemoryStore {
    state: Arc<Mutex<State>>,
    client: Mutex<ClientState>,
}

impl Default for MemoryStore {
    fn default() -> Self {
        let state = State {
            objects: BTreeMap::new(),
            counts: HashMap::new(),
            gets: HashMap::new(),
            versions: 0,
            created: Instant::now(),
            clock_offset: Duration::ZERO,
        };
        Self::of(Arc::new(Mutex::new(state)))
    }
}

impl MemoryStore {
    fn of(state: Arc<Mutex<State>>) -> Self {
        Self { state, client: Mutex::new(ClientState::default()) }
    }

    /// Returns another client of the same object store, without a fault rule.
    #[must_use]
    pub fn new_client(&self) -> Self {
        Self::of(Arc::clone(&self.state))
    }

    /// Sets the fault rule for all further requests.
    ///
    /// A rule that uses the object store must use another client ([`new_client`](Self::new_client)): a rule that holds
    /// this client would keep it alive forever.
    pub fn set_fault_rule(&self, rule: impl Fn(Call<'_>) -> Effect + Send + Sync + 'static) {
        self.client.lock().rule = Some(Arc::new(rule));
    }

    /// Makes conditional deletes unsupported, as in S3.
    pub fn disable_conditional_delete(&self) {
        self.client.lock().no_conditional_delete = true;
    }

    /// Removes the fault rule of this client.
    pub fn heal(&self) {
        self.client.lock().rule = None;
    }

    /// Advances the clock of the object store, for all clients.
    pub fn advance_clock(&self, time: Duration) {
        self.state.lock().clock_offset += time;
    }

    /// Returns the number of requests of this operation, by all clients.
    pub fn count(&self, method: Method) -> u64 {
        self.state.lock().counts.get(&method).copied().unwrap_or(0)
    }

    /// Returns the number of read requests per key, by all clients.
    pub fn gets(&self) -> HashMap<String, u64> {
        self.state.lock().gets.clone()
    }

    /// Returns the number of requests of this client, of any operation.
    pub fn calls(&self) -> u64 {
        self.client.lock().calls
    }

    /// Returns the keys that start with `prefix`, and the sizes of their objects in bytes.
    pub fn object_sizes(&self, prefix: &str) -> BTreeMap<String, u64> {
        let state = self.state.lock();
        let under = state.objects.iter().filter(|(key, _)| key.starts_with(prefix));
        under.map(|(key, object)| (key.clone(), object.bytes.len() as u64)).collect()
    }

    /// Changes the content of an object directly, without a request. If `change` returns false, the object is removed.
    ///
    /// # Panics
    /// Panics if the object does not exist.
    pub fn tamper(&self, key: &str, change: impl FnOnce(&mut Vec<u8>) -> bool) {
        let mut state = self.state.lock();
        let Some(object) = state.objects.get_mut(key) else { panic!("{key} is not there") };
        let mut bytes = object.bytes.to_vec();
        if change(&mut bytes) {
            object.bytes = Arc::new(bytes);
        } else {
            state.objects.remove(key);
        }
    }

    /// Removes all objects directly, without a request.
    pub fn remove_all(&self) {
        self.state.lock().objects.clear();
    }

    /// Counts a request and applies the effects of the fault rule that precede the operation. Returns the effect for
    /// the rest.
    fn begin(&self, method: Method, key: &str, until: CallLimits<'_>) -> Result<Effect> {
        until.check()?;
        let (rule, call) = {
            let mut state = self.state.lock();
            *state.counts.entry(method).or_default() += 1;
            if method == Method::Get {
                *state.gets.entry(key.to_owned()).or_default() += 1;
            }
            drop(state);
            let mut client = self.client.lock();
            let number = client.calls;
            client.calls += 1;
            (client.rule.clone(), Call { method, key, number })
        };
        let effect = rule.map_or(Effect::Pass, |rule| rule(call));
        match &effect {
            Effect::Fail(fault) => return Err(fault.clone()),
            Effect::Delay(time) => wait(until.at_most(*time)).or_else(|fault| match fault {
                Fault::TimedOut => until.check(),
                fault => Err(fault),
            })?,
            Effect::Hang => wait(until)?,
            _ => {}
        }
        Ok(effect)
    }
}

/// Waits until the deadline of the call or its cancellation, and returns that as the error.
fn wait(until: CallLimits<'_>) -> Result<()> {
    loop {
        until.check()?;
        thread::sleep(Duration::from_millis(1));
    }
}

fn apply_outcome<T>(effect: &Effect, done: T) -> Result<T> {
    match effect {
        Effect::FailAfter(fault) => Err(fault.clone()),
        _ => Ok(done),
    }
}

impl State {
    fn elapsed(&self) -> Duration {
        self.created.elapsed() + self.clock_offset
    }

    fn now(&self) -> SystemTime {
        // The clock has whole seconds, as the times in HTTP.
        UNIX_EPOCH + Duration::from_secs((BEGIN + self.elapsed()).as_secs())
    }
}

fn version(object: &Object) -> Version {
    Version(object.version.to_string())
}

impl Objects for MemoryStore {
    fn url(&self) -> &'static str {
        "memory:"
    }

    fn get(&self, key: &str, part: Option<Range<u64>>, most: u64, until: CallLimits<'_>) -> Result<Read> {
        let effect = self.begin(Method::Get, key, until)?;
        let (bytes, version) = {
            let state = self.state.lock();
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
            Effect::Truncate(at) => read.truncate(at),
            _ => {}
        }
        apply_outcome(&effect, Read { bytes: read, version: Some(version) })
    }

    fn put(
        &self,
        key: &str,
        bytes: &[u8],
        when: WriteCondition<'_>,
        until: CallLimits<'_>,
    ) -> Result<Option<Version>> {
        let effect = self.begin(Method::Put, key, until)?;
        let mut state = self.state.lock();
        let before = state.objects.get(key).map(version);
        let holds = match when {
            WriteCondition::Always => true,
            WriteCondition::Absent => before.is_none(),
            WriteCondition::Unchanged(read) => before.as_ref() == Some(read),
        };
        if !holds {
            return Err(Fault::Condition);
        }
        state.versions += 1;
        let object =
            Object { bytes: Arc::new(bytes.to_vec()), modified: state.now(), version: state.versions };
        let version = version(&object);
        state.objects.insert(key.to_owned(), object);
        apply_outcome(&effect, Some(version))
    }

    fn head(&self, key: &str, until: CallLimits<'_>) -> Result<Head> {
        let effect = self.begin(Method::Head, key, until)?;
        let state = self.state.lock();
        let object = state.objects.get(key).ok_or(Fault::NotFound)?;
        let head = Head {
            bytes: object.bytes.len() as u64,
            modified: object.modified,
            version: Some(version(object)),
        };
        apply_outcome(&effect, head)
    }

    fn list(
        &self,
        prefix: &str,
        each: &mut dyn FnMut(ListEntry) -> bool,
        until: CallLimits<'_>,
    ) -> Result<()> {
        let effect = self.begin(Method::List, prefix, until)?;
        let listed: Vec<ListEntry> = {
            let state = self.state.lock();
            let under = state.objects.iter().filter(|(key, _)| key.starts_with(prefix));
            let listed = |(key, object): (&String, &Object)| ListEntry {
                key: key.clone(),
                bytes: object.bytes.len() as u64,
                modified: object.modified,
            };
            under.map(listed).collect()
        };
        let most = if let Effect::Truncate(at) = effect { at } else { usize::MAX };
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
            apply_outcome(&effect, ())
        }
    }

    fn delete(&self, key: &str, until: CallLimits<'_>) -> Result<()> {
        let effect = self.begin(Method::Delete, key, until)?;
        self.state.lock().objects.remove(key);
        apply_outcome(&effect, ())
    }

    fn delete_unchanged(&self, key: &str, read: &Version, until: CallLimits<'_>) -> Result<()> {
        if self.client.lock().no_conditional_delete {
            return Err(Fault::Unsupported("no conditions".to_owned()));
        }
        let effect = self.begin(Method::Delete, key, until)?;
        let mut state = self.state.lock();
        if state.objects.get(key).map(version).as_ref() != Some(read) {
            return Err(Fault::Condition);
        }
        state.objects.remove(key);
        apply_outcome(&effect, ())
    }

    fn uptime(&self) -> Duration {
        self.state.lock().elapsed()
    }
}
