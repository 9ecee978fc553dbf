#!/bin/sh
# ublk-zbd.sh ours|kernel [test..] - runs in the kernel lab (see run-ublk-zbd.sh): fio's tests of zoned block devices (t/zbd of its source)
# on the program's device, or with the same zones on the kernel's null_blk. Prints a line per test. Status 1 if a test failed.
set -eu
export LC_ALL=C XDG_RUNTIME_DIR=/run
whose=$1; shift; tests=; for number in "$@"; do tests="$tests -t $number"; done
ln -s /proc/self/fd /dev/fd 2>/dev/null || true
ZONE=2 CAPACITY=1 CONVENTIONAL=16 OPEN=8 SIZE=$((2*148))
case $whose in
  ours)
    modprobe ublk_drv
    freestone serve z=null,size=${SIZE}M,memory_backed=1,zoned=1,zone_size=${ZONE}M,zone_capacity=${CAPACITY}M,zone_nr_conv=$CONVENTIONAL,zone_max_open=$OPEN \
      --ublk >/tmp/out 2>/tmp/err &
    freestone wait --timeout 2m; disk=$(sed -n 's/^z: \(\/dev\/ublkb.*\)/\1/p' /tmp/out);;
  kernel)
    modprobe configfs; modprobe null_blk nr_devices=0; drive=/sys/kernel/config/nullb/nullb0; mkdir $drive; disk=/dev/nullb0
    for line in size=$SIZE memory_backed=1 blocksize=4096 zoned=1 zone_size=$ZONE zone_capacity=$CAPACITY zone_nr_conv=$CONVENTIONAL \
      zone_max_open=$OPEN power=1; do echo ${line#*=} >$drive/${line%%=*}; done;;
esac
# Test 54 fails an assertion of fio 3.33 (zbd_replay_write_order), also on the kernel's null_blk.
KNOWN=54
cd /fio/t/zbd; bash ./test-zbd-support -r -u -o $OPEN $tests $disk | cat
found=
for log in test-zbd-support.log.*; do
  [ "$(tail -n 1 $log)" = FAIL ] || continue
  number=${log##*.}; found="$found $number"
  [ $number = $KNOWN ] && grep 'Assertion' $log && continue
  echo "-- $log"; tail -n 12 $log; cat /tmp/err; done
[ "${found:- $KNOWN}" = " $KNOWN" ] || { echo "failed:$found"; exit 1; }
