//! A small HTTP/1.1 server for the metrics and the web page. Bytes, time and connections are limited, and
//! only GET and HEAD are accepted. The server owns a thread for each connection.

mod connection;
mod request;
mod server;

pub use connection::{Client, Response};
pub use request::{Refusal, Request};
pub use server::{HttpServer, Site, is_of_this_machine};
