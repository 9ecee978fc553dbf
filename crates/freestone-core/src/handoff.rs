//! Handing a request on to a device below: at once where it can be, else submitted with a copy of
//! the data.

use crate::device::{Buffer, Completion, Device, IoBuf, Request, Result, Tried};

/// How far a request came at once.
pub enum Put {
    /// It was answered.
    Done(Result<()>),
    /// This is left, from this byte of the data on.
    Rest(Request, usize),
}

/// Does as much as can be done without waiting. `data` is `None` for requests that have none.
#[inline]
pub fn try_put(device: &dyn Device, mut request: Request, data: Option<&[u8]>) -> Put {
    let mut from = 0;
    loop {
        let buffer = data.map_or(Buffer::None, |data| Buffer::Write(&data[from..]));
        match device.try_io(&request, buffer) {
            Ok(Tried::Done) => return Put::Done(Ok(())),
            Ok(Tried::Partly(bytes)) => {
                request = request.rest(bytes);
                from += bytes as usize;
            }
            Ok(Tried::WouldBlock) => return Put::Rest(request, from),
            Err(error) => return Put::Done(Err(error)),
        }
    }
}

/// Submits a request with a copy of its data. `then` may run on a thread of the device.
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

/// How far a request of `len` bytes came that stopped after `done`.
#[inline]
pub fn progress(done: u64, len: u64) -> Tried {
    match done {
        0 => Tried::WouldBlock,
        _ if done < len => Tried::Partly(done),
        _ => Tried::Done,
    }
}
