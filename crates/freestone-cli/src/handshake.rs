//! What clients may take before they have an export: the options that say so.

use clap::Args;
use freestone_nbd::{Limits, MAX_HANDSHAKE_BYTES, MIN_HANDSHAKE_BYTES};
use freestone_spec::config::FileConfig;
use freestone_spec::handshake::{self, BYTES, CONNECTS_RANGE, HandshakeWords, MAX_NEWCOMERS_RANGE};
use freestone_spec::{size, times};

use crate::error::Usage;

const _: () = assert!(BYTES.0 == MIN_HANDSHAKE_BYTES as u64 && BYTES.1 == MAX_HANDSHAKE_BYTES as u64);

const MAX_NEWCOMERS_HELP: &str = "Let at most N NBD connections be there that have chosen no export, 1 to 65536; \
                                  further ones wait to be accepted [default: 128]";
const NEWCOMER_GRACE_HELP: &str = "Where one waits, close the oldest of these once it is so old, 100ms to 1h \
                                   [default: 3s]";
const CONNECTS_HELP: &str = "Accept at most N NBD connections a second after a burst of 64, 1 to 1000000; further \
                             ones wait [default: 2000]";
const SILENCE_HELP: &str =
    "End an NBD handshake in which the client is silent for so long, 100ms to 1h [default: 10s]";
const TIMEOUT_HELP: &str = "End an NBD handshake that takes longer, 100ms to 1h [default: 60s]";
const BYTES_HELP: &str = "With --tls require, most bytes of a client in clear, and with TLS most of its handshake \
                          of TLS, 4K to 64K [default: 64K]";

/// The options.
#[derive(Debug, Default, Args)]
pub struct HandshakeArgs {
    /// Connections.
    #[arg(long, value_name = "N", help = MAX_NEWCOMERS_HELP)]
    #[arg(value_parser = clap::value_parser!(u32).range(MAX_NEWCOMERS_RANGE))]
    max_newcomers: Option<u32>,
    /// Their time where it is needed.
    #[arg(long, value_name = "TIME", help = NEWCOMER_GRACE_HELP, value_parser = handshake::time)]
    newcomer_grace: Option<std::time::Duration>,
    /// Their pace.
    #[arg(long, value_name = "N", help = CONNECTS_HELP)]
    #[arg(value_parser = clap::value_parser!(u32).range(CONNECTS_RANGE))]
    connects_per_second: Option<u32>,
    /// Silence.
    #[arg(long, value_name = "TIME", help = SILENCE_HELP, value_parser = handshake::time)]
    handshake_silence: Option<std::time::Duration>,
    /// All of it.
    #[arg(long, value_name = "TIME", help = TIMEOUT_HELP, value_parser = handshake::time)]
    handshake_timeout: Option<std::time::Duration>,
    /// Bytes.
    #[arg(long, value_name = "SIZE", help = BYTES_HELP, value_parser = handshake::bytes)]
    handshake_bytes: Option<u64>,
}

impl HandshakeArgs {
    /// Puts into `limits` what the command line says, and of the rest what the file says.
    pub fn put(&self, file: Option<&FileConfig>, has_tls: bool, limits: &mut Limits) -> Result<(), Usage> {
        let line = HandshakeWords {
            max_newcomers: self.max_newcomers,
            newcomer_grace: self.newcomer_grace,
            connects_per_second: self.connects_per_second,
            handshake_silence: self.handshake_silence,
            handshake_timeout: self.handshake_timeout,
            handshake_bytes: self.handshake_bytes,
        };
        let words = file.map_or_else(|| line.clone(), |file| line.or(&file.handshake));
        if words.handshake_bytes.is_some() && !has_tls {
            return Err(Usage("--handshake-bytes: without --tls no client comes by it".into()));
        }
        put(&words, limits);
        Ok(())
    }
}

fn put(words: &HandshakeWords, limits: &mut Limits) {
    if let Some(most) = words.max_newcomers {
        limits.max_newcomers = most as usize;
    }
    if let Some(bytes) = words.handshake_bytes {
        limits.handshake_bytes = bytes as usize;
    }
    limits.connects_per_second = words.connects_per_second.unwrap_or(limits.connects_per_second);
    limits.newcomer_grace = words.newcomer_grace.unwrap_or(limits.newcomer_grace);
    limits.handshake_silence = words.handshake_silence.unwrap_or(limits.handshake_silence);
    limits.handshake_total = words.handshake_timeout.unwrap_or(limits.handshake_total);
}

/// The keys with what they are.
pub fn keys(limits: &Limits) -> [(&'static str, String); 6] {
    [
        ("max_newcomers", limits.max_newcomers.to_string()),
        ("newcomer_grace", times::exact(limits.newcomer_grace)),
        ("connects_per_second", limits.connects_per_second.to_string()),
        ("handshake_silence", times::exact(limits.handshake_silence)),
        ("handshake_timeout", times::exact(limits.handshake_total)),
        ("handshake_bytes", size::exact(limits.handshake_bytes as u64)),
    ]
}

/// The first key that the file says otherwise than it is, and what it is.
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
    fn the_help_tells_the_defaults() {
        let helps =
            [MAX_NEWCOMERS_HELP, NEWCOMER_GRACE_HELP, CONNECTS_HELP, SILENCE_HELP, TIMEOUT_HELP, BYTES_HELP];
        for (help, (key, value)) in helps.iter().zip(keys(&Limits::default())) {
            // A minute is written so in the file.
            let value = if value == "1m" { "60s".to_owned() } else { value };
            assert!(help.ends_with(&format!("[default: {value}]")), "{key}: {value}");
        }
    }

    #[test]
    fn the_command_line_replaces_what_the_file_says() {
        let file = freestone_spec::config::parse("max_newcomers = 5\nhandshake_silence = '2s'").unwrap();
        let args = HandshakeArgs { max_newcomers: Some(7), ..HandshakeArgs::default() };
        let mut limits = Limits::default();
        args.put(Some(&file), false, &mut limits).unwrap();
        assert_eq!((limits.max_newcomers, limits.handshake_silence.as_secs()), (7, 2));
        assert_eq!(differs(&file, &limits), Some(("max_newcomers", "7".to_owned())));
        limits.max_newcomers = 5;
        assert_eq!(differs(&file, &limits), None);
        let args = HandshakeArgs { handshake_bytes: Some(8 << 10), ..args };
        assert!(args.put(None, false, &mut limits).is_err());
        args.put(None, true, &mut limits).unwrap();
        assert_eq!(keys(&limits)[5], ("handshake_bytes", "8K".to_owned()));
    }
}
