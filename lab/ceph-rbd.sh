#!/bin/bash
# ceph-rbd.sh DIR - disks in RBD of the Ceph that ceph.sh runs in DIR, through qemu-nbd, as devices of the program FREESTONE: the base of a
# fork, the origin of a snapshot, and one that is written while the OSD is killed. The environment is that of ceph.sh.
set -eu
cd "$(dirname "$0")/.."
ceph=$1 dir=$1/rbd server='' seconds=60
mkdir "$dir"
source lab/ceph-use.sh
through() { # image words... : the image as an export of $socket
  socket=$dir/$1.sock; image=$1; shift
  qemu-nbd --persistent --shared=0 -f raw --socket "$socket" "$@" "rbd:rbd/$image:conf=$CEPH_CONF" >"$dir/qemu-nbd.log" 2>&1 & exporter=$!
  soon 20 nbdinfo "nbd+unix:///?socket=$socket" || wrong "no qemu-nbd: $(cat "$dir/qemu-nbd.log")"; }
end_all() { end; kill $exporter; wait $exporter || wrong "qemu-nbd ends with $?"; }
is_in_rbd() { # file image
  timeout $seconds rbd export --no-progress "rbd/$2" - | cmp - "$1" || wrong "rbd/$2 is not $1"; }

head -c 40M /dev/urandom >"$dir/golden"
truncate -s 64M "$dir/golden"
cp "$dir/golden" "$dir/vm"
for name in golden vm; do timeout $seconds rbd import --no-progress "$dir/$name" rbd/$name; done

say "RBD, the base of a fork"
through golden --read-only
serve "nbd,uri=nbd+unix:///?socket=$socket,readonly=yes" f=fork,base=d
same d "$dir/golden"
same f "$dir/golden"
cp "$dir/golden" "$dir/forked"
words=(-c 'write -q -P 1 1M 64k' -c 'write -q -P 2 50M 4k' -c 'write -q -z 20M 1M' -c flush)
qemu-io -f raw "${words[@]}" "$(uri f)"
qemu-io -f raw "${words[@]}" "$dir/forked"
same f "$dir/forked"
same d "$dir/golden"
end_all
is_in_rbd "$dir/golden" golden

say "RBD, the origin of a snapshot"
through vm
serve "nbd,uri=nbd+unix:///?socket=$socket,timeout=2m"
"$FREESTONE" snapshot d s cow="$at/s.cow" cow_size=128M >/dev/null
"$FREESTONE" publish s --nbd "unix:$at/nbd" >/dev/null
qemu-io -f raw "${words[@]}" "$(uri d)"
same d "$dir/forked"
same s "$dir/golden"
is_in_rbd "$dir/forked" vm
timeout 60 "$FREESTONE" merge s --into-origin >/dev/null
qemu-io -f raw -c flush "$(uri d)"
same d "$dir/golden"
is_in_rbd "$dir/golden" vm

say "RBD, and the OSD is killed while it is written"
: >"$dir/acked"
writer() {
  n=0
  while [ ! -e "$dir/enough" ] && [ $n -lt 1000 ]; do
    timeout 100 qemu-io -f raw -c "write -q -P $((n % 255 + 1)) $((n * 64))k 64k" -c flush "$(uri d)" >"$dir/said" 2>&1 || return 1
    echo $n >>"$dir/acked"; n=$((n + 1)); done; }
acked() { [ "$(wc -l <"$dir/acked")" -ge "$1" ]; }
writer & writer=$!
soon 30 acked 20 || wrong "nothing is written: $(cat "$dir/said")"
lab/ceph.sh kill osd "$ceph"
before=$(wc -l <"$dir/acked")
sleep 3
! acked $((before + 2)) || wrong "writes do not need the OSD"
lab/ceph.sh again osd "$ceph"
soon 60 acked $((before + 20)) || wrong "it is not written again: $(cat "$dir/said")"
touch "$dir/enough"
wait $writer || wrong "a write fails: $(cat "$dir/said")"
[ "$("$FREESTONE" get d reconnects)" = 0 ] || wrong "qemu-nbd was lost"
timeout $seconds rbd export --no-progress rbd/vm - >"$dir/read"
words=()
while read -r n; do words+=(-c "read -q -P $((n % 255 + 1)) $((n * 64))k 64k"); done <"$dir/acked"
qemu-io -r -f raw "${words[@]}" "$dir/read" >"$dir/said" 2>&1 || wrong "what was flushed is lost: $(cat "$dir/said")"
[ ! -s "$dir/said" ] || wrong "what was flushed is lost: $(head "$dir/said")"
say "  $(wc -l <"$dir/acked") writes, flushed and there"
end_all
for name in golden vm; do timeout $seconds rbd rm --no-progress rbd/$name; done
rm -rf "$dir"
