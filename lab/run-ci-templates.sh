#!/bin/bash
# run-ci-templates.sh [PART...] - runs the actions and the template of packaging/ci as jobs of hosted runners:
#   github  actionlint over the workflow and the inputs of the actions; act runs a job that passes and one that fails
#   gitlab  gitlab-ci-local runs a job that passes and one that fails
# Each job runs in an overlay of this machine, in which it installs a package of the program. The artifact of the job that fails has the
# changes of its disk. Runs all parts by default. Needs root. FREESTONE names the program; by default it is built.
set -eu
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "run-ci-templates: only root can mount: run this as root" >&2; exit 1; }
[ $# -gt 0 ] || set -- github gitlab
if [ -z "${FREESTONE:-}" ]; then
  cargo build --quiet --package freestone-cli
  FREESTONE=${CARGO_TARGET_DIR:-target}/debug/freestone
fi
FREESTONE=$(realpath "$FREESTONE")
dir=$(mktemp -d) ci=$PWD/packaging/ci
chmod 755 "$dir"
trap 'rm -rf --one-file-system "$dir"' EXIT
trap 'exit 1' HUP INT TERM
wrong() { echo "run-ci-templates: $*" >&2; exit 1; }
ok() { echo "ok   $*"; }

# Makes a package of the program and the script, and the image of the jobs.
materials() {
  mkdir -p "$dir/package/DEBIAN" "$dir/package/usr/bin" "$dir/package/usr/lib/freestone" "$dir/files"
  strip -o "$dir/package/usr/bin/freestone" "$FREESTONE"
  install -m 755 "$ci/freestone-ci" "$dir/package/usr/lib/freestone/freestone-ci"
  printf 'Package: freestone\nVersion: 0\nArchitecture: amd64\nMaintainer: freestone\nDescription: test\n' >"$dir/package/DEBIAN/control"
  dpkg-deb --build --root-owner-group -Zgzip "$dir/package" "$dir/freestone.deb" >/dev/null
  echo 'tools and sources' >"$dir/files/README"
  truncate -s 64M "$dir/golden.img"
  # The jobs of GitHub run as nobody.
  mke2fs -q -t ext4 -E root_owner=65534:65534 -d "$dir/files" "$dir/golden.img"
}

# Makes the repository of a project: all files of packaging/ci, and what the jobs need.
project() { # FILE-OF-CI PLACE
  rm -rf "$dir/project"; mkdir -p "$dir/project/packaging" "$dir/project/$(dirname "$2")"
  cp -r "$ci" "$dir/project/packaging/ci"
  cp "$ci/$1" "$dir/project/$2"
  cp "$dir/freestone.deb" "$dir/golden.img" "$dir/project"
  commit
}
commit() { (cd "$dir/project" && git init --quiet . && git add . && git -c user.name=t -c user.email=t@example.org commit --quiet --allow-empty --message job); }

# Executes a command as root of an overlay of this machine, in namespaces of its own. No process and no change of the machine survives.
overlaid() {
  # shellcheck disable=SC2016 # Expanded by the inner shell.
  unshare --mount --pid --fork --kill-child --propagation private bash -euc '
    mount -t tmpfs -o size=4G tmpfs "$1/over"; mkdir "$1/over/upper" "$1/over/work" "$1/over/root"
    mount -t overlay -o "lowerdir=/,upperdir=$1/over/upper,workdir=$1/over/work" overlay "$1/over/root"
    root=$1/over/root
    mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; mount --rbind /sys "$root/sys"
    for place in /run /srv /tmp; do mount -t tmpfs -o mode=1777 tmpfs "$root$place"; done
    # The directory of the test is that of the machine: artifacts leave the overlay.
    mkdir -p "$root$1"; mount --bind "$1" "$root$1"
    shift; exec chroot "$root" "$@"' bash "$dir" "$@"
}
mkdir "$dir/over"

# Runs the jobs of a file with COMMAND, executed in the project as root of an overlay: one that passes, and one that fails.
jobs() { # TITLE FILE COMMAND
  rm -f "$dir"/artifacts/*
  overlaid bash -c "$3" >"$dir/log" 2>&1 </dev/null || { cat "$dir/log" >&2; wrong "$1: the job fails"; }
  grep -q 'tools and sources' "$dir/log" || { cat "$dir/log" >&2; wrong "$1: the job does not see its disk"; }
  # Installing the package is a part of the job.
  grep -q 'Setting up freestone' "$dir/log" || { cat "$dir/log" >&2; wrong "$1: the job installs no package"; }
  [ -z "$(find "$dir/artifacts" -type f)" ] || wrong "$1: a job that passes has an artifact"
  sed -i "s,\(echo .made by the job.*\),\1 \&\& sync \&\& exit 3," "$dir/project/$2"
  commit
  overlaid bash -c "$3" >"$dir/log" 2>&1 </dev/null && { cat "$dir/log" >&2; wrong "$1: the job passes that must fail"; }
  delta=$(find "$dir/artifacts" -name disk.qcow2)
  [ -n "$delta" ] || { cat "$dir/log" >&2; wrong "$1: the job that fails has no artifact"; }
  # The overlay names its image by a path of the job.
  qemu-img rebase -u -f qcow2 -F raw -b "$dir/golden.img" "$delta" && qemu-img convert -O raw "$delta" "$dir/failed.img" || wrong "$1: qemu cannot read the artifact"
  e2fsck -fn "$dir/failed.img" >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "$1: the disk of the artifact is damaged"; }
  [ "$(debugfs -R 'cat result' "$dir/failed.img" 2>/dev/null)" = 'made by the job' ] || wrong "$1: the artifact lacks the file of the job"
  ok "$1: a job that passes has a disk from the installed package; the artifact of one that fails has its changes"
}

runs_the_actions() {
  go_install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
  go_install github.com/nektos/act@v0.2.89
  project github-workflow.yml .github/workflows/test.yml
  (cd "$dir/project" && "$dir/go/bin/actionlint" -shellcheck= -pyflakes=) || wrong "actionlint complains"
  sed -i 's/image: golden.img/picture: golden.img/' "$dir/project/.github/workflows/test.yml"
  (cd "$dir/project" && "$dir/go/bin/actionlint" -shellcheck= -pyflakes=) >"$dir/log" && wrong "actionlint does not check the inputs of the actions"
  shellcheck --shell=sh "$ci/freestone-ci" || wrong "shellcheck complains"
  ok "actionlint has nothing to say about the workflow and the inputs of its actions, nor shellcheck about the script"
  project github-workflow.yml .github/workflows/test.yml
  # GitHub's own actions come from there. In their place: a checkout that does nothing, as act uses the directory, and an upload that copies.
  mkdir -p "$dir/github/checkout" "$dir/github/upload" "$dir/artifacts"
  printf 'name: checkout\nruns:\n  using: composite\n  steps: []\n' >"$dir/github/checkout/action.yml"
  printf 'name: upload\ninputs:\n  name: {required: true}\n  path: {required: true}\nruns:\n  using: composite\n  steps:\n    - shell: bash\n      run: cp "${{ inputs.path }}" %s/artifacts/\n' "$dir" >"$dir/github/upload/action.yml"
  chmod -R a+rwX "$dir/artifacts" "$dir/github"
  jobs GitHub .github/workflows/test.yml "
    echo 'nobody ALL=(root) NOPASSWD: ALL' >/etc/sudoers.d/job; mkdir /tmp/runner; cp -r '$dir/project' /tmp/runner/project; chown -R nobody /tmp/runner
    cd /tmp/runner/project && exec setpriv --reuid nobody --regid nogroup --clear-groups env -i HOME=/tmp/runner PATH=\"\$PATH\" LANG=C.UTF-8 TERM=dumb \\
      '$dir/go/bin/act' push --platform ubuntu-latest=-self-hosted --action-offline-mode --local-repository actions/checkout@v4='$dir/github/checkout' \\
      --local-repository actions/upload-artifact@v4='$dir/github/upload'"
}
# Runs a Go program of a registry's module at a version, installed in the temporary directory.
go_install() { GOBIN=$dir/go/bin GOFLAGS=-modcacherw go install "$1" >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "go cannot install $1"; }; }

runs_the_template() {
  npm install --silent --no-save --no-audit --no-fund --prefix "$dir" gitlab-ci-local@4.60.0 >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "npm fails"; }
  mkdir -p "$dir/artifacts"
  project gitlab-ci.yml .gitlab-ci.yml
  # gitlab-ci-local uploads the artifacts of a failed job only with `always`, GitLab also with `on_failure`.
  grep -q '^    when: on_failure$' "$ci/gitlab-template.yml" || wrong "GitLab: the template does not upload artifacts of failed jobs"
  sed -i 's/^    when: on_failure$/    when: always/' "$dir/project/packaging/ci/gitlab-template.yml"
  commit
  jobs GitLab .gitlab-ci.yml "cp -r '$dir/project' /tmp/project; cd /tmp/project; status=0
    '$dir/node_modules/.bin/gitlab-ci-local' test || status=\$?
    find . -name disk.qcow2 -path '*artifacts*' -exec cp {} '$dir/artifacts/' \;
    exit \$status"
}

materials
for part; do
  case $part in
    github) runs_the_actions ;; gitlab) runs_the_template ;;
    *) wrong "unknown part: $part" ;;
  esac
done
