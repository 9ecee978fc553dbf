#!/bin/bash
# detach-orders.sh - detaches a mounted disk by hand: in order, in the wrong order, after SIGKILL of the job, of nbdfuse and of the server, and from
# a server that hangs. The table in docs/how-to/mounts.md has the results.
. "$(dirname "$0")/lib.sh"
BY=hand
image golden.img 64M
mounted() { mountpoint -q "$dir/work"; }
begin() {
  serve golden=file,path=golden.img,readonly=yes,mem_limit=256M,publish=no "$@"
  freestone fork golden job --nbd "unix:$dir/nbd.sock" >/dev/null
  attach job work; }
dirty() { head -c 8M /dev/urandom >work/file; }
in_time() { # COMMAND...: within 20 s, which is less than the NBD client's timeout
  local status=0; timeout 20 "$@" >in_time.out 2>&1 || status=$?
  [ $status != 124 ] || wrong "hangs: $*"; return $status; }
left_is_removed() { # the next server removes the block device of the killed one
  rm -f "$dir/nbd.sock"; : >server.log
  serve r=ram,disksize=1M --ublk
  grep -q "${disk_of[job]}: was left by a killed server: removed" server.log || wrong "${disk_of[job]} is left"
  stop_server; }
nothing_left() {
  ! mounted || wrong "$1: the disk is still mounted"
  [ -z "$(losetup -a | grep "$dir/")" ] || wrong "$1: a loop device is left"
  [ -z "$(grep " $dir/" /proc/mounts)" ] || wrong "$1: a mount is left"
  echo "ok   $VIA: $1"; }

# The right order: the mount first.
begin
dirty; detach work
freestone remove job >/dev/null || wrong "the disk is in use after it was unmounted"
nothing_left "umount, then the disk, then the server"

# The disk before the mount.
freestone fork golden job --nbd "unix:$dir/nbd.sock" >/dev/null; attach job work; dirty
case $VIA in
  nbdfuse) fails umount fuse-job; grep -q busy failed.out || wrong "umount of nbdfuse: $(cat failed.out)";;
  ublk) fails freestone unpublish job;;
  nbd) nbd-client -d "${disk_of[job]}" >/dev/null; fails sync -f work;;
esac
mounted || wrong "the mount is gone"
detach work
nothing_left "the disk before the mount: $([ $VIA = nbd ] && echo 'not refused, and unwritten data is lost' || echo refused)"
freestone remove job --force >/dev/null

# The job is killed: only its processes end.
freestone fork golden job --nbd "unix:$dir/nbd.sock" >/dev/null; attach job work
setsid bash -c 'cd work; while echo line >>file; do :; done' 2>/dev/null & job=$!
soon test -s work/file
fails umount work
kill -9 -- "-$job"; wait $job 2>/dev/null || true
mounted || wrong "the mount is gone with its job"
detach work
nothing_left "the job is killed: the mount lives on"

# nbdfuse is killed.
if [ $VIA = nbdfuse ]; then
  for signal in TERM KILL; do
    attach job work; dirty
    kill -$signal "${nbdfuse_pid[job]}"; wait "${nbdfuse_pid[job]}" 2>/dev/null || true
    mounted || wrong "the mount is gone with nbdfuse"
    fails sync -f work
    umount work
    # After SIGTERM nbdfuse has unmounted its own directory.
    [ $signal = TERM ] || umount fuse-job
    attach job work; detach work
  done
  nothing_left "nbdfuse is killed: umount of both, and the disk can be attached again"
fi

# The server is killed. The kernel's NBD client holds requests back, so it is detached first.
attach job work; dirty; kill_server
mounted || wrong "the mount is gone with the server"
if [ $VIA = nbd ]; then
  sync -f work 2>/dev/null & sync=$!
  sleep 2; ! has_ended $sync || wrong "the kernel's client does not hold requests back"
  unplug job; soon has_ended $sync
else
  fails in_time sync -f work
fi
in_time umount work
! mounted || wrong "umount after the server was killed: $(cat in_time.out)"
case $VIA in ublk) left_is_removed;; nbdfuse) unplug job;; esac
nothing_left "the server is killed: $(case $VIA in nbd) echo "the kernel's client, then umount";; *) echo "umount, then the disk";; esac)"

# The server hangs, so umount waits for it: the processes between them, or the server, must end first.
rm -f "$dir/nbd.sock"
begin
dirty; kill -STOP $server
umount work >umount.out 2>&1 & umount=$!
sleep 2
kill -0 $umount || wrong "umount does not wait for a server that hangs: $(cat umount.out)"
case $VIA in
  nbdfuse) kill -9 "${nbdfuse_pid[job]}";;
  nbd) nbd-client -d "${disk_of[job]}" >/dev/null 2>&1 || true;;
  ublk) kill_server;;
esac
soon has_ended $umount
wait $umount 2>/dev/null || true
! mounted || in_time umount work
[ $VIA = ublk ] || unplug job
[ $VIA = ublk ] || { kill -CONT $server; kill_server; }
[ $VIA != ublk ] || left_is_removed
nothing_left "the server hangs: $(case $VIA in nbd) echo "the kernel's client";; ublk) echo the server;; *) echo $VIA;; esac) ends first, then umount"
