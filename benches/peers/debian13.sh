#!/bin/sh
# Unpacks Debian 13's nbdkit, qemu-utils, qemu-storage-daemon and libblkio, with all libraries that they need, into a directory.
# The system itself does not change.
#   debian13.sh [DIR [PACKAGE..]]        DIR: default target/peers/debian13; PACKAGE: other packages to unpack (used by the kernel lab)
# Needs a Debian machine with apt; no root. Uses the archive of this machine's apt sources with another suite. A second call does
# nothing. If a call fails, an existing directory is kept. `benches/src/compare` starts the programs from the directory.
set -eu

SUITE=trixie
PACKAGES="nbdkit qemu-utils qemu-block-extra qemu-system-common libblkio1"

tree=${1:-target/peers/debian13}
[ $# -le 1 ] || { shift; PACKAGES=$*; }
fail() { echo "debian13.sh: $*" >&2; exit 1; }

[ -e "$tree/.unpacked" ] && exit 0
for tool in apt-get dpkg-deb; do command -v $tool >/dev/null || fail "$tool is not installed; it is needed to read Debian's archive"; done
. /etc/os-release
[ "${ID:-}" = debian ] && [ -n "${VERSION_CODENAME:-}" ] || fail "this machine is not a Debian system, so its apt sources do not contain Debian's archive"

mkdir -p "$(dirname "$tree")"
# An absolute path, which apt requires, on the same file system as the tree, so that the final rename is atomic.
work=$(mktemp -d "$(cd "$(dirname "$tree")" && pwd)/.debian13.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/parts" "$work/tree"
: >"$work/status"

# Archives of the machine's release and its updates: CODENAME, CODENAME-updates and CODENAME-security in apt's index.
keys=/usr/share/keyrings/debian-archive-keyring.gpg
if [ -e $keys ]; then signed="[signed-by=$keys]"; else signed=; fi
# shellcheck disable=SC2016 # Variables of apt, not of the shell.
apt-get indextargets --format '$(REPO_URI) $(RELEASE)' | sort -u | while read -r uri release; do
    case $release in
        "$VERSION_CODENAME" | "$VERSION_CODENAME"-updates | "$VERSION_CODENAME"-security)
            echo "deb $signed $uri $SUITE${release#"$VERSION_CODENAME"} main" ;;
    esac
done >"$work/sources.list"
[ -s "$work/sources.list" ] || fail "the apt sources of this machine contain no archive of $VERSION_CODENAME"

# With -c apt reads this file after the machine's configuration and overrides it; other settings, such as a proxy, stay in effect.
# The machine's update hooks are cleared, as they are meant for the system's own lists. With an empty status file no package counts as
# installed, so all dependencies are downloaded.
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
apt-get -c "$work/apt.conf" update -qq >&2 || fail "cannot reach Debian's archive"
# shellcheck disable=SC2086 # PACKAGES is a list of words.
apt-get -c "$work/apt.conf" install -qq -y --download-only $PACKAGES >"$work/apt.log" 2>&1 || fail "apt-get: $(tail -n 3 "$work/apt.log")"

for package in "$work"/archives/*.deb; do dpkg-deb -x "$package" "$work/tree"; done
# Names and versions of the requested packages. The file also marks the tree as complete.
for package in $PACKAGES; do
    # shellcheck disable=SC2016 # Variables of dpkg, not of the shell.
    dpkg-deb --show --showformat '${Package} ${Version}\n' "$work/archives/${package}"_*.deb
done >"$work/tree/.unpacked"
rm -rf "$tree"
mv "$work/tree" "$tree"
