//! The answer to a submitted request.

use std::fmt;

use super::{Error, IoBuf, Result};

type Callback = Box<dyn FnOnce(Result<()>, IoBuf) + Send>;

/// Called exactly once with the outcome and the request's buffer. A completion that is dropped
/// uncalled (a device that went away, a thread that panicked) answers [`Error::Gone`], so no
/// request is ever forgotten.
///
/// The callback runs on a thread of the device: it must be short and must not call back into the
/// device.
pub struct Completion(Option<Callback>);

impl Completion {
    /// A completion that calls `callback`.
    pub fn new(callback: impl FnOnce(Result<()>, IoBuf) + Send + 'static) -> Self {
        Self(Some(Box::new(callback)))
    }

    /// Answer the request. For a read, `buffer` holds the data where `outcome` is `Ok`.
    pub fn complete(mut self, outcome: Result<()>, buffer: IoBuf) {
        if let Some(callback) = self.0.take() {
            callback(outcome, buffer);
        }
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if let Some(callback) = self.0.take() {
            callback(Err(Error::Gone), IoBuf::empty());
        }
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Completion")
    }
}
