#!/bin/bash
# 07-db-sqlite-power.sh - database tester: does SQLite keep what it has acknowledged when the power fails? With synchronous=EXTRA always; with
# FULL the last commit can be lost.
. "$(dirname "$0")/lib.sh"
image golden.img 64M
commits() { # synchronous=...: commits until the disk fails; says which were acknowledged
  local n=0
  while sqlite3 work/db "PRAGMA synchronous=$1; INSERT INTO t VALUES ($((n + 1)))" 2>/dev/null; do n=$((n + 1)); echo $n >acknowledged; done; }
committed() { [ "$(cat acknowledged)" -gt 2 ]; }
trial() { # synchronous seed: sets `lost` to the number of acknowledged commits that are missing
  run freestone rewind t --force >/dev/null
  attach t work
  sqlite3 work/db 'CREATE TABLE t (n)'; sync -f work
  echo 0 >acknowledged
  commits "$1" & local workload=$!
  soon committed; sleep 0.1
  run freestone power-cut t --seed "$2" >cut.out
  soon has_ended $workload || true
  wait $workload 2>/dev/null || true
  detach work
  attach t work # the reboot
  is "the database" ok "$(sqlite3 work/db 'PRAGMA integrity_check')"
  lost=$(($(cat acknowledged) - $(sqlite3 work/db 'SELECT coalesce(max(n), 0) FROM t')))
  [ "$(cat acknowledged)" -gt 0 ] || wrong "no commit was acknowledged"
  detach work
}

serve golden=file,path=golden.img,readonly=yes,publish=no t=fork,base=golden,power_cut=yes
for seed in 1 2 3 4 5; do trial EXTRA $seed; [ $lost -le 0 ] || wrong "synchronous=EXTRA, seed $seed: $lost commits are lost"; done
# A cut loses the last commit with half of the seeds.
for seed in $(seq 1 20); do trial FULL $seed; [ $lost -le 0 ] || break; done
[ $lost -gt 0 ] || wrong "synchronous=FULL loses no commit with 20 seeds"
echo "     synchronous=FULL lost $lost commit with seed $seed"
stop_server
