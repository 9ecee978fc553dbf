//! The amount of work of randomised tests. A copy of `freestone_testkit::effort`: the testkit
//! depends on devices, which loom models omit.

/// Returns `full` if the environment has `FREESTONE_EFFORT=full`, and `quick` otherwise.
pub fn effort<T>(quick: T, full: T) -> T {
    if std::env::var_os("FREESTONE_EFFORT").is_some_and(|value| value == "full") { full } else { quick }
}
