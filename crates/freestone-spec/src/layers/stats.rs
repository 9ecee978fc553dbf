//! Request counters and latencies of a device as JSON.

use std::time::Duration;

use freestone::device::{Counter, IoStats, OpStats};
use serde_json::{Value, json};

/// Returns the request counters of a device as a JSON object. Zone appends count as writes, as in
/// the `stat` file of the kernel's block layer.
pub fn request_stat(counts: &OpStats) -> Value {
    json!({
        "reads": counts.reads,
        "read_bytes": counts.read_bytes,
        "writes": counts.writes + counts.appends,
        "written_bytes": counts.written_bytes,
        "discards": counts.discards,
        "discarded_bytes": counts.discarded_bytes,
        "zeroes": counts.zeroes,
        "zeroed_bytes": counts.zeroed_bytes,
        "flushes": counts.flushes,
        "errors": counts.errors,
        "in_flight": counts.in_flight,
        "limited": counts.limited,
    })
}

/// Returns the latencies of a device's requests by operation as a JSON object. Operations that did
/// not occur are omitted.
pub fn latency_stat(account: &IoStats) -> Value {
    let nanoseconds = |took: Duration| u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    let operation = |counter: Counter| {
        let latency = &account.latency[counter];
        let requests = latency.requests();
        (requests > 0).then(|| {
            let within = |thousandths| latency.quantile(thousandths).map(nanoseconds);
            let fields = json!({
                "requests": requests,
                "mean_ns": nanoseconds(latency.total()) / requests,
                "p50_ns": within(500),
                "p99_ns": within(990),
                "p999_ns": within(999),
            });
            (counter.name().to_owned(), fields)
        })
    };
    Value::Object(Counter::ALL.into_iter().filter_map(operation).collect())
}

/// Returns the counters of requests that reached the data of a test drive, by operation, as a JSON
/// object.
pub fn operation_stat(counts: &OpStats) -> Value {
    json!({
        "reads": counts.reads,
        "writes": counts.writes,
        "discards": counts.discards,
        "zeroes": counts.zeroes,
        "flushes": counts.flushes,
        "appends": counts.appends,
        "read_bytes": counts.read_bytes,
        "written_bytes": counts.written_bytes,
        "errors": counts.errors,
    })
}
