//! Options that limit clients during the NBD handshake.

use clap::Args;
use freestone_nbd::{Limits, MAX_HANDSHAKE_BYTES, MIN_HANDSHAKE_BYTES};
use freestone_spec::{size, times};

use crate::config::FileConfig;
use crate::config::handshake::{self, BYTES, CONNECTS_RANGE, HandshakeWords, MAX_PENDING_HANDSHAKES_RANGE};
use crate::usage::Usage;

const _: () = assert!(BYTES.0 == MIN_HANDSHAKE_BYTES as u64 && BYTES.1 == MAX_HANDSHAKE_BYTES as u64);

const MAX_PENDING_HANDSHAKES_HELP: &str =
    "Limit of NBD connections in handshake, 1 to 65536; further ones wait to be accepted [default: 128]";
const HANDSHAKE_GRACE_HELP: &str = "If connections wait for that limit, close the oldest handshake of at least this age, 100ms to 1h \
    [default: 3s]";
const CONNECTS_HELP: &str = "Limit of NBD connections accepted per second after a burst of 64, 1 to 1000000; further ones wait \
    [default: 2000]";
const SILENCE_HELP: &str =
    "Close an NBD handshake after this time without data from the client, 100ms to 1h [default: 10s]";
const TIMEOUT_HELP: &str = "Close an NBD handshake that takes longer than this, 100ms to 1h [default: 60s]";
const BYTES_HELP: &str = "With TLS: limit of bytes that a client may send in a TLS handshake, and with --tls require before \
    it, 4K to 64K [default: 64K]";

/// Options for handshakes and connections.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Connection limits")]
pub struct HandshakeArgs {
    /// Limit of connections in handshake.
    #[arg(long, value_name = "N", help = MAX_PENDING_HANDSHAKES_HELP)]
    #[arg(value_parser = clap::value_parser!(u32).range(MAX_PENDING_HANDSHAKES_RANGE))]
    max_pending_handshakes: Option<u32>,
    /// Time before a handshake can be closed for a waiting connection.
    #[arg(long, value_name = "TIME", help = HANDSHAKE_GRACE_HELP, value_parser = handshake::parse_time)]
    handshake_grace: Option<std::time::Duration>,
    /// Limit of accepted connections per second.
    #[arg(long, value_name = "N", help = CONNECTS_HELP)]
    #[arg(value_parser = clap::value_parser!(u32).range(CONNECTS_RANGE))]
    max_connect_rate: Option<u32>,
    /// Longest time without data.
    #[arg(long, value_name = "TIME", help = SILENCE_HELP, value_parser = handshake::parse_time)]
    handshake_idle_timeout: Option<std::time::Duration>,
    /// Longest duration of a handshake.
    #[arg(long, value_name = "TIME", help = TIMEOUT_HELP, value_parser = handshake::parse_time)]
    handshake_timeout: Option<std::time::Duration>,
    /// Limit of bytes in a TLS handshake.
    #[arg(long, value_name = "SIZE", help = BYTES_HELP, value_parser = handshake::parse_bytes)]
    handshake_bytes: Option<u64>,
}

impl HandshakeArgs {
    /// Sets each handshake limit in `limits` from its option, or else from the configuration file.
    /// Limits that neither contains keep their value.
    pub fn put(&self, file: Option<&FileConfig>, has_tls: bool, limits: &mut Limits) -> Result<(), Usage> {
        let line = HandshakeWords {
            max_pending_handshakes: self.max_pending_handshakes,
            handshake_grace: self.handshake_grace,
            max_connect_rate: self.max_connect_rate,
            handshake_idle_timeout: self.handshake_idle_timeout,
            handshake_timeout: self.handshake_timeout,
            handshake_bytes: self.handshake_bytes,
        };
        let words = file.map_or_else(|| line.clone(), |file| line.or(&file.handshake));
        if words.handshake_bytes.is_some() && !has_tls {
            return Err(Usage("--handshake-bytes: needs --tls".into()));
        }
        put(&words, limits);
        Ok(())
    }
}

fn put(words: &HandshakeWords, limits: &mut Limits) {
    if let Some(most) = words.max_pending_handshakes {
        limits.max_pending_handshakes = most as usize;
    }
    if let Some(bytes) = words.handshake_bytes {
        limits.max_handshake_bytes = bytes as usize;
    }
    limits.max_connect_rate = words.max_connect_rate.unwrap_or(limits.max_connect_rate);
    limits.handshake_grace = words.handshake_grace.unwrap_or(limits.handshake_grace);
    limits.handshake_idle_timeout = words.handshake_idle_timeout.unwrap_or(limits.handshake_idle_timeout);
    limits.handshake_timeout = words.handshake_timeout.unwrap_or(limits.handshake_timeout);
}

/// Returns the configuration keys of the handshake limits, each with its value in `limits` as text.
pub fn keys(limits: &Limits) -> [(&'static str, String); 6] {
    [
        ("max_pending_handshakes", limits.max_pending_handshakes.to_string()),
        ("handshake_grace", times::exact(limits.handshake_grace)),
        ("max_connect_rate", limits.max_connect_rate.to_string()),
        ("handshake_idle_timeout", times::exact(limits.handshake_idle_timeout)),
        ("handshake_timeout", times::exact(limits.handshake_timeout)),
        ("handshake_bytes", size::exact(limits.max_handshake_bytes as u64)),
    ]
}

/// Returns the first key that differs between the file and `limits`, with its value in `limits`.
pub fn differs(file: &FileConfig, limits: &Limits) -> Option<(&'static str, String)> {
    let mut said = limits.clone();
    put(&file.handshake, &mut said);
    let pairs = keys(&said).into_iter().zip(keys(limits));
    pairs.map(|((_, said), is)| (said, is)).find(|(said, (_, is))| said != is).map(|(_, is)| is)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_states_defaults() {
        let helps = [
            MAX_PENDING_HANDSHAKES_HELP,
            HANDSHAKE_GRACE_HELP,
            CONNECTS_HELP,
            SILENCE_HELP,
            TIMEOUT_HELP,
            BYTES_HELP,
        ];
        for (help, (key, value)) in helps.iter().zip(keys(&Limits::default())) {
            // `times::exact` writes 60s as 1m.
            let value = if value == "1m" { "60s".to_owned() } else { value };
            assert!(help.ends_with(&format!("[default: {value}]")), "{key}: {value}");
        }
    }

    #[test]
    fn command_line_overrides_file() {
        let file = crate::config::parse("max_pending_handshakes = 5\nhandshake_idle_timeout = '2s'").unwrap();
        let args = HandshakeArgs { max_pending_handshakes: Some(7), ..HandshakeArgs::default() };
        let mut limits = Limits::default();
        args.put(Some(&file), false, &mut limits).unwrap();
        assert_eq!((limits.max_pending_handshakes, limits.handshake_idle_timeout.as_secs()), (7, 2));
        assert_eq!(differs(&file, &limits), Some(("max_pending_handshakes", "7".to_owned())));
        limits.max_pending_handshakes = 5;
        assert_eq!(differs(&file, &limits), None);
        let args = HandshakeArgs { handshake_bytes: Some(8 << 10), ..args };
        assert!(args.put(None, false, &mut limits).is_err());
        args.put(None, true, &mut limits).unwrap();
        assert_eq!(keys(&limits)[5], ("handshake_bytes", "8K".to_owned()));
    }
}
