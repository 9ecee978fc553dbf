//! A small HTTP/1.1 server for metrics and the web page. It limits bytes, time and connections, and accepts
//! only GET and HEAD.

mod address;
mod connection;
mod request;
mod server;

pub use address::AddressWords;
pub use connection::{Client, Response};
pub use request::{Refusal, Request};
pub use server::{HttpServer, Site};
