//! The locks and streams that experiments 1 and 2 switch between; only a build with `--cfg freestone_variants` has them in its engine.

#[cfg(not(freestone_variants))]
pub use absent::*;
#[cfg(freestone_variants)]
pub use freestone::variants::{Intent, Lock, Streams, held, intend, set_lock, set_streams};

use anyhow::{Result, ensure};

/// Whether this program can run those experiments.
///
/// # Errors
/// It was built without them, and how to run one that was not.
pub fn need() -> Result<()> {
    ensure!(
        cfg!(freestone_variants),
        "the engine in this program has no lock but its own; run the experiment with `cargo xtask bench reproduce`, which builds one that \
         has the others as well"
    );
    Ok(())
}

/// What [`need`] keeps anybody from using.
#[cfg(not(freestone_variants))]
mod absent {
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Lock {
        Table,
        Cas,
        Spin,
        ReadWrite,
        BitSpin,
        Timed,
        Ours,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Streams {
        ListOf4,
        ListOf8,
        Ours,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Intent {
        Read,
        Write,
    }

    pub fn set_lock(_: Lock) {}
    pub fn set_streams(_: Streams) {}
    pub fn intend(_: Intent) {}
    pub fn held() -> (std::time::Duration, u64) {
        (std::time::Duration::ZERO, 0)
    }
}
