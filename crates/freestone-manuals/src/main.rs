//! `freestone-manuals DIR` writes the manual pages and completions to DIR.
//! `freestone-manuals --docs DIR` renders the reference tables in the documentation in DIR.
//! `freestone-manuals --site DIR` writes a page for each command and each kind of device to DIR.

use std::env;
use std::path::Path;

use anyhow::{Result, bail};

fn main() -> Result<()> {
    let args: Vec<_> = env::args_os().skip(1).collect();
    match args.as_slice() {
        [dir] => freestone_manuals::write(Path::new(dir)),
        [option, dir] if option == "--docs" => freestone_manuals::reference::update(Path::new(dir)),
        [option, dir] if option == "--site" => freestone_manuals::site::write(Path::new(dir)),
        _ => bail!("freestone-manuals [--docs|--site] DIR"),
    }
}
