//! Charts of a table as SVG: the gain over the old lock in the published experiment (the source),
//! on this machine and in the model.
//!
//! A table with one or two loads becomes lines over the number of threads. A table with more loads
//! becomes bars, two or three per row.

use std::path::Path;

use anyhow::{Result, anyhow};
use freestone_report::Summary;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::results::{LoadModel, Table, TableRow};

/// Maximum number of loads in a chart of lines.
const LOADS_MAX: usize = 2;
const WIDTH: u32 = 860;
const LINES_HEIGHT: u32 = 460;
/// Heights in pixels: a bar, the gap between rows, and the space above and below the bars.
const BAR: u32 = 11;
const GAP: u32 = 8;
const HEAD: u32 = 74;
const FOOT: u32 = 34;
/// X coordinate at which bars begin, and space for the figure after the longest bar, in pixels.
const LEFT: i32 = 230;
const RIGHT: i32 = 80;

const PUBLISHED: RGBColor = RGBColor(150, 150, 150);
const OURS: [RGBColor; LOADS_MAX] = [RGBColor(0, 95, 160), RGBColor(190, 85, 0)];
/// Colours of the variant that the source chose, as measured on this machine, by load.
const NEW: [RGBColor; LOADS_MAX] = [RGBColor(90, 165, 215), RGBColor(235, 160, 80)];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

pub fn draw(table: &Table, model: &[LoadModel], title: &str, path: &Path) -> Result<()> {
    let loads = loads(table);
    let model: Vec<&LoadModel> = model.iter().filter(|model| model.table == table.name).collect();
    let threads = (loads.len() <= LOADS_MAX).then(|| numbers_of_threads(table, &model));
    let result = match threads {
        Some(threads) if threads.len() > 2 => lines(table, &loads, &model, &threads, title, path),
        _ => bars(table, title, path),
    };
    result.map_err(|error| anyhow!("{}: {error}", path.display()))
}

/// Returns the distinct loads of a table in order.
fn loads(table: &Table) -> Vec<&str> {
    let mut loads: Vec<&str> = Vec::new();
    for row in &table.rows {
        if !loads.contains(&row.what.as_str()) {
            loads.push(&row.what);
        }
    }
    loads
}

fn numbers_of_threads(table: &Table, model: &[&LoadModel]) -> Vec<usize> {
    let modelled_threads =
        model.iter().flat_map(|model| model.predictions.iter().map(|prediction| prediction.threads));
    let mut threads: Vec<usize> = table.rows.iter().map(|row| row.threads).chain(modelled_threads).collect();
    threads.sort_unstable();
    threads.dedup();
    threads
}

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// Line of a chart. Points are positions on the axis of threads, and ratios.
struct Line {
    name: String,
    color: RGBColor,
    points: Vec<(f64, f64)>,
    /// Position on the axis of threads, and first and third quartile of the rounds.
    quartiles: Vec<(f64, f64, f64)>,
    dashed: bool,
}

fn series(table: &Table, loads: &[&str], model: &[&LoadModel], threads: &[usize]) -> Vec<Line> {
    let position_of = |of: usize| threads.iter().position(|threads| *threads == of).unwrap_or(0) as f64;
    let ours = table.columns[table.ours];
    let mut all = Vec::new();
    for (number, load) in loads.iter().enumerate() {
        let rows: Vec<&TableRow> = table.rows.iter().filter(|row| row.what == *load).collect();
        let named = |what: &str| if loads.len() > 1 { format!("{load}: {what}") } else { what.to_owned() };
        let published: Vec<_> = rows
            .iter()
            .filter_map(|row| Some((position_of(row.threads), table.published_ratio(row, table.new)?)))
            .collect();
        all.push(Line {
            name: named("published"),
            color: PUBLISHED,
            points: published,
            quartiles: Vec::new(),
            dashed: true,
        });
        let mut measured = |column: usize, color: RGBColor| {
            let steady: Vec<(f64, Summary)> = rows
                .iter()
                .filter_map(|row| {
                    Some((position_of(row.threads), row.ratios[column].filter(Summary::is_steady)?))
                })
                .collect();
            all.push(Line {
                name: named(&format!("here, {}", table.columns[column])),
                color,
                points: steady.iter().map(|(at, ratio)| (*at, ratio.median)).collect(),
                quartiles: steady.iter().map(|(at, ratio)| (*at, ratio.quartile1, ratio.quartile3)).collect(),
                dashed: false,
            });
        };
        if table.new != table.ours {
            measured(table.new, NEW[number]);
        }
        measured(table.ours, OURS[number]);
        let models = model.iter().filter(|model| model.what == *load);
        all.push(Line {
            name: named(&format!("modelled upper bound, {ours}")),
            color: OURS[number],
            points: models
                .flat_map(|model| {
                    model
                        .predictions
                        .iter()
                        .map(|prediction| (position_of(prediction.threads), prediction.ratio))
                })
                .collect(),
            quartiles: Vec::new(),
            dashed: true,
        });
    }
    all.retain(|line| !line.points.is_empty());
    all
}

/// Draws ratios over threads, both on logarithmic scales with base 2.
fn lines(
    table: &Table,
    loads: &[&str],
    model: &[&LoadModel],
    threads: &[usize],
    title: &str,
    path: &Path,
) -> Drawn {
    let series = series(table, loads, model, threads);
    let ratios = || series.iter().flat_map(|line| line.points.iter().map(|(_, ratio)| *ratio));
    let low = ratios().fold(0.8, f64::min) * 0.9;
    let high = ratios().fold(1.5, f64::max) * 1.25;
    let area: Area = SVGBackend::new(path, (WIDTH, LINES_HEIGHT)).into_drawing_area();
    area.fill(&WHITE)?;
    let last = (threads.len() - 1) as f64;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 17))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(54)
        .build_cartesian_2d(-0.2..last + 0.2, (low..high).log_scale().base(2.0))?;
    let label = |at: &f64| {
        let whole = (at - at.round()).abs() < 1e-6;
        threads.get(at.round() as usize).filter(|_| whole).map(ToString::to_string).unwrap_or_default()
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .x_labels(threads.len() + 2)
        .x_label_formatter(&label)
        .y_label_formatter(&|ratio| format!("{ratio}"))
        .x_desc("threads")
        .y_desc(format!("times \"{}\"", table.columns[table.old]))
        .label_style(("sans-serif", 13))
        .draw()?;
    chart.draw_series(std::iter::once(PathElement::new([(-0.2, 1.0), (last + 0.2, 1.0)], BLACK)))?;
    for line in &series {
        let style = line.color.stroke_width(2);
        let mark = if line.dashed { style } else { line.color.filled() };
        if line.dashed {
            chart.draw_series(DashedLineSeries::new(line.points.iter().copied(), 6, 4, style))?;
        } else {
            chart.draw_series(LineSeries::new(line.points.iter().copied(), style))?;
        }
        chart
            .draw_series(line.points.iter().map(|point| Circle::new(*point, 4, mark)))?
            .label(&line.name)
            .legend(move |(x, y)| Circle::new((x + 9, y), 4, mark));
        chart.draw_series(
            line.quartiles.iter().map(|(at, q1, q3)| PathElement::new([(*at, *q1), (*at, *q3)], style)),
        )?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(PUBLISHED)
        .label_font(("sans-serif", 13))
        .draw()?;
    area.present()?;
    Ok(())
}

enum Bar {
    Ratio(f64),
    /// The spread of the measurements is too wide.
    Refused,
    Absent,
}

/// Draws bars for each row: the ratio that the source published, that of the variant that the
/// source chose, measured on this machine, and that of Freestone.
fn bars(table: &Table, title: &str, path: &Path) -> Drawn {
    let measured = |row: &TableRow, column: usize| match row.ratios[column] {
        Some(ratio) if ratio.is_steady() => Bar::Ratio(ratio.median),
        Some(_) => Bar::Refused,
        None => Bar::Absent,
    };
    let mut legends = vec![(PUBLISHED, format!("published, {}", table.columns[table.new]))];
    if table.new != table.ours {
        legends.push((NEW[0], format!("here, {}", table.columns[table.new])));
    }
    legends.push((OURS[0], format!("here, {}", table.columns[table.ours])));
    let of = |row: &TableRow| {
        let mut bars = vec![table.published_ratio(row, table.new).map_or(Bar::Absent, Bar::Ratio)];
        if table.new != table.ours {
            bars.push(measured(row, table.new));
        }
        bars.push(measured(row, table.ours));
        bars
    };
    let rows: Vec<&TableRow> = table
        .rows
        .iter()
        .filter(|row| table.published_ratio(row, table.new).is_some() || row.ratios[table.ours].is_some())
        .collect();
    let length = |bar: Bar| if let Bar::Ratio(ratio) = bar { ratio } else { 0.0 };
    let longest = rows.iter().flat_map(|row| of(row)).map(length).fold(1.2, f64::max);
    let step = legends.len() as u32 * BAR + GAP;
    let height = HEAD + FOOT + step * rows.len() as u32;
    let area: Area = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    area.fill(&WHITE)?;
    let x = |ratio: f64| LEFT + (f64::from(WIDTH as i32 - LEFT - RIGHT) * ratio / longest) as i32;
    let font = |size: u32, pos: Pos| ("sans-serif", size).into_font().color(&BLACK).pos(pos);
    let (left, right) = (Pos::new(HPos::Left, VPos::Center), Pos::new(HPos::Right, VPos::Center));
    area.draw(&Text::new(title, (WIDTH as i32 / 2, 20), font(17, Pos::new(HPos::Center, VPos::Center))))?;
    for (number, (color, name)) in legends.iter().enumerate() {
        let from = LEFT + (WIDTH as i32 - LEFT) / legends.len() as i32 * number as i32;
        area.draw(&Rectangle::new([(from, 44), (from + 14, 54)], color.filled()))?;
        area.draw(&Text::new(name.as_str(), (from + 20, 49), font(13, left)))?;
    }
    let bottom = (height - FOOT) as i32;
    for (number, row) in rows.iter().enumerate() {
        let top = (HEAD + step * number as u32) as i32;
        let name = format!("{}, {}", row.what, super::words::counted(row.threads, "thread"));
        let middle = top + (legends.len() as u32 * BAR / 2) as i32;
        area.draw(&Text::new(name, (LEFT - 10, middle), font(13, right)))?;
        for (number, (bar, (color, _))) in of(row).into_iter().zip(&legends).enumerate() {
            let above = top + (BAR * number as u32) as i32;
            let below = above + BAR as i32 - 1;
            let (end, text) = match bar {
                Bar::Ratio(ratio) => (x(ratio), format!("{ratio:.2}")),
                Bar::Refused => (LEFT, "too wide a spread".into()),
                Bar::Absent => continue,
            };
            area.draw(&Rectangle::new([(LEFT, above), (end, below)], color.filled()))?;
            area.draw(&Text::new(text, (end + 6, i32::midpoint(above, below)), font(11, left)))?;
        }
    }
    area.draw(&PathElement::new([(x(1.0), HEAD as i32 - 8), (x(1.0), bottom)], BLACK))?;
    let caption = format!("times \"{}\", above 1 is better", table.columns[table.old]);
    area.draw(&Text::new(caption, (x(1.0), bottom + 14), font(12, Pos::new(HPos::Left, VPos::Center))))?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use freestone_report::Unit;

    use super::*;
    use crate::results::Better;
    use crate::results::Prediction;

    fn svg_of(table: &Table, model: &[LoadModel]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chart.svg");
        draw(table, model, "A title", &path).unwrap();
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn few_loads_become_lines_with_model() {
        let mut table = Table::new("t", Unit::Kiops, Better::More, &["one lock", "ours"]);
        for threads in [1, 2, 4] {
            table.add("reads", threads, &[Some(1.0), Some(2.0)], &[vec![1.0; 3], vec![1.5; 3]]);
        }
        let predictions = vec![Prediction { threads: 48, old: 1.0, in_turn: 1.0, ours: 30.0, ratio: 30.0 }];
        let model = LoadModel {
            table: "t".into(),
            what: "reads".into(),
            inputs: Vec::new(),
            held_share: 0.5,
            checks: Vec::new(),
            predictions,
        };
        let svg = svg_of(&table, &[model]);
        for text in ["A title", "published", "here, ours", "modelled upper bound, ours", "48", "threads"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(!svg_of(&table, &[]).contains("modelled"));
    }

    #[test]
    fn many_loads_become_bars_except_refused() {
        let mut table = Table::new("t", Unit::KbSecond, Better::More, &["one rwlock", "ours"]);
        table.add("read", 4, &[Some(100.0), Some(131.0)], &[vec![1.0; 3], vec![1.47; 3]]);
        table.add("write", 4, &[Some(100.0), Some(103.0)], &[vec![1.0; 4], vec![1.0, 2.0, 3.0, 9.0]]);
        table.add("mixed", 4, &[], &[vec![1.0; 3], vec![2.0; 3]]);
        let svg = svg_of(&table, &[]);
        assert!(!svg.contains("here, one rwlock"), "it is what the others are compared with");
        for text in ["read, 4 threads", "1.31", "1.47", "1.03", "too wide a spread", "2.00", "one rwlock"] {
            assert!(svg.contains(text), "{text}");
        }
        // If Freestone does not use the variant that the source chose, that variant has a bar of
        // its own.
        let mut three = Table::new("t", Unit::Seconds, Better::Less, &["single", "batches", "packed"]);
        three.new = 1;
        three.add("elapsed", 1, &[Some(68.0), Some(17.0)], &[vec![9.0; 3], vec![3.0; 3], vec![1.0; 3]]);
        let three = svg_of(&three, &[]);
        for text in ["published, batches", "here, batches", "here, packed", "4.00", "3.00", "9.00"] {
            assert!(three.contains(text), "{text}");
        }
        assert!(!svg.contains("2.50"), "the median of what is refused");
    }
}
