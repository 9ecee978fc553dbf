//! Numbers for who watches the server: Prometheus asks for them over HTTP, `freestone top` over the
//! control socket.

mod args;
mod names;
pub mod rates;
mod scrape;
mod site;
mod text;

pub use args::{MetricsArgs, MetricsOf};
pub use site::MetricsSite;
