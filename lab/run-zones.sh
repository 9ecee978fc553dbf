#!/bin/bash
# run-zones.sh [seed] - compares the results of the same random operations on the kernel's null_blk in a stock kernel and on Freestone's
# zones on this machine. crates/freestone/examples/zone_lab lists the intended differences. The seed, which is printed, determines the
# operations. ZONE_LAB names the program for Freestone's part; by default it is built. KEEP=DIR keeps the script and all results.
set -eu
cd "$(dirname "$0")/.."
seed=${1:-1}
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${ZONE_LAB:-}" ]; then
  cargo build --quiet --package freestone --example zone_lab
  ZONE_LAB=${CARGO_TARGET_DIR:-target}/debug/examples/zone_lab
fi
"${CC:-cc}" -static -O2 -Wall -Wextra -Werror -o "$dir/zone_guest" lab/zone_guest.c
echo "seed $seed"
"$ZONE_LAB" make "$seed" >"$dir/script"
"$ZONE_LAB" run "$dir/script" >"$dir/ours"
truncate -s 64M "$dir/disk"
lab/kernel-lab.sh -k 7 -m 'configfs null_blk nvmet nvme_loop virtio_blk' -b "dd stat $dir/zone_guest" -i "$dir/script:/script" \
  -D "$dir/disk" -t 900 lab/zones.sh
length=$(head -c 16 "$dir/disk" | tr -d ' \0')
tail -c +17 "$dir/disk" | head -c "${length:-0}" >"$dir/kernel"
if [ -n "${KEEP:-}" ]; then mkdir -p "$KEEP"; cp "$dir/script" "$dir/ours" "$dir/kernel" "$KEEP"; fi
"$ZONE_LAB" compare "$dir/script" "$dir/kernel" "$dir/ours"
