#!/bin/bash
# 08-db-two-disks.sh - database tester: data and log are on two mounted disks; a snapshot of both under a writer is consistent, so the log is
# never behind the data.
. "$(dirname "$0")/lib.sh"

serve data=ram,disksize=64M log=ram,disksize=64M
for disk in data log; do format $disk; attach $disk $disk-dir; done
writer() { # a number goes to the log, then to the data; each is durable before the next step
  local n=0
  while n=$((n + 1)); do
    echo $n | dd of=log-dir/n conv=fsync 2>/dev/null && echo $n | dd of=data-dir/n conv=fsync 2>/dev/null || break
  done; }
writer & pid=$!
soon test -s data-dir/n
for round in 1 2 3 4 5; do
  sleep 0.2
  run freestone snapshot data,log "data-$round,log-$round" >/dev/null
done
wrote_more() { [ "$(cat data-dir/n)" -gt 20 ]; }
soon wrote_more
kill $pid; wait $pid || true
before=0
for round in 1 2 3 4 5; do
  for disk in data log; do
    run freestone fork $disk-$round $disk-then --nbd "unix:$dir/nbd.sock" >/dev/null
    attach $disk-then $disk-then
  done
  data=$(cat data-then/n) log=$(cat log-then/n)
  # A file may be empty while it is replaced. A durable version or its successor must be present.
  [ -z "$data" ] || [ -z "$log" ] || [ $((log - data)) = 0 ] || [ $((log - data)) = 1 ] || wrong "round $round: data $data, log $log"
  [ -z "$log" ] || { [ "$log" -ge $before ] || wrong "round $round: log $log after $before"; before=$log; }
  for disk in data log; do detach $disk-then; run freestone remove $disk-then >/dev/null; done
done
[ $before -gt 0 ] || wrong "no snapshot contains a number"
detach data-dir
detach log-dir
stop_server
