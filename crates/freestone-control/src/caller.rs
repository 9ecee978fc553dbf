//! The client on whose behalf a thread runs a verb.
//!
//! The control server sets the caller for the thread of a connection. Jobs read the client's tag
//! from the caller, and check whether the client still waits for the response.

use std::cell::RefCell;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

thread_local! {
    static CALLER: RefCell<Caller> = const { RefCell::new(Caller { stream: None, tag: None }) };
}

/// The client of the control socket for which a thread runs a verb, or no client.
#[derive(Debug, Clone)]
pub struct Caller {
    stream: Option<Arc<UnixStream>>,
    /// Tag that the client has set for the job of the verb.
    tag: Option<String>,
}

impl Caller {
    /// Makes the client behind `stream` the caller of this thread's verbs.
    pub fn enter(stream: &Arc<UnixStream>) {
        CALLER.set(Self { stream: Some(Arc::clone(stream)), tag: None });
    }

    /// Clears the caller. The thread may outlive the connection, and must not keep its socket open.
    pub fn leave() {
        CALLER.set(Self { stream: None, tag: None });
    }

    /// Sets the tag for the job of the verb that this thread runs next.
    pub fn set_tag(tag: Option<String>) {
        CALLER.with_borrow_mut(|caller| caller.tag = tag);
    }

    /// Returns the tag that the client has set for the job of the verb.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// Returns the caller of this thread's verb.
    pub fn current() -> Self {
        CALLER.with_borrow(Self::clone)
    }

    /// Returns true if the client runs as root or as the user of this process. Returns true without a client.
    pub fn is_privileged(&self) -> bool {
        let Some(stream) = &self.stream else { return true };
        socket_peercred(stream).is_ok_and(|peer| peer.uid.is_root() || peer.uid == geteuid())
    }

    /// Returns true if nobody reads the response any more: the client closed its socket or ended. A
    /// client that only shut down its sending direction counts as connected.
    pub fn has_disconnected(&self) -> bool {
        let Some(stream) = &self.stream else { return false };
        // poll() reports a hang-up even if no events are requested, and only when both directions
        // are shut down.
        let mut fds = [PollFd::new(stream, PollFlags::empty())];
        let polled = poll(&mut fds, Some(&Timespec::default()));
        polled.is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::Caller;

    #[test]
    fn half_closed_client_is_still_connected() {
        let (server, client) = UnixStream::pair().unwrap();
        let server = Arc::new(server);
        assert!(!Caller::current().has_disconnected(), "no caller is set");
        Caller::enter(&server);
        let caller = Caller::current();
        assert!(!caller.has_disconnected());
        client.shutdown(Shutdown::Write).unwrap();
        assert!(!caller.has_disconnected());
        // The control server shuts down the reading direction of connections when it stops.
        server.shutdown(Shutdown::Read).unwrap();
        assert!(!caller.has_disconnected());
        drop(client);
        assert!(caller.has_disconnected());
    }
}
