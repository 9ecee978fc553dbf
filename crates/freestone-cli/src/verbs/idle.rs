//! `idle NAME all|SECONDS`: marks the pages of a RAM disk that nobody uses, for `writeback` and
//! `recompress`.

use std::io::{self, Write};
use std::time::Duration;

use clap::Args;
use freestone::ram;
use serde::{Deserialize, Deserializer, Serialize};

use super::Verb;
use crate::control::protocol::Fault;
use crate::service::Service;

/// A thousand years: no page is older.
const AGE_SECONDS_MAX: u64 = 1000 * 366 * 86_400;

/// The verb.
pub struct Idle;

/// Its parameters.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The ram device
    name: String,
    /// all, or SECONDS: what was not read or written for so long is marked, and the rest unmarked
    #[arg(value_name = "all|SECONDS")]
    #[serde(deserialize_with = "text_or_number")]
    which: String,
}

/// What was done.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// Pages that are marked now.
    pages_marked: u64,
}

impl Verb for Idle {
    const METHOD: &'static str = "idle";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    // Runs under traffic and takes a while: nothing is claimed.
    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let Params { name, which } = params;
        let which = match which.as_str() {
            "all" => ram::Idle::All,
            seconds => {
                let wrong = "must be all, or an age in whole seconds";
                let age = seconds.parse::<u64>();
                let age = age.map_err(|_| Fault::invalid(format!("{name}: idle {seconds}: {wrong}")))?;
                ram::Idle::OlderThan(Duration::from_secs(age.min(AGE_SECONDS_MAX)))
            }
        };
        let ram = service.find_ram(&name, "has pages to mark")?;
        Ok(Reply { pages_marked: ram.idle(which), name })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}: {} pages marked", reply.name, reply.pages_marked)
    }
}

/// Seconds may come as a number.
fn text_or_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "which: must be \"all\" or a number of seconds")]
    enum Which {
        Text(String),
        Seconds(u64),
    }
    Ok(match Which::deserialize(deserializer)? {
        Which::Text(text) => text,
        Which::Seconds(seconds) => seconds.to_string(),
    })
}
