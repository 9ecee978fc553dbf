#!/bin/sh
# torture.sh SEED.. - runs in the kernel lab (see run-torture.sh): the torture of the program with these seeds. Ends at the first failure.
set -eu
export LC_ALL=C XDG_RUNTIME_DIR=/run TMPDIR=/tmp
modprobe ublk_drv
for seed in "$@"; do
  freestone-torture program --seed "$seed" --minutes 0.4 --bin "$(command -v freestone)" >out 2>&1 || { echo "FAIL"; cat out; exit 1; }
  # The torture must have read through each kind of client.
  for kind in nbd vhost-user ublk; do
    grep -q "^ *[0-9]* $kind read$" out || { echo "FAIL: no read through $kind was checked"; cat out; exit 1; }; done
  echo "ok   seed $seed: $(sed -n 's/^clients: //p' out) clients, $(sed -n 's/^requests checked: //p' out) requests"
done
