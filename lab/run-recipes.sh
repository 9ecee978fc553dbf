#!/bin/bash
# run-recipes.sh [PART...] - runs the recipes of packaging/recipes as their pages describe them:
#   github      actionlint over the workflow; act runs it on this machine as an unprivileged user, also with a job that fails; the hooks
#   gitlab      gitlab-ci-local runs the job of a shell executor as an unprivileged user, also one that fails, and one after a killed one
#   qemu        a virtual machine of QEMU changes its disk, and the next one finds the image
#   firecracker the machine that the script describes to Firecracker, in QEMU: Firecracker itself needs KVM
#   compose     a container by podman-compose: forks over TCP, a rewind, the state after a restart; nothing is left
#   go, java    tests that start a container by Testcontainers, through the socket of podman
# Runs all parts by default. Needs root. FREESTONE names the program; by default it is built.
set -eu
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "run-recipes: only root can mount: run this as root" >&2; exit 1; }
[ $# -gt 0 ] || set -- github gitlab qemu firecracker compose go java
if [ -z "${FREESTONE:-}" ]; then
  cargo build --quiet --package freestone-cli
  FREESTONE=${CARGO_TARGET_DIR:-target}/debug/freestone
fi
FREESTONE=$(realpath "$FREESTONE")
dir=$(mktemp -d) recipes=$PWD/packaging/recipes server= service=
chmod 755 "$dir"
end() {
  [ -z "$service" ] || kill "$service" 2>/dev/null || true
  [ ! -e "$dir/store" ] || { pod rm --force --all --volumes; pod volume prune --force; pod network rm compose_default; } >/dev/null 2>&1 || true
  [ -z "$server" ] || kill -9 "$server" 2>/dev/null || true
  rm -rf --one-file-system "$dir"; }
trap end EXIT
trap 'exit 1' HUP INT TERM
wrong() { echo "run-recipes: $*" >&2; exit 1; }
ok() { echo "ok   $*"; }
. lab/container-image.sh

# Executes a script of lab/ in a mount namespace of its own, where a machine is set up as docs/how-to/ci.md says.
ci() { unshare --mount --propagation private env DIR="$dir" FREESTONE="$FREESTONE" lab/ci-jobs.sh "$@"; }

# Runs a Go program of a registry's module at a version, installed in the temporary directory.
go_install() { GOBIN=$dir/go/bin GOFLAGS=-modcacherw go install "$1" >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "go cannot install $1"; }; }

runs_jobs_of_github() {
  go_install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
  printf 'self-hosted-runner:\n  labels: [freestone]\n' >"$dir/actionlint.yaml"
  "$dir/go/bin/actionlint" -config-file "$dir/actionlint.yaml" "$recipes/ci/github-workflow.yml" || wrong "actionlint complains"
  ok "actionlint has nothing to say about the workflow"
  go_install github.com/nektos/act@v0.2.89
  ci github
}

runs_jobs_of_gitlab() {
  npm install --loglevel=error --no-save --no-audit --no-fund --prefix "$dir" gitlab-ci-local@4.60.0 >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "npm fails"; }
  ci gitlab
}

# Starts a server with the image of a root file system, whose program prints whether a machine ran on the disk before.
serves_machines() {
  mkdir -p "$dir/tree/bin" "$dir/tree/proc" "$dir/bin"
  cp /bin/busybox "$dir/tree/bin/busybox"
  printf '#!/bin/busybox sh\n[ -e /was-here ] && echo "data of another machine" || echo "the image"\ntouch /was-here\n' >"$dir/tree/bin/start"
  chmod +x "$dir/tree/bin/start"
  rm -f "$dir/root.img"; truncate -s 64M "$dir/root.img"
  mke2fs -q -t ext4 -d "$dir/tree" "$dir/root.img"
  export FREESTONE_CONTROL=$dir/control
  "$FREESTONE" serve "golden=file,path=$dir/root.img,readonly=yes,publish=no,mem_limit=256M" --control "$dir/control" >"$dir/said" 2>&1 & server=$!
  "$FREESTONE" wait --timeout 30s || { cat "$dir/said" >&2; wrong "the server does not get ready"; }
  ln -sf "$FREESTONE" "$dir/bin/freestone"
  # Kernel and initial RAM disk of the kernel lab. Its QEMU takes the place of the installed one, without KVM.
  lab=$(lab/kernel-lab.sh -n -m virtio_blk lab/vhost-user.sh boot) || wrong "no kernel"
  mv "$lab" "$dir/machine"
  printf '#!/bin/sh\nexec "%s/machine/qemu" "$@"\n' "$dir" >"$dir/bin/qemu-system-x86_64"
  chmod +x "$dir/bin/qemu-system-x86_64"
}
no_disk_is_left() {
  [ "$("$FREESTONE" list --json | grep -c '"name": "vm-')" = 0 ] || wrong "a disk is left: $("$FREESTONE" list)"
  "$FREESTONE" shutdown >/dev/null; wait "$server" || wrong "the server ended with $?"; server=
  rm -rf "$dir/machine"; }

runs_machines_of_qemu() {
  serves_machines
  # The machines run at the same time: each has its own disk.
  for name in a b; do
    PATH=$dir/bin:$PATH SECONDS_MAX=200 "$recipes/sandbox/qemu-sandbox" $name -accel tcg,thread=multi -cpu max,la57=off -kernel "$dir/machine/vmlinuz" \
      -initrd "$dir/machine/initrd.img" -append "$(cat "$dir/machine/append")" -serial null -serial "file:$dir/out-$name" >"$dir/log-$name" 2>&1 || touch "$dir/failed-$name" &
    eval "machine_$name=\$!"
  done
  # shellcheck disable=SC2154 # Set by eval.
  wait "$machine_a" "$machine_b"
  for name in a b; do
    [ ! -e "$dir/failed-$name" ] || { cat "$dir/log-$name" >&2; wrong "the machine $name fails"; }
    grep -q '^the image' "$dir/out-$name" || { cat "$dir/out-$name" >&2; wrong "the machine $name does not find the image"; }
  done
  no_disk_is_left
  ok "QEMU: two machines at the same time find the image on their disks; no disk is left"
}

runs_machines_of_firecracker() {
  serves_machines
  # In place of firecracker: checks the configuration by the names of Firecracker's API, and boots what it describes in QEMU.
  cat >"$dir/bin/firecracker" <<'PROGRAM'
#!/usr/bin/python3
import json, os, sys
assert sys.argv[1:3] == ["--no-api", "--config-file"] and len(sys.argv) == 4, sys.argv
with open(sys.argv[3]) as file:
    machine = json.load(file)
boot, (drive,), size = machine.pop("boot-source"), machine.pop("drives"), machine.pop("machine-config")
assert machine == {} and set(boot) == {"kernel_image_path", "initrd_path", "boot_args"} and set(size) == {"vcpu_count", "mem_size_mib"}
# With a socket, Firecracker accepts no other keys of a drive than these.
assert set(drive) <= {"drive_id", "partuuid", "is_root_device", "cache_type", "socket"} and drive["cache_type"] == "Writeback", drive
memory = f"{size['mem_size_mib']}M"
options = [
    "-m", memory, "-object", f"memory-backend-memfd,id=m,size={memory},share=on", "-machine", "q35,memory-backend=m",
    "-smp", str(size["vcpu_count"]), "-kernel", boot["kernel_image_path"], "-initrd", boot["initrd_path"], "-append", boot["boot_args"],
    "-chardev", f"socket,id=c,path={drive['socket']}", "-device", "vhost-user-blk-pci,chardev=c,num-queues=1",
    "-nodefaults", "-display", "none", "-no-reboot", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off",
    "-serial", "null", "-serial", "stdio",
]
os.execvp("qemu-system-x86_64", ["qemu-system-x86_64", *options])
PROGRAM
  chmod +x "$dir/bin/firecracker"
  for name in a b; do
    KERNEL=$dir/machine/vmlinuz INITRD=$dir/machine/initrd.img BOOT_ARGS=$(cat "$dir/machine/append") PATH=$dir/bin:$PATH \
      timeout 200 "$recipes/sandbox/firecracker-sandbox" $name >"$dir/out" 2>&1 </dev/null || { cat "$dir/out" >&2; wrong "the machine $name fails"; }
    grep -q '^the image' "$dir/out" || { cat "$dir/out" >&2; wrong "the machine $name does not find the image"; }
  done
  no_disk_is_left
  ok "Firecracker: what the configuration describes boots from its disk in QEMU; no disk is left. Firecracker was not run"
}

# Makes the image localhost/freestone of the program, and starts podman's service at $dir/podman.sock.
has_image() {
  [ ! -e "$dir/store" ] || return 0
  mkdir -p "$dir/package/DEBIAN" "$dir/package/usr/bin" "$dir/package/usr/share/doc/freestone" "$dir/debs"
  strip -o "$dir/package/usr/bin/freestone" "$FREESTONE"
  cp LICENSE "$dir/package/usr/share/doc/freestone/copyright"
  printf 'Package: freestone\nVersion: 0\nArchitecture: amd64\nMaintainer: freestone\nDescription: test\n' >"$dir/package/DEBIAN/control"
  dpkg-deb --build --root-owner-group -Zgzip "$dir/package" "$dir/debs/freestone_0_amd64.deb" >/dev/null
  container_image "$dir/debs"
  podman --log-level fatal system service --time 0 "unix://$dir/podman.sock" >"$dir/service" 2>&1 & service=$!
  # The helper container of Testcontainers comes from a registry, so its clean-up is left to this script.
  export DOCKER_HOST=unix://$dir/podman.sock TESTCONTAINERS_RYUK_DISABLED=true FREESTONE_IMAGE=localhost/freestone:latest
}
no_container_is_left() { [ -z "$(pod ps --all --quiet)$(pod volume ls --quiet)" ] || wrong "$1: containers or volumes are left: $(pod ps --all)"; }

runs_compose() {
  has_image
  mkdir "$dir/compose"; cp "$recipes"/compose/* "$dir/compose"
  truncate -s 16M "$dir/compose/golden.img"; seq 200000 | dd of="$dir/compose/golden.img" conv=notrunc status=none
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  compose() { (cd "$dir/compose" && FREESTONE_PORT=$port podman-compose "$@" >"$dir/log" 2>&1 </dev/null) || { cat "$dir/log" >&2; wrong "podman-compose $1 fails"; }; }
  compose up --detach
  compose exec -T disks freestone wait --timeout 30s
  compose exec -T disks freestone fork golden test-1 on_data_loss=empty --nbd tcp:0.0.0.0:10809
  disk=nbd://127.0.0.1:$port/test-1
  nbdcopy "$disk" "$dir/back" && cmp "$dir/compose/golden.img" "$dir/back" || wrong "the fork differs from the image"
  qemu-io -f raw -c 'write -q -P 7 0 1M' "$disk" || wrong "the fork cannot be written"
  compose exec -T disks freestone rewind test-1
  nbdcopy "$disk" "$dir/back" && cmp "$dir/compose/golden.img" "$dir/back" || wrong "the fork differs from the image after a rewind"
  compose stop
  compose start
  compose exec -T disks freestone wait --timeout 30s
  nbdcopy "$disk" "$dir/back" && cmp "$dir/compose/golden.img" "$dir/back" || wrong "the fork differs from the image after a restart"
  compose down --volumes
  # podman-compose 1.0 leaves the network.
  pod network rm compose_default >/dev/null
  no_container_is_left compose
  ok "compose: a fork, a rewind, a restart with the state; nothing is left"
}

runs_tests_of_go() {
  has_image
  cp -r "$recipes/testcontainers/go" "$dir/go-tests"
  (cd "$dir/go-tests" && go vet ./... && go test -count=1 -v ./...) >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "the tests of Go fail"; }
  [ "$(grep -c '^--- PASS' "$dir/log")" = 3 ] || { cat "$dir/log" >&2; wrong "not three tests of Go"; }
  no_container_is_left Go
  ok "Go: $(grep -c '^--- PASS' "$dir/log") tests by Testcontainers"
}

runs_tests_of_java() {
  has_image
  cp -r "$recipes/testcontainers/java" "$dir/java-tests"
  (cd "$dir/java-tests" && mvn --batch-mode --quiet test) >"$dir/log" 2>&1 </dev/null || { cat "$dir/log" >&2; wrong "the tests of Java fail"; }
  count=$(sed -n 's/.*<testsuite .* tests="\([0-9]*\)".*/\1/p' "$dir"/java-tests/target/surefire-reports/*.xml)
  [ "$count" = 3 ] || { cat "$dir/log" >&2; wrong "not three tests of Java: $count"; }
  no_container_is_left Java
  ok "Java: $count tests by Testcontainers"
}

for part; do
  case $part in
    github) runs_jobs_of_github ;; gitlab) runs_jobs_of_gitlab ;; qemu) runs_machines_of_qemu ;; firecracker) runs_machines_of_firecracker ;;
    compose) runs_compose ;; go) runs_tests_of_go ;; java) runs_tests_of_java ;;
    *) wrong "unknown part: $part" ;;
  esac
done
