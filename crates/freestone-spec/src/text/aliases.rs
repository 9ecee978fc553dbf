//! Former names of keys and options, which configuration files and command lines may still use for
//! one release.

use serde_json::{Map, Value};

/// Former and present names of server keys, which are also options.
const RENAMED: [(&str, &str); 4] = [
    ("max_newcomers", "max_pending_handshakes"),
    ("newcomer_grace", "handshake_grace"),
    ("connects_per_second", "max_connect_rate"),
    ("handshake_silence", "handshake_idle_timeout"),
];

/// Former and present names of device keys, which are also attributes.
const RENAMED_DEVICE_KEYS: [(&str, &str); 2] =
    [("on_lost", "on_data_loss"), ("full_warn", "mem_warn_threshold")];

/// Returns the present name of a server key of a configuration file. Logs a warning if `key` is a
/// former name.
pub fn canonical_key(key: &str) -> &str {
    with_warning(key, find_present(&RENAMED, key))
}

/// Returns the present name of a device key or attribute. Logs nothing, because `key` may come from
/// a program or from a state directory of an earlier version.
#[must_use]
pub fn canonical_device_key(key: &str) -> &str {
    find_present(&RENAMED_DEVICE_KEYS, key).unwrap_or(key)
}

/// Returns the present name of a device key or attribute that a user wrote. Logs a warning if `key`
/// is a former name.
pub fn canonical_user_key(key: &str) -> &str {
    with_warning(key, find_present(&RENAMED_DEVICE_KEYS, key))
}

/// Adds each renamed device key in a JSON object of a reply under its former name too, for programs
/// that read the former name.
pub fn add_former_device_keys(object: &mut Map<String, Value>) {
    for (former, present) in RENAMED_DEVICE_KEYS {
        if let Some(value) = object.get(present) {
            object.insert(former.to_owned(), value.clone());
        }
    }
}

/// Returns true if `key` is the former name of a device key, which text output omits.
#[must_use]
pub fn is_former_device_key(key: &str) -> bool {
    find_present(&RENAMED_DEVICE_KEYS, key).is_some()
}

fn find_present(renamed: &[(&str, &'static str)], key: &str) -> Option<&'static str> {
    renamed.iter().find(|(former, _)| *former == key).map(|(_, present)| *present)
}

fn with_warning<'a>(key: &'a str, present: Option<&'static str>) -> &'a str {
    let Some(present) = present else { return key };
    tracing::warn!("{key}: is deprecated, use {present}");
    present
}

/// Returns the present form of a former command-line option, `--key` or `--key=value`. Returns
/// `None` if `arg` is not a former option.
#[must_use]
pub fn canonical_option(arg: &str) -> Option<String> {
    let (name, value) = arg.split_once('=').map_or((arg, None), |(name, value)| (name, Some(value)));
    let name = name.strip_prefix("--")?.replace('-', "_");
    let present = find_present(&RENAMED, &name)?;
    let option = format!("--{}", present.replace('_', "-"));
    Some(value.map_or_else(|| option.clone(), |value| format!("{option}={value}")))
}

#[cfg(test)]
mod tests {
    use super::{canonical_device_key, canonical_key, canonical_option, canonical_user_key};

    #[test]
    fn former_names_are_replaced() {
        assert_eq!(canonical_key("newcomer_grace"), "handshake_grace");
        assert_eq!(canonical_key("nbd"), "nbd");
        assert_eq!(canonical_option("--max-newcomers").as_deref(), Some("--max-pending-handshakes"));
        assert_eq!(canonical_option("--newcomer-grace=5s").as_deref(), Some("--handshake-grace=5s"));
        assert_eq!(canonical_option("--max-connections"), None);
        assert_eq!(canonical_option("newcomer-grace"), None);
        assert_eq!(canonical_option("--on-lost"), None);
        for canonical in [canonical_device_key, canonical_user_key] {
            assert_eq!(canonical("on_lost"), "on_data_loss");
            assert_eq!(canonical("full_warn"), "mem_warn_threshold");
            assert_eq!(canonical("newcomer_grace"), "newcomer_grace");
        }
    }
}
