//! Files and servers that the sections of the docs need before their first command.

/// Page and title of sections that this test does not run. fio's own tests run the engine. The
/// kernel lab has a Ceph cluster: `lab/ceph-rbd.sh` runs what remote-images.md shows for RBD.
pub const NOT_RUN: [(&str, &str); 5] = [
    ("docs/how-to/fio.md", "Build the engine"),
    ("docs/how-to/fio.md", "Verify data"),
    ("docs/how-to/remote-images.md", "Snapshot and fork an image in RBD"),
    ("docs/how-to/remote-images.md", "Use RBD through qemu-nbd"),
    ("docs/how-to/remote-images.md", "Push to Ceph's S3 gateway"),
];

/// Commands that create the files which every section may use.
const IMAGES: &str = "
truncate -s 256M golden.img disk.img
head -c 16M \"$(type -P freestone)\" > t.tar
head -c 4M t.tar > new.img
cp t.tar big.img
";

/// Commands that start a web server for `t.tar` with range requests, which Python's own web server
/// lacks. The URL is in `$url`.
const WEB_SERVER: &str = "
cat >web.py <<'END'
import http.server, re
class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self): self.answer(False)
    def do_GET(self): self.answer(True)
    def answer(self, body):
        data = open('t.tar', 'rb').read()
        asked = re.match('bytes=([0-9]+)-([0-9]+)', self.headers.get('Range', ''))
        if asked: data = data[int(asked[1]):int(asked[2]) + 1]
        self.send_response(206 if asked else 200)
        self.send_header('Accept-Ranges', 'bytes')
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        if body: self.wfile.write(data)
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
print(server.server_address[1], file=open('port.new', 'w'), flush=True)
import os; os.rename('port.new', 'port')
server.serve_forever()
END
python3 web.py 2>/dev/null &
until [ -s port ]; do sleep 0.02; done
url=http://127.0.0.1:$(cat port)/t.tar
";

/// Returns the bash commands that prepare a section. The commands run before the first command of
/// the section, in the same bash.
pub fn preparation(page: &str, section: &str) -> String {
    let own = match (page, section) {
        // The data is incompressible and larger than the memory limit, so pages are evicted.
        ("README.md", "Little RAM: a disk larger than its memory") => "head -c 320M /dev/urandom > t.tar",
        ("docs/how-to/ci.md", "Mount a disk for each job") => {
            "mkdir files; echo sources >files/README; mke2fs -q -t ext4 -F -d files golden.img
             trap 'freestone umount job-7' EXIT"
        }
        // A killed job left a file in its mounted disk.
        ("docs/how-to/ci.md", "Clean up after a killed job") => {
            "mkdir files work; echo sources >files/README; mke2fs -q -t ext4 -F -d files golden.img
             serve golden=file,path=golden.img,readonly=yes,publish=no job-7=fork,base=golden
             freestone mount job-7 work; echo left >work/result
             trap 'freestone umount job-7' EXIT"
        }
        ("docs/how-to/ci.md", "Recover from a killed server") => {
            "mke2fs -q -t ext4 -F golden.img
             trap 'freestone umount job-7 --force' EXIT"
        }
        ("docs/how-to/disk-per-connection.md", "Connect to a template") => {
            "mke2fs -q -t ext4 -F golden.img
             trap 'umount work fuse' EXIT"
        }
        ("docs/how-to/databases.md", "Prepare the fixtures") => "trap 'freestone umount db' EXIT",
        ("docs/how-to/databases.md", "Reset between tests") => {
            "mkdir files work; echo 'the fixtures' >files/table; mke2fs -q -t ext4 -F -d files golden.img
             serve db-ready=file,path=golden.img,readonly=yes,publish=no test-1=fork,base=db-ready
             trap 'freestone umount test-1' EXIT"
        }
        ("docs/how-to/databases.md", "Cut the power") => {
            "mv golden.img db-ready.img; mke2fs -q -t ext4 -F db-ready.img
             trap 'freestone umount t --force' EXIT"
        }
        ("docs/how-to/scripts.md", "Name several devices") => {
            "serve golden=file,path=golden.img,readonly=yes
             freestone fork golden job --count 2
             freestone fork golden trial"
        }
        ("docs/how-to/scripts.md", "Send JSON-RPC") => "cp .block.0 example.py",
        ("docs/how-to/configuration-file.md", "Write the file") => {
            "cp .block.0 freestone.toml; truncate -s 256M img"
        }
        ("docs/reference/faults.md", "Faults") => "serve disk=null,size=1G,faults=none",
        ("docs/how-to/restarts.md", "Move a disk to another machine") => {
            "serve golden=file,path=golden.img,readonly=yes job-1=fork,base=golden"
        }
        ("docs/how-to/remote-images.md", "Fork an image that nbdkit reads") => WEB_SERVER,
        ("docs/tutorials/ram-disk.md", _) => "trap 'umount mnt nbd' EXIT",
        ("docs/how-to/object-storage.md", "Push an image and fork it")
        | ("README.md", "Fleets: images in object storage, disks on any host") => {
            "cp t.tar debian.img; truncate -s 2G debian.img"
        }
        ("docs/how-to/power-cuts.md", "Cut after a number of writes or flushes") => {
            "serve golden=file,path=golden.img,readonly=yes f=fork,base=golden,power_cut=yes"
        }
        ("docs/how-to/power-cuts.md", "Record and replay a log") => {
            "serve golden=file,path=golden.img,readonly=yes f=fork,base=golden,power_cut=yes,record=f.log
             nbdcopy t.tar 'nbd+unix:///f?socket=/tmp/freestone-0/nbd.sock'
             nbdcopy t.tar 'nbd+unix:///f?socket=/tmp/freestone-0/nbd.sock'"
        }
        // The function `seq` reduces the number of trials of the loop to two.
        ("docs/how-to/power-cuts.md", "Try many seeds") => {
            "cp golden.img ext4.img
             seq() { echo 1 2; }
             run-workload() { qemu-io -f raw -c 'write 0 1M' -c flush \"$1\"; }
             check-recovery() { qemu-io -f raw -c 'read -P 0xcd 0 1M' \"$1\" && [ -s \"$2\" ]; }"
        }
        // The function `seq` reduces the number of trials of the loop to two.
        ("docs/tutorials/power-loss.md", _) => {
            "trap 'umount mnt fuse' EXIT
             seq() { echo 1 2; }"
        }
        ("docs/explanation/snapshots.md", "Interrupted merges") => {
            "serve disk=file,path=disk.img
             freestone snapshot disk monday cow=./monday.cow cow_size=2G
             qemu-io -f raw -c 'write 0 64M' 'nbd+unix:///disk?socket=/tmp/freestone-0/nbd.sock'
             end"
        }
        ("docs/reference/ram-statistics.md", "block_state") => {
            "serve r=ram,disksize=64M,backing_dev=./b,backing_size=16M
             head -c 8K /dev/urandom > noise
             qemu-io -f raw -c 'write -P 7 0 4k' -c 'write -s noise 12k 4k' -c 'write -s noise 20k 4k' \
                 'nbd+unix:///r?socket=/tmp/freestone-0/nbd.sock'
             freestone writeback r page_index=5
             freestone idle r all"
        }
        ("docs/reference/zones.md", "Report and change zones") => {
            "serve n0=null,size=4G,zoned=1,zone_size=64M,memory_backed=1,zone_max_open=8
             qemu-io -f raw -c 'write 0 1M' 'nbd+unix:///n0?socket=/tmp/freestone-0/nbd.sock'"
        }
        _ => "",
    };
    format!("{SERVERS}{IMAGES}{own}\n")
}

/// Bash functions: `ready` waits for the last started server, `serve` starts a server, `end` ends
/// the last one.
const SERVERS: &str = "
ready() { until grep -q ^control: $1; do sleep 0.02; kill -0 $! || return 1; done; }
serve() { freestone serve \"$@\" >.served 2>&1 & ready .served; }
end() { kill $!; wait $!; }
";
