#!/usr/bin/env python3
"""Takes the pictures in docs/pictures: the page of `serve --http` in Chromium, and `freestone top` in a
terminal, of a server under load.

    lab/page-pictures.py [--program PATH] [--seconds N] [--out DIR] [--files DIR]

Needs the Debian packages chromium, pngquant and python3-pyte. With --files the page's files come from
that directory and not from the program, to see a change without a build.
"""

import argparse
import base64
import fcntl
import html
import http.server
import json
import os
import pathlib
import pty
import random
import select
import socket
import struct
import subprocess
import tempfile
import termios
import threading
import time
import urllib.error
import urllib.request

import pyte

MIB = 1 << 20
COLUMNS, LINES = 100, 20


class Nbd:
    """A minimal client with one request at a time (option NBD_OPT_EXPORT_NAME)."""

    def __init__(self, path, name):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.lock = threading.Lock()
        self.exactly(18)
        name = name.encode()
        self.socket.sendall(struct.pack(">I8sII", 3, b"IHAVEOPT", 1, len(name)) + name)
        self.size, _ = struct.unpack(">QH", self.exactly(10))

    def exactly(self, count):
        got = b""
        while len(got) < count:
            piece = self.socket.recv(count - len(got))
            if not piece:
                raise EOFError
            got += piece
        return got

    def request(self, command, offset, length, data=b""):
        self.socket.sendall(struct.pack(">IHHQQI", 0x25609513, 0, command, 1, offset, length) + data)
        _, error, _ = struct.unpack(">IIQ", self.exactly(16))
        if error:
            raise OSError(error, "the device returned an error")
        return self.exactly(length) if command == 0 else b""

    def read(self, offset, length):
        return self.request(0, offset, length)

    def write(self, offset, data):
        self.request(1, offset, len(data), data)

    def discard(self, offset, length):
        self.request(4, offset, length)


class Chromium:
    """A browser that is controlled through a pipe."""

    def __init__(self, profile):
        line = 'exec "$0" "$@" 3<&0 4>&1 0</dev/null 1>/dev/null 2>&1'
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                   "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(["sh", "-c", line, "chromium", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.number, self.session, self.rest = 0, None, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        while True:
            while b"\0" not in self.rest:
                piece = os.read(self.process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise EOFError("chromium has ended")
                self.rest += piece
            text, self.rest = self.rest.split(b"\0", 1)
            response = json.loads(text)
            if response.get("id") == self.number:
                if "error" in response:
                    raise RuntimeError(f"{method}: {response['error']}")
                return response["result"]

    def eval(self, expression):
        response = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return response["result"].get("value")

    def picture(self, file, width, height, url=None, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        if url:
            self.eval(f"location.hash = {json.dumps(url)}")
        time.sleep(9)
        shot = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        file.write_bytes(shot)
        subprocess.run(["pngquant", "--force", "--skip-if-larger", "--output", file, "128", "--", file], check=False)
        print(f"{file}: {file.stat().st_size} bytes")

    def end(self):
        self.process.kill()
        self.process.wait()


def page_bytes(random_, kind):
    if kind == "noise":
        return random_.randbytes(4096)
    if kind == "pattern":
        return bytes([random_.randrange(1, 256)]) * 4096
    words = [b"select ", b"insert ", b"update ", b"where id = ", b"commit; "]
    text = b"".join(random_.choice(words) + str(random_.randrange(10**6)).encode() for _ in range(260))
    return (text + random_.randbytes(400))[:4096].ljust(4096, b".")


def prepare(run, nbd, dir_):
    """Fills the devices before the pictures are taken."""
    random_ = random.Random(7)
    scratch = Nbd(nbd, "scratch")
    for start, pages, kind in [(0, 9000, "text"), (60 * MIB, 2500, "noise"), (100 * MIB, 3000, "pattern"), (160 * MIB, 14000, "text"),
                               (330 * MIB, 5000, "noise")]:
        for page in range(pages):
            if random_.random() < 0.93:
                scratch.write(start + page * 4096, page_bytes(random_, kind))
    scratch.discard(20 * MIB, 6 * MIB)
    run("idle", "scratch", "all")
    run("writeback", "scratch", "huge")
    run("snapshot", "scratch", "before-upgrade")
    for page in range(1500):
        scratch.write((170 * MIB) + page * 4096, page_bytes(random_, "text"))
    zones = Nbd(nbd, "zns")
    size = 16 * MIB
    for zone in range(20):
        for piece in range(16 if zone < 14 else random_.randrange(1, 16)):
            zones.write(zone * size + piece * MIB, random_.randbytes(4096) * 256)
    run("zones", "zns", "open", "--offset", f"{30 * 16}M", "--count", "3")
    run("zones", "zns", "close", "--offset", f"{16 * 16}M", "--count", "2")
    run("set", "zns", f"zone_offline={40 * 16}M")
    return scratch


def load(nbd, name, seed, stop, pause, writes):
    random_ = random.Random(seed)
    client = Nbd(nbd, name)
    spots = max(client.size // 4096 // 3, 1)
    began = time.monotonic()
    while not stop.is_set():
        offset = int(spots * random_.random() ** 2) * 4096
        try:
            if random_.random() < writes:
                client.write(offset, page_bytes(random_, "text"))
            else:
                client.read(offset, 4096 << random_.choice([0, 0, 0, 2]))
        except (OSError, EOFError):
            return
        # Slower phases.
        slow = 1 + 4 * (int((time.monotonic() - began) / (9 + seed % 7)) % 3 == 0)
        time.sleep(pause * slow * random_.random())


def files_from(directory, server):
    """Serves the page's files from a directory and forwards API requests to the server."""
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.split("?")[0]
            file = directory / (path.lstrip("/") or "index.html")
            if path.startswith("/api/"):
                try:
                    with urllib.request.urlopen(server.rstrip("/") + self.path) as answer:
                        status, kind, body = 200, "application/json", answer.read()
                except urllib.error.HTTPError as error:
                    status, kind, body = error.code, "application/json", error.read()
            else:
                status, kind, body = 200, kinds[file.suffix], file.read_bytes()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{listening.server_port}/"


# ---- top ----------------------------------------------------------------------------------------

def top(program, control, seconds):
    """Returns the screen of `top` after some seconds."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(program, [program, "top", "--control", str(control)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            stream.feed(os.read(terminal, 65536))
    os.write(terminal, b"q")
    os.waitpid(child, 0)
    os.close(terminal)
    return screen


def draw_top(screen, file):
    width, height, size = 8.4, 18, 14
    names = {"default": "#d8dee6", "brown": "#e0b000", "green": "#4cc38a", "red": "#ff7a6b", "blue": "#6cb6ff", "cyan": "#5ad0d0"}
    def hue(name):
        return names.get(name, f"#{name}" if len(name) == 6 else names["default"])
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{COLUMNS * width + 24:.0f}" height="{LINES * height + 24}">',
           '<rect width="100%" height="100%" rx="6" fill="#12161b"/>',
           f'<g font-family="ui-monospace, DejaVu Sans Mono, monospace" font-size="{size}">']
    for y in range(LINES):
        x = 0
        while x < COLUMNS:
            cell = screen.buffer[y][x]
            look = (cell.fg, cell.bg, cell.bold, cell.reverse)
            end = x
            while end < COLUMNS and (lambda c: (c.fg, c.bg, c.bold, c.reverse))(screen.buffer[y][end]) == look:
                end += 1
            text = "".join(screen.buffer[y][n].data for n in range(x, end))
            front, back = hue(cell.fg), None if cell.bg == "default" else hue(cell.bg)
            if cell.reverse:
                front, back = "#12161b", hue(cell.fg)
            left, base = 12 + x * width, 12 + y * height
            if back:
                out.append(f'<rect x="{left:.1f}" y="{base}" width="{(end - x) * width:.1f}" height="{height}" fill="{back}"/>')
            if text.strip():
                weight = ' font-weight="bold"' if cell.bold else ""
                spaced = f' textLength="{len(text) * width:.1f}" lengthAdjust="spacing" xml:space="preserve"'
                out.append(f'<text x="{left:.1f}" y="{base + 14}" fill="{front}"{weight}{spaced}>{html.escape(text)}</text>')
            x = end
    file.write_text("\n".join(out + ["</g>", "</svg>"]) + "\n")
    print(f"{file}: {file.stat().st_size} bytes")


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default=root / "target/release/freestone", type=pathlib.Path)
    parser.add_argument("--seconds", default=150, type=int, help="duration of the load before the pictures are taken")
    parser.add_argument("--out", default=root / "docs/pictures", type=pathlib.Path)
    parser.add_argument("--files", type=pathlib.Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        dir_ = pathlib.Path(name)
        nbd, control = dir_ / "nbd", dir_ / "control"
        random_ = random.Random(1)
        with open(dir_ / "debian-12.img", "wb") as image:
            for page in range(24 * 256):
                image.write(page_bytes(random_, "text"))
            image.truncate(256 * MIB)
        devices = [f"debian-12=file,path={dir_}/debian-12.img,readonly=yes,mem_limit=64M,publish=no",
                   f"scratch=ram,disksize=512M,mem_limit=192M,backing_dev={dir_}/spill,backing_size=256M",
                   "zns=null,size=1G,zoned=1,zone_size=16M,memory_backed=1,zone_max_open=8",
                   "postgres=ram,disksize=128M,comp_algorithm=zstd,mem_limit=16M"]
        server = subprocess.Popen([args.program, "serve", *devices, "--nbd", f"unix:{nbd}", "--control", control, "--http", "0"],
                                  stdout=subprocess.PIPE, text=True)
        url = next(line.split()[1] for line in server.stdout if line.startswith("page: "))
        def run(*words):
            subprocess.run([args.program, *words, "--control", control], check=True, stdout=subprocess.DEVNULL)
        stop = threading.Event()
        browser = None
        try:
            run("wait")
            run("fork", "debian-12", "job-%n", "--count", "120", "--nbd", f"unix:{nbd}")
            prepare(run, nbd, dir_)
            workers = [("scratch", 0.004, 0.5), ("postgres", 0.003, 0.35), ("zns", 0.03, 0)]
            workers += [(f"job-{n}", 0.01 + 0.004 * n, 0.3) for n in range(1, 40, 2)]
            for seed, (device, pause, writes) in enumerate(workers):
                threading.Thread(target=load, args=(nbd, device, seed, stop, pause, writes), daemon=True).start()
            browser = Chromium(dir_ / "profile")
            browser.call("Emulation.setDeviceMetricsOverride", width=1440, height=900, deviceScaleFactor=1, mobile=False)
            browser.call("Page.navigate", url=files_from(args.files, url) if args.files else url)
            time.sleep(args.seconds)
            browser.picture(args.out / "page.png", 1440, 860)
            browser.picture(args.out / "page-device.png", 1600, 1160, "#device=scratch")
            browser.picture(args.out / "page-dark.png", 1440, 1000, "#device=zns", dark=True)
            if args.files:
                for width in (360, 800):
                    browser.picture(args.out / f"narrow-{width}.png", width, 1900, "#device=scratch")
            draw_top(top(args.program, control, 7), args.out / "top.svg")
        finally:
            stop.set()
            if browser:
                browser.end()
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
