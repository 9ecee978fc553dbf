//! Faults of the server.

use std::fmt;
use std::time::Duration;

/// A request, as passed to the condition of a fault.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// `GET`, `HEAD`, `PUT` or `DELETE`.
    pub method: &'a str,
    /// Name of the bucket.
    pub bucket: &'a str,
    /// Key; empty for the bucket itself.
    pub key: &'a str,
    /// Number of this request among those with the same method and key since the server's start,
    /// from 1.
    pub nth: u64,
}

/// A fault of a request. Unless noted otherwise, the request takes effect.
#[derive(Clone)]
pub enum Trouble {
    /// Responds with this status and code; the request has no effect.
    Status(u16, &'static str),
    /// Responds with this status and code, although the request takes effect.
    StatusAfter(u16, &'static str),
    /// Closes the connection after this many bytes of the body.
    Cut(usize),
    /// Flips the lowest bit of this byte of the body.
    Flip(usize),
    /// Announces a `Content-Length` that differs by this many bytes.
    Length(i64),
    /// Delays the request for this time, or until the server ends.
    Stall(Option<Duration>),
    /// Pauses after this many bytes of the body for this time, or until the server ends.
    StallInBody(usize, Option<Duration>),
    /// Resets the connection; the request has no effect.
    ResetBefore,
    /// Resets the connection after the request took effect.
    ResetAfter,
    /// Ignores the `Range` header.
    NoRange,
    /// Shifts the returned range by this many bytes.
    OtherPart(u64),
    /// Sends these bytes as the whole response, and closes the connection.
    Raw(Vec<u8>),
    /// Sends this header, and then zeroes forever.
    Endless(&'static str),
}

impl fmt::Debug for Trouble {
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
