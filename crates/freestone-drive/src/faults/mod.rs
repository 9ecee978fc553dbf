//! Fault injection over any device, reproducible from a seed.
//!
//! [`Faults`] passes requests to the device below and makes some of them fail according to its
//! [`Rules`]. Zones are passed through if the device below has them.
//!
//! # Rules
//! A rule is `OPERATION EFFECT... [CONDITION...]`. Rules are separated by `;`:
//!
//! ```text
//! write error=EIO chance=1%; read at=1M+64K delay=20ms; flush lie nth=3; writes hang at=0+4K times=1
//! ```
//!
//! | operation | |
//! |---|---|
//! | `read` `write` `discard` `zeroes` `flush` | operations of every device (`zeroes` is "write zeroes") |
//! | `append` `open` `close` `finish` `reset` | operations of zones; "reset all" is one `reset` of the whole device |
//! | `writes` | `write`, `append`, `zeroes` and `discard` |
//! | `all` | all operations |
//!
//! | effect | operations | what happens |
//! |---|---|---|
//! | `error=NAME` | all | fails with this error and does nothing. `EIO`, `ENOSPC`, `ENOMEM`, `EROFS` (or `EPERM`), `EINVAL`, `EOPNOTSUPP` (or `ENOTSUP`), `ESHUTDOWN`, `ETOOMANYREFS`, `EOVERFLOW`. With `torn=` or `misdirected`: has that effect first, then fails |
//! | `delay=TIME` | all | runs at once and completes no earlier than this: 1ns to 3600s, in `ns`, `us`, `ms` or `s` |
//! | `hang` | all | runs at once and completes when [`Faults::release`] is called, or with [`Error::Gone`] if the device is dropped first |
//! | `torn=512`, `torn=4K`, `torn=16K` | write, append | writes some units of this many bytes and not others, at least one of each, and succeeds. A write within one unit is not torn |
//! | `lost` | writes | succeeds and does nothing |
//! | `misdirected` | write, append | writes to another offset of the device, at a multiple of its logical block |
//! | `lie` | flush, writes | a flush succeeds and does nothing; a write loses its FUA flag |
//! | `stale` | read | returns the content before the last overwrite, per block, as far as that is kept ([`OLD_BYTES_MAX`], from the time when the rule is set) |
//! | `rot` | read, write, append | flips one bit, in the data of a read or in the stored data |
//!
//! | condition | fires |
//! |---|---|
//! | `at=OFFSET+LENGTH` | if the request touches this range; units `B`, `K`, `M`, `G`, `T`. A zone operation or append touches its whole zone; a flush touches nothing |
//! | `chance=1%`, `chance=1/1000`, `chance=0.01` | with this probability |
//! | `nth=N` | at the N-th time that this operation starts at this offset |
//! | `times=N` | for the first N requests that would fire, and never again |
//! | `after=N` | not for the first N matching requests |
//!
//! If several rules fire for one request, all take effect: the first error, the first of `torn`,
//! `lost` and `misdirected`, the longest delay.
//!
//! # Reproducibility
//! A hash decides whether a rule fires, and chooses its random values. The hash covers the seed,
//! the rule's position in the list, the operation, the offset, and the number of times that
//! operation started there since the rules were set. So the same requests fail under any thread
//! interleaving, if each offset sees the same sequence.
//!
//! `times` and `after` count requests in order of arrival, so they are reproducible only if that
//! order is. Counts are exact up to about 900 000 different offsets (times rules, times
//! operations). At offsets beyond that each time counts as the first ([`Faults::uncounted`] returns
//! how often).
//!
//! # Notes
//! * If a rule may fire for a request, a try returns "would block", and the submitted request is
//!   decided. So each request is counted once. Other requests go to the device below at once.
//! * A torn write reads the old content first, and writes it back where new data must not arrive.
//!   Overlapping writes in flight may lose data there, too.
//! * In a sequential zone the write pointer moves as if all data had arrived; missing data is
//!   zeroes. A misdirected write is appended to another zone with room, if there is one. No old
//!   content is kept there.
//! * Only the first [`OLD_REQUEST_BYTES_MAX`] of a write, zeroing or discard are kept for stale
//!   reads.
//! * Zone operations block the calling thread, so their delays and hangs do, too.

mod data;
mod decide;
mod hold;
mod job;
mod quantity;
mod rules;
mod stale;
mod tally;
mod text;
mod zoned;

use std::sync::Arc;
use std::{fmt, io};

use freestone_core::device::{
    Buffer, Changes, Completion, Device, Extent, Flags, Geometry, IoBuf, Op, Request, Result, Tried, Zoned,
};
use freestone_core::sync::{AtomicU32, Mutex, Ordering};
use freestone_core::{pin, timer};

use decide::{ActiveRules, Decision, RequestInfo};
use job::{Below, FaultyRequest};
use rules::Operation;

pub use quantity::QuantityError;
pub use rules::{DELAY_SECONDS_MAX, NTH_MAX, RULES_MAX, Rule, Rules};
pub use stale::{OLD_BYTES_MAX, OLD_REQUEST_BYTES_MAX};
pub use text::{Problem, RuleError};

#[cfg(doc)]
use freestone_core::device::Error;

/// Device that injects faults. See the [module](self).
pub struct Faults {
    below: Below,
    active: pin::Swap<ActiveRules>,
    /// Operations for which a rule may fire; the only check for other requests.
    watched: AtomicU32,
    /// Serializes changes of the rules.
    change_lock: Mutex<()>,
}

/// Counters of one rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleCount {
    /// Text of the rule.
    pub rule: String,
    /// Requests that matched the rule's operation and range.
    pub matched: u64,
    /// Requests for which the rule fired.
    pub fired: u64,
}

impl Faults {
    /// Wraps `inner`.
    ///
    /// # Errors
    /// The timer thread could not be started.
    pub fn new(inner: Arc<dyn Device>, rules: Rules, seed: u64) -> io::Result<Self> {
        timer::start()?;
        let active = Box::new(ActiveRules::new(rules, seed, inner.geometry().logical_block));
        let watched = AtomicU32::new(active.ops().bits());
        let below = Below::new(inner);
        Ok(Self { below, active: pin::Swap::new(active), watched, change_lock: Mutex::default() })
    }

    /// Replaces the rules, and the seed if one is given. Counters restart, and old content is
    /// dropped. Earlier decisions stay: hung requests keep hanging. Must not be called from a
    /// completion.
    pub fn set(&self, rules: Rules, seed: Option<u64>) {
        let _guard = self.change_lock.lock();
        let seed = seed.unwrap_or_else(|| self.seed());
        let active = ActiveRules::new(rules, seed, self.below.device.geometry().logical_block);
        let ops = active.ops().bits();
        // Too many operations are watched for a moment, rather than too few.
        self.watched.fetch_or(ops, Ordering::SeqCst);
        drop(self.active.replace(Box::new(active)));
        self.watched.store(ops, Ordering::SeqCst);
    }

    /// Returns the current rules.
    pub fn rules(&self) -> Rules {
        pin::pinned(|pin| self.active.load(pin).rules())
    }

    /// Returns the current seed.
    pub fn seed(&self) -> u64 {
        pin::pinned(|pin| self.active.load(pin).seed())
    }

    /// Completes every hung request and returns their number. Later requests still hang if a rule
    /// says so.
    pub fn release(&self) -> u64 {
        self.below.hold.release()
    }

    /// Returns the number of hung requests.
    pub fn hanging(&self) -> u64 {
        self.below.hold.hanging()
    }

    /// Returns the counters of each rule since the rules were set.
    pub fn counts(&self) -> Vec<RuleCount> {
        pin::pinned(|pin| {
            let counts = self.active.load(pin).counts();
            counts
                .map(|(rule, matched, fired)| RuleCount { rule: rule.to_string(), matched, fired })
                .collect()
        })
    }

    /// Returns how many requests were counted as the first at their offset because the table of
    /// offsets was full.
    pub fn uncounted(&self) -> u64 {
        pin::pinned(|pin| self.active.load(pin).uncounted())
    }

    /// Fails all hung and delayed requests with [`Error::Gone`], now and later. Used to remove a
    /// device with hung requests.
    pub fn close(&self) {
        self.below.hold.close();
    }

    /// Returns true if a rule may fire for this operation.
    #[inline]
    fn watches(&self, operation: Operation) -> bool {
        // Relaxed: a caller that runs after `set` returned sees the new value; before that either
        // value is right.
        self.watched.load(Ordering::Relaxed) & operation.set().bits() != 0
    }

    fn matches(&self, info: &RequestInfo) -> bool {
        pin::pinned(|pin| self.active.load(pin).matches(info))
    }

    fn decide(&self, info: &RequestInfo) -> Decision {
        pin::pinned(|pin| self.active.load(pin).decide(info))
    }
}

impl RequestInfo {
    fn of(request: &Request) -> Self {
        Self {
            operation: operation(request.op),
            offset: request.offset,
            len: request.len,
            reach: request.len,
            durable: request.flags.contains(Flags::FUA),
        }
    }
}

const fn operation(op: Op) -> Operation {
    match op {
        Op::Read => Operation::Read,
        Op::Write => Operation::Write,
        Op::Discard => Operation::Discard,
        Op::WriteZeroes => Operation::Zeroes,
        Op::Flush => Operation::Flush,
    }
}

impl Device for Faults {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.below.device.geometry()
    }

    #[inline]
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        if self.watches(operation(request.op)) && self.matches(&RequestInfo::of(request)) {
            request.check(&self.geometry())?;
            return Ok(Tried::WouldBlock);
        }
        self.below.device.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if !self.watches(operation(request.op)) {
            return self.below.device.submit(request, buffer, done);
        }
        if let Err(error) = request.check(&self.geometry()) {
            return done.complete(Err(error), buffer);
        }
        let info = RequestInfo::of(&request);
        let (decision, old) = pin::pinned(|pin| {
            let active = self.active.load(pin);
            (active.decide(&info), active.old.clone())
        });
        if decision == Decision::default() && old.is_none() {
            return self.below.device.submit(request, buffer, done);
        }
        FaultyRequest { below: self.below.clone(), request, buffer, done, decision, old }.run();
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.below.device.extents(offset, len, row)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.below.device.prefetch(offset, len);
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        self.below.device.zoned().map(|_| self as &dyn Zoned)
    }

    fn changes(&self) -> Option<&dyn Changes> {
        self.below.device.changes()
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        self.below.hold.close();
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Faults({:?}, seed {})", self.rules().to_string(), self.seed())
    }
}
