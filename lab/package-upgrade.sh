# package-upgrade.sh - the part `upgrade` of run-packages.sh, which sources this file.

# Commit whose program stands for the previous release. crates/freestone-cli-tests/tests/program/release has its state and its saved file.
previous=51662d08ba5c
data=/var/lib/freestone-server control=/run/freestone-server/control.sock

# Builds the program of the previous release, once, and copies the files that its package had: $1/freestone, $1/packaging.
previous_release() { # DIRECTORY
  [ ! -e "$1/complete" ] || return 0
  git cat-file -e "$previous^{commit}" 2>/dev/null || wrong "the history lacks the commit $previous: fetch the whole history"
  rm -rf "$1"; mkdir -p "$1/source"
  git archive "$previous" | tar --extract --directory "$1/source"
  # Formats do not depend on optimisation, so the quickest build is used.
  (cd "$1/source" && CARGO_TARGET_DIR=target CARGO_INCREMENTAL=0 FREESTONE_COMMIT=$previous \
    cargo build --quiet --locked --package freestone-cli --bin freestone --no-default-features --features rbd) || wrong "the program of $previous is not built"
  strip -o "$1/freestone" "$1/source/target/debug/freestone"
  mv "$1/source/packaging" "$1/packaging"
  rm -rf "$1/source"; touch "$1/complete"
}

# Makes the package of the previous release: the program, units, rules, settings and scripts are its own, manual pages those of this tree.
previous_package() { # DEB DIRECTORY-OF-RELEASE TARGET
  tree=$dir/previous
  dpkg-deb --raw-extract "$1" "$tree"
  install -m 755 "$2/freestone" "$tree/usr/bin/freestone"
  # The previous release had no templates of continuous integration.
  rm "$tree/usr/lib/freestone/freestone-ci"
  find "$tree/DEBIAN" "$tree/etc" "$tree/usr/lib" -type f | while read -r file; do
    old=$(find "$2/packaging" -type f -name "$(basename "$file")")
    [ -z "$old" ] || cp --no-preserve=mode "$old" "$file"
  done
  sed -i "s/^Version: .*/&~$previous/" "$tree/DEBIAN/control"
  (cd "$tree" && find usr -type f -exec md5sum {} + >DEBIAN/md5sums)
  dpkg-deb --root-owner-group --build "$tree" "$3" >/dev/null
}

# Installs a package as an administrator who keeps the settings.
installs() { # FILE
  inside "$root" apt-get install -qq -y --allow-downgrades --no-install-recommends --option Dpkg::Options::=--force-confold "/tmp/$1" \
    >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "apt-get cannot install $1"; }
}

# Starts a server as user freestone, and waits until it serves.
starts() { # CONTROL ARGUMENT...
  socket=$1; shift
  enter "$root" setpriv --reuid freestone --regid freestone --clear-groups --no-new-privs \
    freestone serve --control "$socket" "$@" >"$dir/said" 2>&1 &
  server=$!
  inside "$root" freestone wait --timeout 60s --control "$socket" >"$dir/log" 2>&1 || { cat "$dir/log" "$dir/said" >&2; wrong "no server starts"; }
}
service() { starts $control --config /etc/freestone-server.toml; }
verb() { inside "$root" freestone "$@" --control "$socket" >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "freestone $* fails"; }; }
ends() { verb shutdown; wait "$server" || wrong "the server ended with $?"; server=; }

uri() { echo "nbd+unix:///$1?socket=$root/run/freestone-server/nbd.sock"; }
writes() { keeps "$(uri "$1")" "$dir/$2"; }
holds() { # DEVICE FILE
  timeout 120 nbdcopy "$(uri "$1")" "$dir/back" || wrong "no read of $1"
  cmp -n "$(stat -c %s "$dir/$2")" "$dir/$2" "$dir/back" || wrong "$1 does not hold the data $2"; }
pattern() { # DEVICE COMMAND-OF-QEMU-IO
  timeout 60 qemu-io -f raw -c "$2" "$(uri "$1")" >"$dir/log" && ! grep -q failed "$dir/log" || { cat "$dir/log" >&2; wrong "$1: $2"; }; }

# Restores a saved file and opens an image of the store in a server without state.
restores() { # SAVED TAG FILE
  starts /run/freestone-server/other.sock --nbd unix:/run/freestone-server/nbd.sock "image=image,url=file://$data/store:$2,cache=$data/cache"
  verb restore "$data/$1"
  verb publish kept --nbd unix:/run/freestone-server/nbd.sock
  holds kept "$3"; holds image "$3"
  ends
}
sums() { (cd "$root$data/state" && find . -type f ! -name lock -exec sha256sum {} + | sort); }

upgraded_and_back() {
  deb=$(one "freestone_*_amd64.deb") root=$dir/root release=${CARGO_TARGET_DIR:-target}/previous-release
  previous_release "$release"
  clean_root directory "$root"
  previous_package "$deb" "$release" "$root/tmp/previous.deb"
  cp "$deb" "$root/tmp/new.deb"
  for name in a b c d; do { seq "$((0x$name))" 200000; head -c 1M /dev/urandom; } >"$dir/$name"; truncate -s %4096 "$dir/$name"; done

  installs previous.deb
  for place in run var/lib var/cache; do inside "$root" install -d -o freestone -g freestone -m 750 "/$place/freestone-server"; done
  cp "$dir/c" "$root$data/golden.img"; truncate -s 64M "$root$data/golden.img" "$root$data/disk.img"
  inside "$root" chown freestone: $data/golden.img $data/disk.img
  cat >>"$root/etc/freestone-server.toml" <<END
state = "$data/state"
[[device]]
name = "golden"
kind = "file"
path = "$data/golden.img"
readonly = true
[[device]]
name = "disk"
kind = "file"
path = "$data/disk.img"
[[device]]
name = "kept"
kind = "ram"
disksize = "64M"
keep = true
[[device]]
name = "scratch"
kind = "ram"
disksize = "64M"
END
  before=$(inside "$root" freestone --version)
  service
  writes disk a; writes kept a; writes scratch a
  verb snapshot disk monday "cow=$data/monday.cow" cow_size=32M store=P
  verb publish monday --nbd unix:/run/freestone-server/nbd.sock
  verb fork golden job keep=yes --nbd unix:/run/freestone-server/nbd.sock
  writes disk b; writes job b
  verb save kept "$data/old.saved"
  verb fork golden pushed --nbd unix:/run/freestone-server/nbd.sock
  writes pushed a; verb push pushed "file://$data/store:old"; verb remove pushed --force

  installs new.deb
  after=$(inside "$root" freestone --version)
  [ "$before" != "$after" ] || wrong "$before is not replaced"
  [ -e "$root/etc/freestone-server.toml.dpkg-dist" ] || wrong "the new settings are not offered"
  case $(readlink "/proc/$server/exe") in *deleted*) ;; *) wrong "the server runs another program" ;; esac
  holds kept a; holds scratch a
  ends
  cp -a "$root$data/state" "$root$data/state.old"

  service
  holds disk b; holds monday a; holds kept a; holds job b
  verb list; grep -q '^scratch .*lost, withheld' "$dir/log" || wrong "a disk that is not kept is served: $(cat "$dir/log")"
  writes disk d; writes kept d; writes job d; holds monday a
  pattern disk 'write -P 9 48M 1M'; pattern monday 'read -P 0 48M 1M'
  verb save kept "$data/new.saved"
  verb fork golden pushed --nbd unix:/run/freestone-server/nbd.sock
  writes pushed d; verb push pushed "file://$data/store:new"; verb remove pushed --force
  ends
  restores old.saved old a
  ok "$after continues the state, the kept content, the COW store, the saved file and the images of $before"

  installs previous.deb
  [ "$(inside "$root" freestone --version)" = "$before" ] || wrong "$before is not installed again"
  sums >"$dir/before"
  (enter "$root" setpriv --reuid freestone --regid freestone --clear-groups timeout 60 freestone serve --config /etc/freestone-server.toml) >"$dir/said" 2>&1 &&
    wrong "the previous program uses the new state"
  grep -q '/state/topology: has version [0-9]* of the format, and this program knows 2 only$' "$dir/said" ||
    { cat "$dir/said" >&2; wrong "the previous program does not say why it refuses the new state"; }
  sums | diff "$dir/before" - >&2 || wrong "the previous program changes the state that it refuses"
  restores new.saved new d
  mv "$root$data/state" "$root$data/state.new"; mv "$root$data/state.old" "$root$data/state"
  service
  # Content is that of the upgrade. The file and the COW store beside it are those of the newer program.
  holds kept a; holds job b; holds disk d; holds monday a; pattern monday 'read -P 0 48M 1M'
  pattern disk 'write -P 9 56M 1M'
  ends
  ok "$before refuses the new state and does not change it; it reads the saved file and the images, and continues the copy of its state"

  installs new.deb
  rm -r "$root$data/state"; mv "$root$data/state.new" "$root$data/state"
  service
  holds disk d; holds monday a; holds kept d; holds job d
  pattern disk 'read -P 9 56M 1M'; pattern monday 'read -P 0 56M 1M'
  ends
  ok "$after continues its own state after that"
}
