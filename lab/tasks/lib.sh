# lib.sh - sourced by the tasks in this directory: makes a working directory, counts and times the commands of a user, mounts disks, cleans up.
#   FREESTONE  the program; `freestone` of PATH unless set
#   BY         mount (the default): disks are mounted with `freestone mount`; hand: with nbdfuse, nbd-client, `publish` and mount(8)
#   VIA        ublk, nbd or nbdfuse; unless set, the first that the kernel has
# Commands of the user go through `run` and `start`. All other commands prepare or check. The first failed check ends a task with status 1.
set -eEu
export LC_ALL=C
task=$(basename "$0" .sh)
program=$(realpath "${FREESTONE:-$(command -v freestone)}" 2>/dev/null) && [ -x "$program" ] ||
  { echo "FAIL $task: FREESTONE names no program, and PATH has no freestone" >&2; exit 1; }
dir=$(mktemp -d "${TMPDIR:-/tmp}/freestone-task.XXXXXX")
cd "$dir"
exec 3>&2 2>task.err # bash reports processes that were killed; shown if the task fails
mkdir bin
ln -s "$program" bin/freestone
export PATH=$dir/bin:$PATH FREESTONE_CONTROL=$dir/control XDG_RUNTIME_DIR=$dir FREESTONE_CACHE=$dir/cache FREESTONE_MOUNTS=$dir/mounts
BY=${BY:-mount}
if [ -z "${VIA:-}" ]; then
  if [ -e /dev/ublk-control ]; then VIA=ublk; elif [ -e /sys/module/nbd ]; then VIA=nbd; else VIA=nbdfuse; fi
fi
commands=0 command_us=0 server=
declare -A nbdfuse_pid=() disk_of=() device_at=()

wrong() {
  trap - ERR
  cd "$dir"
  { echo "FAIL $task: $*"; tail -n 20 task.err
    [ ! -s server.log ] || { echo "the server's log:"; tail -n 20 server.log; }; } >&3
  exit 1
}
trap 'wrong "line $LINENO: $BASH_COMMAND"' ERR
is() { # WHAT WANTED FOUND
  [ "$2" = "$3" ] || wrong "$1: expected '$2', found '$3'"; }
soon() { # COMMAND...: within a minute
  local n; for n in $(seq 3000); do "$@" >/dev/null 2>&1 && return; sleep 0.02; done; wrong "not in time: $*"; }
fails() { # COMMAND...
  ! "$@" >failed.out 2>&1 || wrong "succeeds: $*"; }
has_ended() { ! kill -0 "$1" 2>/dev/null || grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null; }
users_of() { # DIRECTORY: prints processes with a working directory in it
  local cwd; for cwd in /proc/[0-9]*/cwd; do case $(readlink "$cwd") in "$1"|"$1"/*) echo "$cwd";; esac; done; }
unused() { [ -z "$(users_of "$1")" ]; }
us() { echo "${EPOCHREALTIME/./}"; }

run() { # COMMAND...: one command of the user
  local status=0 start; start=$(us)
  "$@" || status=$?
  command_us=$((command_us + $(us) - start)); commands=$((commands + 1))
  return $status
}
start() { # COMMAND...: one command of the user that ends in &
  commands=$((commands + 1))
  "$@" & started=$!
}

# Removes processes, mounts and loop devices of the task. A task that passed must not have left any.
end() {
  local status=$? left pid
  trap - ERR EXIT
  set +e
  cd /
  left=$(grep -s " $dir/" /proc/mounts; losetup -a 2>/dev/null | grep "$dir/"; jobs -rp)
  for pid in $(jobs -rp); do kill -9 "$pid" 2>/dev/null; done
  grep -s " $dir/" /proc/mounts | cut -d' ' -f2 | tac | while read -r at; do umount -l "$at"; done
  losetup -a 2>/dev/null | grep "$dir/" | cut -d: -f1 | while read -r loop; do losetup -d "$loop"; done
  wait 2>/dev/null
  rm -rf "$dir"
  if [ $status = 0 ] && [ -n "$left" ]; then echo "FAIL $task: leaves $left" >&3; status=1; fi
  [ $status != 0 ] || printf 'ok   %s: %d commands, %d.%03d s\n' "$task" $commands $((command_us / 1000000)) $((command_us / 1000 % 1000))
  exit $status
}
trap end EXIT

image() { # FILE SIZE [DIRECTORY]: an ext4, with the files of a directory
  truncate -s "$2" "$1"
  mke2fs -q -t ext4 -F ${3:+-d "$3"} "$1"; }
serve() { # DEVICE... [OPTION...]
  start freestone serve --nbd "unix:$dir/nbd.sock" "$@" >server.out 2>>server.log; server=$started
  run freestone wait; }
stop_server() { run freestone shutdown; wait "$server" || wrong "the server ends with $?"; server=; }
kill_server() { kill -9 "$server"; wait "$server" 2>/dev/null || true; }
uri() { echo "nbd+unix:///$1?socket=$dir/nbd.sock"; } # EXPORT
counter() { # DEVICE KEY: prints a number of `stat`
  freestone stat "$1" --json | sed -n "s/^ *\"$2\": \([0-9]*\),*$/\1/p" | head -n 1; }

# Attaches an export by hand: sets disk_of[KEY] to a block device, or to a file for a loop device. KEY is the export's name by default.
plug() { # EXPORT [KEY]
  local name=$1 key=${2:-$1} n
  case $VIA in
    nbdfuse)
      run mkdir -p "$dir/fuse-$key"
      start nbdfuse "$dir/fuse-$key" "$(uri "$name")" 2>>nbdfuse.log; nbdfuse_pid[$key]=$started
      run soon test -e "$dir/fuse-$key/nbd"
      disk_of[$key]=$dir/fuse-$key/nbd;;
    nbd)
      for n in $(seq 0 15); do [ -e "/sys/block/nbd$n/pid" ] || break; done
      run nbd-client -unix "$dir/nbd.sock" "/dev/nbd$n" -N "$name" -timeout 30 >nbd-client.out 2>&1 || wrong "nbd-client: $(cat nbd-client.out)"
      run soon test -e "/sys/block/nbd$n/pid"
      disk_of[$key]=/dev/nbd$n;;
    ublk)
      run freestone publish "$name" --ublk >publish.out || wrong "publish: $(cat publish.out)"
      disk_of[$key]=$(grep -o '/dev/ublkb[0-9]*' publish.out);;
  esac
}
# Detaches an export. The status of nbdfuse is ignored, as nbdfuse fails after a power cut and after the end of its server.
unplug() { # KEY
  local key=$1
  case $VIA in
    nbdfuse)
      run umount "$dir/fuse-$key"
      run wait "${nbdfuse_pid[$key]}" 2>/dev/null || true;;
    nbd)
      run nbd-client -d "${disk_of[$key]}" >nbd-client.out 2>&1 || true
      # The kernel keeps a mounted disk, without a server, until it is unmounted.
      grep -q "^${disk_of[$key]} " /proc/mounts || soon test ! -e "/sys/block/${disk_of[$key]#/dev/}/pid";;
    ublk) run freestone unpublish "$key" >unpublish.out || wrong "unpublish: $(cat unpublish.out)";;
  esac
  unset "disk_of[$key]"
}
mount_plugged() { # KEY DIRECTORY [OPTIONS]
  local options=${3:-}
  [ $VIA != nbdfuse ] || options=loop${options:+,$options}
  run mount ${options:+-o "$options"} "${disk_of[$1]}" "$2"; }

# Mounts the file system of an export.
attach() { # EXPORT DIRECTORY [OPTIONS]
  mkdir -p "$2"
  if [ $BY = hand ]; then plug "$1" "${4:-$1}"; mount_plugged "${4:-$1}" "$2" "${3:-}"
  else run freestone mount "$1" "$2" --via $VIA ${3:+-o "$3"} >mount.out || wrong "mount: $(cat mount.out)"; fi
  device_at[$2]=${4:-$1}
}
detach() { # DIRECTORY [OPTION]
  if [ $BY = hand ]; then run umount "$1"; unplug "${device_at[$1]}"
  else run freestone umount "$@" >umount.out || wrong "umount: $(cat umount.out)"; fi
}
# Unmounts a disk whose server or client was killed. The kernel's NBD client holds requests back until it is disconnected.
clean_up() { # DIRECTORY
  if [ $BY != hand ]; then detach "$1" --force; return; fi
  [ $VIA != nbd ] || unplug "${device_at[$1]}"
  soon unused "$dir/$1"
  run umount "$1"
  [ $VIA != nbdfuse ] || unplug "${device_at[$1]}"
}
# Sets a mounted fork back to its base, and mounts it again.
rewind() { # EXPORT DIRECTORY
  if [ $BY = hand ]; then
    run umount "$2"
    # The NBD client stays connected.
    run freestone rewind "$1" $([ $VIA = ublk ] || echo --force) >rewind.out || wrong "rewind: $(cat rewind.out)"
    mount_plugged "$1" "$2"
  else run freestone rewind "$1" >rewind.out || wrong "rewind: $(cat rewind.out)"; fi
}
# Makes a file system on an empty device.
format() { # EXPORT
  plug "$1"; run mke2fs -q -t ext4 -F "${disk_of[$1]}"; unplug "$1"; }
