//! Prometheus metrics over HTTP: their names, the text format, and the site.

mod args;
pub mod names;
mod scrape;
mod site;
mod text;

pub use args::{FORKS, MetricsArgs, MetricsConfig};
pub use site::MetricsSite;
