//! What a server can be told to do wrong.

use std::fmt;
use std::time::Duration;

/// A request, as it is shown to who decides whether it has a trouble.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// `GET`, `HEAD`, `PUT`, `DELETE`.
    pub method: &'a str,
    /// The bucket.
    pub bucket: &'a str,
    /// The key; empty for the bucket itself.
    pub key: &'a str,
    /// This is the how manyth request of that method for that key, from 1, since the server's start.
    pub nth: u64,
}

/// What goes wrong with a request. Where nothing else is said it has its effect.
#[derive(Clone)]
pub enum Trouble {
    /// That status and code are answered, and nothing is done.
    Status(u16, &'static str),
    /// That status and code are answered, but what was asked for is done.
    StatusAfter(u16, &'static str),
    /// The connection is cut after that many bytes of the answer's body.
    Cut(usize),
    /// The lowest bit of that byte of the body is another one.
    Flip(usize),
    /// The answer announces that many bytes more or fewer than come.
    Length(i64),
    /// Nothing happens for that time, or until the server ends; then all goes well.
    Stall(Option<Duration>),
    /// The answer stops after that many bytes of the body for that time, or until the server ends.
    StallInBody(usize, Option<Duration>),
    /// The connection is reset, and nothing is done.
    ResetBefore,
    /// The connection is reset, after what was asked for is done.
    ResetAfter,
    /// A `Range` is not looked at.
    NoRange,
    /// The part that is answered begins that many bytes later than asked.
    OtherPart(u64),
    /// These bytes are the answer, head and all, and then the connection ends.
    Raw(Vec<u8>),
    /// This head is sent, and then zeroes for ever.
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
