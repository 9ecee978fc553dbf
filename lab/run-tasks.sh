#!/bin/bash
# run-tasks.sh [--by mount|hand] [--rounds N] [--kernel SERIES] [TASK...] - runs the tasks of users on real mounts: lab/tasks/NN-NAME.sh and
# detach-orders.sh, all of them unless TASK names some. Prints a table: task, commands of the user, seconds that they took (median of the rounds), ok
# or FAILED. Disks are mounted by nbdfuse and loop, with `freestone mount` or by hand; this needs root. With --kernel, a guest of the kernel lab runs
# the tasks that need ublk or the kernel's NBD client. FREESTONE names the program; by default it is built.
set -eu
cd "$(dirname "$0")/.."
by=${BY:-mount} rounds=1 kernel=
while [ $# -gt 0 ]; do case $1 in
  --by) by=$2; shift 2;; --rounds) rounds=$2; shift 2;; --kernel) kernel=$2; shift 2;;
  -*) echo "run-tasks: unknown option $1" >&2; exit 2;; *) break;; esac; done
if [ -z "${FREESTONE:-}" ]; then
  cargo build --quiet --package freestone-cli
  FREESTONE=${CARGO_TARGET_DIR:-target}/debug/freestone
fi
FREESTONE=$(realpath "$FREESTONE")
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT

if [ -n "$kernel" ]; then
  strip -o "$dir/freestone" "$FREESTONE"
  modules="nbd ublk_drv loop fuse ext4 btrfs"; [ "$kernel" = 7 ] || modules="$modules crc32c_generic crc32_generic"
  tools="cmp dd debugfs dumpe2fs e2fsck fstrim grep head losetup mke2fs mkfs.btrfs mount mountpoint nbd-client nbdfuse pgrep sed seq setsid"
  lab/kernel-lab.sh -k "$kernel" -f gen -m "$modules" -t 660 -i lab/tasks:/lab/tasks -i /bin/bash \
    -b "$tools sha256sum sort sync timeout tr umount $dir/freestone" lab/tasks/guest.sh "$by" "$@"
  exit
fi

[ $# -gt 0 ] || set -- detach-orders $(cd lab/tasks && ls [0-9]*.sh)
export FREESTONE BY=$by
median() { sort -n | awk '{ n[NR] = $1 } END { print n[int((NR + 1) / 2)] }'; }
failed=0
: >"$dir/table"
for task; do
  task=${task%.sh} result=ok commands=-
  : >"$dir/seconds"
  for _ in $(seq "$rounds"); do
    timeout 300 "lab/tasks/$task.sh" >"$dir/out" || { result=FAILED; cat "$dir/out"; break; }
    grep -v "^ok   $task: " "$dir/out" || true
    read -r commands seconds < <(sed -n "s/^ok   $task: \([0-9]*\) commands, \([0-9.]*\) s$/\1 \2/p" "$dir/out")
    echo "$seconds" >>"$dir/seconds"
  done
  [ $result = ok ] || failed=1
  printf '%-28s %8s %8s  %s\n' "$task" "$commands" "$(median <"$dir/seconds")" $result >>"$dir/table"
done
printf '%-28s %8s %8s\n' "task, by $by" commands seconds
cat "$dir/table"
exit $failed
