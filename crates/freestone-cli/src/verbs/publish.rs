//! `publish NAME --nbd ADDR`: an export at run time.

use std::io::{self, Write};

use clap::Args;
use freestone_nbd::Address;
use serde::{Deserialize, Serialize};

use super::Verb;
use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::paths::parse_address;
use crate::service::Service;

/// The verb.
pub struct Publish;

/// Its parameters, and the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The device
    name: String,
    /// unix:PATH or tcp:HOST:PORT; the server starts to listen there if it does not yet
    #[arg(long, value_name = "ADDR")]
    nbd: String,
    /// Clients cannot write
    #[arg(long)]
    #[serde(default)]
    read_only: bool,
}

impl Params {
    /// Checks the address before the server is asked, and makes its path independent of our directory.
    pub fn checked(mut self) -> Result<Self, Usage> {
        self.nbd = parse_address(&self.nbd, None)
            .map_err(|e| Usage(format!("{}: --nbd: {e}", self.name)))?
            .to_string();
        Ok(self)
    }
}

/// Where it is now.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    name: String,
    /// With the port that was chosen.
    address: String,
    uri: String,
}

impl Verb for Publish {
    const METHOD: &'static str = "publish";
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let Params { name, nbd, read_only } = params;
        let address: Address =
            parse_address(&nbd, None).map_err(|e| Fault::invalid(format!("{name}: nbd: {e}")))?;
        let mut changes = service.changes();
        let entry = service.find(&name)?;
        let at = service.publish(&mut changes, &entry, &address, read_only)?;
        Ok(Reply { address: at.to_string(), uri: at.uri(&name), name })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}", reply.uri)
    }
}
