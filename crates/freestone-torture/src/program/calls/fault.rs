//! A case of the sweep: the system call of a scene that fails, how and for how long it fails, and
//! how the server ends.

use std::fmt;
use std::str::FromStr;

use libc::{EBUSY, ECONNABORTED, EINTR};

use super::kinds::{CallKind, KINDS, errno_name, errno_of};

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site {
    /// Name of the kind of call, see `CallKind::name`.
    pub call: String,
    /// File, directory or kind of descriptor on which the call operates. All numbers are replaced
    /// by `#`.
    pub object: String,
    /// Ordinal of the call among the calls of this kind on this object, counted from 1.
    pub nth: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureMode {
    /// The call does nothing and returns this errno.
    Fails(i32),
    /// The call takes effect, but returns this errno.
    Done(i32),
    /// The call transfers half of the requested length.
    Short,
}

/// How long calls of the failing kind keep failing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    Once,
    /// The call of the case and the next one of the same kind fail.
    Twice,
    /// The call of the case and all later ones of the same kind fail until the script is over.
    Script,
    /// The call of the case and all later ones of the same kind fail until the server has ended.
    Ever,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// SIGTERM after the script.
    Terminated,
    /// SIGKILL after the script.
    Killed,
    /// SIGKILL at the failing call.
    AtCall,
}

/// A run of a scene with a failing call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    pub scene: String,
    pub site: Site,
    pub how: FailureMode,
    pub extent: Extent,
    pub end: End,
}

impl FailureMode {
    pub fn all(kind: &CallKind) -> Vec<Self> {
        let fails = kind.errnos.iter().map(|&errno| Self::Fails(errno));
        let done = kind.errnos.first().filter(|_| kind.may_be_done).map(|&errno| Self::Done(errno));
        let short = kind.length.map(|_| Self::Short);
        fails.chain(done).chain(short).collect()
    }

    /// Returns the durations that this failure can have. Failures that callers retry last for at
    /// most two calls.
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
    pub fn kind(&self) -> Option<&'static CallKind> {
        KINDS.iter().find(|kind| kind.name == self.call)
    }
}

impl Case {
    /// Returns true if calls no longer fail when the server receives the signal to end.
    pub fn is_over_at_end(&self) -> bool {
        self.extent != Extent::Ever
    }

    /// Returns true if only one or two calls fail: requests and verbs then succeed when repeated.
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
