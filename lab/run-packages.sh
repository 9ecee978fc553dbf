#!/bin/bash
# run-packages.sh [PART...] - builds the Debian packages and wheels with cargo xtask package and tests them:
#   lintian    reports no error and no warning for the packages of the other parts
#   root       in a clean root (minbase): install, run a server as its own user, access it with a client, reinstall under the running
#              server, remove and purge; no files are left
#   upgrade    from the package of an earlier commit to this one and back, with a state, kept content, a COW store, saved files and images
#   archive    the archive of the static program in a root without any library: several kinds, codecs, TLS, shutdown
#   arm64      run the program for arm64 in an emulator (qemu-user): devices of several kinds, codecs, TLS, verbs, shutdown
#   container  the image of packaging/Containerfile on a base of the clean root's packages: an unprivileged server without capabilities,
#              TLS, a state that survives a restart, shutdown; no containers or volumes are left. The manifest for Kubernetes: checked by the
#              types of the API, run by podman with its rights, a disk that survives a restart
#   wheel      with each Python of this machine from 3.9 on (Debian's and those of pyenv, or PYTHONS): install the wheel in a clean
#              environment, use it without a compiler in PATH, run the package's tests with it
#   wheel-arm64  use the program of the wheel for arm64 in an emulator
#   types      pyright over the Python package and its tests
# Runs all parts by default. DEBS names a directory with packages to test in place of a build. Needs root.
set -eu
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "run-packages: only root can make a clean root: run this as root" >&2; exit 1; }
debs=${DEBS:-${CARGO_TARGET_DIR:-target}/package}
[ $# -gt 0 ] || set -- lintian root upgrade archive arm64 container wheel wheel-arm64 types
if [ -z "${DEBS:-}" ]; then
  rm -rf "$debs"
  case " $* " in *\ root\ * | *\ container\ *) cargo xtask package ;;
    # The optimised build takes most of the time that a piece has.
    *\ upgrade\ *) cargo xtask package --profile test ;; esac
  case " $* " in *\ archive\ *) cargo xtask package archive --profile test ;; esac
  case " $* " in *\ arm64\ *) cargo xtask package --arch arm64 ;; esac
  case " $* " in *\ wheel\ *) cargo xtask package wheel ;; esac
  case " $* " in *\ wheel-arm64\ *) cargo xtask package wheel --arch arm64 ;; esac
fi
dir=$(mktemp -d); server=
end() {
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  [ ! -e "$dir/store" ] || pod rm --force --all --volumes >/dev/null 2>&1 || true
  rm -rf --one-file-system "$dir"; }
trap end EXIT
trap 'exit 1' HUP INT TERM
wrong() { echo "run-packages: $*" >&2; exit 1; }
ok() { echo "ok   $*"; }
. lab/container-image.sh
. lab/package-upgrade.sh
one() { set -- "$debs"/$1; [ $# = 1 ] && [ -e "$1" ] || wrong "not exactly one package: $*"; echo "$1"; }

# Executes a command in a root with /proc and a minimal environment, in place of this process.
enter() { root=$1; shift
  exec unshare --mount sh -c 'mount -t proc proc "$1/proc" && root=$1 && shift && exec chroot "$root" "$@"' sh "$root" \
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive LC_ALL=C HOME=/root "$@" </dev/null; }
inside() { (enter "$@"); }

# Checks that the server at a socket accepts a client of this machine, which reads back what it wrote.
serves() {
  for _ in $(seq 150); do [ ! -S "$1" ] || break; sleep 0.2; done
  [ -S "$1" ] || { cat "$dir/said" >&2; wrong "there is no socket at $1"; }
  timeout 60 qemu-io -f raw -c 'write -P 7 0 1M' -c 'flush' "nbd+unix:///?socket=$1" >/dev/null || wrong "no write"
  timeout 60 qemu-io -f raw -c 'read -P 7 0 1M' "nbd+unix:///?socket=$1" | grep -q '^read 1048576/1048576' || wrong "no read"
}

# Lists all files of a root with their attributes and checksums, except apt's and dpkg's own records.
listed() { (cd "$1" && find . -xdev \( -path ./proc -o -path ./run -o -path ./tmp -o -path ./var/log -o -path ./var/cache/apt -o -path ./var/lib/apt \
    -o -path ./var/cache/debconf -o -path ./var/cache/ldconfig \) -prune -o ! -type d -printf '%p %y %m %U %G %l ' \
    \( -type f -exec sh -c 'sha256sum <"$1"' sh {} \; -o -printf '\n' \) -o -type d -printf '%p %y %m %U %G\n') |
  # Omits backup copies and dpkg's status files, whose order changes.
  grep -v -e '^\./etc/\(passwd\|group\|shadow\|gshadow\|subuid\|subgid\)- ' -e '^\./var/lib/dpkg/\(status\|status-old\|lock\|lock-frontend\|triggers/Lock\) ' | sort; }

lintian_says_nothing() {
  said=$(lintian --allow-root --fail-on error,warning "$debs"/freestone*.deb 2>&1) || true
  [ -z "$said" ] || { echo "$said" >&2; wrong "lintian complains"; }
  ok "lintian $(lintian --print-version) has no error and no warning for $(cd "$debs" && echo freestone*.deb)"
}

installed_and_gone() {
  deb=$(one "freestone_*_amd64.deb") root=$dir/root
  clean_root directory "$root"
  listed "$root" >"$dir/before"
  cp "$deb" "$root/tmp/freestone.deb"
  inside "$root" apt-get install -qq -y --no-install-recommends /tmp/freestone.deb >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "apt-get failed"; }
  inside "$root" dpkg --verify freestone | grep . && wrong "installed files differ from the package"
  version=$(inside "$root" freestone --version)
  [[ $version =~ ^freestone\ [0-9.]+\ \([0-9a-f]{12}(-dirty)?\)$ ]] || wrong "--version says: $version"
  ok "$version is installed, $(stat -c %s "$root/usr/bin/freestone") bytes"

  # Do what systemd does for freestone-server.service.
  for place in run var/lib var/cache; do inside "$root" install -d -o freestone -g freestone -m 750 "/$place/freestone-server"; done
  mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
  ln -s /usr/lib/systemd/system/freestone-server.service "$root/etc/systemd/system/multi-user.target.wants/"
  printf '\n[[device]]\nname = "ram0"\nkind = "ram"\ndisksize = "64M"\n' >>"$root/etc/freestone-server.toml"
  control=/run/freestone-server/control.sock
  enter "$root" setpriv --reuid freestone --regid freestone --clear-groups --no-new-privs env FREESTONE_CONTROL=$control \
    freestone serve --config /etc/freestone-server.toml >"$dir/said" 2>&1 &
  server=$!
  socket=$root/run/freestone-server/nbd.sock
  serves "$socket"
  [ "$(stat -c %u "$socket")" = "$(awk -F: '$1 == "freestone" { print $3 }' "$root/etc/passwd")" ] && [ "$(stat -c %a "$socket")" = 660 ] ||
    wrong "the socket is $(stat -c '%u %a' "$socket")"
  grep -q "^Uid:[[:space:]]*$(stat -c %u "$socket")[[:space:]]" "/proc/$server/status" || wrong "the server runs as another user: $(grep ^Uid "/proc/$server/status")"
  ok "a server of user freestone keeps what a client writes"
  inside "$root" apt-get install -qq -y --reinstall --no-install-recommends /tmp/freestone.deb >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "apt-get failed"; }
  qemu-io -f raw -c 'read -P 7 0 1M' "nbd+unix:///?socket=$socket" | grep -q '^read 1048576/1048576' || wrong "an update ended the server"
  ok "a reinstallation does not affect the running server"
  inside "$root" freestone shutdown --control $control >/dev/null
  wait "$server" || wrong "the server ended with $?"
  server=

  inside "$root" apt-get remove -qq -y freestone >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "apt-get failed"; }
  [ ! -e "$root/usr/bin/freestone" ] && [ -e "$root/etc/freestone-server.toml" ] && [ -d "$root/var/lib/freestone-server" ] ||
    wrong "apt-get remove must remove the program and keep configuration and data"
  inside "$root" apt-get purge -qq -y freestone >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "apt-get failed"; }
  # A directory of systemd, which is not installed here; it was made above.
  rmdir "$root/etc/systemd/system/multi-user.target.wants" 2>/dev/null || true
  listed "$root" >"$dir/after"
  diff "$dir/before" "$dir/after" >&2 || wrong "files differ after the purge"
  ok "removed and purged: of $(wc -l <"$dir/before") files and directories each is as before, and none is new"
}

# Makes a certificate authority and a server certificate for this machine, as in docs/how-to/access.md: $1/{ca,server}-{cert,key}.pem.
certificates() {
  mkdir -p "$1"
  new="openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
  { $new -days 2 -subj /CN=authority -keyout "$1/ca-key.pem" -out "$1/ca-cert.pem" &&
    $new -days 1 -CA "$1/ca-cert.pem" -CAkey "$1/ca-key.pem" -subj /CN=disks -addext subjectAltName=DNS:localhost,IP:127.0.0.1 \
      -addext basicConstraints=critical,CA:FALSE -addext extendedKeyUsage=serverAuth -keyout "$1/server-key.pem" -out "$1/server-cert.pem"
  } 2>"$dir/log" || { cat "$dir/log" >&2; wrong "openssl failed"; }
}

# Writes a file to an export, reads it back and compares.
keeps() { # URI FILE
  timeout 120 nbdcopy "$2" "$1" || wrong "no write to $1"
  rm -f "$dir/back"; timeout 120 nbdcopy "$1" "$dir/back" || wrong "no read of $1"
  cmp -n "$(stat -c %s "$2")" "$2" "$dir/back" || wrong "$1 returns other data than was written"
}

# Waits until a process has ended, for SECONDS at most.
ended() { # PID SECONDS
  for _ in $(seq $(($2 * 10))); do [ -d "/proc/$1" ] || return 0; sleep 0.1; done
  wrong "process $1 still runs after $2 s"; }

# Makes a file of compressible text and incompressible bytes.
some_data() { { seq 200000; head -c 2M /dev/urandom; } >"$dir/data"; truncate -s %4096 "$dir/data"; }

runs_on_arm64() {
  deb=$(one "freestone_*_arm64.deb") root=$dir/arm64
  [ "$(dpkg-deb --field "$deb" Architecture)" = arm64 ] || wrong "the package is for $(dpkg-deb --field "$deb" Architecture)"
  dpkg-deb --field "$deb" Description | grep -q experimental || wrong "the package is not called experimental"
  apt-get install --simulate --no-install-recommends "$(realpath "$deb")" >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "dependencies are not available"; }
  dpkg-deb --extract "$deb" "$root"
  readelf --file-header "$root/usr/bin/freestone" | grep -q 'Machine: *AArch64' || wrong "the program is not for arm64"
  serves_each_kind qemu-aarch64-static "$root/usr/bin/freestone"
  ok "arm64, in an emulator: RAM disks of three codecs, a file, a fork, an image in a store and TLS keep what clients write; ended by SIGTERM"
}

runs_without_libraries() {
  archive=$(one "freestone-*-x86_64-linux-musl.tar.gz") root=$dir/static
  mkdir "$root"; tar --extract --file "$archive" --directory "$root" --strip-components 1
  readelf --program-headers --dynamic "$root/bin/freestone" | grep -q -e INTERP -e NEEDED && wrong "the program of the archive loads libraries"
  # The root has the files of the archive and nothing else.
  title=$(chroot "$root" /bin/freestone --version) || wrong "the program of the archive needs other files"
  serves_each_kind "$root/bin/freestone"
  ok "$title without libraries: RAM disks of three codecs, a file, a fork, an image in a store and TLS keep what clients write; ended by SIGTERM"
}

# Checks devices of each kind, TLS and an image in a store with a program, and its end by SIGTERM.
serves_each_kind() { # PROGRAM, WITH WORDS BEFORE IT
  said=$dir/said
  program=("$@")
  freestone() { timeout 60 "${program[@]}" "$@" --control "$dir/control.sock"; }
  certificates "$dir/tls"; some_data; truncate -s 64M "$dir/image"
  "${program[@]}" serve lz4=ram,disksize=64M zstd=ram,disksize=64M,comp_algorithm=zstd \
    lzo=ram,disksize=64M,comp_algorithm=lzo image="file,path=$dir/image" golden="file,path=$dir/data,readonly=yes" job=fork,base=golden \
    zoned=null,size=1G,zoned=1,memory_backed=1 --nbd "unix:$dir/nbd.sock" --nbd tcp:127.0.0.1:0 --control "$dir/control.sock" \
    --tls on --tls-cert "$dir/tls/server-cert.pem" --tls-key "$dir/tls/server-key.pem" >"$said" 2>&1 &
  server=$!
  freestone wait --timeout 30s || { cat "$said" >&2; wrong "the server does not get ready"; }
  version=$(freestone list --json | grep -c '"name"') # Number of devices that the server in the emulator lists.
  [ "$version" -ge 7 ] || wrong "list shows $version devices"
  # FUA needs a system call that not every emulator supports.
  timeout 60 qemu-io -f raw -c 'write -f -P 7 0 64k' -c 'read -P 7 0 64k' "nbd+unix:///image?socket=$dir/nbd.sock" >"$dir/log" || wrong "a write with FUA fails"
  for name in lz4 zstd lzo image; do keeps "nbd+unix:///$name?socket=$dir/nbd.sock" "$dir/data"; done
  cmp -n "$(stat -c %s "$dir/data")" "$dir/data" "$dir/image" || wrong "the image does not contain the written data"
  timeout 60 nbdcopy "nbd+unix:///job?socket=$dir/nbd.sock" "$dir/back" && cmp "$dir/data" "$dir/back" || wrong "the fork differs from its base"
  port=$(freestone list --json | grep -o '127.0.0.1:[0-9]*' | head -n 1)
  keeps "nbds://localhost:${port#*:}/lz4?tls-certificates=$dir/tls" "$dir/data"
  freestone stat zstd >"$dir/log" || wrong "no statistics"
  freestone push golden "file://$dir/images:golden" >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "no push"; }
  freestone create again="image,url=file://$dir/images:golden,cache=$dir/cache" >"$dir/log" || wrong "no image"
  freestone publish again --nbd "unix:$dir/nbd.sock" >"$dir/log" || wrong "no export"
  timeout 60 nbdcopy "nbd+unix:///again?socket=$dir/nbd.sock" "$dir/back" && cmp "$dir/data" "$dir/back" || wrong "the image differs from the pushed data"
  kill -TERM "$server"; wait "$server" || wrong "the server ended with $?"
  server=
  [ ! -e "$dir/nbd.sock" ] && [ ! -e "$dir/control.sock" ] || wrong "sockets are left"
}

runs_in_a_container() {
  one "freestone_*_amd64.deb" >/dev/null
  mkdir "$dir/etc"; said=$dir/log
  container_image "$debs"
  certificates "$dir/etc"; some_data
  printf 'nbd = "tcp:0.0.0.0:0"\nstate = "/var/lib/freestone/state"\ntls = "require"\ntls_cert = "/etc/tls/server-cert.pem"\n' >"$dir/server.toml"
  printf 'tls_key = "/etc/tls/server-key.pem"\n\n[[device]]\nname = "ram0"\nkind = "ram"\ndisksize = "64M"\n' >>"$dir/server.toml"
  chmod 755 "$dir"; chmod 644 "$dir/server.toml"; chown -R 10809:10809 "$dir/etc"
  # The minimal rights of a server.
  pod run --detach --name disks --network host --read-only --cap-drop all --security-opt no-new-privileges \
    --volume "$dir/server.toml:/etc/freestone-server.toml:ro" --volume "$dir/etc:/etc/tls:ro" \
    localhost/freestone >"$said" 2>&1 || { cat "$said" >&2; wrong "the container does not start"; }
  pod exec disks freestone wait --timeout 30s || { pod logs disks >&2; wrong "the server does not get ready"; }
  pid=$(pod inspect --format '{{.State.Pid}}' disks)
  grep -q '^Uid:[[:space:]]*10809[[:space:]]' "/proc/$pid/status" && grep -q '^CapEff:[[:space:]]*0*$' "/proc/$pid/status" ||
    wrong "the server has rights: $(grep -e ^Uid -e ^CapEff "/proc/$pid/status" | tr '\n\t' '  ')"
  pod healthcheck run disks >"$said" || { cat "$said" >&2; wrong "the container is not healthy"; }
  port=$(pod exec disks freestone list --json | grep -o '0.0.0.0:[0-9]*' | head -n 1)
  keeps "nbds://localhost:${port#*:}/ram0?tls-certificates=$dir/etc" "$dir/data"
  timeout 20 nbdinfo "nbd://localhost:${port#*:}/ram0" >"$said" 2>&1 && wrong "a client without TLS is accepted"
  pod exec disks freestone create more=null,size=1G >"$said" || wrong "no device is created"
  pod stop --time 60 disks >/dev/null || wrong "no stop"
  ended "$pid" 5
  [ "$(pod inspect --format '{{.State.ExitCode}}' disks)" = 0 ] || { pod logs disks >&2; wrong "the server ended with $(pod inspect --format '{{.State.ExitCode}}' disks)"; }
  pod start disks >/dev/null || wrong "no second start"
  pod exec disks freestone wait --timeout 30s || { pod logs disks >&2; wrong "the server does not get ready again"; }
  pod exec disks freestone list | grep -q '^more ' || wrong "the state is lost when the container is started again"
  pid=$(pod inspect --format '{{.State.Pid}}' disks)
  pod stop --time 60 disks >/dev/null && pod rm --volumes disks >/dev/null || wrong "the container is not removed"
  ended "$pid" 5
  [ -z "$(pod ps --all --quiet)$(pod volume ls --quiet)" ] || wrong "containers or volumes are left"
  size=$(pod image inspect --format '{{.Size}}' localhost/freestone)
  [ "$size" -lt 30000000 ] || wrong "the image has $size bytes"
  ok "an image of $((size / 1000000)) MB: user 10809 without capabilities serves by TLS, is healthy, keeps its state, ends"
  runs_in_kubernetes
}

# Runs the manifest for Kubernetes with the image localhost/freestone. podman ignores the service, the policy and the monitor.
runs_in_kubernetes() {
  manifest=packaging/kubernetes/freestone.yaml
  (cd lab/kubernetes && go build -o "$dir/kubernetes" .) >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "the check of manifests is not built"; }
  "$dir/kubernetes" $manifest >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "the manifest does not have the types of the API"; }
  sed 's/readinessProbe/readyProbe/' $manifest >"$dir/wrong.yaml"
  "$dir/kubernetes" "$dir/wrong.yaml" >"$dir/log" 2>&1 && wrong "a misspelt field is not found"
  ok "each of $(grep -c '^kind:' $manifest) objects of the manifest has the type of the API of Kubernetes"
  # Other servers of this machine may have the ports.
  read -r nbd metrics <<<"$(python3 -c 'import socket; s = [socket.socket() for _ in "ab"]; [x.bind(("127.0.0.1", 0)) for x in s]; print(*[x.getsockname()[1] for x in s])')"
  # Without a network of its own, the pod can have no ports.
  sed "s/:10809\"/:$nbd\"/; s/:9100\"/:$metrics\"/; /^          ports:$/d; /containerPort/d" $manifest >"$dir/pod.yaml"
  play() { pod kube play --network host "$@" "$dir/pod.yaml" >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "podman kube play $*"; }; }
  ready() { pod exec "$1" freestone wait --timeout 30s >"$dir/log" 2>&1 || { cat "$dir/log" >&2; pod logs "$1" >&2; wrong "the pod does not get ready"; }; }
  play
  name=$(pod ps --all --format '{{.Names}}' | grep -- -freestone) || wrong "the pod has no container"
  ready "$name"
  pid=$(pod inspect --format '{{.State.Pid}}' "$name")
  grep -q '^Uid:[[:space:]]*10809[[:space:]]' "/proc/$pid/status" && grep -q '^CapEff:[[:space:]]*0*$' "/proc/$pid/status" &&
    grep -q '^NoNewPrivs:[[:space:]]*1' "/proc/$pid/status" || wrong "the server of the pod has rights"
  [ "$(pod inspect --format '{{.HostConfig.ReadonlyRootfs}}' "$name")" = true ] || wrong "the root of the pod can be written"
  keeps "nbd://127.0.0.1:$nbd/scratch" "$dir/data"
  python3 -c 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())' "http://127.0.0.1:$metrics/metrics" |
    grep -q '^freestone_.*scratch' || wrong "the pod has no metrics"
  # This podman kills the server with --down, and Kubernetes lets it end.
  pod pod stop --time 60 "${name%-freestone}" >/dev/null || wrong "the pod does not stop"
  ended "$pid" 60; play --down
  # This podman refuses a claim whose volume exists. The pod finds the volume by its name.
  awk 'BEGIN { RS = ORS = "---\n" } !/kind: PersistentVolumeClaim/' "$dir/pod.yaml" >"$dir/again.yaml"
  mv "$dir/again.yaml" "$dir/pod.yaml"
  play
  name=$(pod ps --all --format '{{.Names}}' | grep -- -freestone) || wrong "the second pod has no container"
  ready "$name"
  timeout 120 nbdcopy "nbd://127.0.0.1:$nbd/scratch" "$dir/back" && cmp -n "$(stat -c %s "$dir/data")" "$dir/data" "$dir/back" ||
    { pod logs "$name" >&2; pod exec "$name" freestone list >&2; wrong "the disk of the pod is lost when the pod is made again"; }
  play --down
  pod volume rm freestone >/dev/null
  ok "the pod of the manifest serves by its rights, has metrics, and keeps its disk when it is made again"
}

# Lists a Python of each version from 3.9 on that can make environments.
pythons() {
  known=
  for python in ${PYTHONS:-/usr/bin/python3.[0-9]* "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3}; do
    version=$("$python" -c 'import sys, ensurepip, ssl; sys.version_info >= (3, 9) or sys.exit(1); print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    case " $known " in *" $version "*) ;; *) known="$known $version"; echo "$python" ;; esac
  done; }

# Makes a virtual environment with packages, named as for pip.
environment() { # PYTHON PACKAGE...
  rm -rf "$dir/venv"; python=$1; shift
  { "$python" -m venv "$dir/venv" && "$dir/venv/bin/pip" install --quiet --disable-pip-version-check "$@"; } >"$dir/log" 2>&1 ||
    { cat "$dir/log" >&2; wrong "no environment of $python with $*"; }
}

wheel_is_used() {
  wheel=$(one "wheels/amd64/freestone-*.whl") said=$dir/said count=0
  for python in $(pythons); do
    environment "$python" --no-index "$wheel"
    # The only programs in PATH are those of the environment.
    (cd "$dir" && env -i PATH="$dir/venv/bin" HOME="$dir" "$dir/venv/bin/python" - ) <python/tests/smoke.py >"$said" 2>&1 ||
      { cat "$said" >&2; wrong "$python cannot use the wheel"; }
    grep -q "$dir/venv/bin/freestone\$" "$said" || wrong "$python started another program: $(cat "$said")"
    "$dir/venv/bin/pip" install --quiet --disable-pip-version-check -r python/tests/requirements.txt >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "no pytest"; }
    line=$(sed 's/, [^,]*$//' "$said")
    # Each test of the plugin is a pytest of its own, so two can run at the same time.
    for tests in "--ignore tests/plugin" "-n 2 tests/plugin"; do
      # shellcheck disable=SC2086 # Several words.
      (cd python && env -u FREESTONE_PROGRAM -u PYTHONPATH "$dir/venv/bin/python" -m pytest -q -p no:cacheprovider -o pythonpath= $tests) >"$dir/log" 2>&1 ||
        { cat "$dir/log" >&2; wrong "the tests fail with $python"; }
      line="$line; $(tail -n 1 "$dir/log")"
    done
    ok "$line"
    count=$((count + 1))
  done
  [ $count -gt 0 ] || wrong "this machine has no Python from 3.9 on with venv"
}

wheel_runs_on_arm64() {
  wheel=$(one "wheels/arm64/freestone-*_aarch64.whl")
  python3 -m zipfile --extract "$wheel" "$dir/arm64-wheel"
  program=$(echo "$dir"/arm64-wheel/freestone-*.data/scripts/freestone)
  readelf --file-header "$program" | grep -q 'Machine: *AArch64' || wrong "the program of the wheel is not for arm64"
  chmod 755 "$program"
  printf '#!/bin/sh\nexec qemu-aarch64-static "%s" "$@"\n' "$program" >"$dir/emulated"
  chmod 755 "$dir/emulated"
  PYTHONPATH=$dir/arm64-wheel FREESTONE_PROGRAM=$dir/emulated timeout 300 python3 - <python/tests/smoke.py >"$dir/said" 2>&1 ||
    { cat "$dir/said" >&2; wrong "the program of the arm64 wheel cannot be used"; }
  ok "$(basename "$wheel"), in an emulator: disks, forks and a power cut"
}

types_are_strict() {
  environment "$(pythons | tail -n 1)" pyright -r python/tests/requirements.txt
  (cd python && "$dir/venv/bin/pyright" --pythonpath "$dir/venv/bin/python") >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "pyright complains"; }
  ok "pyright, strict: $(tail -n 1 "$dir/log")"
}

for part; do
  case $part in
    lintian) lintian_says_nothing ;; root) installed_and_gone ;; upgrade) upgraded_and_back ;; archive) runs_without_libraries ;; arm64) runs_on_arm64 ;; container) runs_in_a_container ;;
    wheel) wheel_is_used ;; wheel-arm64) wheel_runs_on_arm64 ;; types) types_are_strict ;;
    *) wrong "unknown part: $part" ;;
  esac
done
