use std::fmt;

use freestone_core::device::Error;

/// Reason for the loss of a snapshot, for log messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cow) enum Loss {
    /// The COW device has no space for a copy.
    NoRoom,
    /// The machine has no memory for a copy or for the table of exceptions.
    NoMemory,
    /// A device failed while an exception was copied or recorded.
    Failed { step: &'static str, error: Error },
}

impl Loss {
    /// Converts an error of a copy. `step` names the failed step, for log messages.
    pub fn of(step: &'static str, error: Error) -> Self {
        match error {
            Error::NoSpace => Self::NoRoom,
            Error::NoMemory => Self::NoMemory,
            error => Self::Failed { step, error },
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRoom => f.write_str("no room for a copy on the COW device; use a larger one next time"),
            Self::NoMemory => f.write_str("no memory for a copy or for the table of exceptions"),
            Self::Failed { step, error } => write!(f, "device failed: {step}: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_reason_names_room_memory_or_device() {
        let message = |error| Loss::of("reading the origin", error).to_string();
        assert!(message(Error::NoSpace).starts_with("no room"));
        assert!(message(Error::NoMemory).starts_with("no memory"));
        assert_eq!(message(Error::Media), "device failed: reading the origin: I/O error");
    }
}
