# container-image.sh - functions of run-packages.sh and run-recipes.sh, which source this file: a clean root of Debian, podman with storage of its
# own, and the image of packaging/Containerfile. The caller defines `dir`, a temporary directory, and `wrong`.

# Makes a clean root of this machine's Debian release from this machine's package sources, as a directory or a tar.
clean_root() { # FORMAT TARGET
  . /etc/os-release
  signed=; keys=/usr/share/keyrings/debian-archive-keyring.gpg; [ ! -e $keys ] || signed="[signed-by=$keys]"
  # shellcheck disable=SC2016 # apt's variables, not ours.
  apt-get indextargets --format '$(REPO_URI) $(RELEASE)' | sort -u | while read -r uri release; do
    case $release in "$VERSION_CODENAME" | "$VERSION_CODENAME"-security) echo "deb $signed $uri $release main" ;; esac
  done >"$dir/sources.list"
  [ -s "$dir/sources.list" ] || wrong "this machine's sources name no archive of $VERSION_CODENAME"
  mmdebstrap --quiet --mode=root --variant=minbase --format="$1" "$VERSION_CODENAME" "$2" "$dir/sources.list" \
    >"$dir/log" 2>&1 </dev/null || { tail -n 20 "$dir/log" >&2; wrong "mmdebstrap failed"; }
}

# Prepares podman with storage of its own. A machine that is itself a container lets containers set only these limits, and has no systemd.
podman_settings() {
  printf '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n' >"$dir/containers.conf"
  printf '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\n' >>"$dir/containers.conf"
  printf '[storage]\ndriver = "overlay"\ngraphroot = "%s/store"\nrunroot = "%s/run"\n' "$dir" "$dir" >"$dir/storage.conf"
  export CONTAINERS_CONF=$dir/containers.conf CONTAINERS_STORAGE_CONF=$dir/storage.conf
  mkdir "$dir/store"
}

# Without systemd podman warns that health checks do not run. Its errors are still printed.
pod() { podman --log-level fatal "$@"; }

# Makes the image localhost/freestone from the package in a directory, on a base of the clean root's packages.
container_image() { # DIRECTORY
  podman_settings
  clean_root tar "$dir/base.tar"
  pod import "$dir/base.tar" localhost/base >"$dir/log" 2>&1 || { cat "$dir/log" >&2; wrong "podman cannot import the base"; }
  rm "$dir/base.tar"
  pod build --isolation chroot --network host --format docker --build-arg BASE=localhost/base --tag localhost/freestone \
    --file packaging/Containerfile "$1" >"$dir/log" 2>&1 || { tail -n 30 "$dir/log" >&2; wrong "the image is not built"; }
}
