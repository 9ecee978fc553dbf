//! `set NAME ATTR=VALUE...`: sets attributes of a device. Either all are set or none.

use std::io::{self, Write};

use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_spec::{aliases, attrs};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::changes::recording::Recording;
use crate::service::Service;
use crate::usage::Usage;
use crate::verbs::Verb;

pub struct Set;

/// Command line of the verb `set`.
#[derive(Debug, Args)]
pub struct Line {
    /// The device
    name: String,
    #[arg(required = true, value_name = "ATTR=VALUE")]
    #[arg(help = "Attributes, for example mem_limit=2G; all are set or none")]
    attrs: Vec<String>,
}

/// Parameters of the verb `set` in a JSON request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    name: String,
    /// Attributes and their new values, for example `{"mem_limit": "2G"}`.
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
            let attr = aliases::canonical_user_key(attr);
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
    /// The attributes that were set, and their new values. Sizes are in bytes.
    type Reply = Map<String, Value>;

    fn run(service: &Service, params: Params) -> Result<Self::Reply, RpcError> {
        if params.attrs.is_empty() {
            refuse!(invalid, "{}: set: no attribute given", params.name);
        }
        let Params { name, attrs: wanted } = params;
        let wanted = with_present_names(&name, wanted)?;
        let claim = service.claim(Self::METHOD, &name)?;
        let entry = service.find(&name)?;
        let recording = Recording::begin(service, &claim, Self::METHOD, &[&name])?;
        service.set(&entry, &wanted)?;
        recording.commit()?;
        let read = |attr: &String| Ok((attr.clone(), attrs::get(&entry, attr)?));
        let mut reply = wanted.keys().map(read).collect::<Result<_, RpcError>>()?;
        aliases::add_former_device_keys(&mut reply);
        Ok(reply)
    }

    fn show(_: &Params, reply: &Self::Reply, out: &mut dyn Write) -> io::Result<()> {
        let mut present = reply.iter().filter(|(attr, _)| !aliases::is_former_device_key(attr));
        present.try_for_each(|(attr, value)| writeln!(out, "{attr}={}", attrs::format_plain(attr, value)))
    }
}

/// Replaces former names of attributes. Fails if an attribute is then given twice.
fn with_present_names(name: &str, attrs: Map<String, Value>) -> Result<Map<String, Value>, RpcError> {
    let mut present = Map::new();
    for (attr, value) in attrs {
        let attr = aliases::canonical_device_key(&attr);
        if present.insert(attr.to_owned(), value).is_some() {
            refuse!(invalid, "{name}: {attr}: given twice");
        }
    }
    Ok(present)
}
