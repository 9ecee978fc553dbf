//! Picture of the memory of each contender over time.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

const SIZE: (u32, u32) = (860, 460);
const COLOURS: [RGBColor; 8] = [
    RGBColor(90, 90, 90),
    RGBColor(0, 95, 160),
    RGBColor(190, 85, 0),
    RGBColor(20, 130, 70),
    RGBColor(140, 60, 150),
    RGBColor(150, 150, 150),
    RGBColor(90, 165, 215),
    RGBColor(235, 160, 80),
];
/// Space above the highest line, for the legend.
const HEADROOM: f64 = 1.5;

/// Memory of a contender a stored byte, from a time on. The last value lasts.
pub struct Line {
    pub name: String,
    pub steps: Vec<(Duration, f64)>,
}

pub fn draw(title: &str, lines: &[Line], path: &Path) -> Result<()> {
    draw_lines(title, lines, path).map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn draw_lines(title: &str, lines: &[Line], path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let steps = || lines.iter().flat_map(|line| &line.steps);
    let end = steps().map(|(at, _)| at.as_secs_f64()).fold(1.0, f64::max) * 1.05;
    let high = steps().map(|(_, bytes)| *bytes).fold(0.1, f64::max) * HEADROOM;
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 17))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(54)
        .build_cartesian_2d(0.0..end, 0.0..high)?;
    let mesh = &mut chart.configure_mesh();
    mesh.disable_x_mesh().light_line_style(WHITE).x_desc("seconds after the last write");
    mesh.y_desc("memory a stored byte").label_style(("sans-serif", 13)).draw()?;
    for (line, colour) in lines.iter().zip(COLOURS.iter().cycle()) {
        // A value lasts until the next one.
        let mut points: Vec<(f64, f64)> = Vec::new();
        for (at, bytes) in &line.steps {
            let at = at.as_secs_f64();
            points.extend(points.last().map(|(_, before)| (at, *before)));
            points.push((at, *bytes));
        }
        points.extend(points.last().map(|(_, last)| (end, *last)));
        let style = colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(points, style))?
            .label(&line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .border_style(COLOURS[0])
        .label_font(("sans-serif", 13))
        .draw()?;
    area.present()?;
    Ok(())
}
