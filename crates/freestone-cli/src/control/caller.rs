//! Who waits for the verb that a thread runs.

use std::cell::RefCell;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

thread_local! {
    static CALLER: RefCell<Caller> = const { RefCell::new(Caller(None)) };
}

/// A client of the control socket, or nobody.
#[derive(Debug, Clone)]
pub struct Caller(Option<Arc<UnixStream>>);

impl Caller {
    /// This thread runs verbs for that client from now on.
    pub fn enter(stream: &Arc<UnixStream>) {
        CALLER.set(Self(Some(Arc::clone(stream))));
    }

    /// For whom this thread runs a verb.
    pub fn current() -> Self {
        CALLER.with_borrow(Self::clone)
    }

    /// Whether nobody reads the answer any more: the client closed its socket, or ended. One that
    /// only says that it will ask nothing more is there.
    pub fn is_gone(&self) -> bool {
        let Some(stream) = &self.0 else { return false };
        // A hang-up is told without being asked for, and only when both directions are shut.
        let mut look = [PollFd::new(stream, PollFlags::empty())];
        let told = poll(&mut look, Some(&Timespec::default()));
        told.is_ok() && look[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::Caller;

    #[test]
    fn who_only_asks_no_more_is_not_gone() {
        let (server, client) = UnixStream::pair().unwrap();
        let server = Arc::new(server);
        assert!(!Caller::current().is_gone(), "there is none");
        Caller::enter(&server);
        let caller = Caller::current();
        assert!(!caller.is_gone());
        client.shutdown(Shutdown::Write).unwrap();
        assert!(!caller.is_gone());
        // As when the server ends.
        server.shutdown(Shutdown::Read).unwrap();
        assert!(!caller.is_gone());
        drop(client);
        assert!(caller.is_gone());
    }
}
