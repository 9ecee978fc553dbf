//! Numbers for who watches the server: Prometheus asks for them over HTTP, `freestone top` over the
//! control socket.

mod address;
mod args;
mod http;
mod names;
pub mod rates;
mod request;
mod scrape;
mod server;
mod text;

pub use args::{MetricsArgs, MetricsOf};
pub use server::MetricsServer;
