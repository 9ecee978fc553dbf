//! JSON API of the web page: query parameters, responses and errors.

use std::borrow::Cow;
use std::str::FromStr;

use freestone_control::http::Response;
use freestone_control::protocol::RpcError;
use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde_json::json;

const JSON: &str = "application/json; charset=utf-8";

/// Error of an API request, with a message for the user.
#[derive(Debug, PartialEq, Eq)]
pub enum ApiError {
    /// A parameter or the device name in the path is invalid.
    Invalid(String),
    /// The device does not exist.
    NoDevice(String),
    /// Another request must end first, the client has disconnected, or the server is shutting down.
    Busy(String),
    /// The request is valid, but failed in the server.
    Failed(String),
}

impl From<RpcError> for ApiError {
    fn from(fault: RpcError) -> Self {
        Self::Failed(fault.message)
    }
}

/// Returns the HTTP response that contains a result or an error as JSON.
pub fn response<T: Serialize>(result: Result<T, ApiError>) -> Response {
    let refused = |status, sentence: String| (status, json!({ "error": sentence }).to_string());
    let (status, text) = match result.map(|value| serde_json::to_string(&value)) {
        Ok(Ok(text)) => ("200 OK", text),
        Ok(Err(error)) => {
            refused("500 Internal Server Error", format!("cannot encode the response: {error}"))
        }
        Err(ApiError::Invalid(sentence)) => refused("400 Bad Request", sentence),
        Err(ApiError::NoDevice(sentence)) => refused("404 Not Found", sentence),
        Err(ApiError::Busy(sentence)) => refused("503 Service Unavailable", sentence),
        Err(ApiError::Failed(sentence)) => refused("500 Internal Server Error", sentence),
    };
    Response { status, content_type: JSON, body: text.into_bytes().into() }
}

/// Decodes the percent-encoded device name in a path.
pub fn name(path: &str) -> Result<Cow<'_, str>, ApiError> {
    let decoded = percent_decode_str(path).decode_utf8();
    decoded.map_err(|_| ApiError::Invalid(format!("{path}: is not a device name")))
}

/// Query parameters of a request. Reading a parameter removes it, so that unknown parameters are left.
pub struct Parameters<'a>(Vec<(Cow<'a, str>, Cow<'a, str>)>);

impl<'a> Parameters<'a> {
    /// Parses the query of a URL.
    pub fn of(query: &'a str) -> Self {
        Self(form_urlencoded::parse(query.as_bytes()).collect())
    }

    /// Removes a parameter and returns its text, or None if it is absent. If the key occurs several times,
    /// the last value is returned.
    pub fn take(&mut self, key: &str) -> Option<Cow<'a, str>> {
        let found = self.0.iter().rposition(|(known, _)| known == key)?;
        let value = self.0.swap_remove(found).1;
        self.0.retain(|(known, _)| known != key);
        Some(value)
    }

    /// Removes a numeric parameter and returns its value, or `default` if it is absent. The value must be
    /// from `least` to `most`.
    pub fn number<N>(&mut self, key: &str, (least, most): (N, N), default: N) -> Result<N, ApiError>
    where
        N: FromStr + PartialOrd + std::fmt::Display,
    {
        let Some(text) = self.take(key) else { return Ok(default) };
        let number = text.parse().ok().filter(|number| (&least..=&most).contains(&number));
        number.ok_or_else(|| {
            ApiError::Invalid(format!("{key}={text}: must be a number from {least} to {most}"))
        })
    }

    /// Fails if parameters are left, because they are unknown.
    pub fn end(self) -> Result<(), ApiError> {
        match self.0.first() {
            Some((key, _)) => Err(ApiError::Invalid(format!("{key}: unknown parameter"))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_read_and_bounded() {
        let mut parameters = Parameters::of("a=1&name=%3Cb%3E%2Fx+y&a=20&c");
        assert_eq!(parameters.number("a", (0, 20), 5), Ok(20));
        assert_eq!(parameters.number("b", (0, 20), 5), Ok(5));
        assert_eq!(parameters.take("name").as_deref(), Some("<b>/x y"));
        assert_eq!(parameters.end(), Err(ApiError::Invalid("c: unknown parameter".into())));
        for text in ["", "x", "-1", "21", "1.5", "99999999999999999999999"] {
            let query = format!("a={text}");
            let why = Parameters::of(&query).number("a", (0, 20), 5);
            assert_eq!(why, Err(ApiError::Invalid(format!("a={text}: must be a number from 0 to 20"))));
        }
    }

    #[test]
    fn device_names_in_paths_are_decoded() {
        assert_eq!(name("job-1").as_deref(), Ok("job-1"));
        assert_eq!(name("a%2F%C3%A4%25").as_deref(), Ok("a/ä%"));
        assert!(name("%FF").is_err());
    }
}
