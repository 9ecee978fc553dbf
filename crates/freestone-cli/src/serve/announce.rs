//! Announces the addresses of a new server: on standard output, and to the command of `--run`.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use freestone_nbd::Address;
use freestone_server::exports::Withheld;
use freestone_server::service::Service;
use freestone_server::settings::paths;

use crate::output;
use crate::serve::supervisor;

/// Returns the `sh -c` process for the command of `--run`, with the addresses in its environment variables.
/// `open_files` is the soft limit of open files before the server raised it. The shell restores that limit,
/// because programs may not expect a higher one.
pub fn run_command(command: &str, open_files: Option<u64>, service: &Service, control: &Path) -> Command {
    let exports = service.exports.nbd.exports();
    let export = exports.iter().find(|e| e.default).or(exports.first());
    let addresses = service.exports.nbd.addresses();
    let uri = match (export, addresses.first()) {
        (Some(export), _) => export.uri(),
        (None, Some(address)) => address.uri_by("", service.exports.tls.is_required()),
        (None, None) => String::new(),
    };
    let mut shell = Command::new("sh");
    let command = match open_files {
        Some(most) => format!("ulimit -S -n {most}; {command}"),
        None => command.to_owned(),
    };
    shell.arg("-c").arg(command).env("uri", &uri).env("nbd", &uri);
    for variable in supervisor::VARIABLES {
        shell.env_remove(variable);
    }
    shell.env("control", control).env(paths::CONTROL_VARIABLE, control);
    let unix = addresses.iter().find_map(|a| if let Address::Unix(path) = a { Some(path) } else { None });
    match unix {
        Some(path) => shell.env("unixsocket", path),
        None => shell.env_remove("unixsocket"),
    };
    shell
}

/// Prints the address of each export with a command to try it, and the URLs and sockets of the server.
/// Ignores a closed stdout.
pub fn announce(service: &Service, control: &Path) {
    // Writing to a string cannot fail, so the results of `writeln!` are ignored.
    let mut text = String::new();
    for export in service.exports.nbd.exports() {
        let uri = quote(&export.uri());
        let _ = writeln!(text, "{}: nbdinfo {uri}", export.name);
    }
    for entry in service.registry.all() {
        for alone in service.exports.of(entry.name()).iter().filter(|export| export.uri.is_none()) {
            let _ = writeln!(text, "{}: {}", entry.name(), alone.address);
        }
    }
    for entry in service.registry.all() {
        if service.exports.withheld(entry.name()).is_some() {
            let _ = writeln!(text, "{}", withheld_message(service, entry.name()));
        }
    }
    for seed in service.registry.seeds() {
        let _ = writeln!(text, "{seed}");
    }
    if let Some(url) = service.metrics_url.get() {
        let _ = writeln!(text, "metrics: {url}");
    }
    if let Some(url) = service.http_url.get() {
        let _ = writeln!(text, "page: {url}");
    }
    if let Some(socket) = service.control_read_only.get() {
        let socket = quote(&socket.display().to_string());
        let _ = writeln!(text, "read-only: freestone list --control {socket}");
    }
    let _ = writeln!(text, "control: freestone list --control {}", quote(&control.display().to_string()));
    output::print(&text);
}

/// Quotes a word for a shell.
pub fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Returns the line that reports why a device is withheld (not published), and how to publish it.
fn withheld_message(service: &Service, name: &str) -> String {
    let content_of = service.saves.stale_since(name);
    let changed_base = service.saves.changed_base_of(name);
    let what = match (service.exports.withheld(name), content_of, changed_base) {
        (Some(Withheld::Other(why)), ..) => format!("is withheld: {why}"),
        (_, Some(when), _) => format!("has the content of {when}, and is withheld"),
        (_, _, Some(file)) => {
            format!("has a base that changed while no server ran ({}), and is withheld", file.display())
        }
        _ => "has lost content, and is withheld".to_owned(),
    };
    format!("{name}: {what}; `freestone publish {name}` shows it as it is")
}

#[cfg(test)]
mod tests {
    use super::quote;

    #[test]
    fn quote_escapes_single_quotes() {
        assert_eq!(quote("a b'c"), r"'a b'\''c'");
    }
}
