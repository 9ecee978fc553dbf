//! Monitoring: Prometheus metrics over HTTP, and rates for `freestone top` and the web page.

mod args;
pub mod names;
pub mod rates;
mod scrape;
mod site;
mod text;

pub use args::{MetricsArgs, MetricsConfig};
pub use site::MetricsSite;
