#!/bin/bash
# run-ublk-zbd.sh [ours|kernel] [test..] - runs fio's tests of zoned block devices (t/zbd of its source, which
# `cargo xtask test --only packages` fetches) in a stock kernel 7 on a block device of the program, or on the kernel's null_blk. Runs all
# tests or those with the given numbers. FREESTONE names the program; by default it is built.
set -eu
cd "$(dirname "$0")/.."
whose=ours; case ${1:-} in ours|kernel) whose=$1; shift;; esac
source=target/fio/$(fio --version)
[ -d "$source/t/zbd" ] || { echo "no $source/t/zbd: run cargo xtask test --only packages" >&2; exit 1; }
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
[ -n "${FREESTONE:-}" ] || cargo build --quiet --package freestone-cli
strip -o "$dir/freestone" "${FREESTONE:-${CARGO_TARGET_DIR:-target}/debug/freestone}"
mkdir -p "$dir/fio/t"; cp -r "$source/t/zbd" "$dir/fio/t/zbd"; cp "$(command -v fio)" "$dir/fio/fio"
lab/kernel-lab.sh -k 7 -f gen -m "ublk_drv configfs null_blk mq-deadline" -t 1200 -M 2G \
  -b "bash dd grep sed tr sort head tail tee cut stat readlink realpath basename dirname timeout blkzone blockdev $dir/freestone" \
  -i "$dir/fio:/fio" lab/ublk-zbd.sh $whose "$@"
