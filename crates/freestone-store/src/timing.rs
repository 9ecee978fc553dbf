//! The time limits with which pushes and prunes of one image store can run concurrently.
//!
//! A prune reads its roots (tags, and manifests younger than the grace period of the store) and deletes
//! objects that no root refers to. A prune uses its roots for at most [`ROOTS_AGE_MAX`] after it began to
//! read them. Only objects that are older than the grace period are deleted. A check of the age precedes each
//! deletion by at most [`DELETION_TIME_MAX`]. A push publishes its manifest at most half of the grace period
//! after its start.
//!
//! A push may refer to an object that it finds in the store, of age `age`, if
//!
//! ```text
//! age + ROOTS_AGE_MAX + DELETION_TIME_MAX <= grace / 2
//! ```
//!
//! Roots that do not name the object were read before the manifest was published, so at most `grace / 2`
//! after the object was found. These roots are used for at most [`ROOTS_AGE_MAX`]. The object is then at most
//! `age + grace / 2 + ROOTS_AGE_MAX` old, which is at most the grace less [`DELETION_TIME_MAX`]: too young to be
//! deleted, even if clocks count whole seconds.
//!
//! All times are measured with [`Clock`](crate::clock::Clock), which also counts while this host sleeps.

use crate::format::domain::GRACE_RANGE;
use crate::rt::time::Duration;

/// Longest time for which a prune uses the roots (tags and manifests) that it has read.
pub const ROOTS_AGE_MAX: Duration = Duration::from_secs(600);
/// Longest time from the check of an object's age to the end of its deletion. Also covers the error of clocks
/// that count whole seconds.
pub const DELETION_TIME_MAX: Duration = Duration::from_secs(30);
/// Longest time after which a store still carries out a deletion whose caller has given up waiting.
pub const DELETION_SETTLE_TIME: Duration = Duration::from_secs(5);

// Even with the shortest grace period, there is an age at which a push can reuse objects.
const _: () = assert!(ROOTS_AGE_MAX.as_secs() + DELETION_TIME_MAX.as_secs() < GRACE_RANGE.0.as_secs() / 2);

/// Returns the longest allowed time from the start of a push to the publication of its manifest.
pub fn push_time_max(grace: Duration) -> Duration {
    grace / 2
}

/// Returns true if a push may refer to an object of age `age` without writing it again.
pub fn is_reusable(age: Duration, grace: Duration) -> bool {
    age + ROOTS_AGE_MAX + DELETION_TIME_MAX <= push_time_max(grace)
}

/// Returns true if a prune may delete an object of age `age`.
pub fn is_old(age: Duration, grace: Duration) -> bool {
    age > grace
}

/// Returns true if a prune may already have checked an object of age `age` and be deleting it.
pub fn may_be_in_deletion(age: Duration, grace: Duration) -> bool {
    is_old(age + DELETION_TIME_MAX, grace)
}
