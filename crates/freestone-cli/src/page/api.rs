//! What the page asks for: parameters, and answers as JSON.

use std::borrow::Cow;
use std::str::FromStr;

use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde_json::json;

use crate::control::protocol::Fault;
use crate::http::Answer;

const JSON: &str = "application/json; charset=utf-8";

/// Why there is no answer: a sentence for people.
#[derive(Debug, PartialEq, Eq)]
pub enum Why {
    /// The parameters cannot be meant.
    Invalid(String),
    /// There is no such device.
    NoDevice(String),
    /// Too much at once, or the server ends.
    Busy(String),
    /// The server could not.
    Failed(String),
}

impl From<Fault> for Why {
    fn from(fault: Fault) -> Self {
        Self::Failed(fault.message)
    }
}

/// The answer to a question.
pub fn answer<T: Serialize>(told: Result<T, Why>) -> Answer {
    let refused = |status, sentence: String| (status, json!({ "error": sentence }).to_string());
    let (status, text) = match told.map(|told| serde_json::to_string(&told)) {
        Ok(Ok(text)) => ("200 OK", text),
        Ok(Err(error)) => {
            refused("500 Internal Server Error", format!("the answer cannot be written: {error}"))
        }
        Err(Why::Invalid(sentence)) => refused("400 Bad Request", sentence),
        Err(Why::NoDevice(sentence)) => refused("404 Not Found", sentence),
        Err(Why::Busy(sentence)) => refused("503 Service Unavailable", sentence),
        Err(Why::Failed(sentence)) => refused("500 Internal Server Error", sentence),
    };
    Answer { status, content_type: JSON, body: text.into_bytes().into() }
}

/// The name in a path.
pub fn name(path: &str) -> Result<Cow<'_, str>, Why> {
    let decoded = percent_decode_str(path).decode_utf8();
    decoded.map_err(|_| Why::Invalid(format!("{path}: is not the name of a device")))
}

/// The parameters of a question, each of them taken once.
pub struct Parameters<'a>(Vec<(Cow<'a, str>, Cow<'a, str>)>);

impl<'a> Parameters<'a> {
    /// Those of a query.
    pub fn of(query: &'a str) -> Self {
        Self(form_urlencoded::parse(query.as_bytes()).collect())
    }

    /// The text of one; the last one where it is there more than once.
    pub fn take(&mut self, key: &str) -> Option<Cow<'a, str>> {
        let found = self.0.iter().rposition(|(known, _)| known == key)?;
        let value = self.0.swap_remove(found).1;
        self.0.retain(|(known, _)| known != key);
        Some(value)
    }

    /// A number of `least` to `most`; `default` where nothing is said.
    pub fn number<N>(&mut self, key: &str, (least, most): (N, N), default: N) -> Result<N, Why>
    where
        N: FromStr + PartialOrd + std::fmt::Display,
    {
        let Some(text) = self.take(key) else { return Ok(default) };
        let number = text.parse().ok().filter(|number| (&least..=&most).contains(&number));
        number.ok_or_else(|| Why::Invalid(format!("{key}={text}: must be a number from {least} to {most}")))
    }

    /// Refuses what nobody has taken.
    pub fn end(self) -> Result<(), Why> {
        match self.0.first() {
            Some((key, _)) => Err(Why::Invalid(format!("{key}: there is no such parameter"))),
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
        assert_eq!(parameters.end(), Err(Why::Invalid("c: there is no such parameter".into())));
        for text in ["", "x", "-1", "21", "1.5", "99999999999999999999999"] {
            let query = format!("a={text}");
            let why = Parameters::of(&query).number("a", (0, 20), 5);
            assert_eq!(why, Err(Why::Invalid(format!("a={text}: must be a number from 0 to 20"))));
        }
    }

    #[test]
    fn names_come_out_of_paths() {
        assert_eq!(name("job-1").as_deref(), Ok("job-1"));
        assert_eq!(name("a%2F%C3%A4%25").as_deref(), Ok("a/ä%"));
        assert!(name("%FF").is_err());
    }
}
