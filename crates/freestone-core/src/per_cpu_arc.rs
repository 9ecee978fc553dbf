//! Shared ownership whose count every CPU keeps for itself.
//!
//! Each request owns what it works on, and a count that all requests change moves from CPU to CPU:
//! two workers of one device would meet there and nowhere else. A [`PerCpuArc`] holds one `Arc` a
//! CPU, each with a count in a cache line of its own. What they hold is a thin shell around the
//! thing itself, which lives as long as any of them.

use std::fmt;
use std::ops::Deref;

use crate::percpu;
use crate::sync::Arc;

/// As many `Arc`s as CPUs. Dereferences to that of the CPU on which the thread runs; where a clone
/// of it is dropped does not matter.
pub struct PerCpuArc<T>(Arc<[Arc<T>]>);

impl<T> PerCpuArc<T> {
    /// What `shell` makes, once for each CPU. `T` has to be as large as a cache line, or the counts
    /// share one.
    pub fn new(shell: impl Fn() -> T) -> Self {
        const { assert!(align_of::<T>() >= 64, "counts of two CPUs would share a cache line") };
        Self((0..percpu::cpus()).map(|_| Arc::new(shell())).collect())
    }

    /// For who only looks and takes no part in owning it: does not ask for the CPU.
    #[inline]
    pub fn look(&self) -> &T {
        &self.0[0]
    }
}

impl<T> Deref for PerCpuArc<T> {
    type Target = Arc<T>;
    #[inline]
    fn deref(&self) -> &Arc<T> {
        &self.0[percpu::current()]
    }
}

impl<T> Clone for PerCpuArc<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> fmt::Debug for PerCpuArc<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PerCpuArc")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use crossbeam_utils::CachePadded;

    use super::*;

    #[test]
    fn the_thing_lives_as_long_as_any_hold_on_it() {
        let thing = Arc::new(5);
        let gone: Weak<i32> = Arc::downgrade(&thing);
        let near = PerCpuArc::new(|| CachePadded::new(Arc::clone(&thing)));
        drop(thing);
        let (second, hold) = (near.clone(), Arc::clone(&near));
        drop(near);
        assert_eq!(****second, 5);
        drop(second);
        assert_eq!(**hold, gone.upgrade().expect("it is held"));
        drop(hold);
        assert!(gone.upgrade().is_none(), "the last hold is gone");
    }
}
