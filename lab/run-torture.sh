#!/bin/bash
# run-torture.sh [kernel [seed..]] - runs the torture of the program in a stock kernel (default: 7), where devices are also block devices,
# whose clients are checked like those of NBD and of virtual machines. FREESTONE and TORTURE name the programs; by default they are built.
set -eu
cd "$(dirname "$0")/.."
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
built=${CARGO_TARGET_DIR:-target}/debug
[ -n "${FREESTONE:-}" ] || cargo build --quiet --package freestone-cli
[ -n "${TORTURE:-}" ] || cargo build --quiet --package freestone-torture
strip -o "$dir/freestone" "${FREESTONE:-$built/freestone}"
strip -o "$dir/freestone-torture" "${TORTURE:-$built/freestone-torture}"
kernel=${1:-7}; [ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- 1
lab/kernel-lab.sh -k "$kernel" -f gen -m ublk_drv -M 3G -t $((120 + 600 * $#)) -b "$dir/freestone $dir/freestone-torture" lab/torture.sh "$@"
