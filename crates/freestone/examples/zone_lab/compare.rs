//! Compares two sets of answers. What differs on purpose is listed in [`DIFFERENCES`], with its
//! reason; a difference that is not in the list is a failure, and so is one in the list that did
//! not show.

use std::collections::BTreeMap;

use crate::ours::Result;
use crate::scenes;
use crate::script::{Config, SECTOR_BYTES, UNTOUCHED, sum};

/// What both were told, and an answer (a line of it) of each.
struct Seen<'a> {
    device: &'a Config,
    /// The comment above the line.
    note: Option<&'a str>,
    words: Vec<&'a str>,
    kernel: &'a str,
    ours: &'a str,
}

struct Difference {
    name: &'static str,
    reason: &'static str,
    is_this: fn(&Seen<'_>) -> bool,
}

/// What the kernel sends to `null_blk` at once where nothing else is said: 255 sectors, in whole
/// blocks.
fn request_max_bytes(device: &Config) -> u64 {
    255 * SECTOR_BYTES / u64::from(device.blocksize) * u64::from(device.blocksize)
}

const DIFFERENCES: [Difference; 17] = [
    Difference {
        name: "blocks above 4096 bytes",
        reason: "ours are 512 to 4096 bytes, as the contract of a device has it",
        is_this: |seen| seen.verb() == "device" && seen.device.blocksize > 4096 && seen.ours == "EINVAL",
    },
    Difference {
        name: "append limit",
        reason: "the kernel cuts it down to the largest request of the queue; ours have none",
        is_this: |seen| {
            let most = |answer: &str| answer.strip_prefix("zone_append_max_bytes ")?.parse::<u64>().ok();
            let (Some(kernel), Some(ours)) = (most(seen.kernel), most(seen.ours)) else { return false };
            kernel == request_max_bytes(seen.device) && ours > kernel
        },
    },
    Difference {
        name: "no append",
        reason: "with a limit of 0 the kernel's block layer makes writes of appends, and shows the largest request; ours refuses them",
        is_this: |seen| {
            let kernel = format!("zone_append_max_bytes {}", request_max_bytes(seen.device));
            let block = u64::from(seen.device.blocksize);
            let unusable =
                seen.device.zone_append_max_sectors.is_some_and(|most| most * SECTOR_BYTES < block);
            unusable && seen.answers(&kernel, "zone_append_max_bytes 0")
        },
    },
    Difference {
        name: "beyond the device",
        reason: "the kernel's block layer answers reads short and writes ENOSPC, as a file's; ours: EINVAL, the request is wrong",
        is_this: |seen| {
            let kernel = match seen.verb() {
                "read" => seen.kernel.starts_with("short "),
                "write" => seen.kernel == "ENOSPC",
                _ => false,
            };
            kernel && seen.beyond() && seen.ours == "EINVAL"
        },
    },
    Difference {
        name: "report beyond the device",
        reason: "the kernel reports no zones; ours: EINVAL",
        is_this: |seen| {
            seen.verb() == "report"
                && seen.number(1) >= seen.device.size << 20
                && seen.answers("ok", "EINVAL")
        },
    },
    Difference {
        name: "write pointer that is none",
        reason: "null_blk gives read-only and offline zones the pointer 2^64-1; ours: their end, as the contract says",
        is_this: |seen| {
            let (kernel, ours): (Vec<_>, Vec<_>) =
                (seen.kernel.split(' ').collect(), seen.ours.split(' ').collect());
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
        reason: "null_blk leaves the reader's memory as it is; ours are zeroes, and nobody sees what was there before",
        is_this: |seen| {
            let sum = |byte| format!("ok {:016x}", sum(&vec![byte; seen.number(2) as usize]));
            seen.verb() == "read" && !seen.device.memory_backed && seen.answers(&sum(UNTOUCHED), &sum(0))
        },
    },
    Difference {
        name: "discards that are not offered",
        reason: "the kernel answers EOPNOTSUPP; ours: ok, for a discard is a hint, and granularity 0 says that it frees nothing",
        is_this: |seen| seen.verb() == "discard" && seen.answers("EOPNOTSUPP", "ok"),
    },
    Difference {
        name: "writes into the next zone",
        reason: "the kernel's block layer cuts them in two and does what can be done; ours: EIO, and nothing is written",
        is_this: |seen| seen.note == Some(scenes::CROSSING),
    },
    Difference {
        name: "first write that failed",
        reason: "null_blk leaves the zone open though it is empty, so that it can be closed; ours is empty again, and that is EIO",
        is_this: |seen| seen.note == Some(FIRST_WRITE_FAILED) && seen.answers("ok", "EIO"),
    },
    Difference {
        name: "bad blocks beyond the device",
        reason: "null_blk takes them; ours: refused, they would never be met",
        is_this: |seen| {
            let last = seen.words.get(1).and_then(|change| change.rsplit('-').next()?.parse::<u64>().ok());
            let beyond = last.is_some_and(|last| last >= (seen.device.size << 20) / SECTOR_BYTES);
            seen.verb() == "badblocks" && beyond && seen.answers("ok", "EINVAL")
        },
    },
    Difference {
        name: "bad blocks in other notations",
        reason: "null_blk takes 0x10 and 010; ours: refused, decimal only",
        is_this: |seen| {
            let hex = seen.words.get(1).is_some_and(|change| change.contains("0x"));
            seen.verb() == "badblocks" && hex && seen.answers("ok", "EINVAL")
        },
    },
    Difference {
        name: "zones closed for one that becomes read-only or offline",
        reason: "null_blk finishes it first, which takes what opening takes, so another is closed; ours takes nothing",
        is_this: |seen| {
            seen.note == Some(scenes::VICTIM)
                && seen.answers("zone 0 2048 8 2048 2 4", "zone 0 2048 8 2048 2 2")
        },
    },
    Difference {
        name: "resources of zones that become read-only or offline",
        reason: "where finishing fails, null_blk counts a closed zone as active for ever; ours gives its resource back",
        is_this: |seen| seen.note == Some(scenes::LEAK) && seen.answers("EOVERFLOW", "ok"),
    },
    Difference {
        name: "long runs of bad blocks",
        reason: "null_blk has entries of up to 512 sectors, of which a failed request clears one with badblocks_once; ours clears the run",
        is_this: |seen| seen.note == Some(scenes::LONG_RUNS),
    },
    Difference {
        name: "overwrites and power",
        reason: "null_blk's cache takes only what has no place in the data yet, and other writes survive; ours holds back all of them",
        is_this: |seen| seen.note == Some(scenes::OVERWRITE),
    },
    Difference {
        name: "discards and power",
        reason: "null_blk's cache does not hold discards back; ours may be lost with the power like any write that was not flushed",
        is_this: |seen| seen.note == Some(scenes::KEPT_DISCARD),
    },
];

/// A comment in scripts: the next line closes a zone after a write that failed.
pub const FIRST_WRITE_FAILED: &str = "a first write that failed";

impl Seen<'_> {
    fn verb(&self) -> &str {
        self.words.first().copied().unwrap_or_default()
    }

    fn number(&self, place: usize) -> u64 {
        self.words.get(place).and_then(|word| word.parse().ok()).unwrap_or(0)
    }

    fn answers(&self, kernel: &str, ours: &str) -> bool {
        self.kernel == kernel && self.ours == ours
    }

    /// The range ends beyond the device.
    fn beyond(&self) -> bool {
        self.number(1) + self.number(2) > self.device.size << 20
    }
}

/// A line of the script with its answers.
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

/// Prints what was found; true where all is as it should be.
pub fn compare(script: &str, kernel: &str, ours: &str) -> Result<bool> {
    let (kernel, ours) = (blocks(kernel), blocks(ours));
    let lines: Vec<_> = script.lines().collect();
    for (who, blocks) in [("the kernel", &kernel), ("ours", &ours)] {
        if blocks.len() != lines.len() || blocks.iter().zip(&lines).any(|(block, line)| block.line != *line) {
            return Err(format!("{who} did not answer each line of the script").into());
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
        // Its word: the last line's, but a device's limits come after it.
        let says =
            if words.first() == Some(&"device") { kernel.answers.first() } else { kernel.answers.last() };
        let says = says.and_then(|answer| answer.split_whitespace().next());
        *outcomes
            .entry((words.first().copied().unwrap_or_default(), says.unwrap_or("nothing")))
            .or_default() += 1;
        let all = (kernel.answers.join(" | "), ours.answers.join(" | "));
        let same_shape = kernel.answers.len() == ours.answers.len();
        let pairs: Vec<_> = if same_shape {
            kernel.answers.iter().copied().zip(ours.answers.iter().copied()).collect()
        } else {
            vec![(all.0.as_str(), all.1.as_str())]
        };
        answers += pairs.len();
        for (kernel_says, ours_says) in pairs {
            if kernel_says == ours_says {
                continue;
            }
            let seen =
                Seen { device: &device, note, words: words.clone(), kernel: kernel_says, ours: ours_says };
            if let Some(found) = DIFFERENCES.iter().position(|difference| (difference.is_this)(&seen)) {
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
    println!("{} lines, {answers} answers compared; what the kernel answered:", lines.len());
    for ((verb, answer), count) in outcomes {
        println!("  {count:>6} {verb} {answer}");
    }
    println!("differences on purpose:");
    for (Difference { name, reason, .. }, count) in DIFFERENCES.iter().zip(counts) {
        println!("  {count:>6} {name}: {reason}");
        if count == 0 {
            println!("FAIL this difference did not show: the list is wrong, or the script too short");
            failures += 1;
        }
    }
    println!("{failures} failures");
    Ok(failures == 0)
}

/// Failures that are shown.
const SHOWN_MAX: u64 = 40;
