//! `freestone-manuals DIR`: writes the manual pages and completions there.

use std::env;
use std::path::Path;

use anyhow::{Result, bail};

fn main() -> Result<()> {
    let args: Vec<_> = env::args_os().skip(1).collect();
    let [dir] = args.as_slice() else { bail!("freestone-manuals DIR") };
    freestone_manuals::write(Path::new(dir))
}
