#!/bin/sh
# ublk-user.sh - runs in the kernel lab (see run-ublk.sh): block devices of an unprivileged user. udev does not run; the script applies the
# udev rule itself. Ends at the first failure.
set -eu
export LC_ALL=C
modprobe ublk_drv; modprobe crc32c_generic 2>/dev/null || true; modprobe ext4 2>/dev/null || true
mkdir -p /tmp/lab/mnt /run/u; cd /tmp/lab; chmod 755 .; chown 1000:1000 /run/u; touch out err said given; chown 1000:1000 out err said
wrong() { echo "FAIL $1"; cat said err out given; ls -l /dev/ublk*; exit 1; }
soon() { for _ in $(seq 100); do "$@" && return; sleep 0.1; done; wrong "not in time: $*"; }
absent() { [ ! -e "$1" ]; }
as() { uid=$1; shift; setpriv --reuid "$uid" --regid "$uid" --clear-groups env XDG_RUNTIME_DIR=/run/u "$@"; }
user() { as 1000 "$@"; }
begin() { setpriv --reuid 1000 --regid 1000 --clear-groups env XDG_RUNTIME_DIR=/run/u freestone serve "$@" >out 2>err & server=$!
  user freestone wait --timeout 2m || wrong "no server"; }
disk_of() { sed -n "s/^$1: \(\/dev\/ublkb.*\)/\1/p" out; }
refused() { # expected message, command
  wanted=$1; shift; "$@" >said 2>&1 && wrong "$* succeeds"; grep -q "$wanted" said || wrong "$*: another error"; }

# Applies the udev rule in /lab/rules to a new device node, as udev does.
rule=$(grep '^ACTION' /lab/rules)
rule_value() { echo "$rule" | sed -n "s/.* $1=\"\([^\"]*\)\".*/\1/p"; }
give() { # node
  program=$(rule_value PROGRAM | sed "s,/usr/bin/freestone,freestone,; s,%k,$1,")
  owner=$($program) || return 0
  [ "$(rule_value OWNER) $(rule_value GROUP)" = "%c{1} %c{2}" ] || wrong "the rule"
  chmod "$(rule_value MODE)" /dev/$1; chown "${owner% *}:${owner#* }" /dev/$1; }
give_all() { while sleep 0.1; do
  for node in $(find /dev -name 'ublk[bc][0-9]*' -user 0); do give ${node#/dev/}; done; done; }

# ---- errors without the udev rule ----------------------------------------------------------------------------------------

begin n=null,size=64M,publish=no
refused "where Freestone's udev rule is installed" user freestone publish n --ublk
chmod "$(sed -n 's/.*ublk-control", MODE="\([0-7]*\)".*/\1/p' /lab/rules)" /dev/ublk-control
refused "udev rule, which gives it to its user, is not installed" user freestone publish n --ublk
[ -e /dev/ublkc0 ] || wrong "the device is missing"
kill -TERM $server; wait $server || wrong "the server ends with $?"
echo "ok   refused without the rule, with the reason"

# ---- with the rule -------------------------------------------------------------------------------------------------------

give_all 2>given & giver=$!
is_his() { [ "$(stat -c %u $1)" = 1000 ]; }
soon is_his /dev/ublkc0
begin r=ram,disksize=128M --ublk
grep -q "ublkb0: was left by a killed server: removed" err || wrong "a leftover device was not removed"
disk=$(disk_of r); char=/dev/ublkc${disk#/dev/ublkb}
[ "$(stat -c '%u %g %a' $disk) $(stat -c '%u %g %a' $char)" = "1000 1000 600 1000 1000 600" ] || wrong "the nodes do not belong to the user"
grep -q "lack CAP_SYS_RESOURCE" err || wrong "no warning about memory"
dd if=/dev/urandom of=image bs=1M count=8 status=none
user dd if=image of=$disk bs=1M seek=64 oflag=direct status=none
user dd if=$disk of=/dev/null bs=1M iflag=direct status=none || wrong "the user cannot read the device"
dd if=$disk bs=1M skip=64 count=8 iflag=direct status=none | cmp - image || wrong "the content differs"
echo "ok   a user makes a block device, reads and writes it"

refused "ermission denied" as 1001 dd if=$disk of=/dev/null count=1
chmod 666 $disk $char
refused "not permitted" as 1001 dd if=$disk of=/dev/null count=1
chmod 600 $disk $char
user mkfs.ext4 -q -F $disk >said 2>&1 || wrong "mkfs by the user"
mount -t ext4 $disk mnt || wrong "root cannot mount the device"
dd if=/dev/urandom of=mnt/file bs=1M count=16 conv=fsync status=none
sum=$(md5sum <mnt/file)
refused "a client is connected" user freestone unpublish r
umount mnt; mount -t ext4 $disk mnt; [ "$(md5sum <mnt/file)" = "$sum" ] || wrong "a file has different content"; umount mnt
echo "ok   other users cannot open the device, whatever its mode; root mounts its file system"

user freestone set r disksize=256M >/dev/null
case $(uname -r) in 6.12*) wanted=262144; grep -q "Linux 6.16 or later" err || wrong "no warning about growth";; *) wanted=524288;; esac
[ "$(blockdev --getsz $disk)" = $wanted ] || wrong "size $(blockdev --getsz $disk) after it has grown"
user freestone snapshot r base >/dev/null; user freestone fork base job >/dev/null
other=$(user freestone publish job --ublk --queues 1 2>said) || wrong "a second device is not published"
user freestone unpublish job; soon absent $other
echo "ok   the device grows to $wanted sectors, and a second one is added and removed"

mount -t ext4 $disk mnt; kill -9 $server; wait $server || true
ls mnt >/dev/null 2>&1 || true; umount mnt || umount -l mnt
begin r=ram,disksize=64M --ublk
grep -q "was left by a killed server: removed" err || wrong "no device of the killed server was removed"
disk=$(disk_of r); [ "$(blockdev --getsz $disk)" = 131072 ] || wrong "the size is wrong"
kill -TERM $server; wait $server || wrong "the server ends with $?"
[ -z "$(ls /dev | grep 'ublk[bc]')" ] || wrong "block devices are left"
freestone serve r=ram,disksize=64M --ublk >out 2>err & server=$!
soon grep -q /dev/ublkb out; sleep 0.5
[ "$(stat -c %u $(disk_of r))" = 0 ] || wrong "a device of root was given to the user"
kill -TERM $server; wait $server || wrong "the server ends with $?"
kill $giver
echo "ok   a user removes the devices of a killed server, and devices of root keep their owner"
