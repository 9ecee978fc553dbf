//! What the command line and a file say of metrics.

use std::net::SocketAddr;

use anyhow::Result;
use clap::Args;
use freestone_spec::config::FileConfig;
use freestone_spec::metrics::{FORKS_RANGE, MetricsWords};

use crate::error::Usage;
use crate::http::Words;

/// How many are, where nothing was said.
const FORKS: u32 = 20;

const METRICS_HELP: &str =
    "Answer Prometheus at http://ADDR/metrics; ADDR is PORT of this machine, or HOST:PORT";

const OPEN_HELP: &str = "Let --metrics be an address that others than this machine's users reach: it is plain \
                         HTTP, and who connects sees the names of all devices";

const FORKS_HELP: &str = "Of the forks, tell Prometheus of the N busiest by themselves, 0 to 1000, and of all in \
                          sums for each base [default: 20]";

const USELESS: &str = "without --metrics nobody is told anything";

/// The options of `serve`.
#[derive(Debug, Args)]
pub struct MetricsArgs {
    /// Where.
    #[arg(long, value_name = "ADDR", help = METRICS_HELP)]
    metrics: Option<String>,
    /// The word for others.
    #[arg(long, help = OPEN_HELP)]
    metrics_open: bool,
    /// How many forks.
    #[arg(long, value_name = "N", help = FORKS_HELP, value_parser = clap::value_parser!(u32).range(FORKS_RANGE))]
    metrics_forks: Option<u32>,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricsOf {
    /// Where it is listened.
    pub at: SocketAddr,
    /// The forks that are told one by one.
    pub forks: usize,
}

impl MetricsArgs {
    /// What the words say; `None` where metrics are off.
    ///
    /// # Errors
    /// An address that cannot be meant, or what makes no sense without one.
    pub fn asked(&self, file: Option<&FileConfig>) -> Result<Option<MetricsOf>> {
        let none = MetricsWords::default();
        let said = file.map_or(&none, |file| &file.metrics);
        let forks = self.metrics_forks.or(said.forks);
        let words = Words {
            key: "metrics",
            line: self.metrics.as_deref(),
            file: said.http.address.as_deref(),
            open: self.metrics_open || said.http.open,
            useless: USELESS,
        };
        match words.resolve()? {
            Some(at) => Ok(Some(MetricsOf { at, forks: forks.unwrap_or(FORKS) as usize })),
            None if forks.is_some() => Err(Usage(format!("--metrics-forks: {USELESS}")).into()),
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_tells_range_and_default() {
        let (least, most) = FORKS_RANGE.into_inner();
        assert!(FORKS_HELP.contains(&format!("{least} to {most}")));
        assert!(FORKS_HELP.contains(&format!("[default: {FORKS}]")));
    }

    #[test]
    fn the_command_line_replaces_what_the_file_says() {
        let none = MetricsArgs { metrics: None, metrics_open: false, metrics_forks: None };
        assert_eq!(none.asked(None).unwrap(), None);
        let of = |text: &str| freestone_spec::config::parse(text).unwrap();
        let file = of("metrics = '0.0.0.0:1'\nmetrics_forks = 3");
        let why = none.asked(Some(&file)).unwrap_err().to_string();
        assert!(why.starts_with("metrics: 0.0.0.0:1: others than"), "{why}");
        let open = of("metrics = '0.0.0.0:1'\nmetrics_forks = 3\nmetrics_open = true");
        assert_eq!(none.asked(Some(&of("metrics = 9100"))).unwrap().unwrap().at.port(), 9100);
        let asked = none.asked(Some(&open)).unwrap().unwrap();
        assert_eq!((asked.at.to_string().as_str(), asked.forks), ("0.0.0.0:1", 3));
        let line = MetricsArgs { metrics: Some("2".into()), metrics_open: false, metrics_forks: Some(4) };
        let asked = line.asked(Some(&open)).unwrap().unwrap();
        assert_eq!((asked.at.to_string().as_str(), asked.forks), ("127.0.0.1:2", 4));
        let alone = MetricsArgs { metrics: None, metrics_open: false, metrics_forks: Some(4) };
        assert!(alone.asked(None).unwrap_err().to_string().starts_with("--metrics-forks: without --metrics"));
    }
}
