//! Compares the results of the kernel with those of this crate. [`DIFFERENCES`] lists the intended
//! differences with their reasons. A difference outside the list is a failure, and so is a listed difference
//! that did not occur.

use std::collections::BTreeMap;

use crate::ours::Result;
use crate::scenes;
use crate::script::{Config, SECTOR_BYTES, UNTOUCHED, sum};

/// A result line of the kernel and the line of this crate, with the script line that produced both.
struct ResultPair<'a> {
    device: &'a Config,
    /// Text of the `#` comment in the script line above, which names an expected difference.
    note: Option<&'a str>,
    words: Vec<&'a str>,
    kernel: &'a str,
    ours: &'a str,
}

struct Difference {
    name: &'static str,
    reason: &'static str,
    matches: fn(&ResultPair<'_>) -> bool,
}

/// Returns the kernel's default limit of a `null_blk` request in bytes: 255 sectors, rounded down to whole
/// blocks.
fn request_max_bytes(device: &Config) -> u64 {
    255 * SECTOR_BYTES / u64::from(device.blocksize) * u64::from(device.blocksize)
}

const DIFFERENCES: [Difference; 17] = [
    Difference {
        name: "blocks above 4096 bytes",
        reason: "blocks of this crate's devices have 512 to 4096 bytes",
        matches: |pair| pair.verb() == "device" && pair.device.blocksize > 4096 && pair.ours == "EINVAL",
    },
    Difference {
        name: "append limit",
        reason: "the kernel reduces it to the largest request of the queue, which is unlimited in ours",
        matches: |pair| {
            let most = |answer: &str| answer.strip_prefix("zone_append_max_bytes ")?.parse::<u64>().ok();
            let (Some(kernel), Some(ours)) = (most(pair.kernel), most(pair.ours)) else { return false };
            kernel == request_max_bytes(pair.device) && ours > kernel
        },
    },
    Difference {
        name: "no append",
        reason: "with a limit of 0 the kernel's block layer converts appends to writes, and reports the largest request; ours refuses appends",
        matches: |pair| {
            let kernel = format!("zone_append_max_bytes {}", request_max_bytes(pair.device));
            let block = u64::from(pair.device.blocksize);
            let unusable =
                pair.device.zone_append_max_sectors.is_some_and(|most| most * SECTOR_BYTES < block);
            unusable && pair.answers(&kernel, "zone_append_max_bytes 0")
        },
    },
    Difference {
        name: "beyond the device",
        reason: "the kernel's block layer returns short reads, and ENOSPC for writes, like a file; ours returns EINVAL",
        matches: |pair| {
            let kernel = match pair.verb() {
                "read" => pair.kernel.starts_with("short "),
                "write" => pair.kernel == "ENOSPC",
                _ => false,
            };
            kernel && pair.beyond() && pair.ours == "EINVAL"
        },
    },
    Difference {
        name: "report beyond the device",
        reason: "the kernel reports no zones; ours returns EINVAL",
        matches: |pair| {
            pair.verb() == "report"
                && pair.number(1) >= pair.device.size << 20
                && pair.answers("ok", "EINVAL")
        },
    },
    Difference {
        name: "write pointer without meaning",
        reason: "null_blk gives read-only and offline zones the pointer 2^64-1; ours reports their end",
        matches: |pair| {
            let (kernel, ours): (Vec<_>, Vec<_>) =
                (pair.kernel.split(' ').collect(), pair.ours.split(' ').collect());
            let &[_, start, len, pointer, _, _, "13" | "15"] = kernel.as_slice() else { return false };
            let none =
                start.parse().is_ok_and(|start: u64| pointer == u64::MAX.wrapping_sub(start).to_string());
            let mut wanted = kernel.clone();
            wanted[3] = len;
            none && ours == wanted
        },
    },
    Difference {
        name: "reads without backing",
        reason: "null_blk leaves the buffer unchanged; ours returns zeroes, so that no old memory is visible",
        matches: |pair| {
            let sum = |byte| format!("ok {:016x}", sum(&vec![byte; pair.number(2) as usize]));
            pair.verb() == "read" && !pair.device.memory_backed && pair.answers(&sum(UNTOUCHED), &sum(0))
        },
    },
    Difference {
        name: "unsupported discards",
        reason: "the kernel returns EOPNOTSUPP; ours returns ok, because a discard is a hint, and a granularity of 0 means that it frees nothing",
        matches: |pair| pair.verb() == "discard" && pair.answers("EOPNOTSUPP", "ok"),
    },
    Difference {
        name: "writes into the next zone",
        reason: "the kernel's block layer splits them and executes the valid part; ours returns EIO and writes nothing",
        matches: |pair| pair.note == Some(scenes::CROSSING),
    },
    Difference {
        name: "first write that failed",
        reason: "null_blk leaves the empty zone open, so a close succeeds; ours leaves it empty, so a close fails with EIO",
        matches: |pair| pair.note == Some(FIRST_WRITE_FAILED) && pair.answers("ok", "EIO"),
    },
    Difference {
        name: "bad blocks beyond the device",
        reason: "null_blk accepts them; ours refuses them, because no request can reach them",
        matches: |pair| {
            let last = pair.words.get(1).and_then(|change| change.rsplit('-').next()?.parse::<u64>().ok());
            let beyond = last.is_some_and(|last| last >= (pair.device.size << 20) / SECTOR_BYTES);
            pair.verb() == "badblocks" && beyond && pair.answers("ok", "EINVAL")
        },
    },
    Difference {
        name: "bad blocks in other notations",
        reason: "null_blk accepts 0x10 and 010; ours accepts decimal numbers only",
        matches: |pair| {
            let hex = pair.words.get(1).is_some_and(|change| change.contains("0x"));
            pair.verb() == "badblocks" && hex && pair.answers("ok", "EINVAL")
        },
    },
    Difference {
        name: "zones closed for one that becomes read-only or offline",
        reason: "null_blk finishes the zone first, which needs an open zone, so it closes another one; ours needs none",
        matches: |pair| {
            pair.note == Some(scenes::VICTIM)
                && pair.answers("zone 0 2048 8 2048 2 4", "zone 0 2048 8 2048 2 2")
        },
    },
    Difference {
        name: "resources of zones that become read-only or offline",
        reason: "if finishing fails, null_blk counts a closed zone as active for ever; ours releases it",
        matches: |pair| pair.note == Some(scenes::LEAK) && pair.answers("EOVERFLOW", "ok"),
    },
    Difference {
        name: "long runs of bad blocks",
        reason: "null_blk has entries of up to 512 sectors, of which a failed request clears one with badblocks_once; ours clears the run",
        matches: |pair| pair.note == Some(scenes::LONG_RUNS),
    },
    Difference {
        name: "overwrites and power",
        reason: "null_blk's cache holds only writes to new pages, so overwrites survive; ours holds all writes",
        matches: |pair| pair.note == Some(scenes::OVERWRITE),
    },
    Difference {
        name: "discards and power",
        reason: "null_blk's cache does not hold discards; ours can lose them like any unflushed write",
        matches: |pair| pair.note == Some(scenes::KEPT_DISCARD),
    },
];

/// Script comment above a line that closes a zone after the zone's first write failed.
pub const FIRST_WRITE_FAILED: &str = "a first write that failed";

impl ResultPair<'_> {
    fn verb(&self) -> &str {
        self.words.first().copied().unwrap_or_default()
    }

    fn number(&self, place: usize) -> u64 {
        self.words.get(place).and_then(|word| word.parse().ok()).unwrap_or(0)
    }

    fn answers(&self, kernel: &str, ours: &str) -> bool {
        self.kernel == kernel && self.ours == ours
    }

    /// Returns true if the range of the request (second and third word of the line) ends beyond the device.
    fn beyond(&self) -> bool {
        self.number(1) + self.number(2) > self.device.size << 20
    }
}

/// A line of the script and the result lines that follow it in one side's output.
struct Block<'a> {
    line: &'a str,
    answers: Vec<&'a str>,
}

fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    for line in text.lines() {
        match (line.strip_prefix("> "), blocks.last_mut()) {
            (Some(line), _) => blocks.push(Block { line, answers: Vec::new() }),
            (None, Some(block)) => block.answers.push(line),
            (None, None) => {}
        }
    }
    blocks
}

/// Compares both outputs and prints a summary. Returns true if all differences are intended and each listed
/// one occurred.
pub fn compare(script: &str, kernel: &str, ours: &str) -> Result<bool> {
    let (kernel, ours) = (blocks(kernel), blocks(ours));
    let lines: Vec<_> = script.lines().collect();
    for (side, blocks) in [("the kernel", &kernel), ("ours", &ours)] {
        if blocks.len() != lines.len() || blocks.iter().zip(&lines).any(|(block, line)| block.line != *line) {
            return Err(format!("{side} does not have a result for each line of the script").into());
        }
    }
    let (mut device, mut note) = (Config::default(), None);
    let (mut answers, mut failures) = (0, 0);
    let mut counts = [0_u64; DIFFERENCES.len()];
    let mut outcomes = BTreeMap::<_, u64>::new();
    for (number, (kernel, ours)) in (1..).zip(kernel.iter().zip(&ours)) {
        if let Some(attributes) = kernel.line.strip_prefix("device ") {
            device = attributes.parse()?;
        }
        if let Some(comment) = kernel.line.strip_prefix("# ") {
            note = Some(comment);
            continue;
        }
        let note = note.take();
        let words: Vec<_> = kernel.line.split_whitespace().collect();
        // The status is the first word of the last result line. A `device` line has its status in the first
        // result line, because limits follow it.
        let status =
            if words.first() == Some(&"device") { kernel.answers.first() } else { kernel.answers.last() };
        let status = status.and_then(|answer| answer.split_whitespace().next());
        *outcomes
            .entry((words.first().copied().unwrap_or_default(), status.unwrap_or("nothing")))
            .or_default() += 1;
        let all = (kernel.answers.join(" | "), ours.answers.join(" | "));
        let same_shape = kernel.answers.len() == ours.answers.len();
        let pairs: Vec<_> = if same_shape {
            kernel.answers.iter().copied().zip(ours.answers.iter().copied()).collect()
        } else {
            vec![(all.0.as_str(), all.1.as_str())]
        };
        answers += pairs.len();
        for (kernel_line, our_line) in pairs {
            if kernel_line == our_line {
                continue;
            }
            let pair = ResultPair {
                device: &device,
                note,
                words: words.clone(),
                kernel: kernel_line,
                ours: our_line,
            };
            if let Some(found) = DIFFERENCES.iter().position(|difference| (difference.matches)(&pair)) {
                counts[found] += 1;
                continue;
            }
            failures += 1;
            if failures <= SHOWN_MAX {
                println!("FAIL line {number}: {}", kernel.line);
                println!("     kernel: {}\n     ours:   {}", all.0, all.1);
            }
        }
    }
    println!("{} lines, {answers} results compared; results of the kernel:", lines.len());
    for ((verb, answer), count) in outcomes {
        println!("  {count:>6} {verb} {answer}");
    }
    println!("intended differences:");
    for (Difference { name, reason, .. }, count) in DIFFERENCES.iter().zip(counts) {
        println!("  {count:>6} {name}: {reason}");
        if count == 0 {
            println!("FAIL this difference did not occur: the list is wrong, or the script too short");
            failures += 1;
        }
    }
    println!("{failures} failures");
    Ok(failures == 0)
}

/// Maximum number of failures that are printed in full. Further failures are only counted.
const SHOWN_MAX: u64 = 40;
