//! Options for the web page, from the command line and the configuration file.

use std::net::SocketAddr;

use anyhow::Result;
use clap::Args;

use crate::config::FileConfig;
use crate::settings::http_address::AddressWords;

const HTTP_HELP: &str = "Serve a web page with devices, maps and latencies at http://ADDR/; ADDR is HOST:PORT, or PORT for \
    this machine only";

const OPEN_HELP: &str = "Allow an address of --http that other machines reach; it is plain HTTP and shows the names of all \
    devices";

/// Options of `serve` for the web page.
#[derive(Debug, Args)]
#[command(next_help_heading = "Observation")]
pub struct PageArgs {
    /// Address to listen at for HTTP.
    #[arg(long, value_name = "ADDR", help = HTTP_HELP)]
    http: Option<String>,
    /// Allow addresses that other machines can reach.
    #[arg(long, help = OPEN_HELP)]
    http_open: bool,
}

impl PageArgs {
    /// Returns the address to listen at, or None if the page is off. The command line overrides the
    /// configuration file.
    ///
    /// # Errors
    /// The address is invalid, or `--http-open` is given without an address.
    pub fn resolve(&self, file: Option<&FileConfig>) -> Result<Option<SocketAddr>> {
        let in_file = file.map(|file| &file.http);
        let words = AddressWords {
            key: "http",
            line: self.http.as_deref(),
            file: in_file.and_then(|http| http.address.as_deref()),
            open: self.http_open || in_file.is_some_and(|http| http.open),
            useless: "has no effect without --http",
        };
        words.resolve()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_overrides_file() {
        let asked = |line: Option<&str>, open, file: &str| {
            let args = PageArgs { http: line.map(str::to_owned), http_open: open };
            let file = crate::config::parse(file).unwrap();
            let asked = args.resolve(Some(&file)).map(|at| at.map(|at| at.to_string()));
            asked.map_err(|error| error.to_string())
        };
        assert_eq!(asked(None, false, ""), Ok(None));
        assert_eq!(asked(None, false, "http = 9200"), Ok(Some("127.0.0.1:9200".into())));
        assert_eq!(asked(Some("1"), false, "http = 9200"), Ok(Some("127.0.0.1:1".into())));
        let why = asked(None, false, "http = '0.0.0.0:9200'").unwrap_err();
        assert!(why.starts_with("http: 0.0.0.0:9200: other machines"), "{why}");
        assert!(why.contains("--http-open"), "{why}");
        for (line, file) in
            [(true, "http = '0.0.0.0:9200'"), (false, "http = '0.0.0.0:9200'\nhttp_open = true")]
        {
            assert_eq!(asked(None, line, file), Ok(Some("0.0.0.0:9200".into())));
        }
        for (line, file) in [(true, ""), (false, "http_open = true")] {
            assert_eq!(asked(None, line, file).unwrap_err(), "--http-open: has no effect without --http");
        }
    }
}
