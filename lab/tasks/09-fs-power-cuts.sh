#!/bin/bash
# 09-fs-power-cuts.sh - file-system developer: the power of an ext4 fails under a writer, with one seed after the other; after each reboot the
# journal is replayed, e2fsck finds nothing, and every file that was synced is there.
. "$(dirname "$0")/lib.sh"
image golden.img 64M
writer() { # files, each durable before it is acknowledged
  local n=0
  while n=$((n + 1)); do
    mkdir "work/$n" && seq $n $((n + 500)) >"work/$n/file" && sync "work/$n/file" "work/$n" work || break
    echo $n >>acknowledged
  done 2>/dev/null; }

serve golden=file,path=golden.img,readonly=yes,publish=no t=fork,base=golden,power_cut=yes
files=0
for seed in 1 2 3 4 5 6; do
  run freestone rewind t --force >/dev/null
  attach t work
  : >acknowledged
  writer & pid=$!
  soon test -s acknowledged; sleep 0.3
  run freestone power-cut t --seed $seed >cut.out
  soon has_ended $pid || true
  wait $pid 2>/dev/null || true
  detach work
  attach t work # the reboot
  for n in $(cat acknowledged); do
    seq $n $((n + 500)) | cmp -s - "work/$n/file" || wrong "seed $seed: synced file $n is missing or changed"
    files=$((files + 1))
  done
  detach work
  plug t
  run e2fsck -fn "${disk_of[t]}" >fsck.out 2>&1 || wrong "seed $seed: e2fsck: $(cat fsck.out)"
  unplug t
done
[ $files -ge 6 ] || wrong "only $files files were synced"
echo "     $files files in 6 cuts"
stop_server
