//! `idle NAME all|SECONDS`: marks idle pages of a RAM disk for `writeback` and `recompress`.

use std::io::{self, Write};
use std::time::Duration;

use clap::Args;
use freestone::ram;
use freestone_control::protocol::RpcError;
use serde::{Deserialize, Deserializer, Serialize};

use crate::service::Service;
use crate::verbs::Verb;

/// Maximum age in seconds. Larger ages are lowered to this value, a thousand years, which no page reaches.
const AGE_SECONDS_MAX: u64 = 1000 * 366 * 86_400;

pub struct Idle;

/// Parameters of the verb `idle`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The ram device
    name: String,
    /// all: mark every page; SECONDS: mark pages that were not accessed for this time, unmark the rest
    #[arg(value_name = "all|SECONDS")]
    #[serde(deserialize_with = "text_or_number")]
    which: String,
}

/// Result of the verb `idle`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// Number of pages that were marked.
    pages_marked: u64,
}

impl Verb for Idle {
    const METHOD: &'static str = "idle";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    // The device is not claimed (locked against other verbs), because it may be in use and the verb may take long.
    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let Params { name, which } = params;
        let which = match which.as_str() {
            "all" => ram::IdleSelection::All,
            seconds => {
                let wrong = "must be all, or an age in whole seconds";
                let age = seconds.parse::<u64>();
                let age = age.map_err(|_| refusal!(invalid, "{name}: idle {seconds}: {wrong}"))?;
                ram::IdleSelection::OlderThan(Duration::from_secs(age.min(AGE_SECONDS_MAX)))
            }
        };
        let ram = service.find_ram(&name, "has pages to mark")?;
        Ok(Reply { pages_marked: ram.mark_idle(which), name })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}: {} pages marked", reply.name, reply.pages_marked)
    }
}

/// Deserializes a text, or a number of seconds, which is converted to text.
fn text_or_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "which: must be \"all\" or a number of seconds")]
    enum TextOrSeconds {
        Text(String),
        Seconds(u64),
    }
    Ok(match TextOrSeconds::deserialize(deserializer)? {
        TextOrSeconds::Text(text) => text,
        TextOrSeconds::Seconds(seconds) => seconds.to_string(),
    })
}
