//! What `top` looks like in a terminal.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Row as Shown, Table};
use unicode_width::UnicodeWidthStr as _;

use super::{Reply, Sorted, TEXTS, TITLES, cells, headline};

/// Lines that are no devices: two of the head, the titles, the sum, the keys.
pub const OTHER_LINES: u16 = 5;
/// Names are cut beyond.
const TEXT_WIDTH_MAX: usize = 40;

/// Draws an answer, or says that there is none yet; `trouble` is what is wrong with the server.
pub fn draw(frame: &mut Frame<'_>, reply: Option<&Reply>, by: Sorted, trouble: Option<&str>) {
    let [head, second, table, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let text = reply.map_or_else(|| "freestone: the server is asked".to_owned(), headline);
    frame.render_widget(Line::from(text), head);
    if let Some(trouble) = trouble {
        frame.render_widget(Line::styled(trouble, Style::new().add_modifier(Modifier::BOLD)), second);
    }
    if let Some(reply) = reply {
        frame.render_widget(devices(reply), table);
    }
    let sorted = match by {
        Sorted::Requests => "requests",
        Sorted::Bytes => "bytes",
        Sorted::Latency => "latency",
    };
    let text = format!("by {sorted}; r, b, l: by requests, bytes, latency; q: end");
    frame.render_widget(Line::styled(text, Style::new().add_modifier(Modifier::DIM)), keys);
}

fn devices(reply: &Reply) -> Table<'_> {
    let rows: Vec<_> = std::iter::once(&reply.total).chain(&reply.devices).map(cells).collect();
    let width = |column: usize| {
        let widest = rows.iter().map(|row| row[column].width()).max().unwrap_or_default();
        widest.max(TITLES[column].len()).min(TEXT_WIDTH_MAX) as u16
    };
    let widths: Vec<_> = (0..TITLES.len()).map(|column| Constraint::Length(width(column))).collect();
    let cell = |column: usize, text: String| {
        let line = Line::from(text);
        Cell::from(if TEXTS.contains(&TITLES[column]) { line } else { line.right_aligned() })
    };
    let titles = Shown::new(TITLES.iter().zip(0..).map(|(title, at)| cell(at, (*title).to_owned())));
    let shown =
        rows.into_iter().map(|row| Shown::new(row.into_iter().zip(0..).map(|(text, at)| cell(at, text))));
    Table::new(shown, widths).header(titles.style(Style::new().add_modifier(Modifier::REVERSED)))
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::*;

    fn shown(width: u16, height: u16, reply: Option<&Reply>, trouble: Option<&str>) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, reply, Sorted::Bytes, trouble)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y: u16| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| line(y).trim_end().to_owned()).collect()
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
    fn it_shows_the_server_the_sum_and_the_devices() {
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
    fn it_fits_into_any_terminal() {
        for (width, height) in [(1, 1), (20, 3), (80, 24), (300, 4)] {
            let lines = shown(width, height, Some(&reply(50)), Some("no server"));
            assert_eq!(lines.len(), usize::from(height));
        }
        let lines = shown(80, 10, None, Some("no answer"));
        assert_eq!((lines[0].as_str(), lines[1].as_str()), ("freestone: the server is asked", "no answer"));
        // As many as there is room for.
        let lines = shown(120, 10, Some(&reply(50)), None);
        assert_eq!(
            lines.iter().filter(|line| line.starts_with("job-")).count(),
            usize::from(10 - OTHER_LINES)
        );
    }
}
