//! What the sections of the docs need before their first command.

/// Sections whose commands are not run here: fio's own tests run the engine, and the lab has a Ceph
/// cluster (`lab/ceph-rbd.sh` runs what nbd-client.md and rbd.md show).
pub const NOT_RUN: [(&str, &str); 5] = [
    ("docs/fio.md", "fio"),
    ("docs/fio.md", "Verifying"),
    ("docs/nbd-client.md", "Ceph"),
    ("docs/object-storage.md", "Ceph"),
    ("docs/rbd.md", "Ceph"),
];

/// Files that every section has.
const IMAGES: &str = "
truncate -s 256M golden.img disk.img
head -c 16M \"$(type -P freestone)\" > t.tar
head -c 4M t.tar > new.img
cp t.tar big.img
";

/// A web server for `t.tar` with range requests, which Python's own server lacks.
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

/// Returns the commands to run before the first command of a section, in the same bash.
pub fn preparation(page: &str, section: &str) -> String {
    let own = match (page, section) {
        // Incompressible data, larger than the memory limit.
        ("README.md", "Little RAM: a disk larger than its memory") => "head -c 320M /dev/urandom > t.tar",
        ("docs/ci.md", "A disk for each job") => {
            "mkdir files; echo sources >files/README; mke2fs -q -t ext4 -F -d files golden.img
             trap 'freestone umount job-7' EXIT"
        }
        // A file left by the job that was killed.
        ("docs/ci.md", "After kill -9 of the job") => {
            "mkdir files work; echo sources >files/README; mke2fs -q -t ext4 -F -d files golden.img
             serve golden=file,path=golden.img,readonly=yes,publish=no job-7=fork,base=golden
             freestone mount job-7 work; echo left >work/result
             trap 'freestone umount job-7' EXIT"
        }
        ("docs/ci.md", "After kill -9 of the server") => {
            "mke2fs -q -t ext4 -F golden.img
             trap 'freestone umount job-7 --force' EXIT"
        }
        ("docs/ci.md", "A disk for each connection") => {
            "mke2fs -q -t ext4 -F golden.img
             trap 'umount work fuse' EXIT"
        }
        ("docs/databases.md", "Prepare the fixtures") => "trap 'freestone umount db' EXIT",
        ("docs/databases.md", "Reset between tests") => {
            "mkdir files work; echo 'the fixtures' >files/table; mke2fs -q -t ext4 -F -d files golden.img
             serve db-ready=file,path=golden.img,readonly=yes,publish=no test-1=fork,base=db-ready
             trap 'freestone umount test-1' EXIT"
        }
        ("docs/databases.md", "Loss of power") => {
            "mv golden.img db-ready.img; mke2fs -q -t ext4 -F db-ready.img
             trap 'freestone umount t --force' EXIT"
        }
        ("docs/control.md", "The control socket") => {
            "serve golden=file,path=golden.img,readonly=yes
             freestone fork golden job --count 2
             freestone fork golden trial"
        }
        ("docs/control.md", "An example") => "cp .block.0 example.py",
        ("docs/devices.md", "Several at once, and a file that says so") => {
            "cp .block.0 freestone.toml; truncate -s 256M img"
        }
        ("docs/faults.md", "Faults") => "serve disk=null,size=1G,faults=none",
        ("docs/forks.md", "Move a disk to another machine") => {
            "serve golden=file,path=golden.img,readonly=yes job-1=fork,base=golden"
        }
        ("docs/nbd-client.md", "Forks of what nbdkit can read") => WEB_SERVER,
        ("docs/nbd.md", "A scratch disk, start to end") => "trap 'umount mnt' EXIT",
        ("docs/object-storage.md", "A first session")
        | ("README.md", "Fleets: images in object storage, disks on any host") => {
            "cp t.tar debian.img; truncate -s 2G debian.img"
        }
        ("docs/power.md", "After so many writes or flushes") => {
            "serve golden=file,path=golden.img,readonly=yes f=fork,base=golden,power_cut=yes"
        }
        ("docs/power.md", "The log") => {
            "serve golden=file,path=golden.img,readonly=yes f=fork,base=golden,power_cut=yes,record=f.log
             nbdcopy t.tar 'nbd+unix:///f?socket=/tmp/freestone-0/nbd.sock'
             nbdcopy t.tar 'nbd+unix:///f?socket=/tmp/freestone-0/nbd.sock'"
        }
        // Two trials are enough.
        ("docs/power.md", "For tests of a file system or a database") => {
            "cp golden.img ext4.img
             seq() { echo 1 2; }
             run-workload() { qemu-io -f raw -c 'write 0 1M' -c flush \"$1\"; }
             check-recovery() { qemu-io -f raw -c 'read -P 0xcd 0 1M' \"$1\" && [ -s \"$2\" ]; }"
        }
        ("docs/power.md", "On a mounted file system") => {
            "cp golden.img ext4.img; mke2fs -q -t ext4 -F ext4.img
             trap 'umount mnt fuse' EXIT
             seq() { echo 1 2; }
             run-workload() { while echo >>\"$1/log\"; do echo done; sleep 0.01; done; }
             check-recovery() { [ -d \"$1/lost+found\" ] && [ -s \"$2\" ]; }"
        }
        ("docs/snapshots.md", "Merges that are cut short") => {
            "serve disk=file,path=disk.img
             freestone snapshot disk monday cow=./monday.cow cow_size=2G
             qemu-io -f raw -c 'write 0 64M' 'nbd+unix:///disk?socket=/tmp/freestone-0/nbd.sock'
             end"
        }
        ("docs/zram.md", "block_state") => {
            "serve r=ram,disksize=64M,backing_dev=./b,backing_size=16M
             head -c 8K /dev/urandom > noise
             qemu-io -f raw -c 'write -P 7 0 4k' -c 'write -s noise 12k 4k' -c 'write -s noise 20k 4k' \
                 'nbd+unix:///r?socket=/tmp/freestone-0/nbd.sock'
             freestone writeback r page_index=5
             freestone idle r all"
        }
        ("docs/zones.md", "The verb") => {
            "serve n0=null,size=4G,zoned=1,zone_size=64M,memory_backed=1,zone_max_open=8
             qemu-io -f raw -c 'write 0 1M' 'nbd+unix:///n0?socket=/tmp/freestone-0/nbd.sock'"
        }
        _ => "",
    };
    format!("{SERVERS}{IMAGES}{own}\n")
}

/// Functions: wait for the last started server, start one, end it.
const SERVERS: &str = "
ready() { until grep -q ^control: $1; do sleep 0.02; kill -0 $! || return 1; done; }
serve() { freestone serve \"$@\" >.served 2>&1 & ready .served; }
end() { kill $!; wait $!; }
";
