#!/bin/bash
# postgresql.sh IMAGE MIB - makes a data set: a disk of MIB MiB with ext4 and the directory of a PostgreSQL server, in which `pgbench -i` has
# filled its tables. `benches/src/data` runs this. Needs Debian's packages postgresql and e2fsprogs. The server listens at no network address.
set -eu
image=$(realpath -m "$1") mib=$2
wrong() { echo "$1" >&2; exit 1; }
bin=$(echo /usr/lib/postgresql/*/bin | tr ' ' '\n' | tail -n 1)
[ -x "$bin/initdb" ] && [ -x "$bin/pgbench" ] || wrong "there is no PostgreSQL in /usr/lib/postgresql (package postgresql)"
command -v mke2fs >/dev/null || wrong "there is no mke2fs (package e2fsprogs)"

dir=$(mktemp -d) started=
end() { [ -z "$started" ] || as_user "$bin/pg_ctl" -s -D "$dir/tree/pg" -m immediate stop || true; rm -rf "$dir" "$image.new"; }
trap end EXIT
trap 'exit 1' HUP INT TERM
# PostgreSQL refuses to run as root.
as_user() { "${user[@]}" env HOME="$dir" PGHOST="$dir/run" LC_ALL=C "$@"; }
user=()
mkdir "$dir/tree" "$dir/tree/pg" "$dir/run"
if [ "$(id -u)" = 0 ]; then
  user=(setpriv --reuid=nobody --regid=nogroup --clear-groups)
  chmod 711 "$dir" "$dir/tree"; chown nobody "$dir/tree/pg" "$dir/run"
fi
as_user "$bin/initdb" -D "$dir/tree/pg" -A trust -E UTF8 --locale=C --no-sync >"$dir/log" 2>&1 || wrong "initdb: $(tail -n 3 "$dir/log")"
# A small log: most of the disk is for tables. A unit of pgbench is 15 MiB with its index; file system and log take 100 MiB.
started=1
as_user "$bin/pg_ctl" -s -w -D "$dir/tree/pg" -l "$dir/run/log" start \
  -o "-k $dir/run -c listen_addresses='' -c fsync=off -c max_wal_size=32MB -c min_wal_size=32MB" || wrong "$(tail -n 3 "$dir/run/log")"
scale=$(((mib - 100) / 16)); [ $scale -ge 1 ] || scale=1
as_user "$bin/pgbench" -i -q -s $scale postgres >"$dir/log" 2>&1 || wrong "pgbench: $(tail -n 3 "$dir/log")"
as_user "$bin/pg_ctl" -s -w -D "$dir/tree/pg" -m fast stop
started=
truncate -s "${mib}M" "$image.new"
mke2fs -q -t ext4 -U 5f3e5a52-7c0e-4a53-9d0c-0b5f1a5e0003 -E hash_seed=5f3e5a52-7c0e-4a53-9d0c-0b5f1a5e0004 -d "$dir/tree" "$image.new"
mv "$image.new" "$image"
