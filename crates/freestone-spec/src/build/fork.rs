//! Forks: what can be a base, and what cannot.

use std::sync::Arc;

use freestone::cow::MergeStatus;
use freestone::file;
use freestone::ram::{ForkConfig, Ram, SetupError};

use super::{family, family_of};
use crate::entry::{Entry, Kind};
use crate::refusal::{Errno, Refusal};
use crate::registry::Registry;
use crate::size::exact;
use crate::spec::ForkSpec;

/// A new fork of a base.
pub fn fork_of(base: &Arc<Entry>, spec: &ForkSpec, registry: &Registry) -> Result<Ram, Refusal> {
    check_base(base)?;
    // Nobody waits for that: the log tells.
    file::look_soon();
    let config = ForkConfig { size: spec.size, mem_limit: spec.mem_limit, mem_min: spec.mem_min };
    let fork = match (&base.kind, base.device()) {
        (Kind::Snapshot(snapshot), _) => snapshot.fork(&config),
        (_, Some(device)) => family_of(base, registry)?.fork(Arc::clone(device), &config),
        (_, None) => unreachable!("templates were refused"),
    };
    fork.map_err(|error| refused(spec, error))
}

fn check_base(base: &Entry) -> Result<(), Refusal> {
    let name = base.name();
    let refuse = |why: String| Err(Refusal::failed(Errno::EINVAL, format!("base={name}: {why}")));
    match &base.kind {
        Kind::Snapshot(_) | Kind::Qcow2(_) => Ok(()),
        // From then on it changes with its origin.
        Kind::Cow(snapshot) if snapshot.merge_status() != MergeStatus::None => {
            refuse("is merged into its origin; take another snapshot".into())
        }
        Kind::File(..) | Kind::Cow(_) if base.is_read_only() => Ok(()),
        Kind::Ram(_) | Kind::Fork(_) | Kind::File(..) => {
            refuse(format!("is live; take a snapshot and fork that: freestone snapshot {name} NAME"))
        }
        Kind::Cow(_) => {
            refuse("is a snapshot that its users write (readonly=no); take one with readonly=yes".into())
        }
        Kind::Null(_) => refuse("a null device is no base".into()),
        Kind::Template(_) => {
            let below = base.below().unwrap_or_default();
            refuse(format!("is a template; fork what it is made of, {below}"))
        }
    }
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
        SetupError::Live => format!("base={}: is live; take a snapshot and fork that", spec.base),
        error @ (SetupError::NoMemory | SetupError::Thread(_)) => {
            return family::refused(error);
        }
        error => error.to_string(),
    };
    Refusal::failed(Errno::EINVAL, sentence)
}
