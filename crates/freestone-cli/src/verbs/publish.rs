//! `publish NAME --nbd ADDR`: an export at run time.

use std::io::{self, Write};
use std::sync::Arc;

use clap::Args;
use freestone_nbd::Address;
use freestone_spec::kinds::Spec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Verb, keys};
use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::paths::{address_text, parse_address};
use crate::service::Service;

/// The verb.
pub struct Publish;

/// Its parameters, and the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
pub struct Params {
    /// The device; with --template the base
    name: String,
    /// With --template: the name that clients ask for [default: NAME-fork]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    export: Option<String>,
    /// unix:PATH or tcp:HOST:PORT; the server starts to listen there if it does not yet
    #[arg(long, value_name = "ADDR", value_parser = super::keys::words_parser())]
    nbd: String,
    /// Clients cannot write
    #[arg(long)]
    #[serde(default)]
    read_only: bool,
    /// Every connection gets a fork of its own, gone when it ends
    #[arg(long)]
    #[serde(default)]
    template: bool,
    /// End a connection to the template after so long
    #[arg(long, value_name = "SECONDS")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ttl: Option<u64>,
    /// Of the template.
    #[arg(value_name = "KEY=VALUE", value_parser = super::keys::words_parser())]
    #[arg(
        help = "With --template: size, mem_limit, mem_min, full, faults, seed, power_cut, power_cut_unit, record as for serve"
    )]
    #[serde(skip)]
    words: Vec<String>,
    /// All else is keys of the template, which refuse what is unknown.
    #[arg(skip)]
    #[serde(flatten)]
    keys: Map<String, Value>,
}

impl Params {
    /// Checks the address before the server is asked, and makes its path independent of our
    /// directory.
    pub fn checked(mut self) -> Result<Self, Usage> {
        // The name can be left out.
        if self.export.as_ref().is_some_and(|export| export.contains('=')) {
            self.words.insert(0, self.export.take().unwrap_or_default());
        }
        self.keys = keys::of_words(&self.name, "template", &self.words)?;
        self.template_spec().map_err(|fault| Usage(fault.message))?;
        let nbd = parse_address(&self.nbd, None);
        self.nbd = address_text(&nbd.map_err(|e| Usage(format!("{}: --nbd: {e}", self.name)))?);
        Ok(self)
    }

    /// The template that is to be made first.
    fn template_spec(&self) -> Result<Option<Spec>, Fault> {
        let name = &self.name;
        if !self.template {
            let name_of_key = self.keys.keys().next();
            return match (&self.export, self.ttl) {
                (None, None) if name_of_key.is_none() => Ok(None),
                (None, None) => {
                    let key = name_of_key.map_or("", String::as_str);
                    Err(Fault::invalid(format!("{name}: publish: {key}: only with --template")))
                }
                (Some(export), _) => Err(Fault::invalid(format!(
                    "{name}: publish: {export}: a name of its own is for --template"
                ))),
                (None, Some(ttl)) => {
                    Err(Fault::invalid(format!("{name}: publish: ttl={ttl}: only with --template")))
                }
            };
        }
        let export = self.export.clone().unwrap_or_else(|| format!("{name}-fork"));
        let entries = keys::over(name, &export, "template", self.ttl, &self.keys)?;
        Spec::from_entries(entries).map(Some).map_err(|e| Fault::invalid(e.to_string()))
    }
}

/// Where it is now.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    /// What clients ask for.
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
        let template = params.template_spec()?;
        let Params { name, nbd, read_only, .. } = params;
        let address: Address =
            parse_address(&nbd, None).map_err(|e| Fault::invalid(format!("{name}: nbd: {e}")))?;
        let claim = match &template {
            Some(spec) => service.claim_new(Self::METHOD, [spec])?,
            None => service.claim(Self::METHOD, &name)?,
        };
        let made = template.map(|spec| service.create(&claim, spec, false)).transpose()?;
        let entry = match &made {
            Some(template) => Arc::clone(template),
            None => service.find(&name)?,
        };
        match service.publish(&claim, &entry, &address, read_only) {
            Ok(at) => Ok(Reply {
                address: at.to_string(),
                uri: at.uri(entry.name()),
                name: entry.name().to_owned(),
            }),
            Err(fault) => {
                if let Some(template) = made {
                    service.undo(&claim, &template);
                }
                Err(fault)
            }
        }
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}", reply.uri)
    }
}
