#!/bin/bash
# ci-jobs.sh github|gitlab - runs in a mount namespace of its own (see run-recipes.sh): sets up a machine for CI jobs as docs/how-to/ci.md says, and
# runs the jobs of packaging/recipes/ci as the user nobody. DIR is a directory for the runner, FREESTONE the program.
set -eu
recipes=$PWD/packaging/recipes/ci home=$DIR/home
wrong() { echo "run-recipes: $*" >&2; exit 1; }
ok() { echo "ok   $*"; }

# ---- The machine
for place in /run /srv /etc/sudoers.d /usr/local/bin /var/lib; do mount -t tmpfs -o mode=755 tmpfs $place; done
install -m 755 "$FREESTONE" /usr/local/bin/freestone
install -m 755 "$recipes/freestone-job" "$recipes"/github-*.sh /usr/local/bin
sed 's/^gitlab-runner/nobody/; /^github-runner/d' "$recipes/sudoers" >/etc/sudoers.d/freestone-job
visudo -q -c -f "$recipes/sudoers" || wrong "sudo cannot read the rules"
mkdir -p /run/freestone-server /var/lib/freestone-server "$home" "$DIR/files"
echo 'tools and sources' >"$DIR/files/README"
truncate -s 64M /var/lib/freestone-server/golden.img
mke2fs -q -t ext4 -E root_owner=65534:65534 -d "$DIR/files" /var/lib/freestone-server/golden.img
export FREESTONE_CONTROL=/run/freestone-server/control.sock
freestone serve --config "$recipes/freestone-server.toml" >"$DIR/said" 2>&1 & server=$!
leftover=
trap 'kill -9 $server $leftover 2>/dev/null || true' EXIT
freestone wait --timeout 30s || { cat "$DIR/said" >&2; wrong "the server does not get ready"; }

# Runs a command as nobody, in the directory of the job's repository. A runner gives a job a small environment.
as_runner() { (cd "$home/project" && setpriv --reuid nobody --regid nogroup --clear-groups --inh-caps=-all env -i HOME="$home" TERM=dumb \
  PATH="$PATH" LANG=C.UTF-8 "$@" </dev/null); }
# Makes the repository of a job with one file.
repository() { # FILE CONTENT-OF-STDIN
  rm -rf "$home/project"; mkdir -p "$home/project/$(dirname "$1")"
  cat >"$home/project/$1"
  chown -R nobody:nogroup "$home"
  as_runner git init --quiet .
  as_runner git -c user.name=t -c user.email=t@example.org add .
  as_runner git -c user.name=t -c user.email=t@example.org commit --quiet --message job
}
# Checks that no job has left a disk.
nothing_is_left() {
  [ "$(freestone mount --json | grep -c '"dir"')" = 0 ] || wrong "$1: a mount is left: $(freestone mount)"
  freestone list | grep -q '^job-' && wrong "$1: a disk is left: $(freestone list)"
  [ -z "$(ls /srv/jobs)" ] || wrong "$1: a directory is left: $(ls /srv/jobs)"
}
# Checks the jobs of a runner: one that passes, one that fails, and one after a job whose runner was killed.
jobs() { # RECIPE FILE DISK COMMAND...
  recipe=$1 file=$2 disk=$3; shift 3
  repository "$file" <"$recipe"
  as_runner "$@" >"$DIR/log" 2>&1 || { cat "$DIR/log" >&2; wrong "the job fails"; }
  grep -q 'tools and sources' "$DIR/log" || { cat "$DIR/log" >&2; wrong "the job does not see its disk"; }
  nothing_is_left "a job that passes"
  sed 's/echo .made by the job.*/exit 3/' "$recipe" | repository "$file"
  as_runner "$@" >"$DIR/log" 2>&1 && { cat "$DIR/log" >&2; wrong "the job passes that must fail"; }
  nothing_is_left "a job that fails"
  # The runner was killed: its disk is mounted, and a program of the job still writes to it.
  as_runner sudo freestone-job start "$disk" >"$DIR/log"
  as_runner sh -c 'cd "/srv/jobs/$1" && echo old >result && exec sleep 600' sh "$disk" & leftover=$!
  for _ in $(seq 100); do [ ! -e "/srv/jobs/$disk/result" ] || break; sleep 0.1; done
  sed 's,cat "$JOB_DISK/README",test ! -e "$JOB_DISK/result",' "$recipe" | repository "$file"
  as_runner "$@" >"$DIR/log" 2>&1 || { cat "$DIR/log" >&2; wrong "the job after a killed one finds the files of that"; }
  ! wait $leftover || wrong "the program of the killed job ended by itself"
  leftover=
  nothing_is_left "a job after a killed one"
}

case $1 in
  github)
    jobs "$recipes/github-workflow.yml" .github/workflows/test.yml runner-1 "$DIR/go/bin/act" push --platform self-hosted=-self-hosted --env RUNNER_NAME=runner-1
    ok "GitHub: a job that passes, one that fails and one after a killed one have a fresh disk; nothing is left"
    : >"$home/env"; chown nobody "$home/env"
    as_runner env RUNNER_NAME=runner-2 GITHUB_ENV="$home/env" bash -e /usr/local/bin/github-job-started.sh >"$DIR/log"
    [ "$(cat "$home/env")" = JOB_DISK=/srv/jobs/runner-2 ] || wrong "the hook sets $(cat "$home/env")"
    as_runner touch /srv/jobs/runner-2/made
    as_runner env RUNNER_NAME=runner-2 bash -e /usr/local/bin/github-job-completed.sh
    nothing_is_left "the hooks"
    ok "GitHub: the hooks of a runner take and return a disk"
    ;;
  gitlab)
    jobs "$recipes/gitlab-ci.yml" .gitlab-ci.yml 7-0 "$DIR/node_modules/.bin/gitlab-ci-local" --variable CI_RUNNER_ID=7 --variable CI_CONCURRENT_ID=0 test
    ok "GitLab: a job that passes, one that fails and one after a killed one have a fresh disk; nothing is left"
    ;;
esac
freestone shutdown >/dev/null
wait $server || wrong "the server ended with $?"
