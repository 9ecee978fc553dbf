//! What the command line and a file say of the page.

use std::net::SocketAddr;

use anyhow::Result;
use clap::Args;
use freestone_spec::config::FileConfig;

use crate::http::Words;

const HTTP_HELP: &str = "Show people a page with devices, maps and latencies at http://ADDR/; ADDR is PORT of this machine, or HOST:PORT";

const OPEN_HELP: &str = "Let --http be an address that others than this machine's users reach: it is plain HTTP, \
                         and who connects sees the names of all devices";

/// The options of `serve`.
#[derive(Debug, Args)]
pub struct PageArgs {
    /// Where.
    #[arg(long, value_name = "ADDR", help = HTTP_HELP)]
    http: Option<String>,
    /// The word for others.
    #[arg(long, help = OPEN_HELP)]
    http_open: bool,
}

impl PageArgs {
    /// Where it is listened; `None` where there is no page.
    ///
    /// # Errors
    /// An address that cannot be meant, or what makes no sense without one.
    pub fn asked(&self, file: Option<&FileConfig>) -> Result<Option<SocketAddr>> {
        let said = file.map(|file| &file.http);
        let words = Words {
            key: "http",
            line: self.http.as_deref(),
            file: said.and_then(|said| said.address.as_deref()),
            open: self.http_open || said.is_some_and(|said| said.open),
            useless: "without --http there is no page",
        };
        words.resolve()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_replaces_what_the_file_says() {
        let asked = |line: Option<&str>, open, file: &str| {
            let args = PageArgs { http: line.map(str::to_owned), http_open: open };
            let file = freestone_spec::config::parse(file).unwrap();
            let asked = args.asked(Some(&file)).map(|at| at.map(|at| at.to_string()));
            asked.map_err(|error| error.to_string())
        };
        assert_eq!(asked(None, false, ""), Ok(None));
        assert_eq!(asked(None, false, "http = 9200"), Ok(Some("127.0.0.1:9200".into())));
        assert_eq!(asked(Some("1"), false, "http = 9200"), Ok(Some("127.0.0.1:1".into())));
        let why = asked(None, false, "http = '0.0.0.0:9200'").unwrap_err();
        assert!(why.starts_with("http: 0.0.0.0:9200: others than") && why.contains("--http-open"), "{why}");
        for (line, file) in
            [(true, "http = '0.0.0.0:9200'"), (false, "http = '0.0.0.0:9200'\nhttp_open = true")]
        {
            assert_eq!(asked(None, line, file), Ok(Some("0.0.0.0:9200".into())));
        }
        for (line, file) in [(true, ""), (false, "http_open = true")] {
            assert_eq!(asked(None, line, file).unwrap_err(), "--http-open: without --http there is no page");
        }
    }
}
