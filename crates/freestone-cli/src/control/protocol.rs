//! JSON-RPC 2.0 as it is spoken here: messages, error codes, limits.
//! (<https://www.jsonrpc.org/specification>)

use freestone_spec::refusal::{Errno, Refusal, one_line};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use thiserror::Error;

/// Longest line in either direction of a request; longer ones are answered with an error and
/// skipped.
pub const MAX_LINE_BYTES: usize = 1 << 20;
/// Most requests in one batch.
pub const MAX_BATCH_REQUESTS: usize = 256;

const PARSE_ERROR: i32 = -32700;
const INVALID_REQUEST: i32 = -32600;
const METHOD_NOT_FOUND: i32 = -32601;
const INVALID_PARAMS: i32 = -32602;
const INTERNAL_ERROR: i32 = -32603;
/// The verb was understood and failed; `data.errno` says how.
const FAILED: i32 = -32000;

/// A JSON-RPC error object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Error)]
#[error("{message}")]
pub struct Fault {
    /// One of the codes above.
    pub code: i32,
    /// One plain sentence that names device and key.
    pub message: String,
    /// `{"errno": "EBUSY"}`
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<Value>,
}

impl Fault {
    /// The verb failed.
    pub fn failed(errno: Errno, message: impl Into<String>) -> Self {
        Self { data: Some(json!({ "errno": errno })), ..Self::plain(FAILED, message.into()) }
    }

    /// Adds a number to `data`: what was done before it failed.
    #[must_use]
    pub fn with(mut self, key: &str, number: u64) -> Self {
        if let Some(Value::Object(data)) = &mut self.data {
            data.insert(key.into(), json!(number));
        }
        self
    }

    /// The parameters cannot be meant.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self { data: Some(json!({ "errno": Errno::EINVAL })), ..Self::plain(INVALID_PARAMS, message.into()) }
    }

    /// No such verb.
    pub fn no_method(method: &str, known: &[&str]) -> Self {
        Self::plain(
            METHOD_NOT_FOUND,
            format!("unknown method {method:?}; the methods are {}", known.join(", ")),
        )
    }

    /// Our own mistake.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::plain(INTERNAL_ERROR, message.into())
    }

    /// A message that is no request.
    pub fn invalid_request(message: impl Into<String>) -> Self {
        Self::plain(INVALID_REQUEST, message.into())
    }

    /// What a client sent may be in the message: whatever that was, it stays one line, and does
    /// nothing to a terminal.
    fn plain(code: i32, message: String) -> Self {
        Self { code, message: one_line(message), data: None }
    }

    /// Whether it failed so.
    pub fn is(&self, errno: Errno) -> bool {
        self.data.as_ref().is_some_and(|data| data["errno"] == json!(errno))
    }

    /// The caller's mistake rather than the state of things.
    pub fn is_usage(&self) -> bool {
        self.code == INVALID_PARAMS
    }
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Self {
        let Refusal { errno, sentence, usage } = refusal;
        if usage { Self::invalid(sentence) } else { Self::failed(errno, sentence) }
    }
}

/// One line, taken apart.
#[derive(Debug, PartialEq)]
pub enum Message {
    /// One request, or what is wrong with it.
    Single(Call),
    /// Several.
    Batch(Vec<Call>),
}

/// A request as far as it could be understood.
#[derive(Debug, PartialEq)]
pub struct Call {
    /// The answer carries it; without it the request is a notification and gets none.
    pub id: Option<Value>,
    /// Method and parameters, or the error to answer with.
    pub request: Result<(String, Option<Value>), Fault>,
}

impl Call {
    /// A line that cannot be answered but with an error.
    pub fn broken(fault: Fault) -> Self {
        Self { id: Some(Value::Null), request: Err(fault) }
    }

    fn parse(value: Value) -> Self {
        let Value::Object(mut object) = value else {
            return Self::broken(Fault::invalid_request("a request is a JSON object"));
        };
        let id = object.remove("id");
        if !matches!(id, None | Some(Value::Null | Value::String(_) | Value::Number(_))) {
            return Self::broken(Fault::invalid_request("id: must be a string, a number or null"));
        }
        // What is no request cannot be a notification either: it is answered, with the id if there
        // was one.
        let wrong = |id: Option<Value>, message: &str| Self {
            id: Some(id.unwrap_or_default()),
            request: Err(Fault::invalid_request(message)),
        };
        if object.get("jsonrpc").and_then(Value::as_str) != Some("2.0") {
            return wrong(id, "jsonrpc: must be \"2.0\"");
        }
        let Some(Value::String(method)) = object.remove("method") else {
            return wrong(id, "method: must be a string");
        };
        let params = object.remove("params");
        if !matches!(params, None | Some(Value::Object(_) | Value::Array(_))) {
            return wrong(id, "params: must be an object");
        }
        Self { id, request: Ok((method, params)) }
    }
}

/// Takes a line apart.
pub fn parse(line: &[u8]) -> Message {
    match serde_json::from_slice(line) {
        Err(e) => Message::Single(Call::broken(Fault::plain(PARSE_ERROR, format!("not JSON: {e}")))),
        Ok(Value::Array(calls)) if calls.is_empty() => {
            Message::Single(Call::broken(Fault::invalid_request("an empty batch")))
        }
        Ok(Value::Array(calls)) if calls.len() > MAX_BATCH_REQUESTS => {
            let sentence = format!("a batch holds at most {MAX_BATCH_REQUESTS} requests");
            Message::Single(Call::broken(Fault::invalid_request(sentence)))
        }
        Ok(Value::Array(calls)) => Message::Batch(calls.into_iter().map(Call::parse).collect()),
        Ok(call) => Message::Single(Call::parse(call)),
    }
}

/// The answer to a request.
#[derive(Debug, Serialize, Deserialize)]
pub struct Response {
    jsonrpc: String,
    /// The result, where the verb succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Box<RawValue>>,
    /// The error, where it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Fault>,
    /// The request's.
    pub id: Value,
}

impl Response {
    /// The answer to the request with this id.
    pub fn new(id: Value, outcome: Result<Box<RawValue>, Fault>) -> Self {
        let (result, error) = match outcome {
            Ok(value) => (Some(value), None),
            Err(fault) => (None, Some(fault)),
        };
        Self { jsonrpc: "2.0".into(), result, error, id }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Call, Fault, MAX_BATCH_REQUESTS, Message, parse};
    use freestone_spec::refusal::{Errno, Refusal};

    fn single(text: &str) -> Call {
        match parse(text.as_bytes()) {
            Message::Single(call) => call,
            Message::Batch(_) => panic!("{text}: a batch"),
        }
    }

    #[test]
    fn a_sentence_is_one_line_whatever_is_in_it() {
        let name = "a\nb\u{1b}[2J'\u{e9}";
        let shown = r"a\nb\u{1b}[2J'é: no such device";
        for fault in [
            Fault::failed(Errno::ENODEV, format!("{name}: no such device")),
            Fault::invalid(format!("{name}: no such device")),
            Fault::invalid_request(format!("{name}: no such device")),
        ] {
            assert_eq!(fault.message, shown);
        }
    }

    #[test]
    fn a_refusal_says_whose_mistake_it_is() {
        let refused = |refusal: Refusal| {
            let Fault { code, message, data } = refusal.into();
            (code, message, data.unwrap())
        };
        let invalid = (-32602, "r: no".to_owned(), json!({ "errno": "EINVAL" }));
        assert_eq!(refused(Refusal::invalid("r: no")), invalid);
        let failed = (-32000, "r: no".to_owned(), json!({ "errno": "EBUSY" }));
        assert_eq!(refused(Refusal::failed(Errno::EBUSY, "r: no")), failed);
    }

    #[test]
    fn requests_and_notifications() {
        let call = single(r#"{"jsonrpc":"2.0","id":7,"method":"list","params":{"pattern":"r*"}}"#);
        assert_eq!(call.id, Some(json!(7)));
        assert_eq!(call.request, Ok(("list".into(), Some(json!({"pattern": "r*"})))));
        let call = single(r#"{"jsonrpc":"2.0","method":"list"}"#);
        assert_eq!((call.id, call.request), (None, Ok(("list".into(), None))));
        // Null is an id.
        assert_eq!(single(r#"{"jsonrpc":"2.0","id":null,"method":"list"}"#).id, Some(Value::Null));
    }

    #[test]
    fn what_is_no_request_is_answered_with_the_code_of_the_specification() {
        let deep = "[".repeat(100_000);
        for (text, code, id) in [
            ("garbage", -32700, Value::Null),
            ("\u{1}", -32700, Value::Null),
            (r#"{"jsonrpc":"2.0""#, -32700, Value::Null),
            (deep.as_str(), -32700, Value::Null),
            ("[]", -32600, Value::Null),
            ("1", -32600, Value::Null),
            ("{}", -32600, Value::Null),
            (r#"{"id":1,"method":"list"}"#, -32600, json!(1)),
            (r#"{"jsonrpc":"1.0","id":1,"method":"list"}"#, -32600, json!(1)),
            (r#"{"jsonrpc":"2.0","id":"x","method":1}"#, -32600, json!("x")),
            (r#"{"jsonrpc":"2.0","method":1}"#, -32600, Value::Null),
            (r#"{"jsonrpc":"2.0","id":[],"method":"list"}"#, -32600, Value::Null),
            (r#"{"jsonrpc":"2.0","id":1,"method":"list","params":3}"#, -32600, json!(1)),
        ] {
            let call = single(text);
            assert_eq!(call.id, Some(id), "{text:.80}");
            assert_eq!(call.request.unwrap_err().code, code, "{text:.80}");
        }
        assert_eq!(
            single(&format!("[{}1]", "1,".repeat(MAX_BATCH_REQUESTS))).request.unwrap_err().code,
            -32600
        );
    }

    #[test]
    fn batches() {
        let text = r#"[{"jsonrpc":"2.0","id":1,"method":"list"},1,{"jsonrpc":"2.0","method":"stat"}]"#;
        let Message::Batch(calls) = parse(text.as_bytes()) else { panic!() };
        let ids: Vec<_> = calls.iter().map(|c| c.id.clone()).collect();
        assert_eq!(ids, [Some(json!(1)), Some(Value::Null), None]);
        assert_eq!(calls[1].request.as_ref().unwrap_err().code, -32600);
    }
}
