//! Lists of who may connect, as they are said: `10.0.0.0/8`, `::1`, `uid:1000`, `gid:NAME`.

use std::path::Path;

use freestone_nbd::{Address, AllowList, MAX_ALLOWED, Who};

use freestone_spec::config::FileConfig;

use crate::access::{find_group, find_user};
use crate::error::Usage;

/// What `--allow` of a verb does.
pub const HELP: &str = "Let only these connect there, for all that is published there: networks (10.0.0.0/8, ::1) by \
                        TCP, uid:USER and gid:GROUP at Unix sockets";

/// What such words say; users and groups by name are those of now. Half a sentence where they cannot be
/// meant.
pub fn parse(words: &[String]) -> Result<AllowList, String> {
    if words.is_empty() {
        return Err("nobody could connect; without a list whoever reaches it can".into());
    }
    if words.len() > MAX_ALLOWED {
        return Err(format!("{} words, at most {MAX_ALLOWED} are allowed", words.len()));
    }
    let who = words.iter().map(|word| one(word).map_err(|why| format!("{word}: {why}")));
    Ok(AllowList::new(who.collect::<Result<Vec<_>, _>>()?))
}

/// Who may connect to the addresses of a server: by its command line, else by its file. True: by the
/// command line.
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

fn one(word: &str) -> Result<Who, String> {
    if let Some(user) = word.strip_prefix("uid:") {
        return find_user(user).map(Who::User);
    }
    if let Some(group) = word.strip_prefix("gid:") {
        return find_group(group).map(Who::Group);
    }
    Who::network(word).map_err(|why| why.to_string())
}

/// The words of a list.
pub fn words(list: &AllowList) -> Vec<String> {
    list.entries().iter().map(ToString::to_string).collect()
}

/// Refuses a list by which nobody could ever connect at an address.
pub fn check(list: &AllowList, address: &Address) -> Result<(), String> {
    match address {
        Address::Unix(_) => check_local(list, address),
        Address::Tcp { host, .. } if !list.has_networks_for(host) => {
            Err(format!("{address}: {list} has no network from which somebody could come there"))
        }
        Address::Tcp { .. } => Ok(()),
        Address::Stdin => Err("--single serves the one client that is there already".into()),
    }
}

/// The same of a Unix socket.
pub fn check_local(list: &AllowList, address: &dyn std::fmt::Display) -> Result<(), String> {
    if list.has_users() {
        return Ok(());
    }
    Err(format!("{address}: {list} has no uid: or gid:, and at a Unix socket nobody comes from a network"))
}

/// A list for people.
pub fn shown(list: Option<&AllowList>) -> String {
    list.map_or_else(|| "whoever can".to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: &[&str]) -> Result<AllowList, String> {
        parse(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn words_are_read_and_what_cannot_be_meant_is_said() {
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
            ("10.0.0.1/8", "10.0.0.0/8 is meant?"),
            ("", "must be a network"),
        ] {
            let said = of(&[word]).unwrap_err();
            assert!(said.starts_with(&format!("{word}: ")) && said.contains(why), "{said}");
        }
        assert!(of(&[]).unwrap_err().starts_with("nobody could connect"));
        assert!(of(&["::1"; MAX_ALLOWED + 1]).unwrap_err().starts_with("257 words, at most 256"));
    }

    #[test]
    fn lists_that_let_nobody_in_are_refused() {
        let checked = |words: &[&str], address: &str| check(&of(words).unwrap(), &address.parse().unwrap());
        assert_eq!(checked(&["uid:0", "10.0.0.0/8"], "unix:/a"), Ok(()));
        assert_eq!(checked(&["uid:0", "10.0.0.0/8"], "tcp:127.0.0.1:1"), Ok(()));
        let said = checked(&["10.0.0.0/8"], "unix:/a").unwrap_err();
        assert_eq!(
            said,
            "unix:/a: 10.0.0.0/8 has no uid: or gid:, and at a Unix socket nobody comes from a network"
        );
        let said = checked(&["uid:0", "::1"], "tcp:127.0.0.1:1").unwrap_err();
        assert_eq!(said, "tcp:127.0.0.1:1: ::1,uid:0 has no network from which somebody could come there");
    }
}
