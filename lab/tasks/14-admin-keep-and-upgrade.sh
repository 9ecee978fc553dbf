#!/bin/bash
# 14-admin-keep-and-upgrade.sh - administrator: a mounted disk keeps its content over a restart and an upgrade of the program; a backup is made
# while it is used, and read on another server.
. "$(dirname "$0")/lib.sh"

serve --state "$dir/state" work=ram,disksize=128M,mem_limit=64M,keep=yes
format work
attach work mnt
echo first >mnt/file; head -c 4M /dev/urandom >mnt/data; sync -f mnt
sum=$(sha256sum <mnt/data)
run freestone save work work.saved >/dev/null # while it is mounted
echo second >>mnt/file
detach mnt
stop_server

# The upgrade: another program on the same state.
cp "$(realpath bin/freestone)" freestone.new; ln -sf "$dir/freestone.new" bin/freestone
serve --state "$dir/state"
attach work mnt
is "after the upgrade" "first second $sum" "$(echo $(cat mnt/file)) $(sha256sum <mnt/data)"
detach mnt
stop_server

unset FREESTONE_CONTROL; export FREESTONE_CONTROL=$dir/other-control
serve
run freestone restore work.saved >/dev/null
run freestone publish work --nbd "unix:$dir/nbd.sock" >/dev/null
attach work mnt
is "the backup" "first $sum" "$(cat mnt/file) $(sha256sum <mnt/data)"
detach mnt
stop_server
