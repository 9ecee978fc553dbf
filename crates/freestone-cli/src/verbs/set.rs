//! `set NAME ATTR=VALUE...`: sets attributes of a device, all or none.

use std::io::{self, Write};

use clap::Args;
use freestone_spec::attrs;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Verb;
use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::recording::Recording;
use crate::service::Service;

pub struct Set;

/// The command line.
#[derive(Debug, Args)]
pub struct Line {
    /// The device
    name: String,
    #[arg(required = true, value_name = "ATTR=VALUE")]
    #[arg(help = "Attributes, for example mem_limit=2G; all are set or none")]
    attrs: Vec<String>,
}

/// Parameters of the request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    name: String,
    /// `{"mem_limit": "2G"}`
    attrs: Map<String, Value>,
}

impl TryFrom<Line> for Params {
    type Error = Usage;

    fn try_from(line: Line) -> Result<Self, Usage> {
        let name = line.name;
        let mut attrs = Map::new();
        for text in &line.attrs {
            let Some((attr, value)) = text.split_once('=') else {
                return Err(Usage(format!("{name}: {text}: a value is missing; write {text}=VALUE")));
            };
            if attrs.insert(attr.into(), value.into()).is_some() {
                return Err(Usage(format!("{name}: {attr}: given twice")));
            }
        }
        Ok(Self { name, attrs })
    }
}

impl Verb for Set {
    const METHOD: &'static str = "set";
    const READ_ONLY: bool = false;
    type Params = Params;
    /// The attributes that were set, with their new values.
    type Reply = Map<String, Value>;

    fn run(service: &Service, params: Params) -> Result<Self::Reply, Fault> {
        if params.attrs.is_empty() {
            return Err(Fault::invalid(format!("{}: set: no attribute given", params.name)));
        }
        let claim = service.claim(Self::METHOD, &params.name)?;
        let entry = service.find(&params.name)?;
        let recording = Recording::begin(service, &claim, Self::METHOD, &[&params.name])?;
        service.set(&entry, &params.attrs)?;
        recording.commit()?;
        params.attrs.keys().map(|attr| Ok((attr.clone(), attrs::get(&entry, attr)?))).collect()
    }

    fn show(_: &Params, reply: &Self::Reply, out: &mut dyn Write) -> io::Result<()> {
        reply.iter().try_for_each(|(attr, value)| writeln!(out, "{attr}={}", attrs::plain(attr, value)))
    }
}
