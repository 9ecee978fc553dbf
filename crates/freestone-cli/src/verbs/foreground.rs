//! Verbs that somebody waits for, and that end when nobody does.

use freestone_spec::refusal::Errno;

use crate::control::caller::Caller;
use crate::control::protocol::Fault;
use crate::service::Service;

/// A verb in the foreground: it is over early where its client goes away or the server ends.
pub struct Foreground<'a> {
    service: &'a Service,
    caller: Caller,
}

impl<'a> Foreground<'a> {
    /// Of the verb that this thread runs.
    pub fn new(service: &'a Service) -> Self {
        Self { service, caller: Caller::current() }
    }

    /// Whether to stop. Asked often: it costs a system call.
    pub fn is_over(&self) -> bool {
        self.service.is_ending() || self.caller.is_gone()
    }

    /// What is answered, to a client that is gone as well; `after` says how things are left.
    pub fn cancelled(&self, verb: &str, after: &str) -> Fault {
        let why = if self.service.is_ending() { "the server is ending" } else { "the client went away" };
        tracing::info!("{verb}: cancelled, {why}");
        Fault::failed(Errno::ECANCELED, format!("{verb}: cancelled, because {why}; {after}"))
    }
}
