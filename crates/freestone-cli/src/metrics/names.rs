//! What there is to be asked for: a promise, as dashboards and alerts are written against it.

/// A number that is counted, set or measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// It only grows; its samples end in `_total`.
    Counter,
    /// It goes up and down.
    Gauge,
    /// Counts by how long something took.
    Histogram,
    /// Words, as labels.
    Info,
}

/// One of them, as it is told.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Without the suffix of its type.
    pub name: &'static str,
    /// What it is.
    pub of: Type,
    /// In a sentence.
    pub help: &'static str,
}

/// What is told of whoever is asked: the server's devices, forks and exports.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    /// Requests that succeeded.
    pub requests: Metric,
    /// Their bytes.
    pub bytes: Metric,
    /// Requests that failed.
    pub errors: Metric,
    /// Requests that are not answered.
    pub in_flight: Metric,
    /// Requests that waited for their turn.
    pub limited: Metric,
    /// How long they took.
    pub duration: Metric,
}

macro_rules! asked {
    ($prefix:literal, $of:literal) => {
        Asked {
            requests: Metric {
                name: concat!($prefix, "_requests"),
                of: Type::Counter,
                help: concat!("Requests that succeeded, of ", $of),
            },
            bytes: Metric {
                name: concat!($prefix, "_bytes"),
                of: Type::Counter,
                help: concat!("Bytes of the requests that succeeded, of ", $of),
            },
            errors: Metric {
                name: concat!($prefix, "_errors"),
                of: Type::Counter,
                help: concat!("Requests that failed, of ", $of),
            },
            in_flight: Metric {
                name: concat!($prefix, "_in_flight"),
                of: Type::Gauge,
                help: concat!("Requests that had to wait and are not answered, of ", $of),
            },
            limited: Metric {
                name: concat!($prefix, "_limited"),
                of: Type::Counter,
                help: concat!("Requests that waited as operations or bytes a second are limited, of ", $of),
            },
            duration: Metric {
                name: concat!($prefix, "_duration_seconds"),
                of: Type::Histogram,
                help: concat!("How long requests took that succeeded, estimated from a sample, of ", $of),
            },
        }
    };
}

macro_rules! metrics {
    ($($name:ident = $text:literal, $of:ident, $help:literal;)*) => {
        $(pub const $name: Metric = Metric { name: $text, of: Type::$of, help: $help };)*
        #[cfg(test)]
        const ALONE: &[Metric] = &[$($name),*];
    };
}

metrics! {
    BUILD = "freestone_build", Info, "The program";
    RESIDENT = "freestone_process_resident_memory_bytes", Gauge, "Memory of the process";
    DEVICES = "freestone_devices", Gauge, "Devices of a kind";
    LEFT_OUT = "freestone_devices_left_out", Gauge, "Devices that are no forks and are not told one by one, as there are too many";
    CONNECTIONS = "freestone_nbd_connections", Gauge, "Connections of NBD clients";
    ACCEPTED = "freestone_nbd_connections_accepted", Counter, "Connections of NBD clients that were accepted";
    REFUSED = "freestone_nbd_connections_refused", Counter, "Connections of NBD clients that were closed at once, as there were too many";
    DENIED = "freestone_connections_denied", Counter, "Connections of NBD clients and virtual machines that were closed at once, as their address does not allow them";
    SIZE = "freestone_device_size_bytes", Gauge, "Size of a device";
    MEMORY = "freestone_device_memory_bytes", Gauge, "Memory that is charged to a device, no fork, that stores in memory";
    STORED = "freestone_device_stored_bytes", Gauge, "What such a device holds itself, before compression";
    FORKS = "freestone_forks", Gauge, "Forks of a base";
    FAMILY_MEMORY = "freestone_family_memory_bytes", Gauge, "Memory of a family: of a base's forks, or of a disk with its snapshots and their forks";
    FAMILY_LIMIT = "freestone_family_memory_limit_bytes", Gauge, "The most that may be, 0 for no limit";
    EXPORT_CONNECTIONS = "freestone_export_connections", Gauge, "Connections to an export";
}

/// Of devices that are no forks.
pub const DEVICE: Asked = asked!("freestone_device", "a device that is no fork");
/// Of all forks of a base together.
pub const FORKS_ASKED: Asked = asked!("freestone_forks", "all forks of a base, those that have gone as well");
/// Of the busiest forks.
pub const FORK: Asked = asked!("freestone_fork", "a fork, of the busiest ones");
/// Of exports.
pub const EXPORT: Asked = asked!("freestone_export", "an export");

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// The page that promises them.
    const PAGE: &str = include_str!("../../../../docs/metrics.md");

    #[test]
    fn the_documentation_has_all_and_no_others() {
        let asked = [DEVICE, FORKS_ASKED, FORK, EXPORT];
        let asked = asked
            .iter()
            .flat_map(|all| [all.requests, all.bytes, all.errors, all.in_flight, all.limited, all.duration]);
        let ours: Vec<_> = ALONE.iter().copied().chain(asked).collect();
        let of = |metric: &Metric| match metric.of {
            Type::Counter => "counter",
            Type::Gauge => "gauge",
            Type::Histogram => "histogram",
            Type::Info => "info",
        };
        let named: BTreeMap<_, _> = ours.iter().map(|metric| (metric.name, of(metric))).collect();
        assert_eq!(named.len(), ours.len(), "a name twice");
        let rows = PAGE.lines().filter(|line| line.starts_with("| `freestone_"));
        let documented: BTreeMap<_, _> = rows
            .map(|row| {
                let cells: Vec<_> = row.split('|').map(str::trim).collect();
                (cells[1].trim_matches('`'), cells[2])
            })
            .collect();
        assert_eq!(named, documented);
    }
}
