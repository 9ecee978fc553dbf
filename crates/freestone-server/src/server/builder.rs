//! The builder of an embedded server.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use freestone_nbd::Limits;
use freestone_spec::{size, times};

use super::plan::{Plan, add_devices, parse_addresses};
use super::{Server, ServerError};
use crate::config::{self, MAX_CONNECTIONS_RANGE};
use crate::declared;
use crate::observe::metrics::{FORKS, MetricsConfig};
use crate::persistence::state_args::StateArgs;
use crate::settings::http_address::AddressWords;
use crate::usage::Usage;

/// Settings of a [`Server`]. Nothing is checked or opened before [`start`](Self::start).
#[derive(Debug, Clone, Default)]
pub struct ServerBuilder {
    devices: Vec<String>,
    nbd: Vec<String>,
    control: Option<PathBuf>,
    metrics: Option<String>,
    page: Option<String>,
    open_http: bool,
    state: StateArgs,
    max_connections: Option<u32>,
    max_memory_in_flight: Option<u64>,
}

impl ServerBuilder {
    /// Adds a device by specification, `NAME=KIND,KEY=VALUE...`, as on the command line of `freestone serve`
    /// (`ram0=ram,disksize=1G`). A device follows the devices that it is based on. Relative paths start at the working
    /// directory.
    #[must_use]
    pub fn device(mut self, spec: impl Into<String>) -> Self {
        self.devices.push(spec.into());
        self
    }

    /// Adds an NBD address, at which every device is exported unless its specification has `publish=no`: `unix:PATH`, or
    /// `tcp:HOST:PORT` with any free port for port 0. Without an address, devices are only exported if clients of the
    /// control socket publish them.
    #[must_use]
    pub fn nbd(mut self, address: impl Into<String>) -> Self {
        self.nbd.push(address.into());
        self
    }

    /// Opens a control socket at this path, over which `freestone --control PATH` controls the server.
    #[must_use]
    pub fn control(mut self, path: impl Into<PathBuf>) -> Self {
        self.control = Some(path.into());
        self
    }

    /// Serves metrics for Prometheus at `http://ADDRESS/metrics`. The address is `PORT` on 127.0.0.1, or `HOST:PORT`; port
    /// 0 is any free port.
    #[must_use]
    pub fn metrics(mut self, address: impl Into<String>) -> Self {
        self.metrics = Some(address.into());
        self
    }

    /// Serves the read-only web page at `http://ADDRESS/`, with an address as for [`metrics`](Self::metrics).
    #[must_use]
    pub fn page(mut self, address: impl Into<String>) -> Self {
        self.page = Some(address.into());
        self
    }

    /// Allows addresses of [`metrics`](Self::metrics) and [`page`](Self::page) that other machines can reach. Both are
    /// plain HTTP, and show the names of all devices.
    #[must_use]
    pub fn open_http(mut self) -> Self {
        self.open_http = true;
        self
    }

    /// Sets the state directory, which is created if it is missing. A server with a state restores the devices and exports
    /// that the last server on it had, and the content of devices with `keep=yes`. The start fails if the
    /// [devices](Self::device) are given and differ from the state, unless
    /// [`apply_differences`](Self::apply_differences) is called.
    #[must_use]
    pub fn state(mut self, dir: impl Into<PathBuf>) -> Self {
        self.state.state = Some(dir.into());
        self
    }

    /// Changes devices of the state that differ from the [devices](Self::device) of this builder.
    #[must_use]
    pub fn apply_differences(mut self) -> Self {
        self.state.apply = true;
        self
    }

    /// Saves changed devices with `keep=yes` at this interval, at least 1 s, in addition to the save at the shutdown.
    /// Needs a [state](Self::state).
    #[must_use]
    pub fn save_every(mut self, interval: Duration) -> Self {
        self.state.save_every = Some(interval);
        self
    }

    /// Saves a device with `keep=yes` once this many of its bytes have changed, at least 1 MiB. Needs a
    /// [state](Self::state).
    #[must_use]
    pub fn save_after(mut self, bytes: u64) -> Self {
        self.state.save_after = Some(bytes);
        self
    }

    /// Sets the longest time of the save at the shutdown; 5 minutes by default. Needs a [state](Self::state).
    #[must_use]
    pub fn save_timeout(mut self, time: Duration) -> Self {
        self.state.save_timeout = Some(time);
        self
    }

    /// Sets the limit of NBD connections, 1 to 65536; 1024 by default. Each connection can hold 35 MiB of buffers.
    #[must_use]
    pub fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = Some(connections);
        self
    }

    /// Sets the limit of request data in flight over all connections, in bytes: at least 64 MiB; 256 MiB by default.
    /// Further requests wait.
    #[must_use]
    pub fn max_memory_in_flight(mut self, bytes: u64) -> Self {
        self.max_memory_in_flight = Some(bytes);
        self
    }

    /// Starts the server. When this returns, clients can connect.
    ///
    /// # Errors
    /// [`ServerError::Invalid`] if a setting is invalid, else [`ServerError::Start`].
    pub fn start(self) -> Result<Server, ServerError> {
        Ok(Server::start(self.plan()?)?)
    }

    fn plan(self) -> Result<Plan> {
        let mut devices = Vec::new();
        add_devices(&mut devices, &self.devices)?;
        declared::check_order(&devices)?;
        let StateArgs { save_every, save_after, .. } = &self.state;
        let refuse = |key, text: String, why| Usage(format!("{key}={text}: {why}"));
        if let Some(every) = *save_every {
            config::check_save_every(every).map_err(|why| refuse("save_every", times::exact(every), why))?;
        }
        if let Some(bytes) = *save_after {
            config::check_save_after(bytes).map_err(|why| refuse("save_after", size::exact(bytes), why))?;
        }
        let state = self.state.settings(None, &devices)?;
        let http = |key, address: Option<&str>| {
            let useless = "has no effect without an address";
            let words = AddressWords { key, line: None, file: address, open: self.open_http, useless };
            address.map(|_| words.resolve()).transpose().map(Option::flatten)
        };
        let mut limits = Limits::default();
        if let Some(most) = self.max_connections {
            let (least, largest) = MAX_CONNECTIONS_RANGE.into_inner();
            if !MAX_CONNECTIONS_RANGE.contains(&most.into()) {
                let why = format!("must be a number from {least} to {largest}");
                return Err(refuse("max_connections", most.to_string(), why).into());
            }
            limits.max_connections = most as usize;
        }
        if let Some(bytes) = self.max_memory_in_flight {
            limits.max_memory_in_flight = config::check_memory_in_flight(bytes)
                .map_err(|why| refuse("max_memory_in_flight", size::exact(bytes), why))?;
        }
        Ok(Plan {
            devices,
            addresses: parse_addresses(&self.nbd, None, "nbd")?,
            control: self.control.map(std::path::absolute).transpose().context("control: no path")?,
            limits,
            state,
            metrics: http("metrics", self.metrics.as_deref())?
                .map(|at| MetricsConfig { at, forks: FORKS as usize }),
            page: http("http", self.page.as_deref())?,
            ..Plan::default()
        })
    }
}
