//! The web page of the server in a headless browser.

use super::Watched;
use super::chromium::Chromium;
use crate::harness::prelude::*;

/// Returns a JavaScript expression for the visible text of the element with this ID.
fn text(id: &str) -> String {
    format!("document.getElementById('{id}').innerText")
}

/// Returns a JavaScript expression for the table row of a device.
fn row(name: &str) -> String {
    format!(
        "[...document.querySelectorAll('#devices tbody tr')].find((row) => row.dataset.name === '{name}')"
    )
}

/// Checks that the page had no errors and sent no requests to other hosts.
#[track_caller]
fn check(browser: &mut Chromium, at: &str) {
    let events = browser.take_events();
    assert_eq!(events.errors, [""; 0]);
    let own = format!("http://{at}/");
    let others: Vec<_> = events.requests.iter().filter(|url| !url.starts_with(&own)).collect();
    assert!(others.is_empty() && !events.requests.is_empty(), "{others:?}");
}

/// Device name with HTML markup, which the page must show as text.
const MARKUP_NAME: &str = "<img/src/onerror>";

/// Starts a server with devices of different kinds, an NBD client of the RAM disk, and a browser
/// that shows the page.
fn open_page() -> (TempDir, Watched, Raw, Chromium) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden"), vec![1; 1 << 20]).unwrap();
    let golden = format!("golden=file,path={}/golden,readonly=yes,mem_limit=64M", dir.path().display());
    let watched = Watched::page(&[
        &golden,
        "f=fork,base=golden",
        "r=ram,disksize=16M,mem_limit=8M",
        "z=null,size=64M,zoned=1,zone_size=4M",
    ]);
    watched.serve.text(&["create", &format!("{MARKUP_NAME}=ram,disksize=1M")]);
    let client = Raw::connect(&watched.serve, "r");
    let mut browser = Chromium::start(1600, 1000);
    browser.open(&format!("http://{}/", watched.at));
    browser.until(&row(MARKUP_NAME));
    (dir, watched, client, browser)
}

#[test]
fn page_shows_devices_writes_and_maps() {
    let (_dir, watched, mut client, mut browser) = open_page();
    assert_eq!(browser.eval("document.querySelectorAll('#devices img').length"), json!(0));
    let names = browser
        .eval("[...document.querySelectorAll('#devices tbody tr')].map((row) => row.dataset.name).sort()");
    assert_eq!(names, json!([MARKUP_NAME, "f", "golden", "r", "z"]));
    let family = browser.text(&text("families"));
    assert!(family.contains("golden file, 1 fork") && family.contains("of 64M"), "{family}");
    let header = browser.text(&text("server"));
    assert!(header.contains("5, 1 of them forks"), "{header}");

    // The page shows the write to `r` in the row of the device and in the sum of all devices.
    assert_eq!(client.write(0, 0, &noise(1, 4 * MIB)), 0);
    browser.until(&format!("{}.innerText.includes('of 8M')", row("r")));
    browser.until(&format!("{}.innerText.includes('4M, 1.0 : 1')", row("r")));

    // The keyboard selects the device. The selection is part of the page's address.
    browser.eval(&format!("{}.querySelector('a').focus()", row("r")));
    browser.press("Enter");
    browser.until(&format!("{}.includes('huge: 4M, 25 %')", text("legend")));
    let legend = browser.text(&text("legend"));
    assert!(legend.contains("hole: 12M, 75 %"), "{legend}");
    assert_eq!(browser.text("location.hash"), "#device=r");
    let facts = browser.text(&text("facts"));
    assert!(facts.contains("4M, 25 % of the disk") && facts.contains("of 8M"), "{facts}");
    // The colours of the map match the legend: the first cell is huge (incompressible).
    let colour = |cell: &str| {
        format!(
            "(() => {{ const c = document.getElementById('cells'); const p = c.getContext('2d'); \
             const [x, y] = {cell}; return [...p.getImageData(x, y, 1, 1).data].slice(0, 3).join(); }})()"
        )
    };
    let of = |name: &str| {
        format!(
            "(() => {{ const d = document.createElement('canvas').getContext('2d'); d.fillStyle = \
             getComputedStyle(document.documentElement).getPropertyValue('--{name}'); d.fillRect(0, 0, 1, 1); \
             return [...d.getImageData(0, 0, 1, 1).data].slice(0, 3).join(); }})()"
        )
    };
    assert_eq!(browser.text(&colour("[4, 4]")), browser.text(&of("huge")));
    // The arrow keys move the cursor over the cells of the map.
    browser.eval("document.getElementById('cells').focus()");
    browser.press("ArrowRight");
    browser.until(&format!("{}.includes('huge: 100 %')", text("tip")));
    let latency = text("latency");
    browser.until(&format!("{latency}.includes('write') && {latency}.includes('p99')"));
    let exports = browser.text(&text("exports"));
    assert!(exports.contains("nbd+unix:///r?socket=") && exports.contains("1 connection"), "{exports}");
    // The map is updated after further writes.
    assert_eq!(client.write(0, 8 * MIB, &noise(2, 4 * MIB)), 0);
    browser.until(&format!(
        "{}.includes('huge: 8M, 50 %') || {}.includes('huge: 7.')",
        text("legend"),
        text("legend")
    ));
    browser.eval("document.getElementById('attributes-all').open = true");
    let attributes = browser.text(&text("attributes"));
    assert!(attributes.contains("comp_algorithm") && attributes.contains("mem_limit"), "{attributes}");
    check(&mut browser, &watched.at);
}

#[test]
fn address_selects_device_on_any_screen() {
    let (_dir, watched, mut client, mut browser) = open_page();
    assert_eq!(client.write(0, 0, &noise(1, 4 * MIB)), 0);
    browser.eval("location.hash = '#device=z'");
    browser.until(&format!("{}.includes('empty: 16 zones')", text("legend")));
    browser.eval(&format!("location.hash = '#device=' + encodeURIComponent('{MARKUP_NAME}')"));
    browser.until(&format!("{}.includes('hole: 1M')", text("legend")));
    assert_eq!(browser.text(&text("device-title")), MARKUP_NAME);
    browser.eval("location.hash = '#device=f'");
    browser.until(&format!("{}.includes('from base: 1M')", text("legend")));
    // The page reports that the device was removed, and continues. The browser itself logs the 404
    // reply as an error.
    check(&mut browser, &watched.at);
    watched.serve.text(&["remove", "f"]);
    browser.until(&format!("{}.includes('f: no such device')", text("device-notice")));
    let events = browser.take_events();
    assert!(events.errors.iter().all(|line| line.contains("404")), "{:?}", events.errors);

    // No element is wider than a small screen, and the map of the selected device is shown.
    browser.eval("location.hash = '#device=r'");
    browser.until(&format!("{}.includes('huge')", text("legend")));
    for (width, height) in [(360, 740), (800, 1000), (1280, 800), (1600, 1000)] {
        browser.resize(width, height);
        browser.until(&format!("innerWidth === {width}"));
        let wide = browser.eval("document.documentElement.scrollWidth");
        assert!(wide.as_u64().unwrap() <= u64::from(width), "{wide} at {width}");
    }
    // Every graphic and control has an accessible name.
    let nameless = browser.eval(
        "[...document.querySelectorAll('svg, canvas, input, select, button, a')].filter((e) => !(e.ariaLabel || \
         e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)",
    );
    assert_eq!(nameless, json!([]));
}

#[test]
fn page_notices_server_end_and_restart() {
    let watched = Watched::page(&["r=ram,disksize=4M"]);
    let Watched { serve, at } = watched;
    let mut browser = Chromium::start(1000, 700);
    browser.open(&format!("http://{at}/#device=r"));
    browser.until(&format!("{}.includes('hole: 4M')", text("legend")));
    assert_eq!(browser.eval("document.getElementById('gone').hidden"), json!(true));
    serve.signal(rustix::process::Signal::KILL);
    let (_, dir) = serve.wait();
    browser.until("!document.getElementById('gone').hidden");
    let output = browser.text(&text("gone"));
    assert!(
        output.contains("The server has not responded since") && output.contains("connection failed"),
        "{output}"
    );
    assert_eq!(browser.text("document.title"), "Offline - Freestone");
    // The browser itself logs the refused connections as errors.
    let events = browser.take_events();
    assert!(events.errors.iter().all(|line| line.contains("ERR_CONNECTION")), "{:?}", events.errors);
    let _again = Serve::start_in(dir, &["r=ram,disksize=8M", "--http", &at], true);
    browser.until(&format!("{}.includes('The server was restarted.')", text("back")));
    browser.until(&format!("{}.includes('hole: 8M')", text("legend")));
    assert_eq!(browser.eval("document.getElementById('gone').hidden"), json!(true));
    assert_eq!(browser.text("document.title"), "r - Freestone");
}

#[test]
fn page_with_20_000_forks_stays_responsive() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden"), vec![1; 1 << 20]).unwrap();
    let golden = format!("golden=file,path={}/golden,readonly=yes", dir.path().display());
    let watched = Watched::page(&[&golden]);
    watched.serve.text(&["fork", "golden", "job", "--count", "20000"]);
    let mut browser = Chromium::start(1600, 1000);
    browser.open(&format!("http://{}/", watched.at));
    browser.until("document.querySelectorAll('#devices tbody tr').length === 50");
    assert_eq!(browser.text(&text("found")), "1 to 50 of 20001");
    // Longest time in milliseconds for which the page did not respond, also during refreshes.
    browser.eval(
        "window.longest = 0; let last = performance.now(); setInterval(() => { const now = performance.now(); \
         longest = Math.max(longest, now - last - 20); last = now; }, 20)",
    );
    let type_in = |browser: &mut Chromium, prefix: &str| {
        browser.eval(&format!(
            "(() => {{ const box = document.getElementById('prefix'); box.value = '{prefix}'; \
             box.dispatchEvent(new Event('input')); }})()"
        ));
    };
    let began = Instant::now();
    type_in(&mut browser, "job-1999");
    browser.until(&format!("{} === '11'", text("found")));
    let found = began.elapsed();
    type_in(&mut browser, "");
    browser.until(&format!("{} === '1 to 50 of 20001'", text("found")));
    browser.eval("document.getElementById('later').click()");
    browser.until(&format!("{} === '51 to 100 of 20001'", text("found")));
    let longest = browser.eval("longest").as_f64().unwrap();
    println!("20,000 forks: found after {found:?}, the page was busy for {longest:.0} ms at most");
    assert!(found < Duration::from_secs(10) && longest < 1000.0, "{found:?}, {longest} ms");
    check(&mut browser, &watched.at);
}
