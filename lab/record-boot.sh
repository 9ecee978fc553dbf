#!/bin/bash
# record-boot.sh [TRACE [IMAGE]] - records the reads of a Debian guest's boot, for a benchmark that replays them. Makes a disk of Debian 13
# from the machine's own mirror (systemd, ssh, cron, nginx, compilers; 2 GiB of ext4), or uses IMAGE if it exists; a new disk is kept as IMAGE
# if given. A guest boots from the disk over NBD, reaches multi-user.target and a login prompt, and powers off. nbdkit logs each request; the
# reads up to the prompt are written to TRACE (default: benches/data/boot.trace), whose first lines describe them. Needs root, mmdebstrap,
# nbdkit, 4 GiB for temporary files and 5 to 10 minutes.
set -eu
cd "$(dirname "$0")/.."
trace=$(realpath -m "${1:-benches/data/boot.trace}")
[ -z "${2:-}" ] || kept=$(realpath -m "$2")
seconds=${SECONDS_AT_MOST:-900}
wrong() { echo "record-boot: $1" >&2; exit 1; }
say() { echo "record-boot: $1" >&2; }
for tool in mmdebstrap nbdkit mke2fs python3; do command -v $tool >/dev/null || wrong "there is no $tool (apt-get install mmdebstrap nbdkit e2fsprogs python3)"; done
[ "$(id -u)" = 0 ] || wrong "the files of a guest belong to root: run this as root"
mkdir -p "$(dirname "$trace")" || wrong "no directory for $trace"

. lab/debian-guest.sh
dir=$(mktemp -d) lab= nbdkit= qemu=
end() {
  for pid in $qemu $nbdkit; do kill "$pid" 2>/dev/null && wait "$pid" || true; done
  rm -rf "$dir" ${lab:+"$lab"} ${kept:+"$kept.new"}; }
trap end EXIT
trap 'exit 1' HUP INT TERM

# A kernel of Debian 13 with its modules, and a newer QEMU.
lab=$(lab/kernel-lab.sh -n -k 6.12t -m virtio_blk /dev/null) || wrong "no kernel and no QEMU"
release=$(basename "$(realpath "$lab/modules")")

# Make the disk.
image=${kept:-$dir/disk.img}
[ -e "$image" ] || make_disk "$image"
debian=$(debugfs -R 'cat /etc/debian_version' "$image" 2>/dev/null) || wrong "$image is not a disk with Debian"
used=$(dumpe2fs -h "$image" 2>/dev/null | awk '/^Block count:/{n=$3} /^Free blocks:/{f=$3} /^Block size:/{b=$3} END{printf "%d", (n-f)*b/1000000}')

make_initrd "$dir/initrd.img"

# Boot. The filter cow redirects the guest's writes to a temporary file, and the filter log records each request.
say "booting Debian $debian with $release (minutes)"
nbdkit --foreground --unix "$dir/nbd" --filter=log --filter=cow file "$image" logfile="$dir/requests" >"$dir/nbdkit.log" 2>&1 & nbdkit=$!
until [ -S "$dir/nbd" ]; do kill -0 $nbdkit 2>/dev/null || { cat "$dir/nbdkit.log" >&2; wrong "nbdkit does not start"; }; sleep 0.1; done
timeout "$seconds" "$lab/qemu" -accel tcg,thread=multi -smp 2 -m 1G -cpu max,la57=off -M q35 -nodefaults -display none -monitor none -no-reboot \
  -drive "file=nbd+unix:///?socket=$dir/nbd,format=raw,if=none,id=d" -device virtio-blk-pci,drive=d \
  -netdev user,id=n,restrict=on -device virtio-net-pci,netdev=n -device virtio-rng-pci -serial "file:$dir/console" \
  -kernel "$lab/vmlinuz" -initrd "$dir/initrd.img" -append "$(cat "$lab/append") net.ifnames=0" </dev/null >"$dir/qemu.log" 2>&1 & qemu=$!
reached=
while kill -0 $qemu 2>/dev/null; do
  if [ -z "$reached" ] && grep -aq 'multi-user.target is reached' "$dir/console" 2>/dev/null && grep -aq 'login: ' "$dir/console"; then
    reached=$(date -u '+%F %T.%6N'); say "multi-user.target and a login"; fi
  sleep 0.1; done
code=0; wait $qemu || code=$?; qemu=
[ $code = 0 ] && [ -n "$reached" ] || { tail -n 40 "$dir/console" "$dir/qemu.log" >&2; wrong "the guest did not boot and power off (qemu ended with $code)"; }
kill $nbdkit; wait $nbdkit || true; nbdkit=

python3 - "$dir/requests" "$reached" "$trace" "$(stat -c %s "$image")" "Debian $debian" "$release" "$used" \
  "$("$lab/qemu" --version | sed -n '1s/.*version \([0-9.]*\).*/\1/p')" "$(nbdkit --version | cut -d' ' -f2)" <<'PY'
import os, re, sys
from datetime import datetime, timezone
log, reached, out, size, debian, release, used, qemu, nbdkit = sys.argv[1:]
us = lambda text: int(datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp() * 1_000_000 + 0.5)
begin = re.compile(r'(\S+ \S+) connection=(\d+) (Read|Write|Zero|Trim) id=(\d+) offset=(0x[0-9a-f]+) count=(0x[0-9a-f]+)')
done = re.compile(r'(\S+ \S+) connection=(\d+) \.\.\.(Read|Write|Zero|Trim) id=(\d+) return=(\S+)')
until = us(reached)
flying, reads, written, own, writes, write_bytes, last, first, ended, busy, busy_from = {}, [], set(), 0, 0, 0, None, None, 0, 0, 0
for line in open(log):
    if match := begin.match(line):
        at, connection, kind, number, offset, count = match.groups()
        at, offset, count = us(at), int(offset, 16), int(count, 16)
        if at > until: break
        if offset % 512 or count % 512: sys.exit(f'record-boot: no whole sectors: {line}')
        sectors = range(offset // 512, (offset + count) // 512)
        if kind != 'Read':
            writes += 1; write_bytes += count; written.update(sectors)
        elif all(sector in written for sector in sectors):
            own += 1
        else:
            depth = len(flying)
            reads.append((offset, count, 0 if depth or last is None else max(0, at - last), depth))
            first = at if first is None else first
            if not depth: busy_from = at
            flying[connection, number] = 1
    elif match := done.match(line):
        at, connection, kind, number, result = match.groups()
        if kind == 'Read' and flying.pop((connection, number), None):
            if result != '0': sys.exit(f'record-boot: a read failed: {line}')
            last = us(at)
            if not flying: busy += last - busy_from
    if flying == {} and last is not None: ended = last
covered = lambda unit: len({block for offset, count, _, _ in reads for block in range(offset // unit, (offset + count - 1) // unit + 1)})
think = sum(read[2] for read in reads)
total, distinct = sum(read[1] for read in reads), covered(512) * 512
figures = (f'{len(reads)} reads, {total} bytes, {distinct} of them distinct, in {covered(512 * 1024)} blocks of 512 KiB; at most {max(read[3] for read in reads) + 1} at a time')
times = (f'{(last - first) / 1e6:.3f} s from the first read to the last, {think / 1e6:.3f} s of it the sum of THINK_US, {busy / 1e6:.3f} s with a read under way')
with open(out + '.new', 'w') as file:
    print(f'''# What the boot of a guest reads from its disk, up to multi-user.target and a login. Recorded by lab/record-boot.sh on {datetime.now(timezone.utc):%Y-%m-%d}.
# guest: {debian} with systemd, ssh, cron, rsyslog, nginx and compilers, not its first boot; 2 processors and 1 GiB of memory;
#   Linux {release}, which QEMU loads itself, so that it is not among the reads
# disk: {size} bytes, ext4, {used} MB of it in use
# how: QEMU {qemu}, virtio-blk, over NBD from nbdkit {nbdkit} with its log filter above its cow filter. What the guest wrote
#   ({writes} requests, {write_bytes} bytes) is left out, and so are reads of only that ({own})
# {figures}
# {times}
# The guest ran without KVM (TCG, two shared processors), so that THINK_US is the time of a slow processor; it also has
# QEMU's and the socket's share. The image lay in the page cache, a read took {busy / len(reads) / 1000:.2f} ms: from a slower disk more are under way at a time.
#
# A line is a read, in the order of issue: OFFSET LENGTH THINK_US IN_FLIGHT
#   OFFSET, LENGTH  bytes
#   THINK_US        from the end of the last read to the start of this one, in microseconds: the guest's own time; 0 where another is under way
#   IN_FLIGHT       reads under way when this one starts''', file=file)
    for read in reads: print(*read, file=file)
os.rename(out + '.new', out)
print(f'record-boot: {figures}\nrecord-boot: {times}\nrecord-boot: {os.path.getsize(out)} bytes in {out}', file=sys.stderr)
PY
