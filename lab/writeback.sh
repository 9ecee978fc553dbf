#!/bin/sh
# writeback.sh - runs in the kernel lab (see run-writeback.sh): runs the same operations on the kernel's zram and on Freestone's, records the
# results and compares line by line. Both use the plain layout (compressed_writeback=0), lz4, and equal backing devices. Intended
# differences, which docs/explanation/zram.md lists, are not tested here.
set -u
BIG=/dev/vda SMALL=/dev/vdb     # 64 MiB, and 1 MiB: 256 blocks
PAGE=4096
DIR=/tmp/lab; mkdir -p $DIR; cd $DIR
export LC_ALL=C XDG_RUNTIME_DIR=$DIR

# ---- the kernel: attributes in sysfs ----------------------------------------------------------------------------------

kernel_prepare() { modprobe zram; DEV=/dev/zram0 Z=/sys/block/zram0; }
kernel_new() { # SIZE BACKING|none
  for attribute in reset=1 writeback_limit=0 writeback_limit_enable=0 writeback_batch_size=32; do
    kernel_set ${attribute%=*} ${attribute#*=} >/dev/null; done
  [ $2 = none ] || kernel_set backing_dev $2; kernel_set comp_algorithm lz4; kernel_set disksize $1; }
kernel_set() { printf '%s\n' "$2" | dd of=$Z/$1 conv=notrunc status=none 2>err && echo ok || named "$(sed 's/.*: //' err)"; }
kernel_numbers() { for name in writeback_limit mm_stat bd_stat; do read -r line <$Z/$name; echo $name $line; done; }
kernel_idle() { kernel_set idle "$1"; }
kernel_writeback() { kernel_set writeback "$1"; }
kernel_reset() { kernel_set reset 1; kernel_set backing_dev $BIG; kernel_set disksize $SIZE; }
kernel_end() { kernel_set reset 1 >/dev/null; }

# ---- Freestone: the program, and the kernel's NBD client ----------------------------------------------------------------

freestone_prepare() {
  DEV=/dev/nbd0; modprobe nbd nbds_max=1
  freestone serve null=null,size=4K --nbd unix:$DIR/nbd --control $DIR/control >serve.log 2>&1 &
  # The program prints the reason of a failure as text; the errno is in the response of the server.
  : >traffic; socat -v UNIX-LISTEN:overheard,fork UNIX-CONNECT:control 2>>traffic &
  until [ -S control ] && [ -S nbd ] && [ -S overheard ]; do sleep 0.1; done; }
ask() { verb=$1; shift; freestone $verb --control overheard "$@"; }
say_ask() {
  : >traffic; ask "$@" >said 2>&1 && echo ok && return
  case $? in 2) echo EINVAL;; *) grep -q '"errno"' traffic && sed -n 's/.*"errno":"\([A-Z]*\)".*/\1/p' traffic || cat said;; esac; }
detach() { nbd-client -d $DEV >/dev/null 2>&1; while [ -e /sys/block/nbd0/pid ]; do sleep 0.1; done; }
attach() { nbd-client -unix $DIR/nbd $DEV -N r -b 4096 >attach.log 2>&1 || cat attach.log; }
freestone_new() {
  detach; ask remove r --force >/dev/null 2>&1
  below=; [ $2 = none ] || below=,backing_dev=$2,compressed_writeback=no
  say_ask create r=ram,disksize=$1,comp_algorithm=lz4,mem_limit=none,publish=yes$below; attach; }
freestone_set() { say_ask set r "$1=$2"; }
freestone_numbers() { ask get r; }
freestone_idle() { say_ask idle r -- "$1"; }
freestone_writeback() { say_ask writeback r -- "$1"; }
freestone_reset() { say_ask reset r --force; }
freestone_end() { detach; }

# ---- steps: each prints its operation and the result -----------------------------------------------------------------

named() {
  case $1 in
    'Invalid argument') echo EINVAL;; 'Input/output error') echo EIO;; 'No space left on device') echo ENOSPC;;
    'Numerical result out of range') echo ERANGE;; 'No such device') echo ENODEV;; 'Device or resource busy') echo EBUSY;;
    'Block device required') echo ENOTBLK;; *) echo "$1";;
  esac; }
say() { printf '%s: %s\n' "$1" "$2"; }
both() { ${WHO}_"$@"; }
sequence() { printf '\n# %s\n' "$*"; }
new() { SIZE=$1; both new "$@" >new.log; grep -qv '^ok$' new.log && cat new.log; rm -f shadow; truncate -s $1 shadow; say "new $*" done; }
state() {
  both numbers | while read -r name a b c d e f g h rest; do
    case $name in
      writeback_limit) echo "  writeback_limit $a";;
      mm_stat) echo "  orig_data_size $a same_pages $f huge_pages $h";;
      bd_stat) echo "  bd_stat $a $b $c";;
    esac; done; }
put() { say "set $1=$2" "$(both set $1 "$2")"; }
idle() { say "idle $1" "$(both idle "$1")"; }
writeback() { say "writeback $1" "$(both writeback "$1")"; state; }
move() { dd bs=64K iflag=skip_bytes,count_bytes$2 oflag=seek_bytes$3 conv=notrunc status=none "$1" "$4" skip=$5 seek=$6 count=$7; }
fill() { # KIND FIRST COUNT
  at=$(($2*PAGE)) length=$(($3*PAGE))
  move if=$1 '' ,direct of=$DEV $at $at $length 2>err && r=ok || r=$(named "$(sed 's/.*: //; q' err)")
  move if=$1 '' '' of=shadow $at $at $length; say "fill $*" "$r"; }
check() { # FIRST COUNT: reads, and compares with what was written
  at=$(($1*PAGE)) length=$(($2*PAGE)); : >back
  move if=$DEV ,direct '' of=back $at 0 $length 2>err && r=same || r=$(named "$(sed 's/.*: //; q' err)")
  move if=shadow '' '' of=wanted $at 0 $length; truncate -s $length back wanted
  cmp -s back wanted || r="$r but wrong content"; say "check $*" "$r"; }
zeroed() { move if=/dev/zero '' '' of=shadow 0 $(($1*PAGE)) $(($2*PAGE)); }
discard() { blkdiscard -f -o $(($1*PAGE)) -l $(($2*PAGE)) $DEV 2>/dev/null; zeroed $1 $2; say "discard $*" done; }
zero() { blkdiscard -f -z -o $(($1*PAGE)) -l $(($2*PAGE)) $DEV 2>/dev/null; zeroed $1 $2; say "zero $*" done; }

# ---- the sequences -----------------------------------------------------------------------------------------------------

sequences() {
  both prepare

  sequence source test: 1002 blocks are allowed of 10 MiB
  new 16M $BIG; put writeback_limit 1002; put writeback_limit_enable 1
  fill noise 0 2560; idle all; writeback idle; check 0 2560; state
  put writeback_limit 502; idle all; writeback idle
  put writeback_limit 10000; idle all; writeback idle; check 0 2560; state
  [ "$PART" = first ] && { both end; return; }

  sequence idle pages of all kinds, read, overwritten, freed
  new 16M $BIG; fill noise 0 64; fill text 64 64; fill pattern 128 64; fill zeroes 192 16; state
  writeback idle; idle all; writeback idle; writeback idle
  check 0 256; state; check 0 256; state
  fill text 0 16; state; fill pattern 16 16; state; fill noise 64 8; state
  discard 80 16; state; zero 100 10; check 100 10; discard 100 10; state; check 0 256; state
  idle all; check 0 8; fill text 8 4; writeback idle; check 0 256; state
  discard 0 4096; state; idle all; writeback idle; check 0 64; state

  sequence huge, huge_idle, incompressible
  new 16M $BIG; fill noise 0 40; fill text 40 40; idle all; check 0 10; fill noise 10 10; writeback huge_idle
  check 0 80; writeback huge_idle; idle all; writeback huge_idle; writeback huge; idle all
  fill noise 0 20; writeback huge; writeback huge; writeback incompressible; writeback idle; check 0 80; state

  sequence single pages and ranges
  new 16M $BIG; fill noise 0 32; fill text 32 32; fill pattern 64 32
  writeback page_index=0; writeback page_index=0; writeback page_index=40; writeback page_index=64; writeback page_index=4095
  writeback page_indexes=1-5; writeback page_indexes=0-0; writeback page_indexes=28-36; writeback page_indexes=60-70
  writeback page_indexes=96-4095; writeback 'page_index=8 page_index=9 page_indexes=10-12'
  writeback page_index=4096; writeback page_index=99999999
  writeback page_indexes=5-1; writeback page_indexes=4090-4096; writeback page_indexes=4096-4097
  writeback 'page_index=20 page_index=4096'; writeback 'page_indexes=20-22 page_indexes=9-8'
  writeback page_index=x; writeback page_index=-1; writeback page_index=0x20; writeback page_index=
  writeback page_indexes=4; writeback page_indexes=2-x; writeback page_indexes=-4; writeback page_indexes=
  writeback page_indexes=0-4095; check 0 96; state

  sequence the limit
  new 16M $BIG; fill text 0 64; fill noise 64 32; put writeback_limit 10; idle all
  writeback page_index=0
  put writeback_limit_enable 1; writeback page_indexes=1-3; put writeback_limit 0; writeback idle; writeback huge
  put writeback_limit 32; writeback idle; check 0 96; state
  writeback page_index=4000; writeback type=huge
  idle all; writeback idle; put writeback_limit 5; writeback page_indexes=0-8; put writeback_limit 7; writeback page_indexes=4-10
  put writeback_limit 3; writeback page_indexes=13-19; fill noise 13 7
  put writeback_limit 1; put writeback_batch_size 1; writeback page_index=20; writeback page_index=21
  put writeback_limit_enable 0; writeback page_indexes=11-12; put writeback_limit_enable 1; put writeback_limit 5; writeback idle
  put writeback_limit 1000; writeback idle; fill noise 0 96; put writeback_batch_size 7; idle all; writeback idle
  check 0 96; state
  put writeback_limit x; put writeback_limit -1; put writeback_limit 99999999999999999999; state
  put writeback_limit_enable x; put writeback_batch_size 0; put writeback_batch_size x; put writeback_batch_size -1

  sequence more than the disk below holds
  new 16M $SMALL; fill noise 0 256; fill text 256 44; idle all; writeback idle; check 0 300; state
  idle all; writeback idle; writeback huge; writeback page_index=0; writeback page_index=299
  discard 0 10; idle all; writeback idle; check 0 300; state
  put writeback_limit 100; put writeback_limit_enable 1; idle all; writeback idle
  fill noise 10 5; fill pattern 64 2; idle all; writeback huge; writeback idle; check 0 300; state
  discard 0 300; state; fill text 0 300; put writeback_limit 1000; idle all; writeback idle; check 0 300; state

  sequence idle for some seconds
  new 16M $BIG; fill noise 0 16; fill text 16 16; sleep 4; fill noise 32 16; check 0 4; idle 2; writeback idle; check 0 48; state
  idle 10000; writeback idle; sleep 3; idle 1; writeback idle; check 0 48; state
  idle x; idle -1; idle ALL; idle ''

  sequence words that mean nothing
  new 16M $BIG; fill noise 0 16; idle all
  for word in bogus IDLE type=bogus type= type=idle1; do writeback "$word"; done
  writeback type=idle; writeback type=huge; writeback type=huge_idle; writeback type=incompressible
  put compressed_writeback 1; put backing_dev $SMALL

  sequence no disk below
  new 16M none; fill noise 0 16; idle all; writeback idle; writeback page_index=0; writeback page_index=4096
  check 0 16

  sequence reset
  new 16M $BIG; fill noise 0 64; idle all; writeback idle; check 0 64; state
  say reset "$(both reset | sort -u)"; rm shadow; truncate -s 16M shadow; state; check 0 64; state
  fill noise 0 32; idle all; writeback idle; check 0 64; state
  both end
}

# Every page of these kinds is unique.
dd if=/dev/urandom of=noise bs=1M count=16 status=none
seq 1000000 1300000 >text
yes 12 | tr -d '\n' | head -c 1048576 >pattern
truncate -s 16M zeroes

PART=
for word; do case $word in kernel|first) PART=$word;; *) echo "$0: $word: neither kernel nor first" >&2; exit 2;; esac; done
if [ "$PART" = kernel ]; then WHO=kernel; sequences; exit; fi
for WHO in kernel freestone; do sequences >$WHO.txt 2>&1; done
echo "==== the kernel $(uname -r)"; cat kernel.txt; echo
if diff -U 8 kernel.txt freestone.txt >difference; then
  echo "==== Freestone returns the same results: $(grep -vc '^$\|^#' kernel.txt) lines"; exit 0
fi
echo "==== Freestone returns different results (-kernel +Freestone)"; cat difference; echo "==== log of the server"; tail -n 50 serve.log; exit 1
