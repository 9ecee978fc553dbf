//! Serves one RAM disk of the program's own over NBD, without the rest of a server.
//!
//! `cargo run -p freestone-server --example own_nbd SOCKET` serves until a line or the end of standard input. Try
//! `nbdcopy FILE nbd+unix:///disk?socket=SOCKET`. `freestone-nbd` is internal to Freestone: a program that uses it
//! requires exactly its version.

use std::env;
use std::error::Error;
use std::io::{self, Write as _};
use std::sync::Arc;

use freestone::ram::{Config, Ram};
use freestone_nbd::{Address, ExportOptions, Limits, Server};

/// Publishes `disk` at an address. The server ends when it is dropped.
pub fn serve(disk: Arc<Ram>, address: &Address) -> Result<Server, Box<dyn Error>> {
    let server = Server::new(Limits::default());
    let address = server.listen(address)?;
    server.publish(&address, "disk", disk, ExportOptions::default())?;
    Ok(server)
}

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let socket = env::args_os().nth(1).ok_or("usage: own_nbd SOCKET")?;
    let disk = Arc::new(Ram::new(Config { disksize: 1 << 30, ..Config::default() })?);
    let server = serve(Arc::clone(&disk), &Address::Unix(socket.into()))?;
    for export in server.exports() {
        println!("{}", export.uri());
    }
    io::stdout().flush()?;
    io::stdin().read_line(&mut String::new())?;
    drop(server);
    println!("{} bytes were stored in {}", disk.mm_stat().orig_data_size, disk.mm_stat().mem_used_total);
    Ok(())
}
