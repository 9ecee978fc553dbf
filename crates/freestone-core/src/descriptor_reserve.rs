//! File descriptors that acceptors leave to the rest of the server, so that client connections cannot exhaust
//! the descriptors needed to save content, to write the state and to shut down.

use std::os::fd::{AsFd, AsRawFd as _};

use rustix::process::{Resource, getrlimit};

/// Descriptors below `RLIMIT_NOFILE` that an acceptor does not use.
#[derive(Debug, Clone, Copy)]
pub struct Reserve {
    most: u64,
    /// The reserve is at most `1/part` of a small limit.
    part: u64,
}

impl Reserve {
    /// Reserve of acceptors of client connections.
    pub const OF_CLIENTS: Self = Self { most: 64, part: 8 };
    /// Reserve of acceptors of control connections (verbs). Smaller, so that verbs still work when clients
    /// are refused.
    pub const OF_VERBS: Self = Self { most: 32, part: 16 };

    /// Returns true if a newly opened descriptor belongs to the reserve; the acceptor then closes it. The
    /// kernel allocates the lowest free number, so all lower ones are in use.
    pub fn includes(self, descriptor: impl AsFd) -> bool {
        let limit = getrlimit(Resource::Nofile).current;
        limit.is_some_and(|limit| self.begins_below(descriptor.as_fd().as_raw_fd() as u64, limit))
    }

    fn begins_below(self, number: u64, limit: u64) -> bool {
        number >= limit - (limit / self.part).min(self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::Reserve;

    #[test]
    fn reserve_of_clients_exceeds_that_of_verbs() {
        let first = |reserve: Reserve, limit| (0..limit).find(|number| reserve.begins_below(*number, limit));
        let both = |limit| (first(Reserve::OF_CLIENTS, limit), first(Reserve::OF_VERBS, limit));
        assert_eq!(both(64), (Some(56), Some(60)));
        assert_eq!(both(1024), (Some(960), Some(992)));
        assert_eq!(both(1 << 20), (Some((1 << 20) - 64), Some((1 << 20) - 32)));
    }
}
