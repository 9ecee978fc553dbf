//! Options for metrics, from the command line and the configuration file.

use std::net::SocketAddr;

use anyhow::Result;
use clap::Args;

use crate::config::FileConfig;
use crate::config::metrics::{FORKS_RANGE, MetricsWords};
use crate::settings::http_address::AddressWords;
use crate::usage::Usage;

/// Default maximum number of forks with metrics of their own; all other forks are only part of sums.
pub const FORKS: u32 = 20;

const METRICS_HELP: &str =
    "Serve Prometheus metrics at http://ADDR/metrics; ADDR is HOST:PORT, or PORT for this machine only";

const OPEN_HELP: &str = "Allow an address of --metrics that other machines reach; it is plain HTTP and shows the names of all \
    devices";

const FORKS_HELP: &str = "Number of forks with metrics of their own, the busiest first, 0 to 1000; all forks are in sums for \
    each base [default: 20]";

/// Error text if other options for metrics are given without `--metrics`.
const USELESS: &str = "has no effect without --metrics";

/// Options of `serve` for metrics.
#[derive(Debug, Args)]
#[command(next_help_heading = "Observation")]
pub struct MetricsArgs {
    /// Address to listen at for HTTP.
    #[arg(long, value_name = "ADDR", help = METRICS_HELP)]
    metrics: Option<String>,
    /// Allow addresses that other machines can reach.
    #[arg(long, help = OPEN_HELP)]
    metrics_open: bool,
    /// Maximum number of forks with metrics of their own.
    #[arg(long, value_name = "N", help = FORKS_HELP, value_parser = clap::value_parser!(u32).range(FORKS_RANGE))]
    metrics_forks: Option<u32>,
}

/// Settings of the metrics of a server, if they are enabled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricsConfig {
    /// Address to listen at for HTTP.
    pub at: SocketAddr,
    /// Maximum number of forks with metrics of their own.
    pub forks: usize,
}

impl MetricsArgs {
    /// Returns the settings, or None if metrics are off. The command line overrides the configuration file.
    ///
    /// # Errors
    /// The address is invalid, or an option has no effect without `--metrics`.
    pub fn resolve(&self, file: Option<&FileConfig>) -> Result<Option<MetricsConfig>> {
        let none = MetricsWords::default();
        let in_file = file.map_or(&none, |file| &file.metrics);
        let forks = self.metrics_forks.or(in_file.forks);
        let words = AddressWords {
            key: "metrics",
            line: self.metrics.as_deref(),
            file: in_file.http.address.as_deref(),
            open: self.metrics_open || in_file.http.open,
            useless: USELESS,
        };
        match words.resolve()? {
            Some(at) => Ok(Some(MetricsConfig { at, forks: forks.unwrap_or(FORKS) as usize })),
            None if forks.is_some() => Err(Usage(format!("--metrics-forks: {USELESS}")).into()),
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_of_forks_has_range_and_default() {
        let (least, most) = FORKS_RANGE.into_inner();
        assert!(FORKS_HELP.contains(&format!("{least} to {most}")));
        assert!(FORKS_HELP.contains(&format!("[default: {FORKS}]")));
    }

    #[test]
    fn command_line_overrides_file() {
        let none = MetricsArgs { metrics: None, metrics_open: false, metrics_forks: None };
        assert_eq!(none.resolve(None).unwrap(), None);
        let of = |text: &str| crate::config::parse(text).unwrap();
        let file = of("metrics = '0.0.0.0:1'\nmetrics_forks = 3");
        let why = none.resolve(Some(&file)).unwrap_err().to_string();
        assert!(why.starts_with("metrics: 0.0.0.0:1: other machines"), "{why}");
        let open = of("metrics = '0.0.0.0:1'\nmetrics_forks = 3\nmetrics_open = true");
        assert_eq!(none.resolve(Some(&of("metrics = 9100"))).unwrap().unwrap().at.port(), 9100);
        let asked = none.resolve(Some(&open)).unwrap().unwrap();
        assert_eq!((asked.at.to_string().as_str(), asked.forks), ("0.0.0.0:1", 3));
        let line = MetricsArgs { metrics: Some("2".into()), metrics_open: false, metrics_forks: Some(4) };
        let asked = line.resolve(Some(&open)).unwrap().unwrap();
        assert_eq!((asked.at.to_string().as_str(), asked.forks), ("127.0.0.1:2", 4));
        let only_forks = MetricsArgs { metrics: None, metrics_open: false, metrics_forks: Some(4) };
        let why = only_forks.resolve(None).unwrap_err().to_string();
        assert_eq!(why, "--metrics-forks: has no effect without --metrics");
    }
}
