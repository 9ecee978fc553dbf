//! Who waits for the verb that a thread runs.

use std::cell::RefCell;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

thread_local! {
    static CALLER: RefCell<Caller> = const { RefCell::new(Caller { stream: None, tag: None }) };
}

/// A client of the control socket, or nobody.
#[derive(Debug, Clone)]
pub struct Caller {
    stream: Option<Arc<UnixStream>>,
    /// How it calls the verb.
    tag: Option<String>,
}

impl Caller {
    /// This thread runs verbs for that client from now on.
    pub fn enter(stream: &Arc<UnixStream>) {
        CALLER.set(Self { stream: Some(Arc::clone(stream)), tag: None });
    }

    /// This thread runs verbs for nobody: it may live on, and must not keep the client's socket open.
    pub fn leave() {
        CALLER.set(Self { stream: None, tag: None });
    }

    /// The verb that this thread runs next is called so.
    pub fn tag_next(tag: Option<String>) {
        CALLER.with_borrow_mut(|caller| caller.tag = tag);
    }

    /// How the client calls the verb.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// For whom this thread runs a verb.
    pub fn current() -> Self {
        CALLER.with_borrow(Self::clone)
    }

    /// Whether nobody reads the answer any more: the client closed its socket, or ended. One that
    /// only says that it will ask nothing more is there.
    pub fn is_gone(&self) -> bool {
        let Some(stream) = &self.stream else { return false };
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
