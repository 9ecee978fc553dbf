//! Kind `template`: creates a separate fork of a base for each connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use super::fork::{Fork, ForkSpec, fork_of};
use crate::entries::{Entries, SpecError};
use crate::full;
use crate::keys::Keys;
use crate::kinds::registry::{AddError, Registry};
use crate::kinds::{DataDevice, Entry, KindConfig, KindInstance, KindSpec, Spec, finish_entry};
use crate::layers::{LayerSpec, NUMBER};
use crate::limits::LimitSpec;
use crate::path_text;
use crate::refusal::{Errno, Refusal};

pub(in crate::kinds) const NAME: &str = "template";
/// Largest value of `ttl` in seconds: 366 days.
const TTL_SECONDS_MAX: u64 = 366 * 86_400;

/// Specification of a device of kind `template`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateSpec {
    /// Specification of the fork that is created for each connection.
    pub fork: ForkSpec,
    /// Maximum duration of a connection, or `None` for no limit.
    pub ttl: Option<Duration>,
}

impl TemplateSpec {
    pub(in crate::kinds) fn take(keys: &Keys) -> Result<Self, SpecError> {
        if keys.typed("record").is_some_and(|record| !record.contains(NUMBER)) {
            return Err(keys.refuse("record", "each connection has a log of its own; %n is its number"));
        }
        Ok(Self { fork: ForkSpec::take(keys)?, ttl: keys.take("ttl", parse_ttl)?.flatten() })
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

impl KindConfig for TemplateSpec {
    fn build(&self, _: &Spec, registry: &Registry) -> Result<DataDevice, Refusal> {
        let base = registry.find_required("base", &self.fork.base)?;
        // Creates one fork and drops it, so that an error is reported now and not at the first
        // connection.
        drop(fork_of(&base, &self.fork, registry)?);
        Ok(DataDevice {
            kind: Box::new(Template(0.into())),
            device: None,
            dependencies: vec![base],
            backing: None,
            origin: None,
        })
    }

    fn fork(&self) -> Option<&ForkSpec> {
        Some(&self.fork)
    }

    fn parent_name(&self) -> Option<&str> {
        Some(&self.fork.base)
    }
}

/// Open template. Contains the number of forks created so far.
struct Template(AtomicU64);

impl KindInstance for Template {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check_origin(&self) -> Result<(), &'static str> {
        Err("a template has no content; take a snapshot of a fork")
    }

    fn check_base(&self, base: &Entry) -> Result<(), String> {
        Err(format!("is a template; fork its base, {}", base.spec.kind.parent_name().unwrap_or_default()))
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
            "full" => full::own_value(spec.fork.full),
            "ttl" => json!(spec.ttl.map_or(0, |ttl| ttl.as_secs())),
            "made" => json!(self.0.load(Ordering::SeqCst)),
            _ => return layer_value(&entry.spec.layers, attr),
        })
    }

    fn create_connection_fork(&self, template: &Entry, registry: &Registry) -> Result<Arc<Entry>, Refusal> {
        let (Some(spec), [base]) = (template.spec.kind.fork(), template.dependencies()) else {
            unreachable!("a template has a fork specification and a base");
        };
        let failed = |errno, why: &str| Refusal::failed(errno, format!("{}: {why}", template.name()));
        let fork = fork_of(base, spec, registry).map_err(|error| failed(error.errno, &error.sentence))?;
        let fork = Arc::new(fork);
        loop {
            let number = self.0.fetch_add(1, Ordering::SeqCst) + 1;
            let name = format!("{}@{number}", template.name());
            // The name is checked before the fork's log file is created.
            if registry.check_free(&name) == Err(AddError::Duplicate) {
                continue;
            }
            let layers = template.spec.layers.numbered(number);
            // The fork ends with its connection and is never created again from these words, so
            // they need no keys.
            let words = Entries { name: name.clone(), kind: "fork".into(), pairs: Vec::new() };
            let spec = Spec {
                name,
                words,
                publish: None,
                tls_clients: None,
                on_data_loss: None,
                keep: false,
                kind: KindSpec::Fork(spec.clone()),
                layers,
                // The template counts and limits the connections, not its forks.
                limits: LimitSpec { max_clients: 0, ..template.limits() },
            };
            let built = DataDevice::standalone(Fork(Arc::clone(&fork)), Arc::clone(&fork) as _);
            let entry_with_layers =
                finish_entry(spec, DataDevice { dependencies: vec![Arc::clone(base)], ..built });
            let mut entry = entry_with_layers.map_err(|error| failed(error.errno, &error.sentence))?;
            entry.template = Some(template.name().to_owned());
            let entry = Arc::new(entry);
            return match registry.add(&entry) {
                Ok(()) => Ok(entry),
                // Another device with this name was added meanwhile, so the next number is tried.
                Err(AddError::Duplicate) => continue,
                Err(AddError::Full) => {
                    Err(failed(Errno::ENOSPC, "the server has the maximum number of devices"))
                }
                Err(AddError::Gone(base)) => Err(failed(Errno::ENODEV, &format!("{base} was removed"))),
            };
        }
    }
}

/// Returns the specified value of an attribute of the forks' layers, or `None` for another
/// attribute.
fn layer_value(layers: &LayerSpec, attr: &str) -> Option<Value> {
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
