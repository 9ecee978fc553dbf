//! Former names of keys, which configuration files and command lines may still have for one release.

/// Each former name with the present one.
const RENAMED: [(&str, &str); 4] = [
    ("max_newcomers", "max_pending_handshakes"),
    ("newcomer_grace", "handshake_grace"),
    ("connects_per_second", "max_connect_rate"),
    ("handshake_silence", "handshake_idle_timeout"),
];

/// Returns the present name of a key of a configuration file. Warns about a former one.
pub fn key(key: &str) -> &str {
    let Some((_, present)) = RENAMED.iter().find(|(former, _)| *former == key) else { return key };
    tracing::warn!("{key}: is deprecated, use {present}");
    present
}

/// Returns the present form of a former option, `--key` or `--key=value`.
#[must_use]
pub fn option(arg: &str) -> Option<String> {
    let (name, value) = arg.split_once('=').map_or((arg, None), |(name, value)| (name, Some(value)));
    let name = name.strip_prefix("--")?.replace('-', "_");
    let (_, present) = RENAMED.iter().find(|(former, _)| *former == name)?;
    let option = format!("--{}", present.replace('_', "-"));
    Some(value.map_or_else(|| option.clone(), |value| format!("{option}={value}")))
}

#[cfg(test)]
mod tests {
    use super::{key, option};

    #[test]
    fn former_names_are_replaced() {
        assert_eq!(key("newcomer_grace"), "handshake_grace");
        assert_eq!(key("nbd"), "nbd");
        assert_eq!(option("--max-newcomers").as_deref(), Some("--max-pending-handshakes"));
        assert_eq!(option("--newcomer-grace=5s").as_deref(), Some("--handshake-grace=5s"));
        assert_eq!(option("--max-connections"), None);
        assert_eq!(option("newcomer-grace"), None);
    }
}
