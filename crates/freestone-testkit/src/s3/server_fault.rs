//! Faults that the S3 server can inject.

use std::fmt;
use std::time::Duration;

/// A request to the S3 server, as passed to the condition of a fault.
#[derive(Debug, Clone, Copy)]
pub struct S3Request<'a> {
    /// Method: `GET`, `HEAD`, `PUT` or `DELETE`.
    pub method: &'a str,
    /// Name of the bucket that contains the object.
    pub bucket: &'a str,
    /// Key of the object; empty if the request is for the bucket.
    pub key: &'a str,
    /// Number of this request among those with the same method and key since the start of the
    /// server, counted from 1.
    pub nth: u64,
}

/// Effect of a fault on a request. Unless noted otherwise, the request takes effect.
#[derive(Clone)]
pub enum ServerFault {
    /// Responds with this HTTP status and S3 error code; the request has no effect.
    Status(u16, &'static str),
    /// Responds with this HTTP status and S3 error code, although the request takes effect.
    StatusAfter(u16, &'static str),
    /// Closes the connection after this number of bytes of the body.
    Cut(usize),
    /// Flips the lowest bit of the body's byte at this offset.
    Flip(usize),
    /// Announces a `Content-Length` that differs from the length of the body by this number of
    /// bytes.
    Length(i64),
    /// Delays the request for this time; `None` delays it until the server ends.
    Stall(Option<Duration>),
    /// Sends this number of bytes of the body, and then pauses for this time; `None` pauses until
    /// the server ends.
    StallInBody(usize, Option<Duration>),
    /// Resets the connection; the request has no effect.
    ResetBefore,
    /// Resets the connection after the request took effect.
    ResetAfter,
    /// Ignores the `Range` header, and returns the whole object.
    NoRange,
    /// Returns a range shifted by this number of bytes.
    OtherPart(u64),
    /// Sends these bytes as the whole response, and closes the connection.
    Raw(Vec<u8>),
    /// Sends these bytes as the start of the response, and then zeroes until the connection or the
    /// server ends.
    Endless(&'static str),
}

impl fmt::Debug for ServerFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Status(status, code) => return write!(f, "Status({status}, {code})"),
            Self::StatusAfter(status, code) => return write!(f, "StatusAfter({status}, {code})"),
            Self::Cut(_) => "Cut",
            Self::Flip(_) => "Flip",
            Self::Length(_) => "Length",
            Self::Stall(_) => "Stall",
            Self::StallInBody(..) => "StallInBody",
            Self::ResetBefore => "ResetBefore",
            Self::ResetAfter => "ResetAfter",
            Self::NoRange => "NoRange",
            Self::OtherPart(_) => "OtherPart",
            Self::Raw(_) => "Raw",
            Self::Endless(_) => "Endless",
        };
        f.write_str(name)
    }
}
