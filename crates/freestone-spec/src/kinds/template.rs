//! Templates: a fork for every connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use super::fork::{Fork, ForkSpec, fork_of};
use super::registry::{Refused, Registry};
use super::{Asked, Built, Entry, KindSpec, Made, Spec, finished};
use crate::entries::{Entries, SpecError};
use crate::full;
use crate::keys::{Keys, joined};
use crate::layers::{FAULT_KEYS, LayerSpec, NUMBER};
use crate::limits::LimitSpec;
use crate::path_text;
use crate::refusal::{Errno, Refusal};

pub(super) const NAME: &str = "template";
const KEYS: [&str; 14] = joined(
    &["base", "size", "mem_limit", "mem_min", "full", "ttl"],
    &FAULT_KEYS,
    &["publish", "tls_clients", "on_lost"],
);
/// The longest life of a connection to a template.
const TTL_SECONDS_MAX: u64 = 366 * 86_400;

/// A template as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateSpec {
    /// What every connection gets.
    pub fork: ForkSpec,
    /// How long a connection may last.
    pub ttl: Option<Duration>,
}

impl TemplateSpec {
    pub(super) fn take(keys: &Keys) -> Result<Self, SpecError> {
        keys.allow(&KEYS)?;
        if keys.typed("record").is_some_and(|record| !record.contains(NUMBER)) {
            return Err(keys.refuse("record", "each connection has a log of its own; %n is its number"));
        }
        Ok(Self { fork: ForkSpec::take_allowed(NAME, keys)?, ttl: keys.take("ttl", parse_ttl)?.flatten() })
    }
}

fn parse_ttl(text: &str) -> Result<Option<Duration>, String> {
    match text.parse() {
        Ok(0) => Ok(None),
        Ok(seconds) if seconds <= TTL_SECONDS_MAX => Ok(Some(Duration::from_secs(seconds))),
        Err(_) if text == "none" => Ok(None),
        _ => Err(format!("must be none, or the seconds a connection may last, 1 to {TTL_SECONDS_MAX}")),
    }
}

impl Asked for TemplateSpec {
    fn build(&self, _: &Spec, registry: &Registry) -> Result<Built, Refusal> {
        let base = registry.needed("base", &self.fork.base)?;
        // Every way in which the first connection could fail shows now.
        drop(fork_of(&base, &self.fork, registry)?);
        Ok(Built {
            kind: Box::new(Template(0.into())),
            device: None,
            needs: vec![base],
            backing: None,
            origin: None,
        })
    }

    fn fork(&self) -> Option<&ForkSpec> {
        Some(&self.fork)
    }

    fn below(&self) -> Option<&str> {
        Some(&self.fork.base)
    }
}

/// A fork for every connection; the number of those that were made.
struct Template(AtomicU64);

impl Made for Template {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check_origin(&self) -> Result<(), &'static str> {
        Err("a template has no content; take a snapshot of a fork")
    }

    fn check_base(&self, base: &Entry) -> Result<(), String> {
        Err(format!("is a template; fork what it is made of, {}", base.spec.kind.below().unwrap_or_default()))
    }

    fn attrs(&self) -> &'static [&'static str] {
        &NAMES
    }

    fn value(&self, entry: &Entry, attr: &str) -> Option<Value> {
        let KindSpec::Template(spec) = &entry.spec.kind else { return None };
        Some(match attr {
            "base" => json!(spec.fork.base),
            "size" => json!(entry.size()),
            "mem_limit" => json!(spec.fork.mem_limit),
            "mem_min" => json!(spec.fork.mem_min),
            "full" => full::own(spec.fork.full),
            "ttl" => json!(spec.ttl.map_or(0, |ttl| ttl.as_secs())),
            "made" => json!(self.0.load(Ordering::SeqCst)),
            _ => return asked_of_layers(&entry.spec.layers, attr),
        })
    }

    fn fresh(&self, template: &Entry, registry: &Registry) -> Result<Arc<Entry>, Refusal> {
        let (Some(spec), [base]) = (template.spec.kind.fork(), template.needs()) else {
            unreachable!("it was made with its base");
        };
        let failed = |errno, why: &str| Refusal::failed(errno, format!("{}: {why}", template.name()));
        let fork = fork_of(base, spec, registry).map_err(|error| failed(error.errno, &error.sentence))?;
        let fork = Arc::new(fork);
        loop {
            let number = self.0.fetch_add(1, Ordering::SeqCst) + 1;
            let name = format!("{}@{number}", template.name());
            // Before its log is made.
            if registry.check_free(&name) == Err(Refused::Duplicate) {
                continue;
            }
            let layers = template.spec.layers.numbered(number);
            // It goes with its connection: nobody makes it again.
            let words = Entries { name: name.clone(), kind: "fork".into(), pairs: Vec::new() };
            let spec = Spec {
                name,
                words,
                publish: None,
                tls_clients: None,
                on_lost: None,
                keep: false,
                kind: KindSpec::Fork(spec.clone()),
                layers,
                // The connections are counted by the template.
                limits: LimitSpec { max_clients: 0, ..template.limits() },
            };
            let built = Built::alone(Fork(Arc::clone(&fork)), Arc::clone(&fork) as _);
            let made = finished(spec, Built { needs: vec![Arc::clone(base)], ..built });
            let mut entry = made.map_err(|error| failed(error.errno, &error.sentence))?;
            entry.template = Some(template.name().to_owned());
            let entry = Arc::new(entry);
            return match registry.add(&entry) {
                Ok(()) => Ok(entry),
                // Somebody gave the name to a device of his own.
                Err(Refused::Duplicate) => continue,
                Err(Refused::Full) => Err(failed(Errno::ENOSPC, "no room for another device")),
                Err(Refused::Gone(base)) => Err(failed(Errno::ENODEV, &format!("{base} was removed"))),
            };
        }
    }
}

/// What its forks have over their data.
fn asked_of_layers(layers: &LayerSpec, attr: &str) -> Option<Value> {
    let or_none = |text: Option<String>| json!(text.unwrap_or_else(|| "none".to_owned()));
    Some(match attr {
        "faults" => or_none(layers.faults.clone()),
        "seed" => layers.seed.map_or(json!("none"), |seed| json!(seed)),
        "power_cut" => json!(u8::from(layers.power_cut)),
        "power_cut_unit" => layers.power_cut_unit.map_or(json!("none"), |bytes| json!(bytes)),
        "record" => or_none(layers.record.as_deref().map(path_text::text)),
        _ => return None,
    })
}

/// Its attributes.
const NAMES: [&str; 12] = [
    "base",
    "size",
    "mem_limit",
    "mem_min",
    "full",
    "ttl",
    "made",
    "faults",
    "seed",
    "power_cut",
    "power_cut_unit",
    "record",
];
