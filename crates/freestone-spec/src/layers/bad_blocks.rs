//! Setup and attributes of the bad-block layer of a test drive.

use std::sync::Arc;

use freestone::device::Device;
use freestone::null::{BadBlocks, BadBlocksConfig};

use crate::keys::SECTOR_BYTES;
use crate::refusal::Refusal;

/// Adds the bad-block layer to `device`. `changes`, such as `+8-15`, are applied to the empty list
/// of bad blocks.
pub(super) fn add_layer(
    device: Arc<dyn Device>,
    config: BadBlocksConfig,
    changes: &[String],
) -> Result<BadBlocks, Refusal> {
    let bad = BadBlocks::new(device, config);
    bad.change_all(changes).map_err(|e| refusal!(EINVAL, "{e}"))?;
    Ok(bad)
}

/// Parses changes of the list of bad blocks: `+8-15` or `-8-15` in sectors, separated by `;` or
/// blanks.
pub(crate) fn parse_badblocks(text: &str) -> Result<Vec<String>, String> {
    let words = text.split([';', ' ']).filter(|word| !word.is_empty()).map(str::to_owned);
    let words: Vec<_> = words.collect();
    let good = |word: &String| {
        let range = word.strip_prefix(['+', '-']).and_then(|range| range.split_once('-'));
        let sectors = range.and_then(|(a, b)| Some((a.parse::<u64>().ok()?, b.parse::<u64>().ok()?)));
        sectors.is_some_and(|(a, b)| a <= b)
    };
    if words.is_empty() || !words.iter().all(good) {
        return Err(format!(
            "must be +FIRST-LAST (bad) or -FIRST-LAST (good again) in {SECTOR_BYTES}-byte sectors, as in +8-15, with ; \
             between several"
        ));
    }
    Ok(words)
}

/// Returns the list of bad sectors in the form that can be set: `+FIRST-LAST`, separated by `;`, or
/// `none`.
pub(crate) fn bad_ranges(bad: &BadBlocks) -> String {
    let all = bad.ranges();
    let text = all.iter().map(|(first, last)| format!("+{first}-{last}")).collect::<Vec<_>>();
    if text.is_empty() { "none".to_owned() } else { text.join(";") }
}
