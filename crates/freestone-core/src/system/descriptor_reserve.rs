//! File descriptors that acceptors leave to the rest of the server, so that client connections cannot exhaust
//! the descriptors needed to save content, to write the state and to shut down.

use std::os::fd::{AsFd, AsRawFd as _};

use rustix::process::{Resource, getrlimit};

/// Descriptors below `RLIMIT_NOFILE` that an acceptor does not use.
#[derive(Debug, Clone, Copy)]
pub struct DescriptorReserve {
    max: u64,
    /// The reserve is at most `1/part` of `RLIMIT_NOFILE`, so that a small limit leaves descriptors for
    /// clients.
    part: u64,
}

impl DescriptorReserve {
    /// Descriptors that acceptors of client connections leave unused.
    pub const CLIENTS: Self = Self { max: 64, part: 8 };
    /// Descriptors that acceptors of control connections (verbs) leave unused. Fewer than for clients, so
    /// that verbs still work when clients are refused.
    pub const CONTROL: Self = Self { max: 32, part: 16 };

    /// Returns true if a newly opened descriptor belongs to the reserve; the acceptor then closes it. The
    /// kernel allocates the lowest free number, so all lower descriptors are in use.
    pub fn includes(self, descriptor: impl AsFd) -> bool {
        let limit = getrlimit(Resource::Nofile).current;
        limit.is_some_and(|limit| self.includes_number(descriptor.as_fd().as_raw_fd() as u64, limit))
    }

    fn includes_number(self, number: u64, limit: u64) -> bool {
        number >= limit - (limit / self.part).min(self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::DescriptorReserve;

    #[test]
    fn reserve_of_clients_exceeds_that_of_verbs() {
        let first = |reserve: DescriptorReserve, limit| {
            (0..limit).find(|number| reserve.includes_number(*number, limit))
        };
        let both =
            |limit| (first(DescriptorReserve::CLIENTS, limit), first(DescriptorReserve::CONTROL, limit));
        assert_eq!(both(64), (Some(56), Some(60)));
        assert_eq!(both(1024), (Some(960), Some(992)));
        assert_eq!(both(1 << 20), (Some((1 << 20) - 64), Some((1 << 20) - 32)));
    }
}
