//! Selection, report and errors of a recompression run.

use thiserror::Error;

use super::space::Attempt;
use crate::codec::{Algorithm, Codecs, PRIORITIES, Scratch, Streams};
use freestone_core::device;
use freestone_core::slot::{Kind, Word};

/// Selection and target of a recompression run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecompressOptions {
    /// Restricts the run to pages of this kind; `None` selects all pages.
    pub kind: Option<RecompressKind>,
    /// Size in bytes: smaller objects are skipped, and the new object must be smaller. 0 means no
    /// threshold. Must be below [`Scratch::BYTES`].
    pub threshold: u32,
    /// Maximum number of pages to compress, successfully or not; `None` means no maximum.
    pub max_pages: Option<u64>,
    /// Secondary algorithm. Without `priority`, the lowest priority with this algorithm is used.
    pub algo: Option<Algorithm>,
    /// Priority of the secondary algorithm, 1 to 3. If neither `priority` nor `algo` is set,
    /// priority 1 is used.
    pub priority: Option<u8>,
    /// True: compress neighbouring pages together, in groups of up to 8, with zstd at a fixed level.
    /// `threshold`, `algo` and `priority` must not be set.
    pub group: bool,
    /// True: make pages with the same stored content share one object, in all devices of the family
    /// (devices that share a memory pool). Only `kind` and `max_pages` may be set, too.
    pub dedup: bool,
}

/// Kind of pages to recompress: the kernel's `type` parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecompressKind {
    /// Pages marked idle and not accessed since.
    Idle,
    /// Pages stored uncompressed.
    Huge,
    /// Pages that are both huge and idle.
    HugeIdle,
}

/// Result of a recompression run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecompressReport {
    /// Number of pages that were compressed, except those whose new object found no space.
    pub tried: u64,
    /// Number of pages that are now stored in a smaller object.
    pub shrunk: u64,
    /// Number of pages that were marked incompressible.
    pub incompressible: u64,
    /// Bytes by which objects shrank. Pool memory returns to the system when spans become empty;
    /// the rest returns after a compaction.
    pub saved_bytes: u64,
}

/// Reasons to refuse a recompression run or to end it early. The first seven (EINVAL) refuse the
/// run, and nothing is changed. After the others, pages already recompressed stay recompressed.
#[derive(Debug, Clone, Copy, Error, PartialEq, Eq)]
pub enum RecompressError {
    /// The priority is not in the range 1 to 3.
    #[error("priority={0} does not exist: secondary algorithms have 1 to {PRIORITIES}")]
    NoPriority(u8),
    /// No secondary algorithm is configured at this priority.
    #[error("priority={0} has no algorithm; recomp_algorithm sets one")]
    NotConfigured(u8),
    /// The algorithm is not configured at any priority.
    #[error("algo={0} is not a secondary algorithm of this disk; recomp_algorithm sets one")]
    NoAlgorithm(Algorithm),
    /// The priority has another algorithm than the requested one.
    #[error("algo={algo} does not match priority={priority}, which is {configured}")]
    Mismatch {
        /// Requested algorithm.
        algo: Algorithm,
        /// Requested priority.
        priority: u8,
        /// Algorithm of that priority.
        configured: Algorithm,
    },
    /// The threshold is at or above the size of the largest compressed object.
    #[error("threshold={0} is beyond the largest compressed object; it must be below {line}", line = Scratch::BYTES)]
    Threshold(u32),
    /// Groups have an algorithm of their own.
    #[error("group=yes has an algorithm of its own; omit threshold, algo and priority")]
    Group,
    /// Pages that share objects keep their form.
    #[error("dedup=yes compares pages as they are stored; omit threshold, algo, priority and group")]
    Dedup,
    /// The memory limit leaves no space for the new objects (ENOSPC; ENOMEM in the kernel).
    #[error("mem_limit leaves no space to store the smaller objects; raise it temporarily")]
    NoSpace,
    /// The system has no memory left (ENOMEM).
    #[error("out of memory")]
    NoMemory,
    /// The object of a page in memory is damaged (EIO).
    #[error("an object in memory cannot be decompressed")]
    Media,
    /// The caller cancelled the run (ECANCELED).
    #[error("the operation was cancelled")]
    Cancelled,
}

impl RecompressError {
    /// Returns the errno with which a write to the kernel's `recompress` file fails.
    pub const fn errno(&self) -> i32 {
        match self {
            Self::NoPriority(_)
            | Self::NotConfigured(_)
            | Self::NoAlgorithm(_)
            | Self::Mismatch { .. }
            | Self::Threshold(_)
            | Self::Group
            | Self::Dedup => libc::EINVAL,
            Self::NoSpace => libc::ENOSPC,
            Self::NoMemory => libc::ENOMEM,
            Self::Media => libc::EIO,
            Self::Cancelled => libc::ECANCELED,
        }
    }
}

impl From<device::Error> for RecompressError {
    fn from(error: device::Error) -> Self {
        match error {
            device::Error::NoSpace => Self::NoSpace,
            device::Error::NoMemory => Self::NoMemory,
            _ => Self::Media,
        }
    }
}

impl RecompressOptions {
    /// Returns the selected priority and the compression streams of its algorithm.
    pub(super) fn target<'c>(&self, codecs: &'c Codecs) -> Result<(u8, &'c Streams), RecompressError> {
        if self.threshold as usize >= Scratch::BYTES {
            return Err(RecompressError::Threshold(self.threshold));
        }
        let priority = match (self.priority, self.algo) {
            (Some(priority), _) => priority,
            (None, Some(algo)) => codecs
                .secondary()
                .find(|(_, streams)| streams.algorithm() == algo)
                .map(|(priority, _)| priority as u8)
                .ok_or(RecompressError::NoAlgorithm(algo))?,
            (None, None) => 1,
        };
        if !(1..=PRIORITIES as u8).contains(&priority) {
            return Err(RecompressError::NoPriority(priority));
        }
        let streams = codecs.get(priority.into()).ok_or(RecompressError::NotConfigured(priority))?;
        match (self.algo, streams.algorithm()) {
            (Some(algo), configured) if algo != configured => {
                Err(RecompressError::Mismatch { algo, priority, configured })
            }
            _ => Ok((priority, streams)),
        }
    }

    /// Returns an error if the options of a run that forms groups contradict each other.
    pub(super) fn check_group(&self) -> Result<(), RecompressError> {
        let is_plain = self.threshold == 0 && self.algo.is_none() && self.priority.is_none();
        if is_plain { Ok(()) } else { Err(RecompressError::Group) }
    }

    /// Returns an error if the options of a run that makes pages share objects contradict each other.
    pub(super) fn check_dedup(&self) -> Result<(), RecompressError> {
        let is_plain = self.check_group().is_ok() && !self.group;
        if is_plain { Ok(()) } else { Err(RecompressError::Dedup) }
    }

    pub(super) fn wants(&self, word: Word) -> bool {
        match self.kind {
            None => true,
            Some(RecompressKind::Idle) => word.is_idle(),
            Some(RecompressKind::Huge) => word.kind() == Kind::Huge,
            Some(RecompressKind::HugeIdle) => word.kind() == Kind::Huge && word.is_idle(),
        }
    }
}

impl RecompressReport {
    /// Counts an attempt to form a group of `pages` pages.
    pub(super) fn count_group(&mut self, attempt: Attempt, pages: u64) {
        self.tried += if matches!(attempt, Attempt::Shrunk { .. } | Attempt::Failed) { pages } else { 0 };
        if let Attempt::Shrunk { from, to } = attempt {
            self.shrunk += pages;
            self.saved_bytes += (from - to) as u64;
        }
    }

    pub(super) fn count(&mut self, attempt: Attempt) {
        self.tried += u64::from(!matches!(attempt, Attempt::Skipped | Attempt::NoSpace | Attempt::Reset));
        match attempt {
            Attempt::Shrunk { from, to } => {
                self.shrunk += 1;
                self.saved_bytes += (from - to) as u64;
            }
            Attempt::FailedForGood => self.incompressible += 1,
            Attempt::Skipped | Attempt::Failed | Attempt::NoSpace | Attempt::Reset => {}
        }
    }
}
