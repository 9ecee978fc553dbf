//! Passing a request to a lower device: synchronously if possible, otherwise submitted with a copy of the
//! data.

use crate::device::{Buffer, Completion, Device, IoBuf, Request, Result, TryResult};

/// Outcome of [`try_put`].
pub enum PutResult {
    /// The request completed, with this outcome.
    Done(Result<()>),
    /// The request would block. Contains the remaining part, and the offset of its data in bytes.
    Rest(Request, usize),
}

/// Executes as much of a write, discard, write zeroes or flush as possible without waiting. `data` is `None`
/// for requests without data.
#[inline]
pub fn try_put(device: &dyn Device, mut request: Request, data: Option<&[u8]>) -> PutResult {
    let mut offset = 0;
    loop {
        let buffer = data.map_or(Buffer::None, |data| Buffer::Write(&data[offset..]));
        match device.try_io(&request, buffer) {
            Ok(TryResult::Done) => return PutResult::Done(Ok(())),
            Ok(TryResult::Partly(bytes)) => {
                request = request.rest(bytes);
                offset += bytes as usize;
            }
            Ok(TryResult::WouldBlock) => return PutResult::Rest(request, offset),
            Err(error) => return PutResult::Done(Err(error)),
        }
    }
}

/// Submits a request with a copy of its data. `then` is called with the outcome, possibly on a thread of the
/// device.
pub fn put(
    device: &dyn Device,
    request: Request,
    data: Option<&[u8]>,
    then: impl FnOnce(Result<()>) + Send + 'static,
) {
    match data.map_or(Ok(IoBuf::empty()), IoBuf::copy_of) {
        Ok(buffer) => device.submit(request, buffer, Completion::new(move |outcome, _| then(outcome))),
        Err(error) => then(Err(error)),
    }
}

/// Converts the number of bytes completed synchronously, `done` of `len`, into the result of a try.
#[inline]
pub fn try_result(done: u64, len: u64) -> TryResult {
    match done {
        0 => TryResult::WouldBlock,
        _ if done < len => TryResult::Partly(done),
        _ => TryResult::Done,
    }
}
