#!/bin/bash
# Runs the database tests of pgqueuer twice: as they are, and moved over to the fixture freestone_postgres.
#
#   lab/pgqueuer/run.sh [ARGUMENT OF pytest...]
#
# As they are, the tests share a PostgreSQL, in which each test gets a database by CREATE DATABASE ... TEMPLATE. Moved
# over, each test has a server of its own, on a fork. `fixtures.py`, appended to the suite's conftest.py, is the whole
# change. The run fails if a moved test fails that passes as it is. Both servers run with fsync=off.
#
# 18 tests are left out: they read host and port from the URL, and a server of the fixture has a Unix socket instead.
#
# FREESTONE names the program, PYTHON a Python with pgqueuer's requirements.txt. Needs root and PostgreSQL.
set -euo pipefail
version=1.6.0
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
FREESTONE=$(realpath "${FREESTONE:-$(command -v freestone)}")
python=${PYTHON:-python3}
programs=$(dirname "$(ls -d /usr/lib/postgresql/*/bin/postgres | sort -V | tail -n 1)")
work=$(mktemp -d "${TMPDIR:-/tmp}/pgqueuer-XXXXXX")
# A memory file system, as the container of the suite uses.
data=$(mktemp -d /dev/shm/pgqueuer-XXXXXX)

finish() {
    as_owner "$programs/pg_ctl" -D "$data/data" -m immediate stop >/dev/null 2>&1 || true
    rm -rf "$work" "$data"
}
as_owner() { (cd "$data" && setpriv --reuid=postgres --regid=postgres --clear-groups "$@"); }
trap finish EXIT
trap 'exit 1' INT TERM

"$python" -m pip download --quiet --no-deps --no-binary pgqueuer --dest "$work" "pgqueuer==$version"
mkdir "$work/before"
tar -xzf "$work/pgqueuer-$version.tar.gz" -C "$work/before" --strip-components=1
cp -a "$work/before" "$work/after"
cat "$here/fixtures.py" >> "$work/after/test/conftest.py"

chown postgres "$data"
as_owner "$programs/initdb" -D "$data/data" -U test -A trust --locale=C -E UTF8 --no-sync >/dev/null
# The settings of the suite's container.
settings="-c fsync=off -c full_page_writes=off -c jit=off -c synchronous_commit=off -c checkpoint_timeout=30min"
settings+=" -c max_wal_size=512MB -c checkpoint_completion_target=0.9 -c shared_buffers=128MB -c autovacuum_naptime=5s"
as_owner "$programs/pg_ctl" -D "$data/data" -l "$data/log" -w \
    -o "-p 54329 -c listen_addresses=127.0.0.1 -k $data $settings" start >/dev/null

by_tcp=(--ignore-glob="test/test_cli_*.py" --ignore=test/integration/test_flask_sync.py)
suite() { # DIRECTORY RESULT ARGUMENT...
    local directory=$1 result=$2
    shift 2
    (cd "$work/$directory" && "$python" -m pytest -q -p with_database "${by_tcp[@]}" -n 2 --junit-xml="$work/$result.xml" "$@") \
        >"$work/$result.log" 2>&1 || true
    echo "$result: $(tail -n 1 "$work/$result.log"), load $(cut -d' ' -f1 /proc/loadavg)"
}

export PYTHONPATH=$here:$root/python/src FREESTONE_PROGRAM=$FREESTONE FREESTONE_REQUIRE=postgres
export EXTERNAL_POSTGRES_DSN=postgresql://test@127.0.0.1:54329/postgres
suite before before "$@"
suite after after -p pytest_freestone "$@"
# Some tests of the suite wait for a fixed time, and fail on a busy machine.
suite after again -p pytest_freestone --last-failed --last-failed-no-failures=none

"$python" - "$work" <<'PYTHON'
import sys
import xml.etree.ElementTree as tree


def passed(name):
    cases = tree.parse(f"{sys.argv[1]}/{name}.xml").iter("testcase")
    return {(case.get("classname"), case.get("name")) for case in cases if len(case) == 0}


before, after = passed("before"), passed("after") | passed("again")
for case in sorted(before - after):
    print("passes as it is, fails moved over:", "::".join(case))
print(f"{len(before & after)} tests pass in both")
sys.exit(bool(before - after) or not before)
PYTHON
