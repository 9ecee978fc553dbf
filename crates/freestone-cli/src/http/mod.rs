//! A small server of HTTP/1.1: bounded in bytes, time and connections; GET and HEAD alone.

mod address;
mod connection;
mod request;
mod server;

pub use address::Words;
pub use connection::{Answer, Client};
pub use request::{Refusal, Request};
pub use server::{HttpServer, Site};
