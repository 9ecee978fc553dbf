//! `publish NAME --nbd ADDR --vhost-user unix:PATH --ublk`: exports at run time.

use std::io::{self, Write};
use std::sync::Arc;

use clap::Args;
use freestone_nbd::{Address, AllowList};
use freestone_spec::kinds::{Entry, Spec};
use freestone_spec::limits::{self, LimitSpec, LimitWords};
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::{Verb, keys};
use crate::allow;
use crate::alone::Shown;
use crate::claims::Claim;
use crate::control::protocol::Fault;
use crate::error::Usage;
use crate::paths::{address_text, parse_address};
use crate::places::{Place, Wanted};
use crate::recording::Recording;
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
    /// For NBD clients: unix:PATH or tcp:HOST:PORT; the server starts to listen there if it does not
    /// yet
    #[arg(long, value_name = "ADDR", value_parser = super::keys::words_parser())]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nbd: Option<String>,
    /// For a virtual machine: a vhost-user-blk socket of this device alone
    #[arg(long, value_name = "unix:PATH", value_parser = super::keys::words_parser())]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vhost_user: Option<String>,
    /// As a block device of this machine, /dev/ublkbN
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    ublk: bool,
    /// With --ublk: queues, each with a thread [default: one a CPU, at most 4]
    #[arg(long, value_name = "N", requires = "ublk", value_parser = clap::value_parser!(u16).range(1..=16))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    queues: Option<u16>,
    /// Who may connect there.
    #[arg(long, value_name = "WHO", help = allow::HELP, value_delimiter = ',')]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    allow: Vec<String>,
    /// Clients cannot write
    #[arg(long)]
    #[serde(default)]
    read_only: bool,
    #[command(flatten)]
    #[serde(flatten)]
    limits: LimitArgs,
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
        self.limits.words(&self.name).map_err(|fault| Usage(fault.message))?;
        let places = self.places(["--nbd", "--vhost-user"]).map_err(|fault| Usage(fault.message))?;
        for place in places {
            match place {
                Place::Nbd(address) => self.nbd = Some(address_text(&address)),
                Place::VhostUser(path) => self.vhost_user = Some(address_text(&Address::Unix(path))),
                Place::Ublk(_) => {}
            }
        }
        Ok(self)
    }

    /// The list of who may connect at one of the places.
    fn allow_at(&self, place: &Place) -> Result<Option<AllowList>, Fault> {
        let said = (!self.allow.is_empty()).then(|| place.allow(&self.allow)).transpose();
        said.map_err(|why| Fault::invalid(format!("{}: publish: allow: {why}", self.name)))
    }

    /// Where it is to be seen, by these keys.
    fn places(&self, [nbd_key, vhost_user_key]: [&str; 2]) -> Result<Vec<Place>, Fault> {
        let name = &self.name;
        let invalid = |key: &str, why: String| Fault::invalid(format!("{name}: {key}: {why}"));
        let nbd = self.nbd.as_deref().map(|text| parse_address(text, None)).transpose();
        let nbd = nbd.map_err(|why| invalid(nbd_key, why))?;
        let vhost_user = self.vhost_user.as_deref().map(|text| Place::vhost_user(text, None)).transpose();
        let vhost_user = vhost_user.map_err(|why| invalid(vhost_user_key, why))?;
        if self.template && (vhost_user.is_some() || self.ublk) {
            let key = if self.ublk { "ublk" } else { vhost_user_key };
            let why = "a template is published over NBD; publish a fork of it";
            return Err(Fault::invalid(format!("{name}: {key}: {why}")));
        }
        if self.template && nbd.is_none() {
            return Err(Fault::invalid(format!("{name}: publish: {nbd_key} is missing")));
        }
        if self.queues.is_some() && !self.ublk {
            return Err(Fault::invalid(format!("{name}: publish: queues: only with ublk")));
        }
        let ublk = self.ublk.then(|| Place::ublk(self.queues)).transpose();
        let ublk = ublk.map_err(|why| invalid("publish", why))?;
        // NBD last: its address may be new to others, who see it then.
        Ok([vhost_user, ublk, nbd.map(Place::Nbd)].into_iter().flatten().collect())
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
    /// What NBD clients ask for.
    name: String,
    /// Of NBD, with the port that was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uri: Option<String>,
    /// `vhost-user:PATH`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vhost_user: Option<String>,
    /// `/dev/ublkbN`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ublk: Option<String>,
}

impl Verb for Publish {
    const METHOD: &'static str = "publish";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, Fault> {
        let template = params.template_spec()?;
        let places = params.places(["nbd", "vhost_user"])?;
        let limits = params.limits.words(&params.name)?;
        let wanted = |place: Place| {
            let allow = params.allow_at(&place)?;
            let limits = limits.over(LimitSpec::default());
            Ok(Wanted { place, read_only: params.read_only, allow, limits })
        };
        let places: Vec<_> = places.into_iter().map(wanted).collect::<Result<_, Fault>>()?;
        if places.is_empty() && !params.allow.is_empty() {
            return Err(Fault::invalid(format!("{}: publish: allow: of which address?", params.name)));
        }
        let Params { name, .. } = params;
        let claim = match &template {
            Some(spec) => service.claim_new(Self::METHOD, [spec])?,
            None => service.claim(Self::METHOD, &name)?,
        };
        let of = template.as_ref().map_or(name.as_str(), |template| &template.name).to_owned();
        let recording = Recording::begin(service, &claim, Self::METHOD, &[&of])?;
        let made = template.map(|spec| service.create(&claim, spec, false)).transpose()?;
        let entry = match &made {
            Some(template) => Arc::clone(template),
            None => service.find(&name)?,
        };
        if places.is_empty() && !service.withheld.has(entry.name()) {
            let why = "say where: --nbd, --vhost-user or --ublk; it is not withheld from where it was";
            return Err(Fault::invalid(format!("{name}: publish: {why}")));
        }
        let withheld = service.withheld.take(entry.name());
        let (mut shown, mut limited) = (Vec::new(), Vec::new());
        let again = withheld.as_ref().map(|seen| service.show(&claim, &entry, seen));
        let again = again.unwrap_or(Ok(()));
        let published = again.and_then(|()| {
            let mut reply = Reply::of(entry.name());
            for wanted in places {
                if let Some(is) = published(service, &entry, &wanted).filter(|_| !limits.is_empty()) {
                    check_list(entry.name(), &wanted, &is)?;
                    let before = service.exports.limit_at(&claim, &entry, &is, limits.over(is.limits))?;
                    reply.add(service, &entry, &is.place);
                    limited.push((is, before));
                    continue;
                }
                publish(service, &claim, &entry, wanted, &mut shown, &mut reply)?;
            }
            recording.commit().map(|()| reply)
        });
        published.inspect_err(|_| {
            // All or nothing; that it is not published is no error here.
            if let Some(seen) = withheld {
                let _ = service.exports.unpublish(&claim, &entry, true);
                service.declarations.forget_exports(entry.name());
                service.withheld.put(entry.name(), seen);
            }
            for (wanted, before) in limited {
                let _ = service.exports.limit_at(&claim, &entry, &wanted, before);
            }
            for place in &shown {
                let _ = service.exports.hide_at(&claim, &entry, place, true);
            }
            if let Some(template) = made {
                service.undo(&claim, &template);
            }
        })
    }

    fn show(_: &Params, reply: &Reply, out: &mut dyn Write) -> io::Result<()> {
        [&reply.uri, &reply.vhost_user, &reply.ublk]
            .into_iter()
            .flatten()
            .try_for_each(|place| writeln!(out, "{place}"))
    }
}

/// What is published at that place already, in the same manner.
fn published(service: &Service, entry: &Entry, wanted: &Wanted) -> Option<Wanted> {
    let read_only = wanted.read_only || entry.is_read_only();
    let is = |live: &Wanted| live.place.is(&wanted.place) && live.read_only == read_only;
    service.exports.wanted(entry.name()).into_iter().find(is)
}

/// Limits change where it is published already; who may connect there does not.
fn check_list(name: &str, wanted: &Wanted, is: &Wanted) -> Result<(), Fault> {
    if wanted.allow.is_none() || wanted.allow == is.allow {
        return Ok(());
    }
    let why = format!("it is published at {} with {}", is.place, allow::shown(is.allow.as_ref()));
    Err(Fault::failed(Errno::EBUSY, format!("{name}: publish: allow: {why}; apply changes lists")))
}

/// At that place; where it is now is added to `shown`.
fn publish(
    service: &Service,
    claim: &Claim<'_>,
    entry: &Arc<Entry>,
    wanted: Wanted,
    shown: &mut Vec<Place>,
    reply: &mut Reply,
) -> Result<(), Fault> {
    let place = match service.exports.show_at(claim, entry, &wanted)? {
        Shown::Nbd(at) => Place::Nbd(at),
        Shown::Alone(_) => wanted.place,
    };
    reply.add(service, entry, &place);
    shown.push(place);
    Ok(())
}

impl Reply {
    fn of(name: &str) -> Self {
        Self { name: name.to_owned(), address: None, uri: None, vhost_user: None, ublk: None }
    }

    /// It is there.
    fn add(&mut self, service: &Service, entry: &Entry, place: &Place) {
        if let Place::Nbd(at) = place {
            self.uri = service.exports.uri_at(entry.name(), at);
            self.address = Some(at.to_string());
            return;
        }
        let at = service.exports.address_of(entry.name(), place);
        match place {
            Place::Ublk(_) => self.ublk = at,
            _ => self.vhost_user = at,
        }
    }
}

/// What an export lets through, as it is typed. 0 is no limit; what is not said stays as it is.
#[derive(Debug, Default, Args, Serialize, Deserialize)]
struct LimitArgs {
    /// Operations a second; 0 for no limit. Of an export that is there, this changes
    #[arg(long, value_name = "N")]
    #[serde(default, deserialize_with = "word", skip_serializing_if = "Option::is_none")]
    iops: Option<String>,
    /// Bytes a second, for example 10M; 0 for no limit
    #[arg(long, value_name = "SIZE")]
    #[serde(default, deserialize_with = "word", skip_serializing_if = "Option::is_none")]
    bps: Option<String>,
    /// Operations that may come at once after a pause [default: a tenth of --iops]
    #[arg(long, value_name = "N")]
    #[serde(default, deserialize_with = "word", skip_serializing_if = "Option::is_none")]
    iops_burst: Option<String>,
    /// Bytes that may come at once after a pause [default: a tenth of --bps]
    #[arg(long, value_name = "SIZE")]
    #[serde(default, deserialize_with = "word", skip_serializing_if = "Option::is_none")]
    bps_burst: Option<String>,
    /// Connections at one time, for NBD; 0 for no limit. Others wait for a place
    #[arg(long, value_name = "N")]
    #[serde(default, deserialize_with = "word", skip_serializing_if = "Option::is_none")]
    max_clients: Option<String>,
}

impl LimitArgs {
    fn words(&self, name: &str) -> Result<LimitWords, Fault> {
        let mut words = LimitWords::default();
        let Self { iops, bps, iops_burst, bps_burst, max_clients } = self;
        for (key, text) in limits::KEYS.into_iter().zip([iops, bps, iops_burst, bps_burst, max_clients]) {
            if let Some(text) = text {
                let taken = words.take(key, text);
                taken.map_err(|why| Fault::invalid(format!("{name}: publish: {key}={text}: {why}")))?;
            }
        }
        Ok(words)
    }
}

/// A text, or a number as one.
fn word<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(match Value::deserialize(from)? {
        Value::String(text) => Some(text),
        other => Some(other.to_string()),
    })
}
