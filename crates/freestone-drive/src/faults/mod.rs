//! Layer that injects faults into the requests of any device, reproducibly from a seed.
//!
//! [`Faults`] passes requests to the device under this layer and makes some of them fail according
//! to its [`Rules`]. If that device is zoned, the zones stay visible.
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
//! the rule's position in the list, the operation and the offset. It also covers how often that
//! operation started at that offset since the rules were set. So the same requests fail under any
//! thread interleaving, if each offset sees the same sequence of operations.
//!
//! `times` and `after` count requests in order of arrival, so they are reproducible only if that
//! order is. Counts are exact for up to about 900 000 combinations of rule, operation and offset.
//! For combinations beyond that, every request counts as the first at its offset
//! ([`Faults::uncounted`] returns their number).
//!
//! # Notes
//! * If a rule may fire for a request, `try_io` returns "would block", and the decision is made
//!   when the request is submitted. So each request is counted once. Other requests go directly to
//!   the device under this layer.
//! * A torn write first reads the old content, and writes it back to the units that lose the new
//!   data. Overlapping writes in flight may lose data in these units, too.
//! * In a sequential zone the write pointer moves as if all data had been written; lost data reads
//!   as zeroes. A misdirected write is appended to another zone with room, if one exists. Old
//!   content of sequential zones is not kept.
//! * Only the first [`OLD_REQUEST_BYTES_MAX`] bytes overwritten by a write, zeroing or discard are
//!   kept for stale reads.
//! * Zone operations block the calling thread, so delays and hangs of zone operations do, too.

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
    Buffer, Completion, Device, Flags, Geometry, IoBuf, Op, Request, Result, TryResult, forward_device,
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

/// Layer that injects faults into requests to another device. See the [module](self).
pub struct Faults {
    below: Below,
    active: pin::Swap<ActiveRules>,
    /// Bits of the operations for which a rule may fire. Requests with other operations need no
    /// further check.
    watched: AtomicU32,
    /// Serializes calls of [`set`](Self::set).
    change_lock: Mutex<()>,
}

/// Counters of one fault rule since the rules were set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleCount {
    /// Text of the rule, as it was parsed.
    pub rule: String,
    /// Number of requests that matched the rule's operation and range.
    pub matched: u64,
    /// Number of requests for which the rule fired.
    pub fired: u64,
}

impl Faults {
    /// Wraps `inner` with a fault layer that uses `rules` and `seed`.
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

    /// Replaces the rules, and the seed if `seed` is `Some`. Resets the counters and drops the old
    /// content kept for stale reads. Requests that already hang continue to hang. Must not be
    /// called from a completion.
    pub fn set(&self, rules: Rules, seed: Option<u64>) {
        let _guard = self.change_lock.lock();
        let seed = seed.unwrap_or_else(|| self.seed());
        let active = ActiveRules::new(rules, seed, self.below.device.geometry().logical_block);
        let ops = active.ops().bits();
        // For a moment the operations of the old and new rules are watched, so that no request
        // escapes the new rules.
        self.watched.fetch_or(ops, Ordering::SeqCst);
        drop(self.active.replace(Box::new(active)));
        self.watched.store(ops, Ordering::SeqCst);
    }

    /// Returns the fault rules in use.
    pub fn rules(&self) -> Rules {
        pin::pinned(|pin| self.active.load(pin).rules())
    }

    /// Returns the seed in use.
    pub fn seed(&self) -> u64 {
        pin::pinned(|pin| self.active.load(pin).seed())
    }

    /// Completes every hung request and returns the number of completed requests. Later requests
    /// still hang if a `hang` rule fires.
    pub fn release(&self) -> u64 {
        self.below.hold.release()
    }

    /// Returns the number of requests that hang now.
    pub fn hung_requests(&self) -> u64 {
        self.below.hold.hung_requests()
    }

    /// Returns the text and counters of each rule, in order.
    pub fn counts(&self) -> Vec<RuleCount> {
        pin::pinned(|pin| {
            let counts = self.active.load(pin).counts();
            counts
                .map(|(rule, matched, fired)| RuleCount { rule: rule.to_string(), matched, fired })
                .collect()
        })
    }

    /// Returns the number of requests that were treated as the first at their offset because the
    /// table of counters was full.
    pub fn uncounted(&self) -> u64 {
        pin::pinned(|pin| self.active.load(pin).uncounted())
    }

    /// Fails all hung and delayed requests with [`Error::Gone`], and all later requests that would
    /// hang or be delayed. Used to remove a device with hung requests.
    pub fn close(&self) {
        self.below.hold.close();
    }

    /// Returns true if a rule may fire for a request with this operation.
    #[inline]
    fn watches(&self, operation: Operation) -> bool {
        // Relaxed: a caller ordered after the return of `set` sees the new value. A concurrent
        // caller may use the old or the new rules.
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
    forward_device!(|faults| faults.below.device => extents;
        prefetch: below, zoned: self, changes: below);

    fn geometry(&self) -> Geometry {
        // Rules may use the data of writes.
        Geometry { ignores_data: false, ..self.below.device.geometry() }
    }

    #[inline]
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        if self.watches(operation(request.op)) && self.matches(&RequestInfo::of(request)) {
            request.check(&self.geometry())?;
            return Ok(TryResult::WouldBlock);
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
