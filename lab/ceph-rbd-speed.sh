#!/bin/bash
# ceph-rbd-speed.sh DIR - compares access paths to RBD of the Ceph that ceph.sh runs in DIR: fio with librbd, through qemu-nbd, through a
# device `nbd` of the program FREESTONE over qemu-nbd, and through its device `rbd` (freestone-rbd), in turn, ROUNDS (9) times for
# SECONDS_EACH (3). Prints requests per second, medians of ratios, and CPU time per request of all programs except Ceph's. Has no pass
# criterion and is in no lane. The machine must be idle.
set -eu
cd "$(dirname "$0")/.."
dir=$1/rbd-speed server=''
rounds=${ROUNDS:-9} runtime=${SECONDS_EACH:-3}
mkdir "$dir"
source lab/ceph-use.sh
timeout 60 rbd create --no-progress rbd/speed --size 1G 2>/dev/null || timeout 60 rbd create rbd/speed --size 1G
qemu-nbd --persistent --shared=0 -f raw --cache=none --socket "$dir/qemu.sock" "rbd:rbd/speed:conf=$CEPH_CONF" >"$dir/qemu-nbd.log" 2>&1 &
exporter=$!
soon 20 nbdinfo "nbd+unix:///?socket=$dir/qemu.sock" || wrong "no qemu-nbd: $(cat "$dir/qemu-nbd.log")"
serve "nbd,uri=nbd+unix:///?socket=$dir/qemu.sock" "r=rbd,image=rbd/speed,conf=$CEPH_CONF"
ticks() { # pid... : their CPU time in hundredths of a second
  for pid in "$@"; do awk '{print $14 + $15}' "/proc/$pid/stat"; done | awk '{sum += $1} END {print sum + 0}'; }
run() { # side rw bytes depth: requests a second, and CPU microseconds of each
  case $1 in
    librbd) engine="--ioengine=rbd --pool=rbd --rbdname=speed --clientname=admin" others='';;
    qemu-nbd) engine="--ioengine=nbd --uri=nbd+unix:///?socket=$dir/qemu.sock" others=$exporter;;
    freestone) engine="--ioengine=nbd --uri=$(uri d)" others="$exporter $server";;
    freestone-rbd) engine="--ioengine=nbd --uri=$(uri r)" others=$server;;
  esac
  # shellcheck disable=SC2086
  before=$(ticks $others)
  # shellcheck disable=SC2086
  fio --name=x $engine --rw="$2" --bs="$3" --iodepth="$4" --size=1G --time_based --runtime="$runtime" --randrepeat=0 --output-format=json \
    >"$dir/fio" 2>&1 || wrong "fio: $(tail -n 3 "$dir/fio")"
  # shellcheck disable=SC2086
  after=$(ticks $others)
  sed -n '/^{/,$p' "$dir/fio" | jq -r --arg ticks $((after - before)) '.jobs[0] as $job | ($job.read, $job.write | select(.total_ios > 0)) as $way |
    [$way.iops, ((($job.usr_cpu + $job.sys_cpu) / 100 * $job.job_runtime * 1000 + ($ticks | tonumber) * 10000) / $way.total_ios)] | @tsv'; }
median() { sort -g | awk '{at[NR] = $1} END {print at[int((NR + 1) / 2)]}'; }
# Writes the whole image before it is read.
fio --name=x --ioengine=rbd --pool=rbd --rbdname=speed --clientname=admin --rw=write --bs=1M --iodepth=8 --size=1G >"$dir/fio" 2>&1 ||
  wrong "fio: $(tail -n 3 "$dir/fio")"
for load in "randread 4k 1" "randread 4k 32" "randwrite 4k 32" "randread 128k 8" "write 128k 8"; do
  rm -f "$dir"/got.*
  for round in $(seq "$rounds"); do
    sides="librbd qemu-nbd freestone freestone-rbd"
    [ $((round % 2)) = 1 ] || sides="freestone-rbd freestone qemu-nbd librbd"
    # shellcheck disable=SC2086
    for side in $sides; do run "$side" $load >>"$dir/got.$side"; done; done
  say "$load: $(for side in librbd qemu-nbd freestone freestone-rbd; do
    printf '%s %.0f/s %.0f us CPU, ' "$side" "$(cut -f1 "$dir/got.$side" | median)" "$(cut -f2 "$dir/got.$side" | median)"; done)"
  ratio() { paste "$dir/got.$1" "$dir/got.$2" | awk '{print $1 / $3}' | median; }
  say "$load: qemu-nbd / librbd $(ratio qemu-nbd librbd), freestone / qemu-nbd $(ratio freestone qemu-nbd), freestone / librbd $(ratio freestone librbd)"
  say "$load: freestone-rbd / librbd $(ratio freestone-rbd librbd), freestone-rbd / qemu-nbd $(ratio freestone-rbd qemu-nbd)"
done
end; kill $exporter; wait $exporter || true
