//! Passing a request to a lower device: synchronously if possible, otherwise submitted with a copy of the
//! data.

use crate::device::{Buffer, Completion, Device, IoBuf, Request, Result, Tried};

/// Outcome of a synchronous attempt.
pub enum Put {
    /// The request completed.
    Done(Result<()>),
    /// The remaining request, and the offset of its data in bytes.
    Rest(Request, usize),
}

/// Executes as much of a request as possible without waiting. `data` is `None` for requests without data.
#[inline]
pub fn try_put(device: &dyn Device, mut request: Request, data: Option<&[u8]>) -> Put {
    let mut offset = 0;
    loop {
        let buffer = data.map_or(Buffer::None, |data| Buffer::Write(&data[offset..]));
        match device.try_io(&request, buffer) {
            Ok(Tried::Done) => return Put::Done(Ok(())),
            Ok(Tried::Partly(bytes)) => {
                request = request.rest(bytes);
                offset += bytes as usize;
            }
            Ok(Tried::WouldBlock) => return Put::Rest(request, offset),
            Err(error) => return Put::Done(Err(error)),
        }
    }
}

/// Submits a request with a copy of its data. The device may call `then` on one of its threads.
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

/// Converts the byte count of a synchronous attempt, `done` of `len`, into its outcome.
#[inline]
pub fn progress(done: u64, len: u64) -> Tried {
    match done {
        0 => Tried::WouldBlock,
        _ if done < len => Tried::Partly(done),
        _ => Tried::Done,
    }
}
