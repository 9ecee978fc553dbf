//! The `[[device]]` tables of a configuration file, with their exports.

use std::ops::Range;

use freestone_spec::aliases;
use freestone_spec::entries::{Entries, SpecError, nearest};
use freestone_spec::kinds::registry::MAX_DEVICES;
use freestone_spec::layers::NUMBER;
use freestone_spec::limits::{self, LimitWords};
use freestone_spec::numbers::integer;
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use super::{KeyError, Lines, error_at_key, string_list};

/// Keys of an export, in addition to those of its limits.
const EXPORT_KEYS: [&str; 6] = ["nbd", "vhost_user", "ublk", "queues", "read_only", "allow"];

/// A `[[device]]` table of the file, which specifies `count` devices.
#[derive(Debug, PartialEq)]
pub struct DeviceWords {
    /// Name, kind and keys of the device.
    pub entries: Entries,
    /// Exports of the device, in addition to those on the addresses of the server.
    pub exports: Vec<ExportWords>,
    /// Number of devices. `%n` in a text is replaced by the number of each device. `None` specifies
    /// one device, without a number.
    count: Option<usize>,
    /// Line number in the file of `[[device]]`.
    line: usize,
    /// Line number of each key.
    key_lines: Vec<(String, usize)>,
}

/// Export of a device, not checked yet. Exactly one of `nbd`, `vhost_user` and `ublk` is set.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ExportWords {
    /// NBD address of the export.
    pub nbd: Option<String>,
    /// Address of a vhost-user socket, `unix:PATH`.
    pub vhost_user: Option<String>,
    /// True if the export is a ublk block device of this machine.
    pub ublk: bool,
    /// Number of queues of the ublk block device, or `None` for the default.
    pub queues: Option<u16>,
    /// True if the export is read-only.
    pub read_only: bool,
    /// Clients that may connect to the export. `None` allows every client.
    pub allow: Option<Vec<String>>,
    /// I/O and connection limits of the export.
    pub limits: LimitWords,
    /// Line number of the export in the file.
    pub line: usize,
}

impl DeviceWords {
    /// Returns the line number of `[[device]]` in the file.
    pub fn line(&self) -> usize {
        self.line
    }

    /// Returns the line number of the key that `error` names, or that of `[[device]]` if it names
    /// none.
    pub fn line_of(&self, error: &SpecError) -> usize {
        let line_of_key = |key| self.key_lines.iter().find(|(known, _)| known == key);
        error.key().and_then(line_of_key).map_or(self.line, |(_, line)| *line)
    }

    /// Returns all `count` devices and their exports, with `%n` replaced by the number of each
    /// device.
    pub fn expand(&self) -> Vec<(Entries, Vec<ExportWords>)> {
        let Some(count) = self.count else { return vec![(self.entries.clone(), self.exports.clone())] };
        let numbered = |number: usize| {
            let at = |text: &str| text.replace(NUMBER, &number.to_string());
            let mut entries = self.entries.clone();
            let name = &self.entries.name;
            entries.name = if name.contains(NUMBER) { at(name) } else { format!("{name}-{number}") };
            entries.pairs.iter_mut().for_each(|(_, value)| *value = at(value));
            let mut exports = self.exports.clone();
            for export in &mut exports {
                export.nbd = export.nbd.as_deref().map(at);
                export.vhost_user = export.vhost_user.as_deref().map(at);
            }
            (entries, exports)
        };
        (0..count).map(numbered).collect()
    }
}

/// Parses a `[[device]]` table. `span` is its position in the text.
pub(super) fn device(
    lines: &Lines<'_>,
    number: usize,
    mut table: DeTable<'_>,
    span: &Range<usize>,
) -> Result<DeviceWords, KeyError> {
    let at = |(key, _): (&Spanned<DeString<'_>>, _)| {
        (aliases::canonical_device_key(key.get_ref()).to_owned(), lines.number(&key.span()))
    };
    let key_lines = table.iter().map(at).collect();
    let mut text = |key: &str| match table.remove(key).map(|value| (value.span(), value.into_inner())) {
        Some((_, DeValue::String(text))) => Ok(text.into_owned()),
        Some((span, _)) => Err((Some(span), format!("device {number}: {key}: must be a text"))),
        None => error_at_key(format!("device {number}: {key} is missing")),
    };
    let entries = Entries::new(&text("name")?, &text("kind")?).map_err(|e| (None, e.to_string()))?;
    let line = lines.number(span);
    let mut device = DeviceWords { entries, exports: Vec::new(), count: None, line, key_lines };
    for (key, value) in table {
        let span = key.span();
        device
            .take(lines, key.get_ref(), value.into_inner())
            .map_err(|(span_of_error, why)| (span_of_error.or(Some(span)), why))?;
    }
    if device.entries.name.contains(NUMBER) && device.count.is_none() {
        return error_at_key(format!("{}: {NUMBER} is for count", device.entries.name));
    }
    Ok(device)
}

impl DeviceWords {
    fn take(&mut self, lines: &Lines<'_>, key: &DeString<'_>, value: DeValue<'_>) -> Result<(), KeyError> {
        let name = self.entries.name.clone();
        let value = match (key.as_ref(), value) {
            ("count", value) => {
                let number = integer(&value).and_then(|number| usize::try_from(number).ok());
                let Some(count @ 1..=MAX_DEVICES) = number else {
                    return error_at_key(format!("{name}: count: must be a number from 1 to {MAX_DEVICES}"));
                };
                self.count = Some(count);
                return Ok(());
            }
            ("export", DeValue::Table(table)) => return self.export(lines, table, None),
            ("export", DeValue::Array(list)) => {
                for entry in list {
                    let span = entry.span();
                    let DeValue::Table(table) = entry.into_inner() else {
                        return Err((Some(span), format!("{name}: {EXPORT_FORM}")));
                    };
                    self.export(lines, table, Some(span))?;
                }
                return Ok(());
            }
            ("export", _) => return error_at_key(format!("{name}: {EXPORT_FORM}")),
            (_, DeValue::String(text)) => text.into_owned(),
            (_, DeValue::Boolean(yes)) => if yes { "yes" } else { "no" }.into(),
            // If the key needs a size with a unit, the number is refused later, with the same
            // message as on the command line.
            (key, value @ DeValue::Integer(_)) => match integer(&value) {
                Some(number) => number.to_string(),
                None => return error_at_key(format!("{name}: {key}: the number is too large")),
            },
            (key, other) => {
                let is = other.type_str();
                return error_at_key(format!(
                    "{name}: {key}: must be a text, a number or a boolean, not {is}"
                ));
            }
        };
        self.entries.add_with_warning(key, &value).map_err(|e| (None, e.to_string()))
    }

    fn export(
        &mut self,
        lines: &Lines<'_>,
        table: DeTable<'_>,
        span: Option<Range<usize>>,
    ) -> Result<(), KeyError> {
        let name = &self.entries.name;
        let mut export = ExportWords {
            line: span.as_ref().map_or(self.line, |span| lines.number(span)),
            ..ExportWords::default()
        };
        for (key, value) in table {
            let at = Some(key.span());
            let value = value.into_inner();
            match (key.get_ref().as_ref(), &value) {
                ("nbd", DeValue::String(address)) => export.nbd = Some(address.to_string()),
                ("vhost_user", DeValue::String(address)) => export.vhost_user = Some(address.to_string()),
                ("ublk", DeValue::Boolean(yes)) => export.ublk = *yes,
                ("read_only", DeValue::Boolean(yes)) => export.read_only = *yes,
                ("allow", value) => {
                    let list = string_list("allow", value);
                    export.allow = Some(list.map_err(|why| (at, format!("{name}: export: {why}")))?);
                }
                ("queues", _) => match integer(&value).and_then(|number| u16::try_from(number).ok()) {
                    Some(queues) => export.queues = Some(queues),
                    None => return Err((at, format!("{name}: export: queues: must be a number"))),
                },
                (key @ ("nbd" | "vhost_user"), _) => {
                    return Err((at, format!("{name}: export: {key}: must be an address as a text")));
                }
                (key @ ("ublk" | "read_only"), _) => {
                    return Err((at, format!("{name}: export: {key}: must be true or false")));
                }
                (key, value) if limits::KEYS.contains(&key) => {
                    let taken = limits::take_toml(&mut export.limits, key, value);
                    taken.map_err(|why| (at, format!("{name}: export: {why}")))?;
                }
                (other, _) => {
                    let keys = [&EXPORT_KEYS[..], &limits::KEYS].concat();
                    let hint = nearest(other, &keys).map(|h| format!("; {h}?")).unwrap_or_default();
                    let keys = keys.join(", ");
                    return Err((
                        at,
                        format!("{name}: export: unknown key {other:?}{hint}; the keys are {keys}"),
                    ));
                }
            }
        }
        let places = [export.nbd.is_some(), export.vhost_user.is_some(), export.ublk];
        if places.iter().filter(|place| **place).count() != 1 {
            return Err((span, format!("{name}: {EXPORT_FORM}")));
        }
        if export.allow.is_some() && export.ublk {
            return Err((span, format!("{name}: export: allow: not with ublk")));
        }
        if export.queues.is_some() && !export.ublk {
            return Err((span, format!("{name}: export: queues: only with ublk")));
        }
        self.exports.push(export);
        Ok(())
    }
}

const EXPORT_FORM: &str =
    "export: write { nbd = ADDRESS }, { vhost_user = 'unix:PATH' } or { ublk = true }, and a list of several";
