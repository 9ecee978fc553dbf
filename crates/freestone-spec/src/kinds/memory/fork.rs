//! Kind `fork`: writable RAM disks over a base, which provides the initial content.

use std::sync::Arc;

use freestone::device;
use freestone::file;
use freestone::ram::{ForkConfig, Ram, SetupError};
use serde_json::{Value, json};

use super::ram::{Change, bd_stat, check_grow, debug_stat, io_stat, mm_stat, skip_wipe, wipe};
use crate::entries::SpecError;
use crate::family::{self, family_stat};
use crate::full;
use crate::keys::{Keys, parse_disksize, parse_limit};
use crate::kinds::registry::Registry;
use crate::kinds::{DataDevice, Entry, KindConfig, KindInstance, Spec, parse_name};
use crate::refusal::{Errno, Refusal};
use crate::schema;
use crate::size::{self, exact};

pub(in crate::kinds) const NAME: &str = "fork";

/// Specification of a device of kind `fork`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForkSpec {
    /// Name of the base device.
    pub base: String,
    /// Size in bytes, or `None` for the size of the base.
    pub size: Option<u64>,
    /// Maximum memory in bytes for the data that the fork itself stores; 0 means unlimited.
    pub mem_limit: u64,
    /// Guaranteed memory: the number of bytes of the family's memory limit that are reserved for
    /// the fork.
    pub mem_min: u64,
    /// Behavior at the memory limit: writes wait for memory (true) or fail (false). `None` uses
    /// that of the family.
    pub full: Option<bool>,
}

impl ForkSpec {
    pub(in crate::kinds) fn take(keys: &Keys) -> Result<Self, SpecError> {
        freestone::trail::step!();
        let fork = Self {
            base: keys.need("base", "base=golden", parse_name)?,
            size: keys.take("size", parse_disksize)?,
            mem_limit: keys.take("mem_limit", parse_limit)?.unwrap_or(0),
            mem_min: keys.take("mem_min", parse_limit)?.unwrap_or(0),
            full: keys.take("full", full::parse_own)?.flatten(),
        };
        if fork.mem_limit > 0 && fork.mem_min > fork.mem_limit {
            return Err(keys.refuse("mem_min", format!("above mem_limit={}", size::exact(fork.mem_limit))));
        }
        Ok(fork)
    }
}

impl KindConfig for ForkSpec {
    fn build(&self, _: &Spec, registry: &Registry) -> Result<DataDevice, Refusal> {
        let base = registry.find_required("base", &self.base)?;
        let ram = Arc::new(fork_of(&base, self, registry)?);
        Ok(DataDevice { dependencies: vec![base], ..DataDevice::standalone(Fork(Arc::clone(&ram)), ram) })
    }

    fn fork(&self) -> Option<&ForkSpec> {
        Some(self)
    }

    fn parent_name(&self) -> Option<&str> {
        Some(&self.base)
    }

    fn is_volatile(&self) -> bool {
        true
    }
}

/// Creates a fork of the device `base`.
pub(in crate::kinds) fn fork_of(
    base: &Arc<Entry>,
    spec: &ForkSpec,
    registry: &Registry,
) -> Result<Ram, Refusal> {
    let no_base = |why| refusal!(EINVAL, "base={}: {why}", base.name());
    base.kind.check_base(base).map_err(no_base)?;
    // Starts a background check whether the files of bases have changed. Changes are logged.
    file::request_check();
    let config = ForkConfig { size: spec.size, mem_limit: spec.mem_limit, mem_min: spec.mem_min };
    let fork = match (base.kind.ram(), base.device()) {
        (Some(snapshot), _) => snapshot.fork(&config),
        (None, Some(device)) => base.ensure_family(registry)?.fork(Arc::clone(device), &config),
        (None, None) => unreachable!("templates were refused"),
    };
    let fork = fork.map_err(|error| refused(spec, error))?;
    fork.set_wait_override(spec.full);
    Ok(fork)
}

fn refused(spec: &ForkSpec, error: SetupError) -> Refusal {
    let sentence = match error {
        SetupError::SmallerThanBase { wanted, base } => {
            let (wanted, base) = (exact(wanted), exact(base));
            format!("size={wanted}: smaller than the base, which has {base}; a fork shows all of it")
        }
        SetupError::Guarantee { wanted, left } => {
            let (wanted, left) = (exact(wanted), exact(left));
            format!("mem_min={wanted}: the family's mem_limit has {left} left for guarantees")
        }
        SetupError::GuaranteeAboveCap { guarantee, cap } => {
            format!("mem_min={}: above mem_limit={}", exact(guarantee), exact(cap))
        }
        SetupError::TooLarge(bytes) => format!("size={}: a fork has at most 256T", exact(bytes)),
        SetupError::WritableBase => format!("base={}: is live; take a snapshot and fork that", spec.base),
        error @ (SetupError::NoMemory | SetupError::MemoryFile(_) | SetupError::Thread(_)) => {
            return family::setup_refusal(error);
        }
        error => error.to_string(),
    };
    refusal!(EINVAL, "{sentence}")
}

pub(in crate::kinds) struct Fork(pub Arc<Ram>);

impl KindInstance for Fork {
    fn name(&self) -> &'static str {
        NAME
    }

    fn ram(&self) -> Option<&Arc<Ram>> {
        Some(&self.0)
    }

    fn fork(&self) -> Option<&Arc<Ram>> {
        Some(&self.0)
    }

    fn can_wipe(&self) -> bool {
        true
    }

    fn wipe(&self, counters: bool) -> device::Result<()> {
        wipe(&self.0, counters)
    }

    fn skip_wipe(&self, counters: bool) -> bool {
        skip_wipe(&self.0, counters)
    }

    fn attrs(&self) -> &'static [&'static str] {
        &NAMES
    }

    fn value(&self, entry: &Entry, attr: &str) -> Option<Value> {
        value(entry, &self.0, attr)
    }

    fn check(&self, entry: &Entry, attr: &str, text: &str) -> Option<Result<Change, Refusal>> {
        check_grow(entry, attr, text).map(Err).or_else(|| check(&self.0, entry.name(), attr, text))
    }

    fn set(
        &self,
        entry: &Arc<Entry>,
        _: &Registry,
        changes: &[(Change, &String, String)],
    ) -> Result<(), Refusal> {
        set(entry, &self.0, changes)
    }
}

// ---- attributes ---------------------------------------------------------------------------------

/// Names of the attributes of a fork. `mem_limit`, `mem_min` and `full` belong to the fork, not to
/// its family.
const NAMES: [&str; 12] = [
    "base",
    "disksize",
    "mem_limit",
    "mem_min",
    "full",
    "comp_algorithm",
    "over_stat",
    "family",
    "mm_stat",
    "io_stat",
    "bd_stat",
    "debug_stat",
];

/// Returns the value of an attribute of a fork, or of a snapshot in memory. Returns `None` for
/// another attribute.
pub(in crate::kinds) fn value(entry: &Entry, ram: &Ram, attr: &str) -> Option<Value> {
    Some(match attr {
        // The base or origin of a restored device may have no name.
        "base" | "origin" => json!(entry.spec.kind.parent_name().unwrap_or("none")),
        "disksize" => json!(entry.size()),
        "mem_limit" => json!(ram.own_limits().0),
        "mem_min" => json!(ram.own_limits().1),
        "full" => full::own_value(ram.wait_override()),
        "comp_algorithm" => json!(ram.config().comp_algorithm.to_string()),
        "over_stat" => over_stat(ram),
        "family" => family_stat(&ram.family()),
        "mm_stat" => mm_stat(ram),
        "io_stat" => io_stat(ram),
        "bd_stat" => bd_stat(ram),
        "debug_stat" => debug_stat(ram),
        _ => return None,
    })
}

/// Returns the statistics of the data that a fork or snapshot itself stores, as a JSON object.
pub fn over_stat(ram: &Ram) -> Value {
    let s = ram.over_stat();
    json!({
        "own_bytes": s.own_bytes,
        "charged_bytes": s.charged,
        "mem_limit": s.mem_limit,
        "mem_min": s.mem_min,
        "handed_over": s.handed_over,
        "snapshots": ram.snapshots(),
    })
}

// ---- changes ------------------------------------------------------------------------------------

/// Parses the new value of an attribute of a fork. Returns `None` if a fork has no such attribute.
fn check(ram: &Ram, name: &str, attr: &str, text: &str) -> Option<Result<Change, Refusal>> {
    let failed = |errno, why: &str| Refusal::failed(errno, format!("{name}: {attr}={text}: {why}"));
    let invalid = |why: String| refusal!(invalid, "{name}: {attr}={text}: {why}");
    Some(match attr {
        "disksize" => return Change::check(ram, name, attr, text),
        "mem_limit" => parse_limit(text).map(Change::MemLimit).map_err(invalid),
        "mem_min" => parse_limit(text).map(Change::MemMin).map_err(invalid),
        "full" => full::parse_own(text).map(Change::OwnWait).map_err(invalid),
        "comp_algorithm" | "base" => {
            Err(failed(Errno::EBUSY, "fixed for the life of a fork, which was created with it"))
        }
        attr if NAMES.contains(&attr) => {
            Err(invalid(format!("read-only; {} can be set", schema::settable(&[schema::FORK_LIMITS]))))
        }
        _ => return None,
    })
}

/// Applies changes to a fork. The memory limits are set first and together, because they can be
/// refused.
fn set(entry: &Entry, ram: &Ram, changes: &[(Change, &String, String)]) -> Result<(), Refusal> {
    let name = entry.name();
    let before = ram.own_limits();
    let (mut cap, mut least) = before;
    let mut limits = Vec::new();
    for (change, attr, text) in changes {
        match change {
            Change::MemLimit(bytes) => cap = *bytes,
            Change::MemMin(bytes) => least = *bytes,
            _ => continue,
        }
        limits.push(format!("{attr}={text}"));
    }
    if !limits.is_empty() {
        let limits = limits.join(" ");
        ram.set_own_limits(cap, least).map_err(|error| {
            let why = match error {
                SetupError::Guarantee { left, .. } => {
                    format!("the family's mem_limit has {} left for guarantees", exact(left))
                }
                SetupError::GuaranteeAboveCap { guarantee, cap } => {
                    format!("mem_min={} is above mem_limit={}", exact(guarantee), exact(cap))
                }
                error => error.to_string(),
            };
            refusal!(EINVAL, "{name}: {limits}: {why}")
        })?;
    }
    for (change, attr, text) in changes {
        match change {
            Change::Grow(bytes) => {
                ram.grow(*bytes).map_err(|error| {
                    // The failed call changed nothing, so only the old limits are restored. That
                    // can fail only if other forks reserved the memory meanwhile.
                    if !limits.is_empty() {
                        let _ = ram.set_own_limits(before.0, before.1);
                    }
                    refusal!(EINVAL, "{name}: {attr}={text}: {error}")
                })?;
            }
            Change::OwnWait(waits) => ram.set_wait_override(*waits),
            _ => {}
        }
    }
    Ok(())
}
