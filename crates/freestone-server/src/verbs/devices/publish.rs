//! `publish NAME --nbd ADDR --vhost-user unix:PATH --ublk`: exports a device, changes the limits of
//! an export, or publishes a withheld device again.

use std::io::{self, Write};
use std::sync::Arc;

use clap::Args;
use freestone_control::protocol::RpcError;
use freestone_nbd::{Address, AllowList};
use freestone_spec::kinds::{Entry, Spec};
use freestone_spec::limits::{self, LimitSpec, LimitWords};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::changes::recording::Recording;
use crate::exports::DeviceExports;
use crate::exports::export_spec::{ExportAddress, ExportSpec};
use crate::service::Service;
use crate::settings::allow;
use crate::settings::paths::{address_text, parse_address};
use crate::usage::Usage;
use crate::verbs::Verb;
use crate::verbs::text::keys;

pub struct Publish;

/// Parameters of the verb `publish`, from a JSON request or the command line.
#[derive(Debug, Args, Serialize, Deserialize)]
pub struct Params {
    /// The device; with --template, the base
    name: String,
    /// With --template: the export name [default: NAME-fork]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    export: Option<String>,
    /// NBD address: unix:PATH or tcp:HOST:PORT; the server listens there if necessary
    #[arg(long, value_name = "ADDR", value_parser = crate::verbs::text::keys::words_parser())]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nbd: Option<String>,
    /// vhost-user-blk socket for a virtual machine, of this device alone
    #[arg(long, value_name = "unix:PATH", value_parser = crate::verbs::text::keys::words_parser())]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vhost_user: Option<String>,
    /// Block device of this machine, /dev/ublkbN
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    ublk: bool,
    /// With --ublk: number of queues, each with a thread [default: one per CPU, at most 4]
    #[arg(long, value_name = "N", requires = "ublk", value_parser = clap::value_parser!(u16).range(1..=16))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    queues: Option<u16>,
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
    /// Give each connection a fork of its own, removed when the connection ends
    #[arg(long)]
    #[serde(default)]
    template: bool,
    /// Longest time of a connection to the template
    #[arg(long, value_name = "SECONDS")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ttl: Option<u64>,
    #[arg(value_name = "KEY=VALUE", value_parser = crate::verbs::text::keys::words_parser())]
    #[arg(
        help = "With --template: size, mem_limit, mem_min, full, faults, seed, power_cut, power_cut_unit, record as for serve"
    )]
    #[serde(skip)]
    words: Vec<String>,
    /// All other members of the request are keys of the template. The template's specification refuses unknown keys.
    #[arg(skip)]
    #[serde(flatten)]
    keys: Map<String, Value>,
}

impl Params {
    /// Checks the parameters before the server is called, and makes paths absolute, because the server opens
    /// the sockets.
    pub fn checked(mut self) -> Result<Self, Usage> {
        // The name of the template is optional, so a word with `=` in its place is a key.
        if self.export.as_ref().is_some_and(|export| export.contains('=')) {
            self.words.insert(0, self.export.take().unwrap_or_default());
        }
        self.keys = keys::parse_words(&self.name, "template", &self.words)?;
        self.template_spec().map_err(|fault| Usage(fault.message))?;
        self.limits.words(&self.name).map_err(|fault| Usage(fault.message))?;
        let places = self.places(["--nbd", "--vhost-user"]).map_err(|fault| Usage(fault.message))?;
        for place in places {
            match place {
                ExportAddress::Nbd(address) => self.nbd = Some(address_text(&address)),
                ExportAddress::VhostUser(path) => self.vhost_user = Some(address_text(&Address::Unix(path))),
                ExportAddress::Ublk(_) => {}
            }
        }
        Ok(self)
    }

    /// Returns the allow list of an export at `place`, or None if the request contains none.
    fn allow_at(&self, place: &ExportAddress) -> Result<Option<AllowList>, RpcError> {
        let list = (!self.allow.is_empty()).then(|| place.parse_allow_list(&self.allow)).transpose();
        list.map_err(|why| rpc_error!(invalid, "{}: publish: allow: {why}", self.name))
    }

    /// Returns the addresses to publish at. Error messages contain the given names of the options.
    fn places(&self, [nbd_key, vhost_user_key]: [&str; 2]) -> Result<Vec<ExportAddress>, RpcError> {
        let name = &self.name;
        let invalid = |key: &str, why: String| rpc_error!(invalid, "{name}: {key}: {why}");
        let nbd = self.nbd.as_deref().map(|text| parse_address(text, None)).transpose();
        let nbd = nbd.map_err(|why| invalid(nbd_key, why))?;
        let vhost_user =
            self.vhost_user.as_deref().map(|text| ExportAddress::vhost_user(text, None)).transpose();
        let vhost_user = vhost_user.map_err(|why| invalid(vhost_user_key, why))?;
        if self.template && (vhost_user.is_some() || self.ublk) {
            let key = if self.ublk { "ublk" } else { vhost_user_key };
            refuse!(invalid, "{name}: {key}: a template is published over NBD; publish a fork of it");
        }
        if self.template && nbd.is_none() {
            refuse!(invalid, "{name}: publish: {nbd_key} is missing");
        }
        if self.queues.is_some() && !self.ublk {
            refuse!(invalid, "{name}: publish: queues: only with ublk");
        }
        let ublk = self.ublk.then(|| ExportAddress::ublk(self.queues)).transpose();
        let ublk = ublk.map_err(|why| invalid("publish", why))?;
        // NBD is last: clients may connect as soon as the server listens at a new address.
        Ok([vhost_user, ublk, nbd.map(ExportAddress::Nbd)].into_iter().flatten().collect())
    }

    /// Returns the specification of the template to create first, or None without `template`.
    fn template_spec(&self) -> Result<Option<Spec>, RpcError> {
        let name = &self.name;
        if !self.template {
            let first_key = self.keys.keys().next();
            return match (&self.export, self.ttl) {
                (None, None) if first_key.is_none() => Ok(None),
                (None, None) => {
                    let key = first_key.map_or("", String::as_str);
                    Err(rpc_error!(invalid, "{name}: publish: {key}: only with --template"))
                }
                (Some(export), _) => Err(rpc_error!(
                    invalid,
                    "{name}: publish: {export}: an export name is only for --template"
                )),
                (None, Some(ttl)) => {
                    Err(rpc_error!(invalid, "{name}: publish: ttl={ttl}: only with --template"))
                }
            };
        }
        let export = self.export.clone().unwrap_or_else(|| format!("{name}-fork"));
        let entries = keys::entries_over(name, &export, "template", self.ttl, &self.keys)?;
        Ok(Some(Spec::from_entries(entries)?))
    }
}

/// Result of the verb `publish`: the addresses of the device's exports.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    /// Export name for NBD clients: the name of the device or template.
    name: String,
    /// NBD address. If the request contained port 0, the address contains the port that was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uri: Option<String>,
    /// Socket of the vhost-user-blk export, as `vhost-user:PATH`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vhost_user: Option<String>,
    /// Path of the ublk block device, `/dev/ublkbN`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ublk: Option<String>,
}

impl Verb for Publish {
    const METHOD: &'static str = "publish";
    const READ_ONLY: bool = false;
    type Params = Params;
    type Reply = Reply;

    fn run(service: &Service, params: Params) -> Result<Reply, RpcError> {
        let template = params.template_spec()?;
        let places = params.places(["nbd", "vhost_user"])?;
        let limits = params.limits.words(&params.name)?;
        let wanted = |place: ExportAddress| {
            let allow = params.allow_at(&place)?;
            let limits = limits.apply_to(LimitSpec::default());
            Ok(ExportSpec { read_only: params.read_only, allow, limits, ..ExportSpec::at(place) })
        };
        let places: Vec<_> = places.into_iter().map(wanted).collect::<Result<_, RpcError>>()?;
        if places.is_empty() && !params.allow.is_empty() {
            refuse!(invalid, "{}: publish: allow: an address is missing", params.name);
        }
        let Params { name, .. } = params;
        let claim = match &template {
            Some(spec) => service.claim_new(Self::METHOD, [spec])?,
            None => service.claim(Self::METHOD, &name)?,
        };
        let export_name = template.as_ref().map_or(name.as_str(), |template| &template.name).to_owned();
        let recording = Recording::begin(service, &claim, Self::METHOD, &[&export_name])?;
        let made = template.map(|spec| service.create(&claim, spec, false)).transpose()?;
        let entry = match &made {
            Some(template) => Arc::clone(template),
            None => service.find(&name)?,
        };
        if places.is_empty() && service.exports.withheld(entry.name()).is_none() {
            refuse!(
                invalid,
                "{name}: publish: say where: --nbd, --vhost-user or --ublk; it is not withheld from where it was"
            );
        }
        let withheld = service.exports.change(entry.name(), DeviceExports::release);
        let (mut shown, mut limited) = (Vec::new(), Vec::new());
        let republished =
            withheld.as_ref().map(|(_, export_set)| service.publish_exports(&claim, &entry, export_set));
        let published = republished.unwrap_or(Ok(())).and_then(|()| {
            let mut reply = Reply::of(entry.name());
            for wanted in places {
                let existing = find_export(service, &entry, &wanted).filter(|_| !limits.is_empty());
                if let Some(existing) = existing {
                    check_allow_list(entry.name(), &wanted, &existing)?;
                    let new_limits = limits.apply_to(existing.limits);
                    let before = service.exports.limit_at(&claim, &entry, &existing.address, new_limits)?;
                    reply.add(service, &entry, &existing.address);
                    limited.push((existing.address, before));
                    continue;
                }
                let place = service.exports.publish_at(&claim, &entry, &wanted)?;
                reply.add(service, &entry, &place);
                shown.push(place);
            }
            recording.commit().map(|()| reply)
        });
        published.inspect_err(|_| {
            // Roll back, so that all addresses are published or none. Errors are ignored: the device may not
            // be published.
            if let Some((reason, export_set)) = withheld {
                let _ = service.exports.unpublish(&claim, &entry, true);
                service.exports.change(entry.name(), |device| {
                    device.withheld = Some(reason);
                    device.set_unpublished(export_set, "");
                });
            }
            for (place, before) in limited {
                let _ = service.exports.limit_at(&claim, &entry, &place, before);
            }
            for place in &shown {
                let _ = service.exports.unpublish_from(&claim, &entry, place, true);
            }
            if let Some(template) = made {
                service.undo_create(&claim, &template);
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

/// Returns the existing export at the wanted address, or None if there is none or its access mode (read-only
/// or not) differs.
fn find_export(service: &Service, entry: &Entry, wanted: &ExportSpec) -> Option<ExportSpec> {
    let read_only = wanted.read_only || entry.is_read_only();
    let matches =
        |export: &ExportSpec| export.address.is_same(&wanted.address) && export.read_only == read_only;
    service.exports.specs(entry.name()).into_iter().find(matches)
}

/// Fails if the wanted allow list differs from that of the existing export, because `publish` changes only
/// the limits of an existing export.
fn check_allow_list(name: &str, wanted: &ExportSpec, existing: &ExportSpec) -> Result<(), RpcError> {
    if wanted.allow.is_none() || wanted.allow == existing.allow {
        return Ok(());
    }
    let why =
        format!("it is published at {} with {}", existing.address, allow::shown(existing.allow.as_ref()));
    refuse!(EBUSY, "{name}: publish: allow: {why}; apply changes lists")
}

impl Reply {
    fn of(name: &str) -> Self {
        Self { name: name.to_owned(), address: None, uri: None, vhost_user: None, ublk: None }
    }

    /// Adds the address of the device's export at `place` to the result.
    fn add(&mut self, service: &Service, entry: &Entry, place: &ExportAddress) {
        if let ExportAddress::Nbd(at) = place {
            self.uri = service.exports.uri_at(entry.name(), at);
            self.address = Some(at.to_string());
            return;
        }
        let at = service.exports.find(entry.name(), place).map(|live| live.address());
        match place {
            ExportAddress::Ublk(_) => self.ublk = at,
            _ => self.vhost_user = at,
        }
    }
}

/// Limits of an export, as the user wrote them. 0 means unlimited; an omitted limit of an existing export
/// does not change.
#[derive(Debug, Default, Args, Serialize, Deserialize)]
struct LimitArgs {
    /// Limit of operations per second, 0 for none; also changes an existing export
    #[arg(long, value_name = "N")]
    #[serde(default, deserialize_with = "word", skip_serializing_if = "Option::is_none")]
    iops: Option<String>,
    /// Limit of bytes per second, for example 10M, 0 for none
    #[arg(long, value_name = "SIZE")]
    #[serde(default, deserialize_with = "word", skip_serializing_if = "Option::is_none")]
    bps: Option<String>,
    /// Burst of operations after a pause [default: a tenth of --iops]
    #[arg(long, value_name = "N")]
    #[serde(default, deserialize_with = "word", skip_serializing_if = "Option::is_none")]
    iops_burst: Option<String>,
    /// Burst of bytes after a pause [default: a tenth of --bps]
    #[arg(long, value_name = "SIZE")]
    #[serde(default, deserialize_with = "word", skip_serializing_if = "Option::is_none")]
    bps_burst: Option<String>,
    /// Limit of NBD connections, 0 for none; further connections wait
    #[arg(long, value_name = "N")]
    #[serde(default, deserialize_with = "word", skip_serializing_if = "Option::is_none")]
    max_clients: Option<String>,
}

impl LimitArgs {
    fn words(&self, name: &str) -> Result<LimitWords, RpcError> {
        let mut words = LimitWords::default();
        let Self { iops, bps, iops_burst, bps_burst, max_clients } = self;
        for (key, text) in limits::KEYS.into_iter().zip([iops, bps, iops_burst, bps_burst, max_clients]) {
            if let Some(text) = text {
                let taken = words.take(key, text);
                taken.map_err(|why| refusal!(invalid, "{name}: publish: {key}={text}: {why}"))?;
            }
        }
        Ok(words)
    }
}

/// Deserializes a text, or a number, which is converted to text.
fn word<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(match Value::deserialize(from)? {
        Value::String(text) => Some(text),
        other => Some(other.to_string()),
    })
}
