#!/bin/bash
# ceph-images.sh DIR - tests images in the Ceph that ceph.sh runs in DIR: pushes, pulls and reads while the OSD or the gateway is killed,
# pushes that are killed or that race, and a bucket that is emptied. FREESTONE names the program; ceph.sh prints the other variables.
set -eu
cd "$(dirname "$0")/.."
ceph=$1 dir=$1/images url=s3://$BUCKET/images server=''
mkdir "$dir"
source lab/ceph-use.sh
# Writes about MB megabytes of noise, text and zeroes.
mixed() { # file mb
  for ((n = 0; n < $2; n += 6)); do
    head -c 3M /dev/urandom
    yes "line of text $n $RANDOM" | head -c 2M || true
    head -c 1M /dev/zero; done >"$1"; }
push() { timeout 120 "$FREESTONE" push "d=file,path=$1,readonly=yes" "$2"; }
# Reads an image with an empty cache; sets $same to the one of the files that it equals.
is_whole() { # tag file...
  serve "image,url=$url:$1"; shift
  uri=$(uri d) same=
  timeout 60 nbdcopy "$uri" "$dir/read" || wrong "the image cannot be read"
  for file; do ! cmp -s "$file" "$dir/read" || same=$file; done
  [ -n "$same" ] || wrong "the image is none of $*"
  end; }
stat_of() { "$FREESTONE" stat d --json | sed -n "s/.*\"$1\": *\"\?\([^\",]*\).*/\1/p" | head -n 1; }
fetched() { [ "$(stat_of chunks_fetched)" -ge "$1" ]; }
curls() { curl -s --aws-sigv4 aws:amz:us-east-1:s3 -u "$AWS_ACCESS_KEY_ID:$AWS_SECRET_ACCESS_KEY" -H 'x-amz-content-sha256: UNSIGNED-PAYLOAD' "$@"; }
# Lists the first thousand keys.
keys() { curls "$AWS_ENDPOINT_URL/$BUCKET?list-type=2&prefix=images" | grep -o '<Key>[^<]*' | sed 's/<Key>//'; }
has() { [ "$(keys | wc -l)" -ge "$1" ]; }

mixed "$dir/v1" 150
say "a push, and the OSD is killed meanwhile"
push "$dir/v1" "$url:v1" >"$dir/pushed" 2>&1 & pusher=$!
soon 30 has 40 || wrong "nothing is sent"
lab/ceph.sh kill osd "$ceph"
sleep 3
kill -0 $pusher 2>/dev/null || wrong "the push has ended: $(cat "$dir/pushed")"
lab/ceph.sh again osd "$ceph"
wait $pusher || wrong "the push fails: $(cat "$dir/pushed")"
serve "image,url=$url:v1" f=fork,base=d
same f "$dir/v1"
end

say "a fork reads, and the OSD is killed meanwhile"
serve "image,url=$url:v1,timeout=5s" f=fork,base=d
qemu-io -f raw -c 'read -q 0 1M' -c 'write -q -P 7 64M 64k' "$(uri f)"
lab/ceph.sh kill osd "$ceph"
since=$SECONDS
timeout 60 qemu-io -f raw -c 'read 100M 64k' "$(uri f)" >"$dir/said" 2>&1 & reader=$!
sleep 1
timeout 2 qemu-io -f raw -c 'read -q 0 1M' -c 'read -q -P 7 64M 64k' "$(uri f)" || wrong "cached data cannot be read"
kill -0 $reader 2>/dev/null || wrong "the read does not wait for the store: $(cat "$dir/said")"
! wait $reader || wrong "a read without a store succeeds: $(cat "$dir/said")"
grep -q 'Input/output error' "$dir/said" || wrong "no EIO: $(cat "$dir/said")"
[ $((SECONDS - since)) -le 17 ] || wrong "EIO after $((SECONDS - since)) s"
[ -n "$(stat_of last_error)" ] || wrong "no reason in stat"
say "  EIO after $((SECONDS - since)) s: $(stat_of last_error)"
timeout 2 qemu-io -f raw -c 'read -q 0 1M' "$(uri f)" || wrong "cached data cannot be read"
lab/ceph.sh again osd "$ceph"
soon 60 timeout 30 qemu-io -f raw -c 'read -q 100M 64k' "$(uri f)" || wrong "reads do not recover"
same d "$dir/v1"
end

say "a pull, and the gateway is killed meanwhile"
serve "image,url=$url:v1"
"$FREESTONE" pull "$url:v1" d >"$dir/pulled" 2>&1 & puller=$!
soon 30 fetched 10 || wrong "nothing is pulled"
lab/ceph.sh kill rgw "$ceph"
kill -0 $puller 2>/dev/null || wrong "the pull has ended: $(cat "$dir/pulled")"
sleep 2
lab/ceph.sh again rgw "$ceph"
wait $puller || wrong "the pull fails: $(cat "$dir/pulled")"
pulled=$(stat_of chunks_fetched)
same d "$dir/v1"
[ "$(stat_of chunks_fetched)" = "$pulled" ] || wrong "the pull is incomplete"
end

say "pushes that are killed"
mixed "$dir/old" 48
since=$(now)
push "$dir/old" "$url:killed" >/dev/null
took=$(($(now) - since)) killed=0 changed=0
for ((round = 1; round <= 10; round++)); do
  cp "$dir/old" "$dir/new"
  head -c 24M /dev/urandom | dd of="$dir/new" bs=1M seek=$((RANDOM % 24)) conv=notrunc status=none
  # Without timeout(1), which would be killed in place of the program.
  "$FREESTONE" push "d=file,path=$dir/new,readonly=yes" "$url:killed" >"$dir/pushed" 2>&1 & pusher=$!
  rest=$((RANDOM % (took + 100)))
  sleep $((rest / 1000)).$(printf %03d $((rest % 1000)))
  kill -9 $pusher 2>/dev/null || true
  rc=0; wait $pusher 2>/dev/null || rc=$?
  case $rc in 137) killed=$((killed + 1));; 0) ;; *) wrong "a push fails: $(cat "$dir/pushed")";; esac
  is_whole killed "$dir/old" "$dir/new"
  if [ "$same" = "$dir/new" ]; then changed=$((changed + 1)); elif [ $rc = 0 ]; then wrong "a push that ended has set no tag"; fi
  mv "$same" "$dir/now"; mv "$dir/now" "$dir/old"
done
say "  a push takes $took ms; of 10, $killed were killed and $changed set the tag"
[ $killed -gt 0 ] || wrong "none was killed"
cp "$dir/old" "$dir/new"
head -c 24M /dev/urandom | dd of="$dir/new" bs=1M conv=notrunc status=none
push "$dir/new" "$url:killed" >/dev/null
is_whole killed "$dir/new"
pruned=$(timeout 60 "$FREESTONE" prune "$url" --dry-run) || wrong "prune fails"
say "  $pruned"

say "pushes that race"
lost=0
for ((round = 1; round <= 5; round++)); do
  pushers=() won=
  for one in 1 2; do
    cp "$dir/new" "$dir/$one"
    head -c 8M /dev/urandom | dd of="$dir/$one" bs=1M seek=$((one * 12)) conv=notrunc status=none; done
  for one in 1 2; do push "$dir/$one" "$url:killed" >"$dir/pushed.$one" 2>&1 & pushers[one]=$!; done
  for one in 1 2; do
    if wait "${pushers[one]}"; then won="$won $dir/$one"
    else grep -q 'changed by another push meanwhile' "$dir/pushed.$one" || wrong "it says: $(cat "$dir/pushed.$one")"; lost=$((lost + 1)); fi; done
  [ -n "$won" ] || wrong "both pushes fail"
  # Both pushes succeed if one began after the other had ended.
  # shellcheck disable=SC2086
  is_whole killed $won
done
say "  in $lost of 5 rounds a push was refused"
[ $lost -ge 3 ] || wrong "the pushes did not race"

say "the bucket is emptied"
serve "image,url=$url:v1,timeout=5s" f=fork,base=d
qemu-io -f raw -c 'read -q 0 1M' "$(uri f)"
while keys >"$dir/keys"; [ -s "$dir/keys" ]; do
  sed "s|.*|url = \"$AWS_ENDPOINT_URL/$BUCKET/&\"|" "$dir/keys" >"$dir/urls"
  curls -X DELETE -w '%{http_code}\n' -K "$dir/urls" >"$dir/said"
  ! grep -qv '^204$' "$dir/said" || wrong "not deleted: $(sort "$dir/said" | uniq -c)"; done
since=$SECONDS
! timeout 60 qemu-io -f raw -c 'read 100M 64k' "$(uri f)" >"$dir/said" 2>&1 || wrong "a read of a deleted object succeeds"
grep -q 'Input/output error' "$dir/said" || wrong "no EIO: $(cat "$dir/said")"
[ $((SECONDS - since)) -le 5 ] || wrong "EIO after $((SECONDS - since)) s"
[ -n "$(stat_of last_error)" ] || wrong "no reason in stat"
say "  EIO after $((SECONDS - since)) s: $(stat_of last_error)"
timeout 2 qemu-io -f raw -c 'read -q 0 1M' "$(uri f)" || wrong "cached data cannot be read"
end
rm -rf "$dir"
