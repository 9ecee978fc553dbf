//! The times that let pushes and prunes of one store run side by side.
//!
//! A prune reads its roots (tags, and manifests younger than the grace of the store) and deletes what they do
//! not refer to. A prune checks objects for at most [`ROOTS_AGE_MAX`] after it began to read them, and
//! deletes only those that are older than the grace. A look at the object precedes each deletion by at most
//! [`LOOK_TO_DELETE`]. A push publishes its manifest at most half of the grace after its start.
//!
//! A push may refer to an object that it finds in the store, of age `age`, if
//!
//! ```text
//! age + ROOTS_AGE_MAX + LOOK_TO_DELETE <= grace / 2
//! ```
//!
//! Roots that do not name the object were read before the manifest was published, so at most `grace / 2`
//! after the object was found. These roots are used for at most [`ROOTS_AGE_MAX`]. The object is then at most
//! `age + grace / 2 + ROOTS_AGE_MAX` old, which is at most the grace less [`LOOK_TO_DELETE`]: too young to be
//! deleted, even if clocks count whole seconds.
//!
//! All times are measured with [`Clock`](crate::clock::Clock), which also counts while this host sleeps.

use crate::format::domain::GRACE_RANGE;
use crate::rt::time::Duration;

/// Longest time for which a prune uses its roots.
pub const ROOTS_AGE_MAX: Duration = Duration::from_secs(600);
/// Longest time from a look at an object to the end of its deletion. Also covers clocks that count whole
/// seconds.
pub const LOOK_TO_DELETE: Duration = Duration::from_secs(30);
/// Longest time for which a store still carries out a deletion that its caller has given up.
pub const DELETE_SETTLES: Duration = Duration::from_secs(5);

// With the shortest grace a push can refer to objects that are young enough.
const _: () = assert!(ROOTS_AGE_MAX.as_secs() + LOOK_TO_DELETE.as_secs() < GRACE_RANGE.0.as_secs() / 2);

/// Longest time from the start of a push to its manifest.
pub fn push_time_max(grace: Duration) -> Duration {
    grace / 2
}

/// Returns true if a push may refer to an object of that age without writing it again.
pub fn is_reusable(age: Duration, grace: Duration) -> bool {
    age + ROOTS_AGE_MAX + LOOK_TO_DELETE <= push_time_max(grace)
}

/// Returns true if a prune may delete an object of that age.
pub fn is_old(age: Duration, grace: Duration) -> bool {
    age > grace
}

/// Returns true if a prune may already have looked at an object of that age in order to delete it.
pub fn may_be_in_deletion(age: Duration, grace: Duration) -> bool {
    is_old(age + LOOK_TO_DELETE, grace)
}
