//! Completion callback of a submitted request.

use std::fmt;

use super::{Error, IoBuf, Result};

type Callback = Box<dyn FnOnce(Result<()>, IoBuf) + Send>;

/// A callback that receives the outcome and the buffer of a request exactly once. Dropping the completion
/// without a call (because the device is gone or a thread panicked) completes the request with
/// [`Error::Gone`], so no request is lost.
///
/// The callback runs on a thread of the device: it must be short and must not call the device.
pub struct Completion(Option<Callback>);

impl Completion {
    /// Creates a completion that calls `callback`.
    pub fn new(callback: impl FnOnce(Result<()>, IoBuf) + Send + 'static) -> Self {
        Self(Some(Box::new(callback)))
    }

    /// Completes the request. For a successful read, `buffer` contains the data.
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
