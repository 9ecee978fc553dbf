#!/bin/bash
# ceph-rbd.sh DIR - tests RBD images of the Ceph that ceph.sh runs in DIR as devices of the program FREESTONE, through librbd (kind rbd) and
# through qemu-nbd (kind nbd): as the base of a fork, as the origin of a snapshot, and written while the OSD is killed. Through librbd also:
# holes, snapshots of RBD, sizes, pages of a RAM disk, and missing images. Also runs the commands in docs/how-to/remote-images.md.
# ceph.sh prints the other variables.
set -eu
cd "$(dirname "$0")/.."
ceph=$1 dir=$1/rbd server='' exporter='' seconds=60
mkdir "$dir"
source lab/ceph-use.sh
through() { # image words... : the image as an export of $socket
  socket=$dir/$1.sock; image=$1; shift
  qemu-nbd --persistent --shared=0 -f raw --socket "$socket" "$@" "rbd:rbd/$image:conf=$CEPH_CONF" >"$dir/qemu-nbd.log" 2>&1 & exporter=$!
  soon 20 nbdinfo "nbd+unix:///?socket=$socket" || wrong "no qemu-nbd: $(cat "$dir/qemu-nbd.log")"; }
end_all() {
  end
  [ -z "$exporter" ] || { kill "$exporter"; wait "$exporter" || wrong "qemu-nbd ends with $?"; exporter=; }; }
image() { # way image [read]: sets $words to those of the device
  case $1:${3:-write} in
    librbd:read) words="rbd,image=rbd/$2,conf=$CEPH_CONF,readonly=yes";;
    librbd:write) words="rbd,image=rbd/$2,conf=$CEPH_CONF";;
    qemu-nbd:read) through "$2" --read-only; words="nbd,uri=nbd+unix:///?socket=$socket,readonly=yes";;
    qemu-nbd:write) through "$2"; words="nbd,uri=nbd+unix:///?socket=$socket,timeout=2m";;
  esac; }
is_in_rbd() { # file image
  timeout $seconds rbd export --no-progress "rbd/$2" - | cmp - "$1" || wrong "rbd/$2 is not $1"; }

head -c 40M /dev/urandom >"$dir/golden"
truncate -s 64M "$dir/golden"
cp "$dir/golden" "$dir/vm"
for name in golden vm; do timeout $seconds rbd import --no-progress "$dir/$name" rbd/$name; done

as_disks() { # way
  say "RBD by $1, the base of a fork"
  image "$1" golden read
  serve "$words" f=fork,base=d
  same d "$dir/golden"
  same f "$dir/golden"
  cp "$dir/golden" "$dir/forked"
  qemu-io -f raw "${changes[@]}" "$(uri f)"
  qemu-io -f raw "${changes[@]}" "$dir/forked"
  same f "$dir/forked"
  same d "$dir/golden"
  end_all
  is_in_rbd "$dir/golden" golden

  say "RBD by $1, the origin of a snapshot"
  image "$1" vm
  serve "$words"
  "$FREESTONE" snapshot d s cow="$at/s.cow" cow_size=128M >/dev/null
  "$FREESTONE" publish s --nbd "unix:$at/nbd" >/dev/null
  qemu-io -f raw "${changes[@]}" "$(uri d)"
  same d "$dir/forked"
  same s "$dir/golden"
  is_in_rbd "$dir/forked" vm
  timeout 60 "$FREESTONE" merge s --into-origin >/dev/null
  qemu-io -f raw -c flush "$(uri d)"
  same d "$dir/golden"
  is_in_rbd "$dir/golden" vm

  say "RBD by $1, and the OSD is killed while it is written"
  : >"$dir/acked"
  rm -f "$dir/enough"
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
  soon 60 acked $((before + 20)) || wrong "writes do not recover: $(cat "$dir/said")"
  touch "$dir/enough"
  wait $writer || wrong "a write fails: $(cat "$dir/said")"
  [ "$1" != qemu-nbd ] || [ "$("$FREESTONE" get d reconnects)" = 0 ] || wrong "qemu-nbd was lost"
  timeout $seconds rbd export --no-progress rbd/vm - >"$dir/read"
  reads=()
  while read -r n; do reads+=(-c "read -q -P $((n % 255 + 1)) $((n * 64))k 64k"); done <"$dir/acked"
  qemu-io -r -f raw "${reads[@]}" "$dir/read" >"$dir/said" 2>&1 || wrong "flushed data is lost: $(cat "$dir/said")"
  [ ! -s "$dir/said" ] || wrong "flushed data is lost: $(head "$dir/said")"
  say "  $(wc -l <"$dir/acked") flushed writes are present"
  end_all
  # Restores the content of the image.
  timeout $seconds qemu-img convert -n -f raw -O raw "$dir/golden" "rbd:rbd/vm:conf=$CEPH_CONF"
}

changes=(-c 'write -q -P 1 1M 64k' -c 'write -q -P 2 50M 4k' -c 'write -q -z 20M 1M' -c flush)
as_disks librbd
as_disks qemu-nbd

say "RBD by librbd, a snapshot of the image, and its size"
timeout $seconds rbd snap create --no-progress rbd/vm@monday
timeout $seconds rbd snap protect rbd/vm@monday
serve "rbd,image=rbd/vm,conf=$CEPH_CONF" "m=rbd,image=rbd/vm,snap=monday,conf=$CEPH_CONF" f=fork,base=m
qemu-io -f raw "${changes[@]}" "$(uri d)"
same d "$dir/forked"
same m "$dir/golden"
same f "$dir/golden"
qemu-io -f raw "${changes[@]}" "$(uri f)"
same f "$dir/forked"
is_in_rbd "$dir/forked" vm
timeout $seconds rbd export --no-progress rbd/vm@monday - | cmp - "$dir/golden" || wrong "the snapshot changed"
is_large() { [ "$("$FREESTONE" get d size)" = "$1" ]; }
is_large $((64 << 20)) || wrong "the size is $("$FREESTONE" get d size)"
timeout $seconds rbd resize --no-progress rbd/vm --size 96M
soon 20 is_large $((96 << 20)) || wrong "the size is still $("$FREESTONE" get d size)"
qemu-io -f raw -c 'write -q -P 3 95M 1M' -c flush "$(uri d)"
is_large $((96 << 20)) && [ "$("$FREESTONE" get m size)" = $((64 << 20)) ] || wrong "a snapshot grows"
# Open images and protected snapshots cannot be removed.
! timeout $seconds rbd snap rm --no-progress rbd/vm@monday >"$dir/said" 2>&1 || wrong "a protected snapshot is removed"
end_all
timeout $seconds rbd snap unprotect rbd/vm@monday
timeout $seconds rbd snap rm --no-progress rbd/vm@monday
serve "rbd,image=rbd/vm,conf=$CEPH_CONF"
! timeout $seconds rbd rm --no-progress rbd/vm >"$dir/said" 2>&1 || wrong "an open image is removed"
end_all

say "RBD by librbd, holes, discards and zeroes"
timeout $seconds rbd create rbd/holes --size 64M
serve "rbd,image=rbd/holes,conf=$CEPH_CONF"
qemu-io -f raw -c 'write -q -P 5 8M 12M' -c 'discard -q 12M 4M' -c 'write -q -z -u 16M 1M' -c 'write -q -z 17M 1M' -c 'write -q -z 18000k 3k' -c flush "$(uri d)"
truncate -s 64M "$dir/holes"
qemu-io -f raw -c 'write -q -P 5 8M 12M' -c 'write -q -z 12M 6M' -c 'write -q -z 18000k 3k' "$dir/holes"
same d "$dir/holes"
is_in_rbd "$dir/holes" holes
map=$(nbdinfo --map "$(uri d)")
echo "$map" | awk '$3 == 3 {holes += $2} $3 == 0 {data += $2} END {exit !(holes >= 44 * 1048576 && data >= 4 * 1048576 && holes + data == 64 * 1048576)}' ||
  wrong "the holes are $map"
end_all
rm "$dir/holes"

say "RBD by librbd, the pages of a RAM disk, and the copies of a snapshot"
serve "rbd,image=rbd/holes,conf=$CEPH_CONF" "big=ram,disksize=64M,mem_limit=4M,backing_dev=device:d"
nbdcopy "$dir/golden" "$(uri big)"
same big "$dir/golden"
[ "$("$FREESTONE" get big bd_stat | awk '{print $1}')" -gt 1000 ] || wrong "no pages were written to the backing device: $("$FREESTONE" get big bd_stat)"
end_all
cp "$dir/golden" "$dir/file"
timeout $seconds rbd create rbd/copies --size 64M
serve "rbd,image=rbd/copies,conf=$CEPH_CONF,publish=no" "o=file,path=$dir/file"
"$FREESTONE" snapshot o s cow=d >/dev/null
"$FREESTONE" publish s --nbd "unix:$at/nbd" >/dev/null
qemu-io -f raw "${changes[@]}" "$(uri o)"
same o "$dir/forked"
same s "$dir/golden"
end_all

say "RBD by librbd, missing images and pools, and a read-only user"
refused() { # device, expected message
  "$FREESTONE" serve "d=$1" --nbd "unix:$dir/none" --control "$dir/none.ctl" >"$dir/said" 2>&1 && wrong "the server accepts $1"
  grep -qF -- "$2" "$dir/said" || wrong "$1: $(cat "$dir/said")"; }
refused "rbd,image=rbd/none,conf=$CEPH_CONF" 'rbd/none: there is no such image'
refused "rbd,image=none/vm,conf=$CEPH_CONF" 'pool none: there is no such pool'
refused "rbd,image=rbd/vm,snap=none,conf=$CEPH_CONF" 'rbd/vm@none: there is no such image, or no such snapshot of it'
refused "rbd,image=rbd/vm,conf=$dir/none.conf" "conf=$dir/none.conf: there is no such file"
timeout $seconds rbd config image set rbd/vm rbd_cache true
refused "rbd,image=rbd/vm,conf=$CEPH_CONF" 'turns rbd_cache on'
timeout $seconds rbd config image rm rbd/vm rbd_cache
refused "rbd,image=rbd/vm,conf=$CEPH_CONF,id=nobody" 'the cluster refuses this user or its key, or the keyring was not found'
timeout $seconds ceph auth get-or-create client.reader mon 'profile rbd' osd 'profile rbd-read-only' >"${CEPH_CONF%/*}/keyring.client.reader"
serve "rbd,image=rbd/vm,conf=$CEPH_CONF,id=reader,readonly=yes" f=fork,base=d
qemu-io -r -f raw -c 'read -q -P 3 95M 1M' "$(uri f)" >"$dir/said" 2>&1 && [ ! -s "$dir/said" ] || wrong "a reader: $(cat "$dir/said")"
end_all

say "RBD by librbd, and the OSD does not come back in time"
serve "rbd,image=rbd/vm,conf=$CEPH_CONF,timeout=5s"
qemu-io -f raw -c 'write -q -P 6 0 64k' -c flush "$(uri d)"
lab/ceph.sh kill osd "$ceph"
began=$(now)
! timeout 60 qemu-io -f raw -c 'read 32M 4k' "$(uri d)" >"$dir/said" 2>&1 || wrong "a read without an OSD succeeds"
took=$(($(now) - began))
[ $took -ge 4000 ] && [ $took -lt 30000 ] || wrong "a read fails after $took ms"
# librbd's cache would complete a write before the OSD does, lose the error, and then flush nothing. nbdcopy does not flush.
head -c 64k /dev/urandom >"$dir/unwritten"
! timeout 60 nbdcopy "$dir/unwritten" "$(uri d)" >"$dir/said" 2>&1 || wrong "a write without an OSD succeeds"
"$FREESTONE" get d last_error | grep -q 'the cluster did not answer in time' || wrong "last_error: $("$FREESTONE" get d last_error)"
# The end of the server does not wait for the OSD either.
began=$(now)
end_all
[ $(($(now) - began)) -lt 30000 ] || wrong "the end takes $(($(now) - began)) ms"
lab/ceph.sh again osd "$ceph"
serve "rbd,image=rbd/vm,conf=$CEPH_CONF"
qemu-io -r -f raw -c 'read -q -P 6 0 64k' "$(uri d)" >"$dir/said" 2>&1 && [ ! -s "$dir/said" ] || wrong "flushed data is lost: $(cat "$dir/said")"
end_all
for name in golden vm holes copies; do timeout $seconds rbd rm --no-progress rbd/$name; done

shown() { # page, section: runs the commands in the section and compares the output
  say "$1, $2: its commands"
  mkdir "$dir/shown" "$dir/shown/bin"
  ln -s "$FREESTONE" "$dir/shown/bin/freestone"
  head -c 16M "$FREESTONE" >"$dir/shown/t.tar"
  lines=$(awk -v title="## $2" '/^#/ {inside = ($0 == title)} inside && sub(/^    /, "")' "$1" |
    sed "s:/tmp/freestone-0/:$dir/shown/freestone/:g; s:/tmp/try/:$dir/shown/:g; s:/etc/ceph/ceph.conf:$CEPH_CONF:g")
  [ -n "$lines" ] || wrong "$1, $2: no commands"
  number=0
  while IFS= read -r line; do
    case $line in
      '$ '*)
        number=$((number + 1)) line=${line#'$ '}
        # The previous server has ended.
        [ "${line#freestone serve}" = "$line" ] || echo 'ended'
        printf '{ :\n%s\n} >out.%s 2>&1 || wrong "status $?: $(cat out.%s)"\n' "$line" $number $number
        [ "${line#freestone serve}" = "$line" ] || echo 'server=$!';;
      *) printf 'soon 20 grep -qxF -- %q out.%s || wrong "%s is not printed: $(cat out.%s)"\n' "$line" $number 'what is shown' $number;;
    esac; done <<<"$lines" >"$dir/shown/session"
  (
    ended() { [ -z "$server" ] || { kill "$server"; wait "$server" || wrong "the server ends with $?"; server=; }; }
    trap 'for pid in $(jobs -p); do kill -9 "$pid" 2>/dev/null || true; done' EXIT
    cd "$dir/shown"
    unset FREESTONE_CONTROL
    export PATH=$dir/shown/bin:$PATH XDG_RUNTIME_DIR=$dir/shown FREESTONE_CACHE=$dir/shown/cache
    source ./session
    ended
    # Otherwise the images would keep their watchers for a while.
    for pid in $(jobs -p); do kill "$pid"; wait "$pid" || wrong "the server ends with $?"; done
  )
  rm -rf "$dir/shown"; }
shown docs/how-to/remote-images.md 'Snapshot and fork an image in RBD'
timeout $seconds rbd snap unprotect rbd/vm@golden
timeout $seconds rbd snap rm --no-progress rbd/vm@golden
timeout $seconds rbd rm --no-progress rbd/vm
shown docs/how-to/remote-images.md 'Use RBD through qemu-nbd'
for name in vm golden; do timeout $seconds rbd rm --no-progress rbd/$name; done
rm -rf "$dir"
