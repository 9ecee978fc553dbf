//! Algorithm names and parameters, in the syntax of the kernel's zram.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use thiserror::Error;

use super::dictionary::{DICTIONARY_BYTES_MAX, Dictionary};

/// A compression algorithm. The kernel's default, `lzo-rle`, is missing, as no library provides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Algorithm {
    /// LZ4, the default: the fastest.
    #[default]
    Lz4,
    /// LZ4 with a slower, more thorough search; decompresses as fast as LZ4.
    Lz4hc,
    /// LZO, the kernel's default before lzo-rle. Here it is slower than the kernel's and compresses
    /// better.
    Lzo,
    /// Zstandard: the smallest results, several times slower than LZ4.
    Zstd,
    /// No compression: same-filled pages are detected, all others are stored uncompressed.
    Store,
}

impl Algorithm {
    /// All algorithms that can be selected.
    pub const ALL: [Self; 5] = [Self::Lz4, Self::Lz4hc, Self::Lzo, Self::Zstd, Self::Store];

    /// Returns the algorithm's name in options and parameters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::Lz4hc => "lz4hc",
            Self::Lzo => "lzo",
            Self::Zstd => "zstd",
            Self::Store => "store",
        }
    }

    /// Returns the minimum, default and maximum `level`; `None` if the algorithm does not have
    /// levels. For lz4 the level is the acceleration, as in the kernel: a higher level is faster
    /// and compresses less.
    const fn levels(self) -> Option<(i32, i32, i32)> {
        match self {
            Self::Lz4 => Some((1, 1, 65537)),
            Self::Lz4hc => Some((2, 9, 12)),
            Self::Zstd => Some((-131_072, 3, 22)),
            Self::Lzo | Self::Store => None,
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = ParamsError;

    fn from_str(name: &str) -> Result<Self, ParamsError> {
        Self::ALL.into_iter().find(|a| a.name() == name).ok_or_else(|| match name {
            "lzo-rle" => ParamsError::LzoRle,
            _ => ParamsError::UnknownAlgorithm(name.into()),
        })
    }
}

/// Errors from parsing or checking algorithm names and parameters.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "each variant's message is its documentation")]
pub enum ParamsError {
    #[error("unknown algorithm \"{0}\"; available are lz4, lz4hc, lzo, zstd and store")]
    UnknownAlgorithm(String),
    #[error("lzo-rle is not offered, as no library has it; there are lz4, lz4hc, lzo, zstd and store")]
    LzoRle,
    #[error("\"{0}\" is not a parameter; level=NUMBER, dict=PATH and algo=NAME are")]
    UnknownKey(String),
    #[error("{0} is given twice")]
    Twice(String),
    #[error("level={0} is not a whole number")]
    BadLevel(String),
    #[error("level={level} is out of range: {algorithm} takes {min} to {max}")]
    LevelRange { algorithm: Algorithm, level: i32, min: i32, max: i32 },
    #[error("{0} takes no {1}")]
    NotFor(Algorithm, &'static str),
    #[error("algo={0} does not match comp_algorithm={1}")]
    OtherAlgorithm(String, Algorithm),
    #[error("dict={}: {error}", path.display())]
    Dictionary { path: PathBuf, error: std::io::Error },
    #[error("dict={}: {bytes} bytes; a dictionary has 1 to {DICTIONARY_BYTES_MAX}", path.display())]
    DictionarySize { path: PathBuf, bytes: u64 },
}

/// Parameters of a compression algorithm, as set by zram's `algorithm_params`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Params {
    /// Compression level; `None` for the algorithm's default.
    pub level: Option<i32>,
    /// Compression dictionary (zstd only; the kernel also supports one for lz4 and lz4hc).
    pub dictionary: Option<Dictionary>,
    /// Name of the algorithm for which the parameters were written (`algo=NAME`), if given.
    pub algo: Option<String>,
}

impl Params {
    /// Parses the kernel's syntax: `level=NUMBER`, `dict=PATH` and `algo=NAME`, separated by
    /// spaces. Reads the dictionary file.
    ///
    /// # Errors
    /// Fails if a word is invalid or the dictionary file cannot be read.
    pub fn parse(text: &str) -> Result<Self, ParamsError> {
        Self::parse_with(text, |path| path.into())
    }

    /// Parses like [`parse`](Self::parse); `path` decodes the written form of the dictionary's
    /// path, which may not be UTF-8.
    ///
    /// # Errors
    /// Fails if a word is invalid or the dictionary file cannot be read.
    pub fn parse_with(text: &str, path: impl Fn(&str) -> PathBuf) -> Result<Self, ParamsError> {
        let Words { level, dict, algo } = Words::parse(text)?;
        let dictionary = dict.map(|dict| read_dictionary(&path(&dict))).transpose()?;
        Ok(Self { level, dictionary, algo })
    }

    /// Parses like [`parse_with`](Self::parse_with), with `content` as that of the dictionary file, which is not
    /// read.
    ///
    /// # Errors
    /// Fails if a word is invalid, or the dictionary has another size than 1 byte to 1 MiB.
    pub fn parse_stored(
        text: &str,
        path: impl Fn(&str) -> PathBuf,
        content: &[u8],
    ) -> Result<Self, ParamsError> {
        let Words { level, dict, algo } = Words::parse(text)?;
        let dictionary = dict.map(|dict| stored_dictionary(&path(&dict), content.to_vec())).transpose()?;
        Ok(Self { level, dictionary, algo })
    }

    /// Checks that `text` can be parsed and fits `algorithm`, without reading the dictionary file.
    ///
    /// # Errors
    /// Fails if a word is invalid or does not fit `algorithm`; the error contains the valid range.
    pub fn check_words(text: &str, algorithm: Algorithm) -> Result<(), ParamsError> {
        let words = Words::parse(text)?;
        fits(algorithm, words.level, words.dict.is_some(), words.algo.as_deref()).map(drop)
    }

    /// Checks that the parameters fit `algorithm`, and returns the given level or the default one.
    ///
    /// # Errors
    /// Fails if a parameter does not fit `algorithm`; the error contains the valid range.
    pub fn check(&self, algorithm: Algorithm) -> Result<i32, ParamsError> {
        fits(algorithm, self.level, self.dictionary.is_some(), self.algo.as_deref())
    }
}

/// The parsed words of the parameters, before the dictionary file is read.
#[derive(Default)]
struct Words {
    level: Option<i32>,
    dict: Option<String>,
    algo: Option<String>,
}

impl Words {
    fn parse(text: &str) -> Result<Self, ParamsError> {
        let mut words = Self::default();
        for word in text.split_whitespace() {
            let (key, value) = word.split_once('=').ok_or_else(|| ParamsError::UnknownKey(word.into()))?;
            let twice = match key {
                "level" => {
                    let level = value.parse().map_err(|_| ParamsError::BadLevel(value.into()))?;
                    words.level.replace(level).is_some()
                }
                "dict" => words.dict.replace(value.into()).is_some(),
                "algo" => words.algo.replace(value.into()).is_some(),
                _ => return Err(ParamsError::UnknownKey(key.into())),
            };
            if twice {
                return Err(ParamsError::Twice(key.into()));
            }
        }
        Ok(words)
    }
}

/// Checks that the parameters fit `algorithm`, and returns the given level or the default one.
fn fits(
    algorithm: Algorithm,
    level: Option<i32>,
    has_dictionary: bool,
    algo: Option<&str>,
) -> Result<i32, ParamsError> {
    if let Some(algo) = algo
        && algo != algorithm.name()
    {
        return Err(ParamsError::OtherAlgorithm(algo.into(), algorithm));
    }
    if has_dictionary && algorithm != Algorithm::Zstd {
        return Err(ParamsError::NotFor(algorithm, "dictionary"));
    }
    match (algorithm.levels(), level) {
        (None, Some(_)) => Err(ParamsError::NotFor(algorithm, "level")),
        (None, None) => Ok(0),
        (Some((_, default, _)), None) => Ok(default),
        (Some((min, _, max)), Some(level)) if (min..=max).contains(&level) => Ok(level),
        (Some((min, _, max)), Some(level)) => Err(ParamsError::LevelRange { algorithm, level, min, max }),
    }
}

fn read_dictionary(path: &Path) -> Result<Dictionary, ParamsError> {
    let failed = |error| ParamsError::Dictionary { path: path.into(), error };
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    check_size(path, bytes)?;
    stored_dictionary(path, std::fs::read(path).map_err(failed)?)
}

fn stored_dictionary(path: &Path, content: Vec<u8>) -> Result<Dictionary, ParamsError> {
    check_size(path, content.len() as u64)?;
    Ok(Dictionary::of_file(path, content))
}

fn check_size(path: &Path, bytes: u64) -> Result<(), ParamsError> {
    let fits = (1..=DICTIONARY_BYTES_MAX).contains(&bytes);
    fits.then_some(()).ok_or_else(|| ParamsError::DictionarySize { path: path.into(), bytes })
}

/// Prints the words that [`Params::parse`] accepts. A trained dictionary is printed as
/// `dict=(trained,N)`.
impl fmt::Display for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = [
            self.level.map(|level| format!("level={level}")),
            self.dictionary.as_ref().map(|dictionary| format!("dict={dictionary}")),
        ];
        f.write_str(&words.into_iter().flatten().collect::<Vec<_>>().join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(algorithm: Algorithm, text: &str) -> String {
        match Params::parse(text).and_then(|p| p.check(algorithm)) {
            Ok(level) => panic!("{text} was taken, level {level}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn params_level_outside_range_fails() {
        assert_eq!(Params::parse("").unwrap().check(Algorithm::Zstd).unwrap(), 3);
        assert_eq!(Params::parse(" level=-5  algo=zstd ").unwrap().check(Algorithm::Zstd).unwrap(), -5);
        assert_eq!(refused(Algorithm::Lz4hc, "level=13"), "level=13 is out of range: lz4hc takes 2 to 12");
        assert_eq!(refused(Algorithm::Store, "level=1"), "store takes no level");
        assert_eq!(refused(Algorithm::Lz4, "level=fast"), "level=fast is not a whole number");
        assert_eq!(refused(Algorithm::Lz4, "level=1 level=2"), "level is given twice");
        assert_eq!(refused(Algorithm::Lz4, "algo=zstd"), "algo=zstd does not match comp_algorithm=lz4");
        assert_eq!(
            refused(Algorithm::Lz4, "wbits=3"),
            "\"wbits\" is not a parameter; level=NUMBER, dict=PATH and algo=NAME are"
        );
    }

    #[test]
    fn params_dictionary_size_is_limited() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().display();
        assert!(
            refused(Algorithm::Zstd, &format!("dict={path}"))
                .ends_with("0 bytes; a dictionary has 1 to 1048576")
        );
        assert!(refused(Algorithm::Zstd, "dict=/nowhere/d").starts_with("dict=/nowhere/d: No such file"));
        std::fs::write(file.path(), b"words words words").unwrap();
        assert_eq!(refused(Algorithm::Lz4, &format!("dict={path}")), "lz4 takes no dictionary");
        let params = Params::parse(&format!("level=7 dict={path}")).unwrap();
        assert_eq!(params.check(Algorithm::Zstd).unwrap(), 7);
        assert_eq!(params.to_string(), format!("level=7 dict={path}"));
        let there = |name: &str| file.path().with_file_name(name.replace('?', ""));
        let odd = format!("dict={}?", file.path().file_name().unwrap().display());
        assert_eq!(Params::parse_with(&odd, there).unwrap().dictionary, params.dictionary);
    }

    #[test]
    fn check_words_does_not_read_dictionary() {
        let refused =
            |algorithm, text| Params::check_words(text, algorithm).err().map(|error| error.to_string());
        assert_eq!(refused(Algorithm::Zstd, "level=22 dict=/nowhere/d algo=zstd"), None);
        assert_eq!(refused(Algorithm::Lz4, "dict=/nowhere/d"), Some("lz4 takes no dictionary".into()));
        assert_eq!(refused(Algorithm::Zstd, "dict=/nowhere/d dict=/b"), Some("dict is given twice".into()));
        assert_eq!(refused(Algorithm::Store, "level=1"), Some("store takes no level".into()));
    }

    #[test]
    fn algorithm_unknown_name_fails_with_name() {
        assert!(Algorithm::from_str("lzo-rle").unwrap_err().to_string().contains("no library"));
        assert!(Algorithm::from_str("gzip").unwrap_err().to_string().contains("\"gzip\""));
        for algorithm in Algorithm::ALL {
            assert_eq!(Algorithm::from_str(algorithm.name()).unwrap(), algorithm);
        }
    }
}
