//! Error of an invalid command line, configuration or builder.

use freestone_spec::entries::SpecError;
use thiserror::Error;

/// An invalid command line or configuration. The exit status is 2, as for clap's own errors.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct Usage(pub String);

impl From<SpecError> for Usage {
    fn from(error: SpecError) -> Self {
        Self(error.to_string())
    }
}
