//! The locks and streams that experiments 1 and 2 switch between; only a build with `--cfg freestone_variants` has them in its engine.

// The same names where no engine looks at them: `need` keeps the experiments from running then.
#[cfg(not(freestone_variants))]
#[path = "../variants/mod.rs"]
#[expect(dead_code, reason = "the engine's side of it")]
mod switches;

#[cfg(freestone_variants)]
use freestone::variants as switches;
pub use switches::{Intent, Lock, Streams, held, intend, set_lock, set_streams};

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
