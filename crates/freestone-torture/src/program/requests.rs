//! Requests of clients, and virtual machines that wait for their disk with requests in flight.

use std::ops::Range;

use super::machine::Driver;
use crate::oracle::{FlushToken, Kind as Write, Oracle, ReadToken, WriteToken};

/// A request, as the judge sees it.
#[derive(Debug, Clone)]
pub enum Intent {
    Write {
        id: u64,
        sectors: Range<u64>,
        kind: Write,
        fua: bool,
    },
    Flush,
    /// From this sector.
    Read(u64),
    /// From this sector, with this length in bytes.
    Status(u64, u64),
    Cache,
    /// An invalid request, which must fail with this error.
    Invalid(u32),
}

/// The oracle's token of a request.
pub enum Token {
    Write(WriteToken),
    Flush(FlushToken),
    Read(ReadToken),
    Nothing,
}

impl Intent {
    /// Tells the oracle that the request starts.
    pub fn begin(&self, oracle: &mut Oracle) -> Token {
        match self {
            Self::Write { id, sectors, kind, .. } => {
                Token::Write(oracle.begin_write(*id, sectors.clone(), *kind))
            }
            Self::Flush => Token::Flush(oracle.begin_flush()),
            Self::Read(_) | Self::Status(..) => Token::Read(oracle.begin_read()),
            Self::Cache | Self::Invalid(_) => Token::Nothing,
        }
    }
}

/// A request that was sent.
pub struct Request {
    pub command: u16,
    pub offset: u64,
    pub len: u64,
    pub intent: Intent,
    pub text: String,
}

/// A machine whose connection ended because of a verb or the end of its server.
pub struct WaitingMachine {
    /// Name of the device.
    pub disk: String,
    pub driver: Box<Driver>,
    /// Requests in flight, by cookie.
    pub sent_requests: Vec<(u64, Request)>,
}
