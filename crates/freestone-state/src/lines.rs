//! Lines of the topology file: encoding, and decoding after any crash.

use std::collections::HashMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::topology::{Device, Topology};

/// Format version that is written. Version 1 had no generations and no withheld devices (content
/// not restored after a crash). Version 2 had no base files. Both are readable without conversion.
pub const VERSION: u32 = 3;
const FORMAT: &str = "freestone state";
/// Length in bytes of the checksum and the space at the start of a line.
const HEAD_BYTES: usize = 17;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum Line {
    /// Format and version, the first line of a file.
    Format { format: String, version: u32 },
    /// Begin of a change; `synced` is the number of bytes that were durable before.
    Begin { begin: u64, synced: u64, verb: String, names: Vec<String> },
    /// Creation or modification of a device by a change.
    Put { put: u64, device: Device },
    /// Removal of a device by a change.
    Gone { gone: u64, name: String },
    /// Commit of a change.
    End { end: u64 },
}

impl Line {
    pub fn first() -> Self {
        Self::Format { format: FORMAT.to_owned(), version: VERSION }
    }

    /// Appends the encoded line with its checksum to `text`.
    pub fn write(&self, text: &mut String) {
        let json = serde_json::to_string(self).expect("strings and numbers are valid JSON");
        let _ = writeln!(text, "{:016x} {json}", xxh3_64(json.as_bytes()));
    }

    pub fn text(lines: &[Self]) -> String {
        let mut text = String::new();
        for line in lines {
            line.write(&mut text);
        }
        text
    }

    fn read(line: &[u8]) -> Option<Self> {
        let (sum, json) = (line.get(..HEAD_BYTES)?, &line[HEAD_BYTES..]);
        let sum = u64::from_str_radix(std::str::from_utf8(sum).ok()?.strip_suffix(' ')?, 16).ok()?;
        if sum == xxh3_64(json) { serde_json::from_slice(json).ok() } else { None }
    }
}

/// Result of reading a topology file.
#[derive(Debug, PartialEq, Eq)]
pub enum ReadResult {
    /// The devices, the number of valid bytes in the file, the uncommitted changes (verb and device
    /// names), and the number of the next change.
    Whole { topology: Topology, bytes: u64, interrupted: Vec<(String, Vec<String>)>, next: u64 },
    /// The file was not written by this program.
    Foreign,
    /// The file has this later format version, which cannot be read.
    Newer(u32),
    /// The line with this number was durable and has changed.
    Damaged(usize),
}

/// A change whose commit line has not been read yet.
struct OpenChange {
    verb: String,
    names: Vec<String>,
    puts: Vec<Device>,
    removed: Vec<String>,
}

/// Decodes the content of a topology file.
pub fn read(file: &[u8]) -> ReadResult {
    let mut at = 0;
    let lines = file.split_inclusive(|byte| *byte == b'\n').map(|line| {
        let begin = at;
        at += line.len();
        (begin, line.strip_suffix(b"\n").and_then(Line::read))
    });
    let lines: Vec<(usize, Option<Line>)> = lines.collect();
    match lines.first() {
        Some((_, Some(Line::Format { format, version }))) if format == FORMAT && *version > VERSION => {
            return ReadResult::Newer(*version);
        }
        Some((_, Some(Line::Format { format, .. }))) if format == FORMAT => {}
        // The file is empty: it was created but never written.
        None => {}
        Some(_) => return ReadResult::Foreign,
    }
    let whole = lines.iter().position(|(_, line)| line.is_none()).unwrap_or(lines.len());
    let end = lines.get(whole).map_or(file.len(), |(begin, _)| *begin);
    let proves_durable = |(_, line): &(usize, Option<Line>)| matches!(line, Some(Line::Begin { synced, .. }) if *synced > end as u64);
    if lines[whole..].iter().any(proves_durable) {
        return ReadResult::Damaged(whole + 1);
    }
    let (mut topology, mut open, mut next) = (Topology::default(), HashMap::<u64, OpenChange>::new(), 1);
    for (number, (_, line)) in lines.into_iter().take(whole).enumerate().skip(1) {
        let Some(line) = line else { break };
        let is_valid = match line {
            Line::Format { .. } => false,
            Line::Begin { begin, verb, names, .. } => {
                next = next.max(begin + 1);
                open.insert(begin, OpenChange { verb, names, puts: Vec::new(), removed: Vec::new() })
                    .is_none()
            }
            Line::Put { put, device } => open.get_mut(&put).map(|open| open.puts.push(device)).is_some(),
            Line::Gone { gone, name } => open.get_mut(&gone).map(|open| open.removed.push(name)).is_some(),
            Line::End { end } => match open.remove(&end) {
                Some(OpenChange { puts, removed, .. }) => {
                    for name in removed {
                        topology.remove(&name);
                    }
                    for device in puts {
                        topology.put(device);
                    }
                    true
                }
                None => false,
            },
        };
        if !is_valid {
            return ReadResult::Damaged(number + 1);
        }
    }
    let mut uncommitted: Vec<_> = open.into_iter().collect();
    uncommitted.sort_unstable_by_key(|(number, _)| *number);
    let interrupted = uncommitted.into_iter().map(|(_, open)| (open.verb, open.names)).collect();
    ReadResult::Whole { topology, bytes: end as u64, interrupted, next }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_round_trip() {
        let begin = Line::Begin { begin: 7, synced: 99, verb: "fork".into(), names: vec!["ä\n".into()] };
        for line in [Line::first(), begin, Line::Gone { gone: 7, name: "x".into() }, Line::End { end: 7 }] {
            let mut text = String::new();
            line.write(&mut text);
            assert_eq!(Line::read(text.strip_suffix('\n').unwrap().as_bytes()), Some(line));
            assert_eq!(text.matches('\n').count(), 1);
            let damaged = text.replace('7', "8");
            if damaged != text {
                assert_eq!(Line::read(damaged.strip_suffix('\n').unwrap().as_bytes()), None);
            }
        }
        assert_eq!(Line::read(b""), None);
    }

    #[test]
    fn foreign_and_newer_files_are_detected() {
        assert_eq!(read(b"[Unit]\n"), ReadResult::Foreign);
        assert_eq!(read(b"\0\0\0\0"), ReadResult::Foreign);
        let mut text = String::new();
        Line::Format { format: FORMAT.into(), version: VERSION + 1 }.write(&mut text);
        assert_eq!(read(text.as_bytes()), ReadResult::Newer(VERSION + 1));
    }

    #[test]
    fn line_without_begin_is_damage() {
        let mut text = String::new();
        Line::first().write(&mut text);
        Line::End { end: 3 }.write(&mut text);
        assert_eq!(read(text.as_bytes()), ReadResult::Damaged(2));
    }
}
