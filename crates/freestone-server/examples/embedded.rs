//! Embeds a server: a RAM disk that survives restarts, served over NBD, with metrics.
//!
//! `cargo run -p freestone-server --example embedded DIR` serves until a line or the end of standard input. Try
//! `nbdcopy FILE nbd+unix:///ram0?socket=DIR/nbd.sock`, and start the example again.

use std::env;
use std::error::Error;
use std::io::{self, Write as _};
use std::path::Path;

use freestone_server::{Server, ServerError};

/// Starts the server in `dir`.
pub fn start(dir: &Path) -> Result<Server, ServerError> {
    Server::builder()
        .device("ram0=ram,disksize=64M,keep=yes")
        .state(dir.join("state"))
        .nbd(format!("unix:{}/nbd.sock", dir.display()))
        .metrics("127.0.0.1:0")
        .start()
}

fn main() -> Result<(), Box<dyn Error>> {
    let dir = env::args_os().nth(1).ok_or("usage: embedded DIR")?;
    let server = start(Path::new(&dir))?;
    println!("{}", server.uris("ram0").join(" "));
    println!("{}", server.metrics_url().unwrap_or_default());
    io::stdout().flush()?;
    io::stdin().read_line(&mut String::new())?;
    // Saves the content, and flushes. Without this line, dropping the server does the same, but hides errors.
    server.shutdown()?;
    Ok(())
}
