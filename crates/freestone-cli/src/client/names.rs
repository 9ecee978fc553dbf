//! Verbs on several devices, which the user selects by names and patterns.
//!
//! The client calls the verb for one device after the other. If the client ends, the remaining devices are not changed.

use std::collections::{HashMap, HashSet};
use std::io;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use freestone_control::protocol::RpcError;
use freestone_server::verbs::Verb;
use freestone_server::verbs::status::list;
use freestone_server::verbs::text::pattern::Pattern;
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use crate::client::connection::Client;
use crate::client::long::{Long, LongRunner, ask_long};
use crate::client::{Common, call, print, print_json, show};
use crate::error;

/// Order in which a verb is called for the devices.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// In the order of the words on the command line. The matches of a pattern are in the order of their creation.
    Named,
    /// Newest first, so that a device follows the devices that depend on it. Patterns do not match forks of
    /// templates, which are removed when their connections end.
    LastFirst,
}

/// The part of a `list` result that this module needs.
#[derive(Deserialize)]
struct DeviceList {
    devices: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    name: String,
    #[serde(default)]
    template: Option<String>,
}

/// JSON output of a verb on several devices.
#[derive(Serialize)]
struct Results {
    devices: Vec<Box<RawValue>>,
}

/// How the client calls a verb for each device.
#[derive(Clone, Copy)]
pub enum CallMode<'a> {
    /// As a long verb, with progress and cancellation.
    Long(&'a Long),
    /// With steps of the client before and after each call.
    CallWrapper(CallWrapper),
}

/// Function that runs a call for the named device, with steps of the client before and after the call.
pub type CallWrapper = fn(&str, &Common, &mut dyn FnMut() -> Result<Box<RawValue>>) -> Result<Box<RawValue>>;

/// Calls a verb for each device. If a call fails, prints the error and continues with the next device. A single name
/// without a pattern is passed to the server without a check. Returns a failure status if any call failed.
pub fn ask_each<V: Verb>(
    words: &[String],
    order: Order,
    params: impl Fn(&str) -> V::Params,
    manner: CallMode<'_>,
    common: &Common,
) -> Result<ExitCode> {
    if let [name] = words
        && !Pattern::is_pattern(name)
    {
        let params = params(name);
        return match manner {
            CallMode::Long(long) => ask_long::<V>(&params, long, common),
            CallMode::CallWrapper(around) => {
                let answer = around(name, common, &mut || call::<V>(&params, common))?;
                show::<V>(&params, &answer, common).map(|()| ExitCode::SUCCESS)
            }
        };
    }
    let mut client = Client::connect(common.control.as_deref())?;
    let answer = client.call(list::List::METHOD, &json!({}))?;
    let DeviceList { devices } =
        serde_json::from_str(answer.get()).context("list: the answer is not understood")?;
    let (targets, unmatched) = resolve(words, &devices, order);
    let mut failed = !unmatched.is_empty();
    for word in unmatched {
        error::print_error(&rpc_error!(ENODEV, "{word}: no device matches").into());
    }
    let mut results = Results { devices: Vec::new() };
    let mut broken = Ok(());
    let runner = match manner {
        CallMode::Long(long) => Some(LongRunner::new(long, common)?),
        CallMode::CallWrapper(_) => None,
    };
    for Target { name, by_pattern } in targets {
        let params = params(&name);
        let answer = match (&runner, manner) {
            (Some(runner), _) => runner.call::<V>(&mut client, &params),
            (None, CallMode::CallWrapper(around)) => {
                let request = serde_json::to_value(&params).context("cannot write the request")?;
                around(&name, common, &mut || client.call(V::METHOD, &request))
            }
            (None, CallMode::Long(_)) => unreachable!("a long verb has a runner"),
        };
        match answer {
            Ok(answer) if common.json => results.devices.push(answer),
            Ok(answer) => match manner {
                CallMode::Long(long) => long.show::<V>(&params, &answer, common)?,
                CallMode::CallWrapper(_) => print::<V>(&params, &answer, &mut io::stdout().lock())?,
            },
            Err(error) => match error.downcast_ref::<RpcError>() {
                // The device was removed after it had been listed, which is not an error for a pattern.
                Some(fault) if by_pattern && fault.has_errno(Errno::ENODEV) => {}
                Some(_) => {
                    failed = true;
                    error::print_error(&error);
                }
                // The connection is lost, so the remaining devices are skipped. The earlier results are printed.
                None => {
                    broken = Err(error);
                    break;
                }
            },
        }
    }
    if common.json {
        let json = serde_json::to_string(&results).context("cannot write the answer")?;
        print_json(&json)?;
    }
    broken?;
    Ok(if failed { ExitCode::from(error::STATUS_FAILURE) } else { ExitCode::SUCCESS })
}

#[derive(Debug, PartialEq, Eq)]
struct Target {
    name: String,
    by_pattern: bool,
}

/// Returns the devices that the words select, each once, and the patterns that match no device. A word that
/// is the name of a device selects only that device, even if the word looks like a pattern.
fn resolve<'a>(words: &'a [String], devices: &[Row], order: Order) -> (Vec<Target>, Vec<&'a str>) {
    let positions: HashMap<&str, usize> =
        devices.iter().enumerate().map(|(position, row)| (row.name.as_str(), position)).collect();
    let (mut targets, mut unmatched, mut added) = (Vec::new(), Vec::new(), HashSet::new());
    let mut add = |name: &str, by_pattern| {
        if added.insert(name.to_owned()) {
            targets.push(Target { name: name.to_owned(), by_pattern });
        }
    };
    for word in words {
        if !Pattern::is_pattern(word) || positions.contains_key(word.as_str()) {
            add(word, false);
            continue;
        }
        let pattern = Pattern::new(word);
        let is_eligible = |row: &&Row| order == Order::Named || row.template.is_none();
        let mut has_match = false;
        for row in devices.iter().filter(is_eligible).filter(|row| pattern.matches(&row.name)) {
            has_match = true;
            add(&row.name, true);
        }
        if !has_match {
            unmatched.push(word.as_str());
        }
    }
    if order == Order::LastFirst {
        targets.sort_by_key(|target| std::cmp::Reverse(positions.get(target.name.as_str()).copied()));
    }
    (targets, unmatched)
}

#[cfg(test)]
mod tests {
    use super::{Order, Row, resolve};

    fn names(words: &[&str], order: Order) -> (Vec<String>, Vec<String>) {
        let row = |name: &str, template: Option<&str>| Row {
            name: name.to_owned(),
            template: template.map(str::to_owned),
        };
        let devices = [
            row("a1", None),
            row("a2", None),
            row("b", None),
            row("ci", None),
            row("ci@1", Some("ci")),
            row("a?", None),
        ];
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        let (targets, unmatched) = resolve(&words, &devices, order);
        let targets = targets.into_iter().map(|target| target.name).collect();
        (targets, unmatched.into_iter().map(str::to_owned).collect())
    }

    #[test]
    fn resolve_returns_each_device_once_in_order() {
        let named = |words: &[&str]| names(words, Order::Named).0.join(" ");
        assert_eq!(named(&["b", "a*", "a1"]), "b a1 a2 a?");
        // A word that is the name of a device is not used as a pattern.
        assert_eq!(named(&["a?"]), "a?");
        assert_eq!(named(&["c*"]), "ci ci@1");
        let removed = |words: &[&str]| names(words, Order::LastFirst).0.join(" ");
        assert_eq!(removed(&["a1", "gone", "*"]), "a? ci b a2 a1 gone");
        assert_eq!(
            names(&["x*", "?", "y?"], Order::Named),
            (vec!["b".into()], vec!["x*".into(), "y?".into()])
        );
    }
}
