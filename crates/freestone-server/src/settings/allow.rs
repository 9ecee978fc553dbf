//! Allow lists as text: `10.0.0.0/8`, `::1`, `uid:1000`, `gid:NAME`.

use std::path::Path;

use freestone_nbd::{Address, AllowEntry, AllowList, MAX_ALLOWED};

use crate::config::FileConfig;
use crate::settings::access::{find_group, find_user};
use crate::usage::Usage;

/// Help of the option `--allow` of verbs.
pub const HELP: &str = "Clients that may connect to this address: networks (10.0.0.0/8, ::1) for TCP, uid:USER and gid:GROUP \
    for Unix sockets; applies to all exports there";

/// Parses an allow list. User and group names are looked up now, not at each connection.
///
/// # Errors
/// Returns the reason without the option or key, which the caller puts before it.
pub fn parse(words: &[String]) -> Result<AllowList, String> {
    if words.is_empty() {
        return Err("the list is empty, so no client could connect; omit it to admit every client".into());
    }
    if words.len() > MAX_ALLOWED {
        return Err(format!("{} words, at most {MAX_ALLOWED} are allowed", words.len()));
    }
    let entries = words.iter().map(|word| parse_entry(word).map_err(|why| format!("{word}: {why}")));
    Ok(AllowList::new(entries.collect::<Result<Vec<_>, _>>()?))
}

/// Returns the allow list for the server's own addresses: from `--allow`, or else from the configuration
/// file. Returns `None` if neither contains one. The boolean is true if the list is that of `--allow`.
pub fn of_server(
    line: &[String],
    file: Option<(&FileConfig, &Path)>,
) -> Result<Option<(AllowList, bool)>, Usage> {
    if !line.is_empty() {
        let list = parse(line).map_err(|why| Usage(format!("--allow: {why}")))?;
        return Ok(Some((list, true)));
    }
    let Some((words, path)) = file.and_then(|(file, path)| Some((file.allow.as_deref()?, path))) else {
        return Ok(None);
    };
    let list = parse(words).map_err(|why| Usage(format!("{}: allow: {why}", path.display())))?;
    Ok(Some((list, false)))
}

fn parse_entry(word: &str) -> Result<AllowEntry, String> {
    if let Some(user) = word.strip_prefix("uid:") {
        return find_user(user).map(AllowEntry::User);
    }
    if let Some(group) = word.strip_prefix("gid:") {
        return find_group(group).map(AllowEntry::Group);
    }
    AllowEntry::parse_network(word).map_err(|why| why.to_string())
}

/// Returns the entries of an allow list as text, one word per entry, as accepted by [`parse`].
pub fn words(list: &AllowList) -> Vec<String> {
    list.entries().iter().map(ToString::to_string).collect()
}

/// Fails if no entry of the allow list can match a client of `address`.
pub fn check(list: &AllowList, address: &Address) -> Result<(), String> {
    match address {
        Address::Unix(_) => check_local(list, address),
        Address::Tcp { host, .. } if !list.has_networks_for(host) => {
            Err(format!("{address}: {list} has no network that can reach this address"))
        }
        Address::Tcp { .. } => Ok(()),
        Address::Stdin => Err("--single serves one client, which is already connected".into()),
    }
}

/// Fails if no entry of the allow list can match a client of a Unix socket. `address` names the socket in the
/// error.
pub fn check_local(list: &AllowList, address: &dyn std::fmt::Display) -> Result<(), String> {
    if list.has_users() {
        return Ok(());
    }
    Err(format!("{address}: {list} has no uid: or gid: entry, and networks do not apply to Unix sockets"))
}

/// Returns an allow list as text for messages. `None` is shown as "every client".
pub fn shown(list: Option<&AllowList>) -> String {
    list.map_or_else(|| "every client".to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: &[&str]) -> Result<AllowList, String> {
        parse(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn parse_accepts_each_kind_and_names_invalid_entry() {
        let list = of(&["uid:root", "gid:root", "10.0.0.0/8", "uid:1000", "gid:7", "::1", "uid:0"]).unwrap();
        assert_eq!(words(&list), ["10.0.0.0/8", "::1", "uid:0", "uid:1000", "gid:0", "gid:7"]);
        assert_eq!(parse(&words(&list)), Ok(list));
        for (word, why) in [
            ("uid:no-such-user", "there is no such user"),
            ("gid:no-such-group", "there is no such group"),
            ("uid:", "there is no such user"),
            ("uid:-1", "there is no such user"),
            ("uid:4294967295", "below 4294967295"),
            ("user:root", "must be a network (10.0.0.0/8"),
            ("10.0.0.1/8", "; use 10.0.0.0/8"),
            ("", "must be a network"),
        ] {
            let said = of(&[word]).unwrap_err();
            assert!(said.starts_with(&format!("{word}: ")) && said.contains(why), "{said}");
        }
        assert!(of(&[]).unwrap_err().starts_with("the list is empty"));
        assert!(of(&["::1"; MAX_ALLOWED + 1]).unwrap_err().starts_with("257 words, at most 256"));
    }

    #[test]
    fn check_list_without_possible_client_fails() {
        let checked = |words: &[&str], address: &str| check(&of(words).unwrap(), &address.parse().unwrap());
        assert_eq!(checked(&["uid:0", "10.0.0.0/8"], "unix:/a"), Ok(()));
        assert_eq!(checked(&["uid:0", "10.0.0.0/8"], "tcp:127.0.0.1:1"), Ok(()));
        let said = checked(&["10.0.0.0/8"], "unix:/a").unwrap_err();
        assert_eq!(
            said,
            "unix:/a: 10.0.0.0/8 has no uid: or gid: entry, and networks do not apply to Unix sockets"
        );
        let said = checked(&["uid:0", "::1"], "tcp:127.0.0.1:1").unwrap_err();
        assert_eq!(said, "tcp:127.0.0.1:1: ::1,uid:0 has no network that can reach this address");
    }
}
