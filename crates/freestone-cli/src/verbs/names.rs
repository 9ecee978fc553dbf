//! Verbs on several devices, by names and patterns: one call of the method for each, in turn. So
//! what was not begun yet ends with the program.

use std::collections::{HashMap, HashSet};
use std::io;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use super::long::{Asker, Long, ask_long};
use super::pattern::Pattern;
use super::{Common, Verb, ask, list, print, print_json};
use crate::control::client::Client;
use crate::control::protocol::Fault;
use crate::error;

/// In which order devices are taken.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// As they were named; those of a pattern in the order in which they were made.
    Named,
    /// The last made first, so that none goes before those that stand on it. A pattern does not
    /// mean what goes with its connection.
    LastFirst,
}

#[derive(Deserialize)]
struct Listed {
    devices: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    name: String,
    #[serde(default)]
    template: Option<String>,
}

/// What was done to several.
#[derive(Serialize)]
struct Done {
    devices: Vec<Box<RawValue>>,
}

/// Asks for a verb on each of the devices. What fails is told, and the others are done all the
/// same. One name is asked for as it is.
pub fn ask_each<V: Verb>(
    words: &[String],
    order: Order,
    params: impl Fn(&str) -> V::Params,
    long: Option<&Long>,
    common: &Common,
) -> Result<ExitCode> {
    if let [name] = words
        && !Pattern::is_meant(name)
    {
        return match long {
            Some(long) => ask_long::<V>(&params(name), long, common),
            None => ask::<V>(&params(name), common).map(|()| ExitCode::SUCCESS),
        };
    }
    let mut client = Client::connect(common.control.as_deref())?;
    let answer = client.call(list::List::METHOD, &json!({}))?;
    let Listed { devices } =
        serde_json::from_str(answer.get()).context("list: the answer is not understood")?;
    let (targets, unmatched) = resolve(words, &devices, order);
    let mut failed = !unmatched.is_empty();
    for word in unmatched {
        error::tell(&Fault::failed(Errno::ENODEV, format!("{word}: no device matches")).into());
    }
    let mut done = Done { devices: Vec::new() };
    let asker = long.map(|long| Asker::new(long, common)).transpose()?;
    for Target { name, by_pattern } in targets {
        let params = params(&name);
        let answer = if let Some(asker) = &asker {
            asker.ask::<V>(&mut client, &params)
        } else {
            let request = serde_json::to_value(&params).context("cannot write the request")?;
            client.call(V::METHOD, &request)
        };
        match answer {
            Ok(answer) if common.json => done.devices.push(answer),
            Ok(answer) => match long {
                Some(long) => long.show::<V>(&params, &answer, common)?,
                None => print::<V>(&params, &answer, &mut io::stdout().lock())?,
            },
            Err(error) => match error.downcast_ref::<Fault>() {
                // It went by itself since it was listed.
                Some(fault) if by_pattern && fault.is(Errno::ENODEV) => {}
                Some(_) => {
                    failed = true;
                    error::tell(&error);
                }
                None => return Err(error),
            },
        }
    }
    if common.json {
        let json = serde_json::to_string(&done).context("cannot write the answer")?;
        print_json(&json)?;
    }
    Ok(if failed { ExitCode::from(error::STATUS_FAILURE) } else { ExitCode::SUCCESS })
}

#[derive(Debug, PartialEq, Eq)]
struct Target {
    name: String,
    by_pattern: bool,
}

/// The devices that are meant, each once, and patterns that match none. A device whose very name a
/// word is comes before what the word could match.
fn resolve<'a>(words: &'a [String], devices: &[Row], order: Order) -> (Vec<Target>, Vec<&'a str>) {
    let places: HashMap<&str, usize> =
        devices.iter().enumerate().map(|(place, row)| (row.name.as_str(), place)).collect();
    let (mut targets, mut unmatched, mut known) = (Vec::new(), Vec::new(), HashSet::new());
    let mut add = |name: &str, by_pattern| {
        if known.insert(name.to_owned()) {
            targets.push(Target { name: name.to_owned(), by_pattern });
        }
    };
    for word in words {
        if !Pattern::is_meant(word) || places.contains_key(word.as_str()) {
            add(word, false);
            continue;
        }
        let pattern = Pattern::new(word);
        let own = |row: &&Row| order == Order::Named || row.template.is_none();
        let mut any = false;
        for row in devices.iter().filter(own).filter(|row| pattern.matches(&row.name)) {
            any = true;
            add(&row.name, true);
        }
        if !any {
            unmatched.push(word.as_str());
        }
    }
    if order == Order::LastFirst {
        targets.sort_by_key(|target| std::cmp::Reverse(places.get(target.name.as_str()).copied()));
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
    fn words_are_devices_each_once_and_in_order() {
        let named = |words: &[&str]| names(words, Order::Named).0.join(" ");
        assert_eq!(named(&["b", "a*", "a1"]), "b a1 a2 a?");
        // A name that looks like a pattern is a name.
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
