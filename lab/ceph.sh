#!/bin/bash
# ceph.sh start|stop|env DIR, ceph.sh kill|again osd|rgw DIR - runs a Ceph of one node in DIR, an absolute, short path on a file system with
# direct I/O: one mon, one mgr, one OSD on a sparse file, one S3 gateway, all on loopback. Needs no systemd, module or loop device.
# `start` creates the cluster, or restarts the one in DIR, and prints the environment for clients, as `env` does. The cluster has a bucket
# BUCKET and an RBD pool `rbd`. `kill` ends a daemon with SIGKILL, `again` restarts it. As root, installs missing Debian packages.
set -eu
usage() { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
verb=${1:-} which=
case $verb in
  start|stop|env) [ $# -eq 2 ] || usage; D=$2;;
  kill|again) [ $# -eq 3 ] || usage; which=$2 D=$3; case $which in osd|rgw) ;; *) usage;; esac;;
  *) usage;;
esac
# Sockets are in DIR/run, and the path of a socket has at most 107 bytes.
case $D in /*) [ ${#D} -le 70 ] || { echo "ceph: $D is too long" >&2; exit 2; };; *) usage;; esac
export CEPH_CONF=$D/ceph.conf
key=AKFREESTONE secret=freestone-lab-secret bucket=disks
wrong() { echo "ceph: $1" >&2; tail -n 15 "$D"/log/*.out >&2 2>/dev/null || true; exit 1; }
soon() { # seconds command...
  tenths=$(($1 * 5)); shift
  while ! "$@" >/dev/null 2>&1; do [ $tenths -gt 0 ] || return 1; tenths=$((tenths - 1)); sleep 0.2; done; }
lives() { # daemon
  pid=$(cat "$D/run/$1.pid" 2>/dev/null) && [ -d "/proc/$pid" ] && [ "$(awk '{print $3}' "/proc/$pid/stat" 2>/dev/null)" != Z ]; }
gone() { ! lives "$1"; }
go() { # daemon command...
  name=$1; shift
  ! lives "$name" || return 0
  setsid "$@" -c "$CEPH_CONF" >>"$D/log/$name.out" 2>&1 3>&- </dev/null & echo $! >"$D/run/$name.pid"; }
go_mon() { go mon ceph-mon -f -i a; }
go_mgr() { go mgr ceph-mgr -f -i x; }
go_osd() { go osd ceph-osd -f -i 0; }
go_rgw() { go rgw radosgw -f -n client.rgw.a; }
osd_is_up() { timeout 10 ceph osd stat | grep -q '1 up'; }
is_healthy() { [ "$(timeout 10 ceph health)" = HEALTH_OK ]; }
endpoint() { sed -n 's/^ *rgw frontends = .*endpoint=\([^ ]*\).*/http:\/\/\1/p' "$CEPH_CONF"; }
rgw_answers() { [ "$(curl -s -o "$D/said" -w '%{http_code}' "$(endpoint)/")" = 200 ]; }
signed() { # method path
  curl -s --aws-sigv4 aws:amz:us-east-1:s3 -u "$key:$secret" -H 'x-amz-content-sha256: UNSIGNED-PAYLOAD' -o "$D/said" -w '%{http_code}' \
    -X "$1" "$(endpoint)/$2"; }
print_env() {
  for word in "CEPH_CONF=$CEPH_CONF" "AWS_ENDPOINT_URL=$(endpoint)" "AWS_ACCESS_KEY_ID=$key" "AWS_SECRET_ACCESS_KEY=$secret" \
    "BUCKET=$bucket"; do echo "export $word"; done; }
port() { # Prints an unused port.
  while :; do
    port=$((20000 + RANDOM % 10000))
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "$port"; return; }; done; }

install_missing() {
  for pair in ceph-mon=ceph-mon ceph-mgr=ceph-mgr ceph-osd=ceph-osd radosgw=radosgw ceph=ceph-common curl=curl; do
    command -v "${pair%=*}" >/dev/null || packages="${packages:-} ${pair#*=}"; done
  # RBD driver of qemu's programs.
  ls /usr/lib/*/qemu/block-rbd.so >/dev/null 2>&1 || packages="${packages:-} qemu-block-extra"
  [ -n "${packages:-}" ] || return 0
  [ "$(id -u)" = 0 ] || wrong "install$packages"
  # shellcheck disable=SC2086
  { apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -y -qq install --no-install-recommends $packages; } >&2; }

make() {
  mkdir -p "$D"/{mon,mgr,osd,rgw,run,log}
  fsid=$(cat /proc/sys/kernel/random/uuid)
  mon="[v2:127.0.0.1:$(port),v1:127.0.0.1:$(port)]"
  cat >"$CEPH_CONF" <<END
[global]
fsid = $fsid
mon host = $mon
public network = 127.0.0.0/8
keyring = $D/keyring.\$name
admin socket = $D/run/\$name.asok
log file = $D/log/\$name.log
mon data = $D/mon
mgr data = $D/mgr
osd data = $D/osd
rgw data = $D/rgw
osd pool default size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon warn on pool no redundancy = false
auth allow insecure global id reclaim = false
# The file system is shared with other users.
mon data avail warn = 1
mon data avail crit = 0
mgr initial modules =
# No other OSD reports the failure of a single one.
osd beacon report interval = 3
mon osd report timeout = 12
osd memory target = 939524096
bluestore block create = true
bluestore block size = 6442450944
[client.admin]
log file =
admin socket =
[client.rgw.a]
# Without nodelay a small response takes 40 ms.
rgw frontends = beast endpoint=127.0.0.1:$(port) tcp_nodelay=1
rgw thread pool size = 64
ms mon client mode = crc secure
END
  ceph-authtool "$D/keyring.client.admin" --create-keyring --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' \
    --cap mgr 'allow *' --cap mds 'allow *'
  ceph-authtool "$D/boot" --create-keyring --gen-key -n mon. --cap mon 'allow *'
  ceph-authtool "$D/boot" --import-keyring "$D/keyring.client.admin"
  monmaptool --create --clobber --fsid "$fsid" --addv a "$mon" "$D/monmap"
  ceph-mon --mkfs -i a -c "$CEPH_CONF" --monmap "$D/monmap" --keyring "$D/boot"; rm "$D/boot"
  go_mon; timeout 60 ceph --connect-timeout 30 mon stat || wrong "no mon"
  ceph auth get-or-create mgr.x mon 'allow profile mgr' osd 'allow *' mds 'allow *' >"$D/keyring.mgr.x"
  go_mgr
  id=$(cat /proc/sys/kernel/random/uuid) osd_key=$(ceph-authtool --gen-print-key)
  ceph-authtool "$D/keyring.osd.0" --create-keyring -n osd.0 --add-key "$osd_key"
  echo "{\"cephx_secret\":\"$osd_key\"}" | ceph osd new "$id" -i -
  # Its messages about missing files are harmless: it is about to create them.
  ceph-osd --mkfs -i 0 -c "$CEPH_CONF" --osd-uuid "$id"
  go_osd; soon 60 osd_is_up || wrong "no OSD"
  ceph osd pool create rbd 8; rbd pool init rbd
  soon 60 is_healthy || wrong "$(timeout 10 ceph health detail)"
  ceph auth get-or-create client.rgw.a mon 'allow rw' osd 'allow rwx' mgr 'allow rw' >"$D/keyring.client.rgw.a"
  go_rgw; soon 90 rgw_answers || wrong "no gateway"
  radosgw-admin user create --uid=lab --display-name=lab --access-key=$key --secret-key=$secret
  [ "$(signed PUT $bucket)" = 200 ] || wrong "no bucket: $(cat "$D/said")"
  touch "$D/made"; }

stop() {
  for name in rgw osd mgr mon; do
    if lives $name; then
      kill "$pid"
      soon 20 gone $name || { kill -9 "$pid"; soon 5 gone $name || wrong "$name does not end"; }
    fi
    rm -f "$D/run/$name.pid"; done; }

case $verb in
  env) print_env;;
  stop) [ ! -e "$D/run" ] || stop;;
  start)
    install_missing
    if [ -e "$D/made" ]; then
      go_mon; go_mgr; go_osd; go_rgw
      soon 60 osd_is_up || wrong "no OSD"
    else
      [ ! -e "$CEPH_CONF" ] || wrong "$D has an incomplete cluster: stop and remove it"
      # A failed start stops its daemons itself.
      exec 3>&2
      trap '[ -e "$D/made" ] || { cat "$D/make.log" >&3; stop; }' EXIT
      mkdir -p "$D"; make >"$D/make.log" 2>&1
    fi
    soon 60 rgw_answers || wrong "no gateway"
    print_env;;
  kill)
    lives "$which" || wrong "$which does not run"
    kill -9 "$pid"; soon 10 gone "$which" || wrong "$which survived SIGKILL"
    # The mon would detect the failure only after its timeout; until then `again` would see the OSD as up.
    [ "$which" != osd ] || timeout 20 ceph osd down 0 >/dev/null 2>&1;;
  again)
    "go_$which"
    if [ "$which" = osd ]; then soon 120 osd_is_up || wrong "no OSD"; else soon 60 rgw_answers || wrong "no gateway"; fi;;
esac
