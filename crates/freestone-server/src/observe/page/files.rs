//! Static files of the web page, included in the program.

use freestone_control::http::Response;

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// URL path, content type and content of each file.
const FILES: [(&str, &str, &str); 7] = [
    ("/", "text/html; charset=utf-8", include_str!("files/index.html")),
    ("/app.js", SCRIPT, include_str!("files/app.js")),
    ("/device.js", SCRIPT, include_str!("files/device.js")),
    ("/draw.js", SCRIPT, include_str!("files/draw.js")),
    ("/map.js", SCRIPT, include_str!("files/map.js")),
    ("/style.css", "text/css; charset=utf-8", include_str!("files/style.css")),
    ("/icon.svg", "image/svg+xml", include_str!("files/icon.svg")),
];

/// Returns the file at a URL path, or None if there is none.
pub fn file(path: &str) -> Option<Response> {
    let found = FILES.iter().find(|(at, ..)| *at == path);
    found.map(|(_, content_type, content)| Response::ok(content_type, content.as_bytes()))
}
