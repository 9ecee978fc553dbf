//! What a device is asked to be: kinds, their keys, and the values these take.

use std::path::PathBuf;
use std::str::FromStr;

use freestone::codec::{Algorithm, Params, ParamsError};
use freestone::file::Direct;
use freestone::{null, ram};

use crate::entries::{Entries, SpecError, nearest};
use crate::size::{self, SizeError};

/// Every kind of device.
pub const KINDS: [&str; 3] = ["ram", "null", "file"];
const RAM_KEYS: [&str; 5] = ["disksize", "comp_algorithm", "algorithm_params", "mem_limit", "publish"];
const NULL_KEYS: [&str; 3] = ["size", "blocksize", "publish"];
const FILE_KEYS: [&str; 5] = ["path", "readonly", "direct", "size", "publish"];

const BLOCKSIZE_MIN_BYTES: u32 = 512;
const BLOCKSIZE_MAX_BYTES: u32 = 4096;
const _: () =
    assert!(null::MAX_SIZE_BYTES == i64::MAX as u64, "what a file has at most too, says parse_length");

/// A device as it was asked for; every value is checked, nothing is opened yet.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// Its name.
    pub name: String,
    /// Publish it on the addresses of `serve`, where this was said.
    pub publish: Option<bool>,
    /// What it is.
    pub kind: KindSpec,
}

/// The kinds with their keys.
#[derive(Debug, Clone, PartialEq)]
pub enum KindSpec {
    /// A compressed RAM disk.
    Ram {
        /// Bytes.
        disksize: u64,
        /// Codec.
        comp_algorithm: Algorithm,
        /// Its parameters: words that fit it. A dictionary among them is not read yet.
        algorithm_params: String,
        /// Bytes, 0 for none; without it, half of the machine's memory.
        mem_limit: Option<u64>,
    },
    /// Writes vanish, reads are zeroes.
    Null {
        /// Bytes.
        size: u64,
        /// Logical block in bytes.
        blocksize: u32,
    },
    /// A raw image or a block device.
    File {
        /// Where it is.
        path: PathBuf,
        /// Only reads are served.
        readonly: bool,
        /// Use of `O_DIRECT`.
        direct: Direct,
        /// Bytes, where not the file's own.
        size: Option<u64>,
    },
}

impl FromStr for Spec {
    type Err = SpecError;
    fn from_str(text: &str) -> Result<Self, SpecError> {
        Self::from_entries(Entries::parse(text)?)
    }
}

impl Spec {
    /// Checks kinds, keys and values.
    pub fn from_entries(entries: Entries) -> Result<Self, SpecError> {
        let keys = Keys(entries);
        let kind = match keys.0.kind.as_str() {
            "ram" => {
                keys.allow(&RAM_KEYS)?;
                let comp_algorithm = keys.take("comp_algorithm", parse_algorithm)?.unwrap_or(Algorithm::Lz4);
                KindSpec::Ram {
                    disksize: keys.need("ram", "disksize", "disksize=4G", parse_disksize)?,
                    comp_algorithm,
                    algorithm_params: keys.params(comp_algorithm)?,
                    mem_limit: keys.take("mem_limit", parse_limit)?,
                }
            }
            "null" => {
                keys.allow(&NULL_KEYS)?;
                let blocksize = keys.take("blocksize", parse_blocksize)?.unwrap_or(BLOCKSIZE_MAX_BYTES);
                let size = keys.need("null", "size", "size=4G", parse_length)?;
                if !size.is_multiple_of(u64::from(blocksize)) {
                    let why = format!("must be a multiple of the blocksize, {blocksize} bytes");
                    return Err(keys.value_error("size", keys.typed("size").unwrap_or_default(), why));
                }
                KindSpec::Null { size, blocksize }
            }
            "file" => {
                keys.allow(&FILE_KEYS)?;
                KindSpec::File {
                    path: keys.need("file", "path", "path=disk.img", parse_path)?,
                    readonly: keys.take("readonly", parse_bool)?.unwrap_or(false),
                    direct: keys.take("direct", parse_direct)?.unwrap_or(Direct::Auto),
                    size: keys.take("size", parse_length)?,
                }
            }
            other => {
                let (kind, hint) = (other.to_owned(), nearest(other, &KINDS));
                return Err(SpecError::Kind { name: keys.0.name, kind, hint, kinds: &KINDS });
            }
        };
        let publish = keys.take("publish", parse_bool)?;
        Ok(Self { name: keys.0.name, publish, kind })
    }
}

/// Hands out keys one by one.
struct Keys(Entries);

impl Keys {
    fn allow(&self, allowed: &'static [&'static str]) -> Result<(), SpecError> {
        let Entries { name, kind, pairs } = &self.0;
        match pairs.iter().find(|(key, _)| !allowed.contains(&key.as_str())) {
            None => Ok(()),
            Some((key, _)) => Err(SpecError::Key {
                name: name.clone(),
                kind: kind.clone(),
                key: key.clone(),
                hint: nearest(key, allowed),
                allowed,
            }),
        }
    }

    fn take<T>(&self, key: &str, parse: fn(&str) -> Result<T, String>) -> Result<Option<T>, SpecError> {
        let Some(value) = self.typed(key) else { return Ok(None) };
        parse(value).map(Some).map_err(|why| self.value_error(key, value, why))
    }

    fn need<T>(
        &self,
        kind: &'static str,
        key: &'static str,
        example: &'static str,
        parse: fn(&str) -> Result<T, String>,
    ) -> Result<T, SpecError> {
        let missing = || SpecError::Missing { name: self.0.name.clone(), kind, key, example };
        self.take(key, parse)?.ok_or_else(missing)
    }

    fn params(&self, algorithm: Algorithm) -> Result<String, SpecError> {
        let words = self.typed("algorithm_params").unwrap_or_default();
        match Params::check_words(words, algorithm) {
            Ok(()) => Ok(words.to_owned()),
            // These two do not say what was typed; the others name the word.
            Err(e @ (ParamsError::NotFor(..) | ParamsError::Twice(_))) => {
                Err(self.value_error("algorithm_params", words, e.to_string()))
            }
            Err(e) => Err(SpecError::Params { name: self.0.name.clone(), why: e.to_string() }),
        }
    }

    fn typed(&self, key: &str) -> Option<&str> {
        self.0.pairs.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }

    fn value_error(&self, key: &str, value: &str, why: String) -> SpecError {
        SpecError::Value { name: self.0.name.clone(), key: key.into(), value: value.into(), why }
    }
}

/// The size of a RAM disk, with a unit.
pub fn parse_disksize(text: &str) -> Result<u64, String> {
    let max = size::exact(ram::DISKSIZE_BYTES_MAX);
    parse_size(text, ram::DISKSIZE_BYTES_MAX, &format!("a ram device has at most {max}"))
}

/// The size of a null device or a file, with a unit: what a signed 64-bit offset reaches.
fn parse_length(text: &str) -> Result<u64, String> {
    parse_size(text, null::MAX_SIZE_BYTES, "the size must be less than 8388608T (2^63 bytes)")
}

fn parse_size(text: &str, max: u64, allowed: &str) -> Result<u64, String> {
    match size::parse(text) {
        Ok(bytes) if bytes <= max => Ok(bytes),
        Ok(_) | Err(SizeError::Overflow) => Err(format!("too large; {allowed}")),
        Err(e) => Err(e.to_string()),
    }
}

/// A size with a unit; `0` and `none` are no limit.
pub fn parse_limit(text: &str) -> Result<u64, String> {
    match text {
        "0" | "none" => Ok(0),
        _ => size::parse(text).map_err(|e| format!("{e}; 0 or none is no limit")),
    }
}

fn parse_algorithm(text: &str) -> Result<Algorithm, String> {
    text.parse().map_err(|e| {
        if let ParamsError::Lzo(_) = e {
            return e.to_string();
        }
        let names = Algorithm::ALL.map(|a| a.to_string());
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let hint = nearest(text, &names).map(|h| format!("; {h}?")).unwrap_or_default();
        format!("unknown algorithm{hint}; allowed are {}", names.join(", "))
    })
}

fn parse_blocksize(text: &str) -> Result<u32, String> {
    // A block size is written in bytes by everybody, so the bare number is welcome here.
    let bytes = text.parse().ok().or_else(|| size::parse(text).ok().and_then(|n| u32::try_from(n).ok()));
    bytes
        .filter(|n: &u32| n.is_power_of_two() && (BLOCKSIZE_MIN_BYTES..=BLOCKSIZE_MAX_BYTES).contains(n))
        .ok_or_else(|| format!("must be 512, 1024, 2048 or {BLOCKSIZE_MAX_BYTES} (bytes)"))
}

fn parse_path(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() { Err("a path is missing".into()) } else { Ok(text.into()) }
}

fn parse_bool(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "yes" | "on" | "true" | "1" => Ok(true),
        "no" | "off" | "false" | "0" => Ok(false),
        _ => Err("must be yes or no".into()),
    }
}

fn parse_direct(text: &str) -> Result<Direct, String> {
    match text {
        "auto" => Ok(Direct::Auto),
        "on" => Ok(Direct::On),
        "off" => Ok(Direct::Off),
        _ => Err("must be auto, on or off".into()),
    }
}

#[cfg(test)]
mod tests {
    use freestone::codec::Algorithm;
    use freestone::file::Direct;

    use super::{KindSpec, Spec};

    #[test]
    fn devices_are_parsed() {
        let spec: Spec =
            "r=ram,disksize=4G,comp_algorithm=zstd,algorithm_params=level=3,mem_limit=1g".parse().unwrap();
        assert_eq!((spec.name.as_str(), spec.publish), ("r", None));
        let KindSpec::Ram { disksize, comp_algorithm, mem_limit, .. } = spec.kind else { panic!() };
        assert_eq!((disksize, comp_algorithm, mem_limit), (4 << 30, Algorithm::Zstd, Some(1 << 30)));

        for (text, limit) in [("", None), (",mem_limit=0", Some(0)), (",mem_limit=none", Some(0))] {
            let spec: Spec = format!("r=ram,disksize=1M{text}").parse().unwrap();
            assert!(matches!(spec.kind, KindSpec::Ram { mem_limit, .. } if mem_limit == limit), "{text}");
        }

        let spec: Spec = "n=null,size=1T,blocksize=512,publish=no".parse().unwrap();
        assert_eq!(spec.kind, KindSpec::Null { size: 1 << 40, blocksize: 512 });
        assert_eq!(spec.publish, Some(false));
        let spec: Spec = "n=null,size=1T,blocksize=2K".parse().unwrap();
        assert_eq!(spec.kind, KindSpec::Null { size: 1 << 40, blocksize: 2048 });

        let spec: Spec = "f=file,path=/a=b,,c,readonly=1,direct=off,size=8K,publish=yes".parse().unwrap();
        let path = "/a=b,c".into();
        assert_eq!(spec.kind, KindSpec::File { path, readonly: true, direct: Direct::Off, size: Some(8192) });
        assert_eq!(spec.publish, Some(true));
    }

    #[test]
    fn refusals_name_device_key_and_what_is_allowed() {
        let form = "a device is NAME=KIND[,key=value]..., for example ram0=ram,disksize=4G";
        let ram =
            "the keys of a ram device are disksize, comp_algorithm, algorithm_params, mem_limit, publish";
        let unit = "(K, M, G and T are known, 1024-based)";
        for (text, sentence) in [
            ("ram0", format!("\"ram0\": {form}")),
            ("", format!("\"\": {form}")),
            (
                "=ram,disksize=1G",
                "\"\": a device name is 1 to 255 bytes of printable characters without '=', ',', '/' or blanks".into(),
            ),
            ("r=rma,disksize=1G", "r: unknown kind \"rma\"; ram?; the kinds are ram, null, file".into()),
            ("r=", "r: unknown kind \"\"; the kinds are ram, null, file".into()),
            ("r=ram,disksiez=1G", format!("r: unknown key \"disksiez\"; disksize?; {ram}")),
            ("r=ram,size=1G", format!("r: unknown key \"size\"; disksize?; {ram}")),
            ("r=ram,colour=blue", format!("r: unknown key \"colour\"; {ram}")),
            ("r=ram,disksize", "r: disksize: a value is missing; write disksize=VALUE".into()),
            ("r=ram,disksize=1G,disksize=1G", "r: disksize: given twice".into()),
            ("r=ram", "r: disksize is missing; a ram device needs it, for example disksize=4G".into()),
            ("n=null", "n: size is missing; a null device needs it, for example size=4G".into()),
            ("f=file", "f: path is missing; a file device needs it, for example path=disk.img".into()),
            ("f=file,path=", "f: path=: a path is missing".into()),
            ("r=ram,disksize=1024", format!("r: disksize=1024: give a unit; 1024M? {unit}")),
            ("r=ram,disksize=1.5G", "r: disksize=1.5G: a size is a whole number; 1536M?".into()),
            ("r=ram,disksize=0", "r: disksize=0: must be more than 0".into()),
            (
                "r=ram,disksize=99999999T",
                "r: disksize=99999999T: too large; a ram device has at most 256T".into(),
            ),
            ("r=ram,disksize=300T", "r: disksize=300T: too large; a ram device has at most 256T".into()),
            (
                "r=ram,disksize=1G,mem_limit=99999999T",
                "r: mem_limit=99999999T: too large; the largest size that can be written is 16777215T; 0 or none is no limit".into(),
            ),
            (
                "r=ram,disksize=1G,comp_algorithm=lzo-rle",
                "r: comp_algorithm=lzo-rle: lzo-rle is not offered (its crates are under the GPL); there are lz4, lz4hc, zstd and store".into(),
            ),
            (
                "r=ram,disksize=1G,comp_algorithm=store,algorithm_params=level=1",
                "r: algorithm_params=level=1: store takes no level".into(),
            ),
            (
                "r=ram,disksize=1G,algorithm_params=level=1 level=2",
                "r: algorithm_params=level=1 level=2: level is given twice".into(),
            ),
            (
                "r=ram,disksize=1G,comp_algorithm=zstd,algorithm_params=algo=lz4",
                "r: algorithm_params: algo=lz4 does not match comp_algorithm=zstd".into(),
            ),
            (
                "r=ram,disksize=1G,algorithm_params=level=13,comp_algorithm=lz4hc",
                "r: algorithm_params: level=13 is out of range: lz4hc takes 2 to 12".into(),
            ),
            (
                "r=ram,disksize=1G,algorithm_params=level=fast",
                "r: algorithm_params: level=fast is not a whole number".into(),
            ),
            (
                "r=ram,disksize=1G,algorithm_params=dict=/nowhere/d",
                "r: algorithm_params=dict=/nowhere/d: lz4 takes no dictionary".into(),
            ),
            (
                "n=null,size=8388608T",
                "n: size=8388608T: too large; the size must be less than 8388608T (2^63 bytes)".into(),
            ),
            ("n=null,size=5K", "n: size=5K: must be a multiple of the blocksize, 4096 bytes".into()),
            (
                "n=null,size=1K,blocksize=2K",
                "n: size=1K: must be a multiple of the blocksize, 2048 bytes".into(),
            ),
            (
                "f=file,path=a,size=16777216T",
                "f: size=16777216T: too large; the size must be less than 8388608T (2^63 bytes)".into(),
            ),
            (
                "r=ram,disksize=1G,mem_limit=12",
                format!("r: mem_limit=12: give a unit; 12M? {unit}; 0 or none is no limit"),
            ),
            (
                "r=ram,disksize=1G,comp_algorithm=zst",
                "r: comp_algorithm=zst: unknown algorithm; zstd?; allowed are lz4, lz4hc, zstd, store".into(),
            ),
            ("n=null,size=1G,blocksize=513", "n: blocksize=513: must be 512, 1024, 2048 or 4096 (bytes)".into()),
            ("n=null,size=1G,blocksize=8K", "n: blocksize=8K: must be 512, 1024, 2048 or 4096 (bytes)".into()),
            ("f=file,path=a,readonly=maybe", "f: readonly=maybe: must be yes or no".into()),
            ("f=file,path=a,direct=1", "f: direct=1: must be auto, on or off".into()),
            ("f=file,path=a,publish=2", "f: publish=2: must be yes or no".into()),
        ] {
            assert_eq!(text.parse::<Spec>().unwrap_err().to_string(), sentence, "{text}");
        }
    }

    #[test]
    fn the_largest_sizes_are_taken() {
        for text in ["r=ram,disksize=256T", "n=null,size=8388607T", "f=file,path=a,size=8388607T"] {
            assert!(text.parse::<Spec>().is_ok(), "{text}");
        }
    }
}
