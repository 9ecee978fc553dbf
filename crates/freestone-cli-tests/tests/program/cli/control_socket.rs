//! The control socket: JSON-RPC requests, and bytes that are none.

use crate::harness::prelude::*;

#[test]
fn control_socket_speaks_json_rpc() {
    let serve = Serve::start(&["r=ram,disksize=64M"]);
    let stream = serve.control();
    let request = |method: &str, params: Value| {
        let line = json!({ "jsonrpc": "2.0", "id": "x", "method": method, "params": params }).to_string();
        ask(&stream, line.as_bytes())
    };
    assert_eq!(
        request("get", json!({ "name": "r", "attr": "disksize" }))["result"],
        json!({ "disksize": 64 << 20 })
    );
    let reply = request("set", json!({ "name": "r", "attrs": { "mem_limit": "1M", "disksize": "128M" } }));
    assert_eq!(reply["result"], json!({ "mem_limit": 1 << 20, "disksize": 128 << 20 }));

    let errno = |reply: &Value| (reply["error"]["code"].clone(), reply["error"]["data"]["errno"].clone());
    let expected = |code: i32, errno: &str| (json!(code), json!(errno));
    assert_eq!(errno(&request("get", json!({ "name": "q" }))), expected(-32000, "ENODEV"));
    assert_eq!(errno(&request("create", json!({ "device": "r=null,size=1M" }))), expected(-32000, "EEXIST"));
    let busy = request("set", json!({ "name": "r", "attrs": { "comp_algorithm": "zstd" } }));
    assert_eq!(errno(&busy), expected(-32000, "EBUSY"));
    assert_eq!(errno(&request("get", json!({}))), expected(-32602, "EINVAL"));
    assert_eq!(errno(&request("get", json!({ "name": "r", "colour": 1 }))), expected(-32602, "EINVAL"));
    assert_eq!(errno(&request("get", json!(["r"]))), expected(-32602, "EINVAL"));
    assert_eq!(request("gte", json!({}))["error"]["code"], -32601);
    let batch =
        ask(&stream, br#"[{"jsonrpc":"2.0","id":1,"method":"list"},{"jsonrpc":"2.0","method":"list"},7]"#);
    assert_eq!((batch[0]["id"].clone(), batch[1]["error"]["code"].clone()), (json!(1), json!(-32600)));
    assert_eq!(batch.as_array().unwrap().len(), 2);
}

#[test]
fn control_socket_garbage_returns_errors() {
    let serve = Serve::start(&["n=null,size=1M"]);
    let stream = serve.control();
    let code = |reply: Value| reply["error"]["code"].as_i64().unwrap();
    assert_eq!(code(ask(&stream, b"\xff\x00garbage")), -32700);
    assert_eq!(code(ask(&stream, b"GET / HTTP/1.1")), -32700);
    assert_eq!(code(ask(&stream, &[b'['; 4096])), -32700);
    assert_eq!(code(ask(&stream, b"{}")), -32600);
    assert_eq!(code(ask(&stream, &vec![b' '; 3 << 20])), -32600);
    let long = format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"{}\"}}", "x".repeat(2 << 20));
    assert_eq!(code(ask(&stream, long.as_bytes())), -32600);
    // After invalid requests the connection still works. A connection that closes in the middle of
    // a request line causes no error.
    let list = br#"{"jsonrpc":"2.0","id":1,"method":"list"}"#;
    assert!(ask(&stream, list)["result"].is_object());
    let mut half = serve.control();
    half.write_all(&list[..20]).unwrap();
    drop(half);
    let mut whole = serve.control();
    whole.write_all(list).unwrap();
    whole.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(answer(&whole)["result"].is_object());
    assert_eq!(serve.text(&["list"]).lines().count(), 2);
}
