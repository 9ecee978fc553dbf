#!/bin/sh
# Unpacks Debian 13's nbdkit, qemu-utils, qemu-storage-daemon and libblkio, with every library that they need, beside the system's own and without a change to it.
#   debian13.sh [DIR [PACKAGE..]]        DIR: target/peers/debian13 where it is not given; other packages, where they are (the kernel lab's)
# Needs a Debian machine with apt; no root. The archive is the one that this machine's own sources name, with the suite changed. A
# second call does nothing; what was there stays where a call fails. `benches/src/compare` starts the programs from there.
set -eu

SUITE=trixie
PACKAGES="nbdkit qemu-utils qemu-block-extra qemu-system-common libblkio1"

tree=${1:-target/peers/debian13}
[ $# -le 1 ] || { shift; PACKAGES=$*; }
fail() { echo "debian13.sh: $*" >&2; exit 1; }

[ -e "$tree/.unpacked" ] && exit 0
for tool in apt-get dpkg-deb; do command -v $tool >/dev/null || fail "there is no $tool here: Debian's archive needs it"; done
. /etc/os-release
[ "${ID:-}" = debian ] && [ -n "${VERSION_CODENAME:-}" ] || fail "this is no Debian, so its sources do not name Debian's archive"

mkdir -p "$(dirname "$tree")"
# Absolute: apt takes nothing else. Beside the tree, so that a rename puts it in its place.
work=$(mktemp -d "$(cd "$(dirname "$tree")" && pwd)/.debian13.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/parts" "$work/tree"
: >"$work/status"

# The machine's release and its updates: what apt here calls CODENAME, CODENAME-updates, CODENAME-security.
keys=/usr/share/keyrings/debian-archive-keyring.gpg
if [ -e $keys ]; then signed="[signed-by=$keys]"; else signed=; fi
# shellcheck disable=SC2016 # apt's variables, not ours.
apt-get indextargets --format '$(REPO_URI) $(RELEASE)' | sort -u | while read -r uri release; do
    case $release in
        "$VERSION_CODENAME" | "$VERSION_CODENAME"-updates | "$VERSION_CODENAME"-security)
            echo "deb $signed $uri $SUITE${release#"$VERSION_CODENAME"} main" ;;
    esac
done >"$work/sources.list"
[ -s "$work/sources.list" ] || fail "this machine's sources name no archive of $VERSION_CODENAME"

# With -c it is read after the machine's configuration and has the last word; what else that says (a proxy, say) stays. Its hooks do
# not run: they are about the system's own lists. An empty status: nothing counts as installed, so all that is needed is fetched.
cat >"$work/apt.conf" <<END
Dir::Etc::sourcelist "$work/sources.list";
Dir::Etc::sourceparts "$work/parts";
Dir::State::lists "$work/lists";
Dir::State::status "$work/status";
Dir::Cache "$work";
Dir::Cache::archives "$work/archives";
Dir::Log "$work";
APT::Sandbox::User "";
APT::Install-Recommends "false";
Acquire::Languages "none";
Acquire::Retries "2";
Debug::NoLocking "true";
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
END
apt-get -c "$work/apt.conf" update -qq >&2 || fail "Debian's archive could not be reached"
# shellcheck disable=SC2086 # A list of words.
apt-get -c "$work/apt.conf" install -qq -y --download-only $PACKAGES >"$work/told" 2>&1 || fail "apt-get: $(tail -n 3 "$work/told")"

for package in "$work"/archives/*.deb; do dpkg-deb -x "$package" "$work/tree"; done
# Names and versions of what was asked for; the file also says that the tree is whole.
for package in $PACKAGES; do
    # shellcheck disable=SC2016 # dpkg's variables, not ours.
    dpkg-deb --show --showformat '${Package} ${Version}\n' "$work/archives/${package}"_*.deb
done >"$work/tree/.unpacked"
rm -rf "$tree"
mv "$work/tree" "$tree"
