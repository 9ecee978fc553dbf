//! Settings of the whole server in a file that is applied: they must be those of the running server.

use std::path::Path;

use freestone_control::protocol::RpcError;
use freestone_nbd::Address;
use freestone_spec::size;
use freestone_state::State;

use crate::config::FileConfig;
use crate::persistence::saves::SaveSchedule;
use crate::service::Service;
use crate::settings::handshake;
use crate::settings::paths::parse_address;

/// Fails if the file differs from a setting of the whole server that can only be changed by a restart.
pub(super) fn check_server(service: &Service, file: &FileConfig, path: &Path) -> Result<(), RpcError> {
    let differs = |key: &str, is: String| {
        let path = path.display();
        Err(rpc_error!(EBUSY, "{path}: {key}: the server uses {is}; restart the server to change this"))
    };
    let same = |key: &str, said: &str, is: Option<&String>| {
        let is = is.map_or("none", String::as_str);
        if is == said { Ok(()) } else { differs(key, is.to_owned()) }
    };
    let mut home = service.exports.server_addresses();
    home.retain(|address| *address != Address::Stdin);
    let is_home = |text: &String| match parse_address(text, Some(&file.base)) {
        // Port 0 matches the port that the system chose when the server started.
        Ok(Address::Tcp { host, port: 0, .. }) => {
            home.iter().any(|at| matches!(at, Address::Tcp { host: other, .. } if *other == host))
        }
        Ok(address) => home.contains(&address),
        Err(_) => false,
    };
    let is_same = file.nbd.len() == home.len() && file.nbd.iter().all(is_home);
    if !file.nbd.is_empty() && !is_same {
        let is: Vec<_> = home.iter().map(ToString::to_string).collect();
        return differs("nbd", is.join(", "));
    }
    if let (Some(control), Some(is)) = (&file.control, service.control.get())
        && std::path::absolute(file.base.join(control)).ok().as_ref() != Some(is)
    {
        return differs("control", is.display().to_string());
    }
    if let Some(control) = &file.control_read_only {
        let is = service.control_read_only.get();
        if std::path::absolute(file.base.join(control)).ok().as_ref() != is {
            let is = is.map_or_else(|| "none".to_owned(), |is| is.display().to_string());
            return differs("control_read_only", is);
        }
    }
    if let Some(asked) = &file.state {
        let is = service.records.state().map(State::dir);
        if std::path::absolute(file.base.join(asked)).ok().as_deref() != is {
            return differs("state", is.map_or_else(|| "none".into(), |dir| dir.display().to_string()));
        }
    }
    if file.recoverable && service.recovery.get().is_none() {
        return differs("recoverable", "false".to_owned());
    }
    let (now, asked) = (service.saves.keys(), SaveSchedule::keys_of(file));
    for (key, value) in asked {
        same(key, &value, now.iter().find(|(known, _)| *known == key).map(|(_, is)| is))?;
    }
    let said = [&file.sockets, &file.control_socket, &file.control_read_only_socket];
    for ((prefix, is), said) in service.access.each().into_iter().zip(said) {
        let now = is.words.keys(prefix);
        for (key, value) in said.keys(prefix) {
            same(&key, &value, now.iter().find(|(known, _)| *known == key).map(|(_, is)| is))?;
        }
    }
    let (now, base) = (&service.exports.tls.words, &file.base);
    for ((key, value), (_, is)) in file.tls.clone().with_base(base).texts().into_iter().zip(now.texts()) {
        if let Some(value) = value {
            same(key, &value, is.as_ref())?;
        }
    }
    let limits = &service.limits;
    if file.max_connections.is_some_and(|most| most as usize != limits.max_connections) {
        return differs("max_connections", limits.max_connections.to_string());
    }
    if let Some((key, is)) = handshake::differs(file, limits) {
        return differs(key, is);
    }
    if file.max_memory_in_flight.is_some_and(|most| most != limits.max_memory_in_flight) {
        return differs("max_memory_in_flight", size::exact(limits.max_memory_in_flight));
    }
    Ok(())
}
