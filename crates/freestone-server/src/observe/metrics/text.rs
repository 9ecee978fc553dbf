//! Encoding of the metrics as `OpenMetrics` text.

use std::fmt;

use freestone::device::{Counter, IoStats, Latency};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::names::{
    ACCEPTED, BACKING_SIZE, BACKING_USED, BUILD, CONNECTIONS, DENIED, DEVICE, DEVICES, EXPORT,
    EXPORT_CONNECTIONS, FAMILY_LIMIT, FAMILY_MEMORY, FORK, FORK_LIMIT, FORK_MEMORY, FORKS, FORKS_SUM,
    LEFT_OUT, MEMORY, Metric, REFUSED, RESIDENT, RequestMetrics, SIZE, STORED, Type,
};
use super::scrape::Scrape;

/// Returns the metrics in `scrape` as `OpenMetrics` text.
pub fn text(scrape: Scrape) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(scrape));
    let mut text = String::new();
    encode(&mut text, &registry).expect("writing to a string cannot fail");
    text
}

type Labels<'a> = &'a [(&'static str, &'a str)];

/// Labels of a device, fork, base or export, and its request statistics.
type Row<'a> = (Vec<(&'static str, &'a str)>, &'a IoStats);

impl Collector for Scrape {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        begin(&mut to, BUILD)?.encode_info(&[("version", env!("CARGO_PKG_VERSION"))])?;
        gauges(&mut to, RESIDENT, [(&[][..], self.resident_bytes)])?;
        let kinds: Vec<_> = self.kinds.iter().map(|(kind, count)| ([("kind", *kind)], *count)).collect();
        gauges(&mut to, DEVICES, kinds.iter().map(|(labels, count)| (&labels[..], *count)))?;
        gauges(&mut to, LEFT_OUT, [(&[][..], self.left_out)])?;
        gauges(&mut to, CONNECTIONS, [(&[][..], self.nbd.connections)])?;
        counter(&mut to, ACCEPTED, self.nbd.accepted)?;
        counter(&mut to, REFUSED, self.nbd.refused)?;
        counter(&mut to, DENIED, self.nbd.denied)?;

        let devices: Vec<Row<'_>> = self
            .devices
            .iter()
            .map(|device| (vec![("device", device.name.as_str()), ("kind", device.kind)], &device.account))
            .collect();
        let of_each = || devices.iter().map(|(labels, _)| &labels[..]).zip(&self.devices);
        gauges(&mut to, SIZE, of_each().map(|(labels, device)| (labels, device.size)))?;
        let stored = || of_each().filter_map(|(labels, device)| Some((labels, device.stored?)));
        gauges(&mut to, STORED, stored().map(|(labels, (stored, _))| (labels, stored)))?;
        gauges(&mut to, MEMORY, stored().map(|(labels, (_, memory))| (labels, memory)))?;
        encode_requests(&mut to, &DEVICE, &devices)?;

        let bases: Vec<Row<'_>> =
            self.bases.iter().map(|of| (vec![("base", of.base.as_str())], &of.account)).collect();
        let forks = bases.iter().zip(&self.bases).map(|((labels, _), of)| (&labels[..], of.forks));
        gauges(&mut to, FORKS, forks)?;
        encode_requests(&mut to, &FORKS_SUM, &bases)?;

        let families: Vec<_> = self.families.iter().map(|of| ([("family", of.name.as_str())], of)).collect();
        gauges(&mut to, FAMILY_MEMORY, families.iter().map(|(labels, of)| (&labels[..], of.used)))?;
        gauges(&mut to, FAMILY_LIMIT, families.iter().map(|(labels, of)| (&labels[..], of.limit)))?;
        let backing = || families.iter().filter_map(|(labels, of)| Some((&labels[..], of.backing?)));
        gauges(&mut to, BACKING_SIZE, backing().map(|(labels, backing)| (labels, backing.size)))?;
        gauges(&mut to, BACKING_USED, backing().map(|(labels, backing)| (labels, backing.used_bytes)))?;

        let forks: Vec<Row<'_>> = self
            .forks
            .iter()
            .map(|fork| (vec![("fork", fork.name.as_str()), ("base", fork.base.as_str())], &fork.account))
            .collect();
        let each = || forks.iter().map(|(labels, _)| &labels[..]).zip(&self.forks);
        gauges(&mut to, FORK_MEMORY, each().map(|(labels, fork)| (labels, fork.memory)))?;
        gauges(&mut to, FORK_LIMIT, each().map(|(labels, fork)| (labels, fork.limit)))?;
        encode_requests(&mut to, &FORK, &forks)?;

        let exports: Vec<Row<'_>> = self
            .exports
            .iter()
            .map(|of| (vec![("device", of.device.as_str()), ("address", of.address.as_str())], &of.account))
            .collect();
        let connections = exports.iter().zip(&self.exports);
        gauges(
            &mut to,
            EXPORT_CONNECTIONS,
            connections.map(|((labels, _), of)| (&labels[..], of.connections as u64)),
        )?;
        encode_requests(&mut to, &EXPORT, &exports)
    }
}

fn begin<'a>(to: &'a mut DescriptorEncoder<'_>, metric: Metric) -> Result<MetricEncoder<'a>, fmt::Error> {
    let of = match metric.of {
        Type::Counter => MetricType::Counter,
        Type::Gauge => MetricType::Gauge,
        Type::Histogram => MetricType::Histogram,
        Type::Info => MetricType::Info,
    };
    to.encode_descriptor(metric.name, metric.help, None, of)
}

fn gauges<'a>(
    to: &mut DescriptorEncoder<'_>,
    metric: Metric,
    of: impl IntoIterator<Item = (Labels<'a>, u64)>,
) -> fmt::Result {
    let mut metric = begin(to, metric)?;
    for (labels, value) in of {
        if labels.is_empty() {
            metric.encode_gauge(&value)?;
        } else {
            metric.encode_family(&labels)?.encode_gauge(&value)?;
        }
    }
    Ok(())
}

fn counter(to: &mut DescriptorEncoder<'_>, metric: Metric, value: u64) -> fmt::Result {
    begin(to, metric)?.encode_counter::<NoLabelSet, _, u64>(&value, None)
}

/// Encodes the request statistics of each row in `of`, by operation.
fn encode_requests(to: &mut DescriptorEncoder<'_>, names: &RequestMetrics, of: &[Row<'_>]) -> fmt::Result {
    let of_each = |value: fn(&IoStats, Counter) -> Option<u64>| {
        of.iter().flat_map(move |(labels, account)| {
            Counter::ALL.into_iter().filter_map(move |counter| {
                let op = [("op", counter.name())];
                Some(([labels, &op[..]].concat(), value(account, counter)?))
            })
        })
    };
    let counters = |to: &mut DescriptorEncoder<'_>, metric, value| {
        let mut metric = begin(to, metric)?;
        for (labels, value) in of_each(value) {
            metric.encode_family(&&labels[..])?.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
        }
        Ok::<_, fmt::Error>(())
    };
    counters(to, names.requests, |account, counter| Some(account.ops.requests(counter)))?;
    counters(to, names.bytes, |account, counter| {
        // A flush has no bytes, and bytes of appends are counted as writes.
        let has = !matches!(counter, Counter::Flush | Counter::Append);
        has.then(|| account.ops.bytes(counter))
    })?;
    counters(to, names.errors, |account, counter| Some(account.failed[counter]))?;
    gauges(to, names.in_flight, of.iter().map(|(labels, account)| (&labels[..], account.ops.in_flight)))?;
    let mut metric = begin(to, names.limited)?;
    for (labels, account) in of {
        let value = account.ops.limited;
        metric.encode_family(labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
    }
    let mut metric = begin(to, names.duration)?;
    for (labels, account) in of {
        for counter in Counter::ALL {
            let op = [("op", counter.name())];
            let labels = [labels, &op[..]].concat();
            histogram(metric.encode_family(&&labels[..])?, &account.latency[counter])?;
        }
    }
    Ok(())
}

/// Encodes a histogram. A histogram without requests is omitted.
fn histogram(mut to: MetricEncoder<'_>, latency: &Latency) -> fmt::Result {
    let count = latency.requests();
    if count == 0 {
        return Ok(());
    }
    let mut before = 0;
    let mut buckets: Vec<_> = latency
        .below_powers_of_four()
        .map(|(end, below)| (end.as_secs_f64(), below - std::mem::replace(&mut before, below)))
        .collect();
    buckets.push((f64::INFINITY, count - before));
    to.encode_histogram::<NoLabelSet>(latency.total().as_secs_f64(), count, &buckets, None)
}
