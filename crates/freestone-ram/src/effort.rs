//! How much work a randomised test does. The crate's own copy of `freestone_testkit::effort`, as the
//! testkit is built for devices and the models leave out devices.

/// Returns `full` if the environment has `FREESTONE_EFFORT=full`, and `quick` otherwise.
pub fn effort<T>(quick: T, full: T) -> T {
    if std::env::var_os("FREESTONE_EFFORT").is_some_and(|value| value == "full") { full } else { quick }
}
