//! `mark NAME TEXT`: adds a mark to the write log of a device. `power-cut --at` can return the device to the mark.

use std::io::{self, Write};

use clap::Args;
use freestone::power::RecordError;
use freestone_control::protocol::RpcError;
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};

use crate::service::Service;
use crate::verbs::Verb;

pub struct Mark;

/// Parameters of the verb `mark`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// A device with record=FILE
    name: String,
    /// Text of the mark, for example what the program under test has acknowledged
    text: String,
}

/// Result of the verb `mark`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    text: String,
    /// Number of the mark's entry in the log, from 1. `power-cut --at` accepts this number or the text.
    entry: u64,
}

impl Verb for Mark {
    const METHOD: &'static str = "mark";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let Params { name, text } = params;
        let entry = service.find(&name)?;
        let failed = |error: &RecordError| {
            let errno = match error {
                RecordError::NotRecording => Errno::EOPNOTSUPP,
                RecordError::BadMark { .. } => Errno::EINVAL,
                _ => Errno::EIO,
            };
            RpcError::failed(errno, format!("{name}: mark: {error}"))
        };
        if text.parse::<u64>().is_ok() {
            refuse!(
                invalid,
                "{name}: mark: {text}: a number is the number of an entry; begin the text with a letter"
            );
        }
        let power = entry.layers.power.as_ref().ok_or_else(|| failed(&RecordError::NotRecording))?;
        let number = power.mark(&text).map_err(|error| failed(&error))?;
        Ok(Reply { name, text, entry: number })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}: {:?} is entry {}", reply.name, reply.text, reply.entry)
    }
}
