//! JSON-RPC 2.0 (<https://www.jsonrpc.org/specification>): messages, error codes, limits.
//!
//! Client and server share this module. Every error message is one line without control characters.

use freestone_spec::entries::SpecError;
use freestone_spec::refusal::{Errno, Refusal, one_line};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use thiserror::Error;

/// Longest request line, in bytes. The server skips a longer line and returns an error.
pub const MAX_LINE_BYTES: usize = 1 << 20;
/// Maximum number of requests in a batch.
pub const MAX_BATCH_REQUESTS: usize = 256;

const PARSE_ERROR: i32 = -32700;
const INVALID_REQUEST: i32 = -32600;
const METHOD_NOT_FOUND: i32 = -32601;
const INVALID_PARAMS: i32 = -32602;
const INTERNAL_ERROR: i32 = -32603;
/// The verb was understood and failed; `data.errno` names the error.
const FAILED: i32 = -32000;

/// Error codes, each with its meaning and the exit status of the program.
pub const CODES: [(i32, &str, &str); 6] = [
    (PARSE_ERROR, "the message is not JSON", "1"),
    (INVALID_REQUEST, "not a request, an empty or too large batch, or a line above the limit", "1"),
    (METHOD_NOT_FOUND, "the method does not exist", "1"),
    (INVALID_PARAMS, "invalid parameters; `data.errno` is EINVAL", "2"),
    (INTERNAL_ERROR, "a defect of the server; the log has details", "1"),
    (FAILED, "the verb failed; `data.errno` names the error", "1; 130 if Ctrl-C cancelled it"),
];

/// A JSON-RPC error object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Error)]
#[error("{message}")]
pub struct RpcError {
    /// JSON-RPC error code, one of [`CODES`].
    pub code: i32,
    /// Error message: one sentence that names the device and the key.
    pub message: String,
    /// Details, for example `{"errno": "EBUSY"}`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<Value>,
}

impl RpcError {
    /// Returns the error of a verb that failed with `errno`.
    pub fn failed(errno: Errno, message: impl Into<String>) -> Self {
        Self { data: Some(json!({ "errno": errno })), ..Self::plain(FAILED, message.into()) }
    }

    /// Adds a member to `data`, such as the amount of work that was done before the failure.
    #[must_use]
    pub fn with(mut self, key: &str, number: u64) -> Self {
        if let Some(Value::Object(data)) = &mut self.data {
            data.insert(key.into(), json!(number));
        }
        self
    }

    /// Returns the error for invalid parameters.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self { data: Some(json!({ "errno": Errno::EINVAL })), ..Self::plain(INVALID_PARAMS, message.into()) }
    }

    /// Returns the error for an unknown method.
    pub fn no_method(method: &str, known: &[&str]) -> Self {
        Self::plain(
            METHOD_NOT_FOUND,
            format!("unknown method {method:?}; the methods are {}", known.join(", ")),
        )
    }

    /// Returns the error for a defect of the server.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::plain(INTERNAL_ERROR, message.into())
    }

    /// Returns the error for a message that is not a request.
    pub fn invalid_request(message: impl Into<String>) -> Self {
        Self::plain(INVALID_REQUEST, message.into())
    }

    /// Escapes the message to one line: it may quote the client's text, which must not control a
    /// terminal.
    fn plain(code: i32, message: String) -> Self {
        Self { code, message: one_line(message), data: None }
    }

    /// Returns true if the verb failed with `errno`.
    pub fn has_errno(&self, errno: Errno) -> bool {
        self.data.as_ref().is_some_and(|data| data["errno"] == json!(errno))
    }

    /// Returns true if the parameters of the request are invalid, whatever the state of the server.
    pub fn is_usage(&self) -> bool {
        self.code == INVALID_PARAMS
    }
}

impl From<SpecError> for RpcError {
    fn from(error: SpecError) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<Refusal> for RpcError {
    fn from(refusal: Refusal) -> Self {
        let Refusal { errno, sentence, usage } = refusal;
        if usage { Self::invalid(sentence) } else { Self::failed(errno, sentence) }
    }
}

/// Creates the [`RpcError`] of a [`refusal!`](freestone_spec::refusal!).
#[macro_export]
macro_rules! rpc_error {
    ($($refusal:tt)+) => { $crate::protocol::RpcError::from(freestone_spec::refusal!($($refusal)+)) };
}

/// A parsed JSON request line.
#[derive(Debug, PartialEq)]
pub enum Message {
    /// A single request, or the error in an invalid one.
    Single(Call),
    /// A batch of requests.
    Batch(Vec<Call>),
}

/// A request of the client, or the error in an invalid request.
#[derive(Debug, PartialEq)]
pub struct Call {
    /// ID that the response repeats. A request without an ID is a notification, which has no
    /// response.
    pub id: Option<Value>,
    /// Method and parameters, or the error to return.
    pub request: Result<(String, Option<Value>), RpcError>,
}

impl Call {
    /// Returns a call without a method, to which the response is the error `fault` with the ID
    /// null.
    pub fn broken(fault: RpcError) -> Self {
        Self { id: Some(Value::Null), request: Err(fault) }
    }

    fn parse(value: Value) -> Self {
        let Value::Object(mut object) = value else {
            return Self::broken(RpcError::invalid_request("a request is a JSON object"));
        };
        let id = object.remove("id");
        if !matches!(id, None | Some(Value::Null | Value::String(_) | Value::Number(_))) {
            return Self::broken(RpcError::invalid_request("id: must be a string, a number or null"));
        }
        // An invalid request is not a notification: the error is returned even without an ID.
        let wrong = |id: Option<Value>, message: &str| Self {
            id: Some(id.unwrap_or_default()),
            request: Err(RpcError::invalid_request(message)),
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

/// Parses a JSON request line. An invalid request is returned as a call with an error.
pub fn parse(line: &[u8]) -> Message {
    freestone_core::trail::step!();
    match serde_json::from_slice(line) {
        Err(e) => Message::Single(Call::broken(RpcError::plain(PARSE_ERROR, format!("not JSON: {e}")))),
        Ok(Value::Array(calls)) if calls.is_empty() => {
            Message::Single(Call::broken(RpcError::invalid_request("an empty batch")))
        }
        Ok(Value::Array(calls)) if calls.len() > MAX_BATCH_REQUESTS => {
            let sentence = format!("a batch holds at most {MAX_BATCH_REQUESTS} requests");
            Message::Single(Call::broken(RpcError::invalid_request(sentence)))
        }
        Ok(Value::Array(calls)) => Message::Batch(calls.into_iter().map(Call::parse).collect()),
        Ok(call) => Message::Single(Call::parse(call)),
    }
}

/// The response to a request.
#[derive(Debug, Serialize, Deserialize)]
pub struct Response {
    jsonrpc: String,
    /// Result of the verb, or `None` if it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Box<RawValue>>,
    /// Error of the verb, or `None` if it succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RpcError>,
    /// ID of the request.
    pub id: Value,
}

impl Response {
    /// Returns the response to the request with this ID.
    pub fn new(id: Value, outcome: Result<Box<RawValue>, RpcError>) -> Self {
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

    use super::{Call, MAX_BATCH_REQUESTS, Message, RpcError, parse};
    use freestone_spec::refusal::{Errno, Refusal};

    fn single(text: &str) -> Call {
        match parse(text.as_bytes()) {
            Message::Single(call) => call,
            Message::Batch(_) => panic!("{text}: a batch"),
        }
    }

    #[test]
    fn fault_message_is_one_escaped_line() {
        let name = "a\nb\u{1b}[2J'\u{e9}";
        let shown = r"a\nb\u{1b}[2J'é: no such device";
        for fault in [
            RpcError::failed(Errno::ENODEV, format!("{name}: no such device")),
            RpcError::invalid(format!("{name}: no such device")),
            RpcError::invalid_request(format!("{name}: no such device")),
        ] {
            assert_eq!(fault.message, shown);
        }
    }

    #[test]
    fn fault_code_tells_usage_from_failure() {
        let refused = |refusal: Refusal| {
            let RpcError { code, message, data } = refusal.into();
            (code, message, data.unwrap())
        };
        let invalid = (-32602, "r: no".to_owned(), json!({ "errno": "EINVAL" }));
        assert_eq!(refused(Refusal::invalid("r: no")), invalid);
        let failed = (-32000, "r: no".to_owned(), json!({ "errno": "EBUSY" }));
        assert_eq!(refused(Refusal::failed(Errno::EBUSY, "r: no")), failed);
    }

    #[test]
    fn parse_tells_requests_from_notifications() {
        let call = single(r#"{"jsonrpc":"2.0","id":7,"method":"list","params":{"pattern":"r*"}}"#);
        assert_eq!(call.id, Some(json!(7)));
        assert_eq!(call.request, Ok(("list".into(), Some(json!({"pattern": "r*"})))));
        let call = single(r#"{"jsonrpc":"2.0","method":"list"}"#);
        assert_eq!((call.id, call.request), (None, Ok(("list".into(), None))));
        // Null is a valid ID, so the request is not a notification.
        assert_eq!(single(r#"{"jsonrpc":"2.0","id":null,"method":"list"}"#).id, Some(Value::Null));
    }

    #[test]
    fn invalid_request_returns_the_specified_code() {
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
    fn batch_keeps_order_and_invalid_requests() {
        let text = r#"[{"jsonrpc":"2.0","id":1,"method":"list"},1,{"jsonrpc":"2.0","method":"stat"}]"#;
        let Message::Batch(calls) = parse(text.as_bytes()) else { panic!() };
        let ids: Vec<_> = calls.iter().map(|c| c.id.clone()).collect();
        assert_eq!(ids, [Some(json!(1)), Some(Value::Null), None]);
        assert_eq!(calls[1].request.as_ref().unwrap_err().code, -32600);
    }
}
