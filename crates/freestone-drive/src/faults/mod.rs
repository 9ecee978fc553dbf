//! Faults that repeat from a seed, over any device.
//!
//! A [`Faults`] passes every request on to the device below, and makes some of them fail as its
//! [`Rules`] say. Zones are passed on too, where the device below has them.
//!
//! # Rules
//! A rule is `OPERATION EFFECT... [CONDITION...]`, rules are separated by `;`:
//!
//! ```text
//! write error=EIO chance=1%; read at=1M+64K delay=20ms; flush lie nth=3; writes hang at=0+4K times=1
//! ```
//!
//! | operation | |
//! |---|---|
//! | `read` `write` `discard` `zeroes` `flush` | the operations of every device (`zeroes` is "write zeroes") |
//! | `append` `open` `close` `finish` `reset` | the operations of zones; "reset all" is one `reset` of the whole device |
//! | `writes` | `write`, `append`, `zeroes` and `discard` |
//! | `all` | every one of them |
//!
//! | effect | of | what happens |
//! |---|---|---|
//! | `error=NAME` | all | answered with this error, nothing is done. `EIO`, `ENOSPC`, `ENOMEM`, `EROFS` (or `EPERM`), `EINVAL`, `EOPNOTSUPP` (or `ENOTSUP`), `ESHUTDOWN`, `ETOOMANYREFS`, `EOVERFLOW`. With `torn=` or `misdirected`: done in that way, then answered with the error |
//! | `delay=TIME` | all | done at once, answered no earlier than this: 1ns to 3600s, in `ns`, `us`, `ms` or `s` |
//! | `hang` | all | done at once, answered when [`Faults::release`] is called; [`Error::Gone`] where the device ends first |
//! | `torn=512`, `torn=4K`, `torn=16K` | write, append | some units of this many bytes arrive and others do not, at least one of each; answered as a success. A write inside one unit is not torn |
//! | `lost` | writes | answered, and nothing is done |
//! | `misdirected` | write, append | written at another place of the device, at a multiple of its logical block |
//! | `lie` | flush, writes | a flush is answered and not done; from what is written the FUA flag is taken |
//! | `stale` | read | returns what was there before the last overwrite, block by block, as far as that is kept ([`OLD_BYTES_MAX`], from when the rule is set) |
//! | `rot` | read, write, append | one bit flips: in what a read returns, or in what is stored |
//!
//! | condition | fires |
//! |---|---|
//! | `at=OFFSET+LENGTH` | where the request touches this range; units `B`, `K`, `M`, `G`, `T`. A zone operation touches all of its zone, an append too; a flush touches nothing |
//! | `chance=1%`, `chance=1/1000`, `chance=0.01` | with this probability |
//! | `nth=N` | the N-th time that this operation begins at this offset |
//! | `times=N` | for the first N requests that would fire; it never fires again |
//! | `after=N` | not for the first N requests that it is asked about |
//!
//! Where several rules fire at one request all of them have effect: the first error, the first of
//! `torn`, `lost` and `misdirected`, the longest pause.
//!
//! # What repeats
//! Whether a rule fires, and what the seed chooses for it, is a hash of the seed, the rule's
//! position in the list, the operation, the offset of the request and how many times that operation
//! began there since the rules were set. So the same requests fail however threads interleave, as
//! long as each offset sees the same sequence. `times` and `after` count requests in the order in
//! which they arrive: they repeat where that order does. Counts are exact up to about 900 000
//! different offsets (times rules, times operations); at an offset beyond that each time counts as
//! the first ([`Faults::uncounted`] says how often).
//!
//! # Notes
//! * A request that a rule may fire at is answered "would block" when it is tried and decided when
//!   it is submitted, so that one request is counted once. Others go to the device below at once.
//! * What is torn is read first: what does not arrive is written again with its old content.
//!   Overlapping writes in flight may lose theirs there too.
//! * In a zone that is written at its write pointer, the pointer moves as if all had arrived, and
//!   what did not arrive is zeroes. A misdirected write is appended to another zone, if one has
//!   room. Old content is not kept there.
//! * Of a write, zeroing or discard, the first [`OLD_REQUEST_BYTES_MAX`] are kept for stale reads;
//!   blocks behind are not stale.
//! * Zone operations block the calling thread, so a delay or a hang of one does.

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

use decide::{Active, Occasion, Verdict};
use job::{Below, Job};
use rules::Operation;

pub use quantity::QuantityError;
pub use rules::{DELAY_SECONDS_MAX, NTH_MAX, RULES_MAX, Rule, Rules};
pub use stale::{OLD_BYTES_MAX, OLD_REQUEST_BYTES_MAX};
pub use text::{Problem, RuleError};

#[cfg(doc)]
use freestone_core::device::Error;

/// A device that fails by rules. See [the module](self).
pub struct Faults {
    below: Below,
    active: pin::Swap<Active>,
    /// The operations that a rule may fire at: all that requests without a rule look at.
    watched: AtomicU32,
    /// Held while the rules are changed, so that this happens one after the other.
    changing: Mutex<()>,
}

/// How often a rule could have fired, and how often it did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleCount {
    /// The rule's text.
    pub rule: String,
    /// Requests of its operation and range.
    pub matched: u64,
    /// Those of them at which it fired.
    pub fired: u64,
}

impl Faults {
    /// Injects faults into what goes to `inner`.
    ///
    /// # Errors
    /// The thread of the timers could not be started.
    pub fn new(inner: Arc<dyn Device>, rules: Rules, seed: u64) -> io::Result<Self> {
        timer::start()?;
        let active = Box::new(Active::new(rules, seed, inner.geometry().logical_block));
        let watched = AtomicU32::new(active.ops().bits());
        let below = Below::new(inner);
        Ok(Self { below, active: pin::Swap::new(active), watched, changing: Mutex::default() })
    }

    /// Puts other rules in place, and another seed if there is one. Counts begin anew, old content
    /// is forgotten. Requests that were decided before keep what was decided: what hangs goes on
    /// hanging. Not to be called from a completion.
    pub fn set(&self, rules: Rules, seed: Option<u64>) {
        let _one = self.changing.lock();
        let seed = seed.unwrap_or_else(|| self.seed());
        let active = Active::new(rules, seed, self.below.device.geometry().logical_block);
        let ops = active.ops().bits();
        // Too much is watched for a moment rather than too little.
        self.watched.fetch_or(ops, Ordering::SeqCst);
        drop(self.active.replace(Box::new(active)));
        self.watched.store(ops, Ordering::SeqCst);
    }

    /// The rules in place.
    pub fn rules(&self) -> Rules {
        pin::pinned(|pin| self.active.load(pin).rules())
    }

    /// The seed that decides.
    pub fn seed(&self) -> u64 {
        pin::pinned(|pin| self.active.load(pin).seed())
    }

    /// Lets go of every hanging request; how many there were. Later ones hang as the rules say.
    pub fn release(&self) -> u64 {
        self.below.hold.release()
    }

    /// How many requests hang.
    pub fn hanging(&self) -> u64 {
        self.below.hold.hanging()
    }

    /// For each rule how often it fired since the rules were set.
    pub fn counts(&self) -> Vec<RuleCount> {
        pin::pinned(|pin| {
            let counts = self.active.load(pin).counts();
            counts
                .map(|(rule, matched, fired)| RuleCount { rule: rule.to_string(), matched, fired })
                .collect()
        })
    }

    /// How many requests were taken for the first at their offset because too many offsets are
    /// known.
    pub fn uncounted(&self) -> u64 {
        pin::pinned(|pin| self.active.load(pin).uncounted())
    }

    /// Ends all waiting: what hangs or is delayed is answered [`Error::Gone`], now and from now on.
    /// For a device that is removed while requests hang, whose owners would wait for them.
    pub fn close(&self) {
        self.below.hold.close();
    }

    /// Whether a rule may fire at this operation.
    #[inline]
    fn watches(&self, operation: Operation) -> bool {
        // Relaxed: after `set` returned the value is seen as its caller is; before that either
        // value is right.
        self.watched.load(Ordering::Relaxed) & operation.set().bits() != 0
    }

    fn meets(&self, occasion: &Occasion) -> bool {
        pin::pinned(|pin| self.active.load(pin).meets(occasion))
    }

    fn decide(&self, occasion: &Occasion) -> Verdict {
        pin::pinned(|pin| self.active.load(pin).decide(occasion))
    }
}

impl Occasion {
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
        if self.watches(operation(request.op)) && self.meets(&Occasion::of(request)) {
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
        let occasion = Occasion::of(&request);
        let (verdict, old) = pin::pinned(|pin| {
            let active = self.active.load(pin);
            (active.decide(&occasion), active.old.clone())
        });
        if verdict == Verdict::default() && old.is_none() {
            return self.below.device.submit(request, buffer, done);
        }
        Job { below: self.below.clone(), request, buffer, done, verdict, old }.run();
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
