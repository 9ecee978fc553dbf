//! Requests of judged clients, and virtual machines that wait to reconnect with requests in flight.

use std::ops::Range;

use crate::oracle::{FlushToken, Kind as Write, Oracle, ReadToken, WriteToken};
use crate::program::transport::machine::MachineClient;

/// The effect of a request, against which the completion is judged.
#[derive(Debug, Clone)]
pub enum Intent {
    Write {
        id: u64,
        sectors: Range<u64>,
        kind: Write,
        fua: bool,
    },
    Flush,
    /// A read, from this sector on.
    Read(u64),
    /// A block status request, from this sector on, with this length in bytes.
    Status(u64, u64),
    Cache,
    /// An invalid request, which must fail with this error number.
    Invalid(u32),
}

/// The token that the oracle returned at the start of a request.
pub enum Token {
    Write(WriteToken),
    Flush(FlushToken),
    Read(ReadToken),
    Nothing,
}

impl Intent {
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

pub struct Request {
    pub command: u16,
    pub offset: u64,
    pub len: u64,
    pub intent: Intent,
    pub text: String,
}

/// A virtual machine whose connection was ended by a verb or by the end of the server.
pub struct WaitingMachine {
    pub disk: String,
    pub client: Box<MachineClient>,
    pub sent_requests: Vec<(u64, Request)>,
}
