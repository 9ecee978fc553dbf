//! `get NAME [ATTR]`: attributes of a device, as sysfs shows them.

use std::io::{self, Write};

use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_spec::{aliases, attrs};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::service::Service;
use crate::verbs::Verb;

pub struct Get;

/// Parameters of the verb `get`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// The device
    name: String,
    /// One attribute; without it, all of them
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attr: Option<String>,
}

impl Params {
    /// Returns the parameters for all attributes of a device.
    pub fn all(name: &str) -> Self {
        Self { name: name.to_owned(), attr: None }
    }

    /// Replaces a former name of the attribute on the command line, with a warning.
    #[must_use]
    pub fn with_present_name(self) -> Self {
        Self { attr: self.attr.map(|attr| aliases::canonical_user_key(&attr).to_owned()), ..self }
    }
}

impl Verb for Get {
    const METHOD: &'static str = "get";
    const READ_ONLY: bool = true;
    type Params = Params;
    /// Attributes and their values. Sizes are in bytes.
    type Reply = Map<String, Value>;

    fn run(service: &Service, params: Params) -> Result<Self::Reply, RpcError> {
        let entry = service.find(&params.name)?;
        let read = |attr: &str| Ok((attr.to_owned(), attrs::get(&entry, attr)?));
        let mut reply: Map<_, _> = match &params.attr {
            Some(attr) => Map::from_iter([read(aliases::canonical_device_key(attr))?]),
            None => attrs::names(&entry).iter().map(|attr| read(attr)).collect::<Result<_, RpcError>>()?,
        };
        aliases::add_former_device_keys(&mut reply);
        Ok(reply)
    }

    fn show(params: &Params, reply: &Self::Reply, out: &mut dyn Write) -> io::Result<()> {
        let present = || reply.iter().filter(|(attr, _)| !aliases::is_former_device_key(attr));
        let width = present().map(|(attr, _)| attr.len()).max().unwrap_or_default();
        for (attr, value) in present() {
            let text = attrs::format_plain(attr, value);
            // A request for a single attribute comes from a script, so only the value is printed.
            if params.attr.is_some() {
                writeln!(out, "{text}")
            } else {
                let below = format!("\n{:width$}  ", "");
                writeln!(out, "{}", format!("{attr:width$}  {}", text.replace('\n', &below)).trim_end())
            }?;
        }
        Ok(())
    }
}
