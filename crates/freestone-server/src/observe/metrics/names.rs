//! Names, types and help texts of all metrics. The names are stable, because dashboards and alerts depend on
//! them. The table in `docs/reference/metrics.md` is generated from this module.

/// Type of a metric in `OpenMetrics`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// A value that only grows. The names of its samples end with `_total`.
    Counter,
    /// A value that goes up and down.
    Gauge,
    /// Numbers of requests by latency.
    Histogram,
    /// Constant texts, which are values of labels.
    Info,
}

impl Type {
    /// Returns the name of the metric type as in `OpenMetrics`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Info => "info",
        }
    }
}

/// Description of a metric.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Name without the suffix that `OpenMetrics` adds for the type.
    pub name: &'static str,
    /// Type of the metric.
    pub of: Type,
    /// Names of the labels, in the order of their values.
    pub labels: &'static [&'static str],
    /// Help text, without a period.
    pub help: &'static str,
}

/// Metrics about requests. Devices, forks, bases and exports have the same metrics with different prefixes.
#[derive(Debug, Clone, Copy)]
pub struct RequestMetrics {
    /// Number of successful requests.
    pub requests: Metric,
    /// Number of bytes of successful requests.
    pub bytes: Metric,
    /// Number of failed requests.
    pub errors: Metric,
    /// Number of requests in flight.
    pub in_flight: Metric,
    /// Number of requests delayed by limits of operations or bytes per second.
    pub limited: Metric,
    /// Latencies of successful requests.
    pub duration: Metric,
}

macro_rules! request_metrics {
    ($prefix:literal, [$($label:literal),*], $of:literal) => {
        RequestMetrics {
            requests: Metric {
                name: concat!($prefix, "_requests"),
                of: Type::Counter,
                labels: &[$($label,)* "op"],
                help: concat!("Successful requests of ", $of),
            },
            bytes: Metric {
                name: concat!($prefix, "_bytes"),
                of: Type::Counter,
                labels: &[$($label,)* "op"],
                help: concat!("Bytes of successful requests of ", $of),
            },
            errors: Metric {
                name: concat!($prefix, "_errors"),
                of: Type::Counter,
                labels: &[$($label,)* "op"],
                help: concat!("Failed requests of ", $of),
            },
            in_flight: Metric {
                name: concat!($prefix, "_in_flight"),
                of: Type::Gauge,
                labels: &[$($label),*],
                help: concat!("Requests in flight that wait for a device, a limit or memory, of ", $of),
            },
            limited: Metric {
                name: concat!($prefix, "_limited"),
                of: Type::Counter,
                labels: &[$($label),*],
                help: concat!("Requests delayed by limits of operations or bytes per second, of ", $of),
            },
            duration: Metric {
                name: concat!($prefix, "_duration_seconds"),
                of: Type::Histogram,
                labels: &[$($label,)* "op"],
                help: concat!("Latency of successful requests, estimated from a sample, of ", $of),
            },
        }
    };
}

macro_rules! metrics {
    ($($name:ident = $text:literal, $of:ident, [$($label:literal),*], $help:literal;)*) => {
        $(pub const $name: Metric =
            Metric { name: $text, of: Type::$of, labels: &[$($label),*], help: $help };)*
        const SINGLE: &[Metric] = &[$($name),*];
    };
}

metrics! {
    BUILD = "freestone_build", Info, ["version"], "Version of the program";
    RESIDENT = "freestone_process_resident_memory_bytes", Gauge, [], "Resident memory of the process";
    DEVICES = "freestone_devices", Gauge, ["kind"], "Number of devices of a kind";
    LEFT_OUT = "freestone_devices_left_out", Gauge, [], "Devices omitted from per-device metrics because the limit was reached (forks excluded)";
    CONNECTIONS = "freestone_nbd_connections", Gauge, [], "Open connections of NBD clients";
    ACCEPTED = "freestone_nbd_connections_accepted", Counter, [], "Accepted connections of NBD clients";
    REFUSED = "freestone_nbd_connections_refused", Counter, [], "Connections of NBD clients closed at once because of a limit or missing resources";
    DENIED = "freestone_connections_denied", Counter, [], "Connections of NBD clients and virtual machines closed at once because the allow list of the address excludes them";
    SIZE = "freestone_device_size_bytes", Gauge, ["device", "kind"], "Size of a device";
    MEMORY = "freestone_device_memory_bytes", Gauge, ["device", "kind"], "Memory charged to a RAM disk or snapshot in memory";
    STORED = "freestone_device_stored_bytes", Gauge, ["device", "kind"], "Data in the own pages of a RAM disk or snapshot in memory, before compression";
    FORKS = "freestone_forks", Gauge, ["base"], "Number of forks of a base";
    FAMILY_MEMORY = "freestone_family_memory_bytes", Gauge, ["family"], "Memory of a family: the forks of a base, or a RAM disk with its snapshots and their forks";
    FAMILY_LIMIT = "freestone_family_memory_limit_bytes", Gauge, ["family"], "Memory limit of a family; 0: no limit";
    BACKING_SIZE = "freestone_family_backing_size_bytes", Gauge, ["family"], "Size of the backing device of a family";
    BACKING_USED = "freestone_family_backing_used_bytes", Gauge, ["family"], "Bytes in use on the backing device of a family";
    FORK_MEMORY = "freestone_fork_memory_bytes", Gauge, ["fork", "base"], "Memory charged to a fork (busiest forks only)";
    FORK_LIMIT = "freestone_fork_memory_limit_bytes", Gauge, ["fork", "base"], "Own memory limit of a fork (busiest forks only); 0: no limit";
    EXPORT_CONNECTIONS = "freestone_export_connections", Gauge, ["device", "address"], "Open connections to an export";
}

/// Metrics about requests of a device that is not a fork.
pub const DEVICE: RequestMetrics =
    request_metrics!("freestone_device", ["device", "kind"], "a device that is not a fork");
/// Metrics about requests of all forks of a base, summed.
pub const FORKS_SUM: RequestMetrics =
    request_metrics!("freestone_forks", ["base"], "all forks of a base, including removed ones");
/// Metrics about requests of each of the busiest forks.
pub const FORK: RequestMetrics =
    request_metrics!("freestone_fork", ["fork", "base"], "a fork (busiest forks only)");
/// Metrics about requests of an export.
pub const EXPORT: RequestMetrics = request_metrics!("freestone_export", ["device", "address"], "an export");

/// Returns the descriptions of all metrics.
pub fn all() -> Vec<Metric> {
    let requests = [DEVICE, FORKS_SUM, FORK, EXPORT]
        .into_iter()
        .flat_map(|all| [all.requests, all.bytes, all.errors, all.in_flight, all.limited, all.duration]);
    SINGLE.iter().copied().chain(requests).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::all;

    #[test]
    fn names_are_unique() {
        let names: BTreeSet<_> = all().iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), all().len());
    }
}
