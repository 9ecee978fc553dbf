//! An `Arc` with one reference count for each CPU.
//!
//! Each request holds a reference to its device. A single count would bounce between the CPUs of workers that
//! share nothing else. A [`PerCpuArc`] contains one `Arc` for each CPU, with its count in a separate cache
//! line. Each `Arc` holds a thin shell around the shared object, which lives as long as any shell.

use std::fmt;
use std::ops::Deref;

use crate::percpu;
use crate::sync::Arc;

/// An array of `Arc`s, one for each CPU. Dereferences to the `Arc` of the current CPU; a clone may be dropped
/// on any CPU.
pub struct PerCpuArc<T>(Arc<[Arc<T>]>);

impl<T> PerCpuArc<T> {
    /// Creates the `Arc`s, calling `shell` once for each CPU. `T` must be aligned to a cache line, or the
    /// counts of two CPUs would share a cache line.
    pub fn new(shell: impl Fn() -> T) -> Self {
        const { assert!(align_of::<T>() >= 64, "counts of two CPUs would share a cache line") };
        Self((0..percpu::cpus()).map(|_| Arc::new(shell())).collect())
    }

    /// Returns the shell of the first CPU without looking up the current CPU, for callers that do not clone
    /// the `Arc`.
    #[inline]
    pub fn any(&self) -> &T {
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
    fn object_lives_as_long_as_any_reference() {
        let object = Arc::new(5);
        let weak: Weak<i32> = Arc::downgrade(&object);
        let near = PerCpuArc::new(|| CachePadded::new(Arc::clone(&object)));
        drop(object);
        let (second, hold) = (near.clone(), Arc::clone(&near));
        drop(near);
        assert_eq!(****second, 5);
        drop(second);
        assert_eq!(**hold, weak.upgrade().expect("a reference exists"));
        drop(hold);
        assert!(weak.upgrade().is_none(), "the last reference is dropped");
    }
}
