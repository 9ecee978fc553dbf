//! The lines that `top` draws on a terminal.

use std::io::{self, Write};

use crossterm::cursor::MoveTo;
use crossterm::queue;
use crossterm::style::{Attribute, Print, SetAttribute};
use crossterm::terminal::{BeginSynchronizedUpdate, Clear, ClearType, EndSynchronizedUpdate};
use freestone_server::verbs::status::top::{Reply, Sorted, headline, write_devices};
use unicode_width::UnicodeWidthChar as _;

/// Number of lines that do not show a device: two at the top, the titles, the sum of all devices, the keys.
pub const OTHER_LINES: u16 = 5;

/// Draws a result, or that none was received yet (`reply` is None). `error` is the reason why the server does
/// not respond any more.
pub fn draw(
    out: &mut impl Write,
    (width, height): (u16, u16),
    reply: Option<&Reply>,
    by: Sorted,
    error: Option<&str>,
) -> io::Result<()> {
    queue!(out, BeginSynchronizedUpdate)?;
    for (y, (attribute, line)) in (0..height).zip(lines(height, reply, by, error)?) {
        queue!(out, MoveTo(0, y), Clear(ClearType::UntilNewLine))?;
        queue!(out, SetAttribute(attribute), Print(cut(&line, width)), SetAttribute(Attribute::Reset))?;
    }
    queue!(out, EndSynchronizedUpdate)?;
    out.flush()
}

/// Returns `height` lines: the state of the server, the table of devices cut to the height, and the keys.
fn lines(
    height: u16,
    reply: Option<&Reply>,
    by: Sorted,
    error: Option<&str>,
) -> io::Result<Vec<(Attribute, String)>> {
    let head = reply.map_or_else(|| "freestone: waiting for the server".to_owned(), headline);
    let mut lines = vec![(Attribute::Reset, head), (Attribute::Bold, error.unwrap_or_default().to_owned())];
    if let Some(reply) = reply {
        let mut table = Vec::new();
        write_devices(reply, &mut table)?;
        let attributes = std::iter::once(Attribute::Reverse).chain(std::iter::repeat(Attribute::Reset));
        lines.extend(attributes.zip(String::from_utf8_lossy(&table).lines().map(str::to_owned)));
    }
    let sorted = match by {
        Sorted::Requests => "requests",
        Sorted::Bytes => "bytes",
        Sorted::Latency => "latency",
    };
    let keys = format!("by {sorted}; r, b, l: by requests, bytes, latency; q: end");
    let above = usize::from(height).saturating_sub(1);
    lines.resize(above, (Attribute::Reset, String::new()));
    lines.push((Attribute::Dim, keys));
    Ok(lines)
}

/// Returns the start of a line that fits into `columns` terminal columns. Control characters are omitted.
fn cut(line: &str, columns: u16) -> String {
    let mut left = usize::from(columns);
    let fits = |&(_, width): &(char, usize)| {
        let fits = width <= left;
        left = left.saturating_sub(width);
        fits
    };
    line.chars().filter_map(|c| Some((c, c.width()?))).take_while(fits).map(|(c, _)| c).collect()
}

#[cfg(test)]
mod tests {
    use freestone_server::verbs::status::top::TITLES;
    use serde_json::json;

    use super::*;

    fn shown(width: u16, height: u16, reply: Option<&Reply>, error: Option<&str>) -> Vec<String> {
        let lines = lines(height, reply, Sorted::Bytes, error).unwrap();
        lines.into_iter().map(|(_, line)| cut(&line, width)).collect()
    }

    fn reply(devices: usize) -> Reply {
        let row = |name: &str| {
            json!({
                "name": name, "kind": "fork", "base": "golden", "reads_per_second": 1234.5,
                "writes_per_second": 0.5, "others_per_second": 0.0, "read_bytes_per_second": 1_048_576.0,
                "written_bytes_per_second": 0.0, "errors_per_second": 0.0, "in_flight": 3,
                "p50_ns": 2560, "p99_ns": 3_145_728,
            })
        };
        let rows: Vec<_> = (0..devices).map(|n| row(&format!("job-{n}"))).collect();
        let server = json!({
            "version": "1.2.3", "devices": 20_001, "forks": 20_000, "connections": 7,
            "process_rss_bytes": 3 << 20,
        });
        let reply = json!({ "seconds": 1.0, "server": server, "total": row(""), "devices": rows });
        serde_json::from_value(reply).unwrap()
    }

    #[test]
    fn lines_show_server_sum_and_devices() {
        let lines = shown(120, 8, Some(&reply(2)), None);
        let head = "freestone 1.2.3: devices 20001, forks 20000, NBD connections 7, memory 3M; in 1.0 s:";
        assert_eq!((lines[0].as_str(), lines[1].as_str()), (head, ""));
        let words = |line: usize| lines[line].split_whitespace().collect::<Vec<_>>();
        assert_eq!(words(2), TITLES);
        let numbers = ["fork", "golden", "1234", "0.5", "0", "1M", "0B", "0", "3", "2.6us", "3.1ms"];
        assert_eq!(words(3)[1..], numbers, "{}", lines[3]);
        assert_eq!((words(3)[0], words(4)[0], words(5)[0]), ("(all)", "job-0", "job-1"));
        assert_eq!(lines[7], "by bytes; r, b, l: by requests, bytes, latency; q: end");
    }

    #[test]
    fn draw_fits_into_any_terminal() {
        for (width, height) in [(1, 1), (20, 3), (80, 24), (300, 4)] {
            let mut drawn = Vec::new();
            draw(&mut drawn, (width, height), Some(&reply(50)), Sorted::Bytes, Some("no server")).unwrap();
            let drawn = String::from_utf8(drawn).unwrap();
            let lines = shown(width, height, Some(&reply(50)), Some("no server"));
            assert_eq!(lines.len(), usize::from(height));
            for line in lines {
                assert!(line.len() <= usize::from(width) && drawn.contains(&line), "{line:?} in {drawn:?}");
            }
        }
        let lines = shown(80, 10, None, Some("no answer"));
        assert_eq!(
            (lines[0].as_str(), lines[1].as_str()),
            ("freestone: waiting for the server", "no answer")
        );
        // The number of devices is limited to those that fit.
        let lines = shown(120, 10, Some(&reply(50)), None);
        assert_eq!(
            lines.iter().filter(|line| line.starts_with("job-")).count(),
            usize::from(10 - OTHER_LINES)
        );
    }

    #[test]
    fn cut_counts_terminal_columns() {
        assert_eq!(cut("äöü", 2), "äö");
        assert_eq!(cut("日本", 3), "日");
        assert_eq!(cut("a\x1b[2Jb\n", 10), "a[2Jb");
        assert_eq!(cut("日a", 1), "");
    }
}
