//! What a request is for, and machines that wait for their disk with some of them in flight.

use std::ops::Range;

use super::machine::Driver;
use crate::oracle::{FlushToken, Kind as Write, Oracle, ReadToken, WriteToken};

/// What is asked for.
#[derive(Debug, Clone)]
pub enum Intent {
    Write {
        id: u64,
        sectors: Range<u64>,
        kind: Write,
        fua: bool,
    },
    Flush,
    /// From this sector on.
    Read(u64),
    /// From this sector on, so many bytes.
    Status(u64, u64),
    Cache,
    /// It must be answered with this error.
    Wrong(u32),
}

/// What the oracle was told of it.
pub enum Token {
    Write(WriteToken),
    Flush(FlushToken),
    Read(ReadToken),
    Nothing,
}

impl Intent {
    /// Tells the oracle that it begins.
    pub fn begin(&self, oracle: &mut Oracle) -> Token {
        match self {
            Self::Write { id, sectors, kind, .. } => {
                Token::Write(oracle.begin_write(*id, sectors.clone(), *kind))
            }
            Self::Flush => Token::Flush(oracle.begin_flush()),
            Self::Read(_) | Self::Status(..) => Token::Read(oracle.begin_read()),
            Self::Cache | Self::Wrong(_) => Token::Nothing,
        }
    }
}

/// A request that is sent.
pub struct Request {
    pub command: u16,
    pub offset: u64,
    pub len: u64,
    pub intent: Intent,
    pub text: String,
}

/// A machine whose connection was ended, by a verb or with its server.
pub struct Asleep {
    /// The device's name.
    pub disk: String,
    pub driver: Box<Driver>,
    /// What is in flight, by cookie.
    pub asked: Vec<(u64, Request)>,
}
