//! A case of the sweep: the call of a scene that fails, how, for how long, and how the server ends.

use std::fmt;
use std::str::FromStr;

use libc::{EBUSY, ECONNABORTED, EINTR};

use super::kinds::{KINDS, Kind, errno_name, errno_of};

/// A numbered call.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site {
    /// Name of the kind of call.
    pub call: String,
    /// File, directory or kind of descriptor, with all numbers replaced by `#`.
    pub object: String,
    /// Number of the call among those of this kind on this object, from 1.
    pub nth: u32,
}

/// How a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureMode {
    /// The call does nothing and returns this error.
    Fails(i32),
    /// The call is done and returns this error.
    Done(i32),
    /// The call transfers half of the requested length.
    Short,
}

/// How long calls of the kind fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Only this call.
    Once,
    /// This call and the next one of its kind.
    Twice,
    /// This call and all later ones of its kind until the script is over.
    Script,
    /// This call and all later ones of its kind until the server has ended.
    Ever,
}

/// How the server ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// SIGTERM after the script.
    Terminated,
    /// SIGKILL after the script.
    Killed,
    /// SIGKILL at the failing call.
    AtCall,
}

/// One run of a scene.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// Name of the scene.
    pub scene: String,
    /// The call that fails first.
    pub site: Site,
    /// How the call fails.
    pub how: FailureMode,
    /// For how long calls fail.
    pub extent: Extent,
    /// How the server ends.
    pub end: End,
}

impl FailureMode {
    /// Returns all ways in which calls of this kind fail.
    pub fn all(kind: &Kind) -> Vec<Self> {
        let fails = kind.errnos.iter().map(|&errno| Self::Fails(errno));
        let done = kind.errnos.first().filter(|_| kind.may_be_done).map(|&errno| Self::Done(errno));
        let short = kind.length.map(|_| Self::Short);
        fails.chain(done).chain(short).collect()
    }

    /// Returns how long this failure can last. Retryable failures last for at most two calls.
    pub fn extents(self) -> &'static [Extent] {
        match self {
            Self::Fails(EINTR | ECONNABORTED | EBUSY) | Self::Done(_) | Self::Short => {
                &[Extent::Once, Extent::Twice]
            }
            Self::Fails(_) => &[Extent::Once, Extent::Twice, Extent::Script, Extent::Ever],
        }
    }
}

impl Site {
    /// Returns the kind of the call.
    pub fn kind(&self) -> Option<&'static Kind> {
        KINDS.iter().find(|kind| kind.name == self.call)
    }
}

impl Case {
    /// Returns true if the failure has ended when the server is told to end.
    pub fn is_over_at_end(&self) -> bool {
        self.extent != Extent::Ever
    }

    /// Returns true if only one or two calls fail, so that repeated requests and verbs succeed.
    pub fn is_short(&self) -> bool {
        matches!(self.extent, Extent::Once | Extent::Twice)
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.call, self.object, self.nth)
    }
}

impl fmt::Display for FailureMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fails(errno) => f.write_str(errno_name(*errno)),
            Self::Done(errno) => write!(f, "done+{}", errno_name(*errno)),
            Self::Short => f.write_str("short"),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let extent = match self.extent {
            Extent::Once => "once",
            Extent::Twice => "twice",
            Extent::Script => "script",
            Extent::Ever => "ever",
        };
        let end = match self.end {
            End::Terminated => "told",
            End::Killed => "killed",
            End::AtCall => "there",
        };
        write!(f, "{} {} {} {extent} {end}", self.scene, self.site, self.how)
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [scene, call, object, nth, how, extent, end] = words[..] else {
            return Err(format!("{line:?} is not SCENE CALL OBJECT NTH HOW EXTENT END"));
        };
        let errno = |name: &str| errno_of(name).ok_or_else(|| format!("{name}: unknown error"));
        let how = match (how, how.strip_prefix("done+")) {
            ("short", _) => FailureMode::Short,
            (_, Some(name)) => FailureMode::Done(errno(name)?),
            (name, None) => FailureMode::Fails(errno(name)?),
        };
        let extent = match extent {
            "once" => Extent::Once,
            "twice" => Extent::Twice,
            "script" => Extent::Script,
            "ever" => Extent::Ever,
            _ => return Err(format!("{extent}: must be once, twice, script or ever")),
        };
        let end = match end {
            "told" => End::Terminated,
            "killed" => End::Killed,
            "there" => End::AtCall,
            _ => return Err(format!("{end}: must be told, killed or there")),
        };
        let nth = nth.parse().map_err(|why| format!("{nth}: {why}"))?;
        let site = Site { call: call.to_owned(), object: object.to_owned(), nth };
        Ok(Self { scene: scene.to_owned(), site, how, extent, end })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_printed_and_parsed_is_equal() {
        for how in [FailureMode::Fails(libc::EIO), FailureMode::Done(libc::ENOSPC), FailureMode::Short] {
            let site = Site { call: "fsync".into(), object: "state/content/#".into(), nth: 2 };
            let case = Case { scene: "saves".into(), site, how, extent: Extent::Once, end: End::AtCall };
            assert_eq!(case.to_string().parse(), Ok(case));
        }
    }

    #[test]
    fn every_error_of_a_kind_has_a_name() {
        for errno in KINDS.iter().flat_map(|kind| kind.errnos) {
            assert_eq!(errno_of(errno_name(*errno)), Some(*errno));
        }
    }
}
