#!/bin/bash
# 06-db-postgresql.sh - database tester: PostgreSQL on a fork of a disk with fixtures; each test changes tables, and the next one finds the
# fixtures again.
. "$(dirname "$0")/lib.sh"
bin=$(echo /usr/lib/postgresql/*/bin | tr ' ' '\n' | tail -n 1)
[ -x "$bin/initdb" ] || wrong "there is no PostgreSQL in /usr/lib/postgresql (package postgresql)"
chmod 711 "$dir"
as_user() { setpriv --reuid=nobody --regid=nogroup --clear-groups env HOME="$dir" PGHOST="$dir/pg/run" "$@"; }
query() { as_user "$bin/psql" -qAtX -d postgres -c "$1"; }
postgres() { # start|stop
  as_user "$bin/pg_ctl" -s -w -D "$dir/pg/data" -l "$dir/pg/run/log" -m fast -o "-k $dir/pg/run -c listen_addresses=''" "$1" || return
  # pg_ctl returns a moment before the last process has ended.
  [ "$1" != stop ] || soon unused "$dir/pg"; }

serve db=ram,disksize=512M,mem_limit=256M
format db
attach db pg
mkdir pg/data pg/run; chown nobody pg/data pg/run
as_user "$bin/initdb" -D "$dir/pg/data" -A trust --no-sync >initdb.out 2>&1 || wrong "initdb: $(cat initdb.out)"
run postgres start || wrong "PostgreSQL does not start: $(cat pg/run/log)"
query 'CREATE TABLE t (n int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 10000)'
run postgres stop
detach pg
run freestone snapshot db db-ready >/dev/null
run freestone fork db-ready db-test --nbd "unix:$dir/nbd.sock" >/dev/null
attach db-test pg
for test in 1 2 3; do
  run postgres start || wrong "PostgreSQL does not start: $(cat pg/run/log)"
  is "the fixtures of test $test" 10000 "$(query 'SELECT count(*) FROM t')"
  query 'DELETE FROM t WHERE n % 2 = 0; CREATE TABLE other (n int)'
  is "test $test" 5000 "$(query 'SELECT count(*) FROM t')"
  run postgres stop
  rewind db-test pg
done
# A test that is killed with its database.
run postgres start
query 'DROP TABLE t'
kill -9 "$(head -n 1 pg/data/postmaster.pid)"
soon unused "$dir/pg"
rewind db-test pg
run postgres start
is "the fixtures after a test that was killed" 10000 "$(query 'SELECT count(*) FROM t')"
run postgres stop
detach pg
stop_server
