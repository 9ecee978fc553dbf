//! JSON-RPC request lines to the control server, without its socket. Properties:
//!
//! * Every request with an id has one response with that id and with a result or an error. A notification has
//!   no response. An invalid line has one error response without an id.
//! * An error is one sentence, and never an internal error. The responses are one line.
//!
//! Requests that name files or sockets are not executed.

use freestone_cli::inputs::Control;
use serde_json::Value;

const DEVICES: [&str; 2] =
    ["ram0=ram,disksize=64K", "null0=null,size=1M,memory_backed=1,zoned=1,zone_size=64K,power_cut=yes"];
const NOT_RUN: [&str; 9] =
    ["delta_show", "delta_save", "delta_apply", "save", "restore", "publish", "create", "writeback", "apply"];

fn runs(method: &str, params: Option<&Value>) -> bool {
    let words = params.map(Value::to_string).unwrap_or_default();
    let names_file = ["/", "path", "backing", "cow", "dict", "record", "state"];
    !NOT_RUN.contains(&method)
        && !method.contains("delta")
        && !names_file.iter().any(|word| words.contains(word))
}

/// Returns the ids of the expected responses in order, and whether the line is a batch. None: the line is
/// not JSON, or a batch that is refused as a whole.
fn expected_ids(line: &[u8]) -> Option<(Vec<Value>, bool)> {
    let id = |call: &Value| {
        let Value::Object(call) = call else { return Some(Value::Null) };
        let id = call.get("id").cloned();
        let whole = call.get("jsonrpc").and_then(Value::as_str) == Some("2.0")
            && matches!(call.get("method"), Some(Value::String(_)))
            && matches!(call.get("params"), None | Some(Value::Object(_) | Value::Array(_)));
        match id {
            Some(Value::Bool(_) | Value::Array(_) | Value::Object(_)) => Some(Value::Null),
            None if !whole => Some(Value::Null),
            id => id,
        }
    };
    match serde_json::from_slice(line).ok()? {
        Value::Array(calls) if calls.is_empty() || calls.len() > 1000 => None,
        Value::Array(calls) => Some((calls.iter().filter_map(id).collect(), true)),
        call => Some((id(&call).into_iter().collect(), false)),
    }
}

/// Checks one request line. Returns true if a request succeeded.
///
/// # Panics
/// Panics if a property does not hold.
pub fn check(line: &[u8]) -> bool {
    let control = Control::new(&DEVICES).expect("devices without files");
    let response = control.answer(line, runs);
    let (ids, batch) = expected_ids(line).unwrap_or((vec![Value::Null], false));
    if ids.is_empty() {
        assert!(response.is_empty(), "a notification is answered");
        return false;
    }
    assert!(response.ends_with(b"\n") && !response[..response.len() - 1].contains(&b'\n'), "not one line");
    let responses: Value = serde_json::from_slice(&response).expect("an answer is JSON");
    let responses = match responses {
        Value::Array(responses) if batch => responses,
        answer => vec![answer],
    };
    assert_eq!(responses.len(), ids.len());
    // An error message quotes unescaped names of the line, and an escape sequence can be a line break.
    let escapes = line.contains(&b'\\');
    let mut done = false;
    for (answer, id) in responses.iter().zip(&ids) {
        assert_eq!(answer["jsonrpc"], "2.0");
        assert_eq!(&answer["id"], id);
        let (result, error) = (answer.get("result"), answer.get("error"));
        assert!(result.is_some() != error.is_some(), "{answer}");
        done |= result.is_some();
        if let Some(error) = error {
            let message = error["message"].as_str().expect("an error has a message");
            assert!(!message.is_empty() && (escapes || !message.contains('\n')), "{message:?}");
            assert!(error["code"] != -32603, "{message}");
        }
    }
    done
}
