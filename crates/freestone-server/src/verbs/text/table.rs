//! Output of text tables.

use std::io::{self, Write};

use unicode_width::UnicodeWidthStr as _;

/// Writes a table, with a space between columns. Columns in `texts` are aligned to the left, other columns (numbers) to
/// the right. No crate is used: those that were tried took ten times as long for tens of thousands of rows.
pub fn write_table<const N: usize>(
    titles: [&str; N],
    texts: &[&str],
    rows: &[[String; N]],
    out: &mut dyn Write,
) -> io::Result<()> {
    // Fast path: nearly all cells are ASCII, whose width is their length.
    let width = |cell: &str| if cell.is_ascii() { cell.len() } else { cell.width() };
    let titles_row = titles.map(str::to_owned);
    let all = || std::iter::once(&titles_row).chain(rows);
    let mut widths = [0; N];
    for (cell, at) in all().flat_map(|row| row.iter().zip(0..)) {
        widths[at] = width(cell).max(widths[at]);
    }
    let blanks = " ".repeat(widths.into_iter().max().unwrap_or_default());
    let mut text = String::new();
    for row in all() {
        let start = text.len();
        for ((cell, most), title) in row.iter().zip(widths).zip(titles) {
            let blanks = &blanks[..most - width(cell)];
            if texts.contains(&title) {
                text.extend([cell, blanks]);
            } else {
                text.extend([blanks, cell]);
            }
            text.push(' ');
        }
        text.truncate(start + text[start..].trim_end().len());
        text.push('\n');
    }
    out.write_all(text.as_bytes())
}
