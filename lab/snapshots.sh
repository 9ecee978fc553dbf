#!/bin/sh
# snapshots.sh [exchange|full|merge|mark|crash|refuse].. - runs in the kernel lab (see run-snapshots.sh): snapshots of the kernel's dm-snapshot
# and of Freestone, on the same devices in turn. Each must load the other's exceptions with the same content and status line, return the
# same results, and finish the other's merges. Prints a line per check.
#
# Intended differences, each of which is checked:
#   smaller chunks    The kernel accepts chunks from one sector on, Freestone from 4 KiB on, because Freestone reads and writes
#                     metadata in units of 4 KiB.
#   valid flag        The kernel treats any number but 0 as "valid"; Freestone refuses numbers other than 0 and 1.
#   entries           The kernel trusts every exception. Freestone refuses exceptions for chunks beyond the origin, exceptions that point
#                     beyond the COW device or into its metadata, two for the same chunk, two at the same place, and a list with a gap
#                     within a sector: the content of such a snapshot is wrong, and writes would destroy more.
#   last place        If the device ends before the next area, the last place of an area is unusable. The kernel allocates it, and
#                     the snapshot becomes invalid when the next area cannot be written. Freestone does not allocate it: with PO a
#                     write to the snapshot overflows there, and no data is lost.
#   errno             A write to a full snapshot fails with EIO in the kernel and with ENOSPC in Freestone ("failed" below).
set -u
export LC_ALL=C DM_DISABLE_UDEV=1
DISK=/dev/vda MAP=/dev/mapper
SECTORS=16391                                   # of the origin: 8 MiB and 7 sectors, so the last chunk is always a short one
ORIGIN_AT=0 COW_AT=32768 SECOND_AT=65536 IMAGE_AT=98304 COW_IMAGE_AT=131072
DIR=/tmp/lab; mkdir -p $DIR; cd $DIR
CHECKS=0 FAILED=0

# ---- checks --------------------------------------------------------------------------------------------------------------

failed() { CHECKS=$((CHECKS+1)) FAILED=$((FAILED+1)); printf 'FAIL %s\n' "$1"; }
passed() { CHECKS=$((CHECKS+1)); printf 'ok   %s\n' "$1"; }
same() { # WHAT WANTED FOUND
  [ "$2" = "$3" ] && passed "$1: $(echo "$3" | cut -c1-60 | head -n 1)" || { failed "$1"; printf '     expected: %s\n     found:    %s\n' "$2" "$3"; }; }
same_file() { # WHAT WANTED FOUND
  cmp $2 $3 >difference 2>&1 && passed "$1: $(stat -c %s $3) bytes" || failed "$1: $(cat difference)"; }
same_lines() { # WHAT WANTED FOUND
  [ -s $2 ] && diff $2 $3 >difference && passed "$1: $(wc -l <$2) lines" || { failed "$1"; sed 's/^/     /' difference; }; }
all_done() { # WHAT TRANSCRIPT..: nothing failed
  what=$1; shift; bad=$(grep -v ': ok$\|^status\|Finished$' "$@" | head -n 1)
  [ -z "$bad" ] || failed "$what: $bad"; }

# ---- devices -------------------------------------------------------------------------------------------------------------

slice() { dmsetup remove $1 2>/dev/null; dmsetup create $1 --table "0 $3 linear $DISK $2" || failed "a slice $1"; }
load() { dd bs=1M oflag=direct conv=notrunc,fsync status=none if=$1 of=$MAP/$2 || failed "loading $2"; }
dump() { rm -f $2; dd bs=1M iflag=direct status=none if=$MAP/$1 of=$2 count=${3:-64}; }
noise() { # FILE SECTOR COUNT SKIP [FLAG]
  dd if=noise of=$1 bs=$(($3*512)) count=1 skip=$4 seek=$(($2*512)) iflag=fullblock,skip_bytes oflag=seek_bytes${5:-} conv=notrunc status=none 2>>dd.log; }
blank() { dd if=/dev/zero of=$MAP/$1 bs=4096 count=1 oflag=direct status=none; }
# The COW device is not cleared except for its header: old data must not matter.
slices() { # [COW-SECTORS]
  slice o $ORIGIN_AT $SECTORS; slice c1 $COW_AT ${1:-32768}; slice c2 $SECOND_AT 32768; }
fresh() { # [COW-SECTORS]: a new origin, empty stores, and files with the expected content of origin and snapshots
  slices ${1:-}; load base o; blank c1; blank c2
  for name in origin snap1 snap2; do cp base must.$name; done; }
keep() { dump o o.image; dump c1 c1.image 8; }
again() { slices; load o.image o; load c1.image c1; }     # restores the devices that keep() saved

images() { slice oi $IMAGE_AT $SECTORS; slice ci $COW_IMAGE_AT 32768; }
take() { # FIRST COUNT IMAGE
  dd if=$DISK of=$MAP/$3 bs=1M skip=$(($1*512)) count=$(($2*512)) iflag=direct,skip_bytes,count_bytes oflag=direct conv=fsync status=none; }
delayed() { dmsetup create slow --table "0 $2 delay $MAP/$1 0 0 $MAP/$1 0 60"; }  # DEVICE SECTORS: its writes take 60 ms longer

# ---- a session: opens origin and snapshots, runs a file line by line, closes -----------------------------------------------
# SNAPS has a word for each snapshot: COW:KIND:CHUNK. The lines are commands of the program cow_lab.

freestone_run() { # FILE
  words=; for snap in $SNAPS; do words="$words $MAP/$(echo $snap | tr ':' ' ')"; done
  cow_lab noise $MAP/o $words <$1 2>said; code=$?
  [ $code = 1 ] && { cat said >&2; echo refused; }
  return $code; }

kernel_name() { [ $1 = origin ] && echo org || echo $1; }
kernel_status() { dmsetup status $1 | cut -d ' ' -f 4-; }
merging() { echo "0 $SECTORS snapshot-merge $MAP/$1 $MAP/c1 P $C"; }
allocated() { kernel_status $1 | cut -d / -f 1; }
metadata() { kernel_status $1 | cut -d ' ' -f 2; }
merged_out() { tries=0; until [ "$(allocated $1)" = "$(metadata $1)" ] || [ $tries = 600 ]; do sleep 0.1; tries=$((tries+1)); done; }
kernel_open() {
  dmsetup create org --table "0 $SECTORS snapshot-origin $MAP/o" || return 1
  number=0
  for snap in $SNAPS; do
    number=$((number+1)) cow=${snap%%:*} rest=${snap#*:}
    dmsetup suspend org
    dmsetup create snap$number --table "0 $SECTORS snapshot $MAP/o $MAP/$cow ${rest%%:*} ${rest#*:}" 2>said || return 1
    dmsetup resume org
  done; }
kernel_close() {
  dmsetup resume org 2>/dev/null
  for name in snap1 snap2 org; do [ -e $MAP/$name ] && dmsetup remove $name; done; }
kernel_do() {
  case $1 in
    write) noise $MAP/$(kernel_name $2) $3 $4 $5 ,direct && echo ok || echo failed;;
    read)
      if [ $# = 3 ]; then set -- "$@" 0 $SECTORS; bs=1M; else bs=$(($5*512)); fi
      dd if=$MAP/$(kernel_name $2) of=$3 bs=$bs skip=$(($4*512)) count=$(($5*512)) iflag=direct,skip_bytes,count_bytes status=none \
        2>>dd.log && echo ok || echo failed;;
    status) kernel_status $2;;
    merge) # the first snapshot, while others stay: as lvconvert does it
      dmsetup suspend org && dmsetup remove snap1 && dmsetup reload org --table "$(merging o)" && dmsetup resume org || return
      merged_out org; echo Finished;;
    *) echo "unknown command: '$*'";;
  esac; }
kernel_run() { # FILE
  if kernel_open; then
    while read -r line; do echo "$line: $(kernel_do $line)"; done <$1
  else cat said >&2; echo refused; fi
  kernel_close; }

# ---- expected content of origin and snapshots -------------------------------------------------------------------------------

expect() { # TRANSCRIPT: writes that were done
  while read -r verb name sector count skip answer; do
    [ "$verb $answer" = 'write ok' ] && noise must.$name $sector $count ${skip%:}
  done <$1; }

# ---- lines -------------------------------------------------------------------------------------------------------------------

K=0
put() { K=$((K+1)); echo "write $1 $2 $3 $((K*7919*512%12582912))"; }
# Writes whole chunks and parts of chunks to origin and snapshot, in both orders. C is the size of a chunk in sectors.
mixed() {
  put origin 0 $C; put origin $((C*3+1)) 3; put origin $((C*5-2)) $((C+4)); echo status snap1
  put snap1 $((C*10)) $C; put snap1 $((C*11+2)) 1; put snap1 $((C*20-1)) $((C*2+2)); echo status snap1
  put snap1 $((C*3+2)) 2; put origin $((C*10)) $C; put origin $((C*11)) $C; put snap1 0 $C; put origin 0 $((C*2))
  put origin $((SECTORS-1)) 1; put snap1 $((SECTORS-2)) 1; put origin $((C*30)) $((C*12)); echo status snap1; }
# Writes of the other implementation, which continues.
more() {
  put snap1 $((C*32+1)) $((C-1)); put origin $((C*60+3)) $((C+1)); put snap1 $((C*61)) $C; put snap1 $((C*70)) $((C*3)); put origin 0 $C
  put origin $((C*71-1)) 2; echo status snap1; }
# COUNT exceptions by writes to origin and snapshot, starting at chunk FIRST.
many() { # FIRST COUNT
  at=$1 left=$2 name=snap1
  while [ $left -gt 0 ]; do
    some=100; [ $some -gt $left ] && some=$left
    [ $name = origin ] && name=snap1 || name=origin
    put $name $((at*C)) $((some*C)); echo status snap1
    at=$((at+some)) left=$((left-some))
  done; }
show() { # SINGLE-CHUNKS: looks at everything, changes nothing
  for name in $NAMES; do echo status $name; echo read $name got.$name; done | grep -v 'status origin'
  for chunk in $1; do echo read snap1 got.$chunk $((chunk*C)) $C; done; }

# ---- 1, 2: each loads the other's exceptions ----------------------------------------------------------------------------------

looks() { # WHAT WHO STATUSES: WHO loads, and shows what must be
  show '0 3 11 30' >look; rm -f got.*
  ${2}_run look >looked
  grep '^status' looked >statuses
  same "$1: status" "$3" "$(sed 's/^status //' statuses | tr '\n' ' ')"
  for name in $NAMES; do same_file "$1: $name" must.$name got.$name; done
  for chunk in 0 3 11 30; do
    dd if=must.snap1 of=one bs=512 skip=$((chunk*C)) count=$C status=none; same_file "$1: chunk $chunk" one got.$chunk
  done; }

ends() { tail -n $(wc -l <ending) $1 | sed 's/^status //' | tr '\n' ' '; }
exchange() { # NAME SNAPS FIRST-LINES SECOND-LINES
  SNAPS=$2 C=${2%% *} NAMES='snap1 origin'
  [ "${2#* }" = "$2" ] || NAMES='snap1 snap2 origin'
  C=${C##*:} K=0; $3 >first; K=500; $4 >second
  for name in $NAMES; do [ $name = origin ] || echo status $name; done >ending
  for who in kernel freestone; do
    [ $who = kernel ] && other=freestone || other=kernel
    fresh
    cat first ending >lines; ${who}_run lines >first.$who; expect first.$who
    looks "$1: $who wrote, $other loads" $other "$(ends first.$who)"
    cat second ending >lines; ${other}_run lines >second.$who; expect second.$who
    looks "$1: $other went on, $who loads" $who "$(ends second.$who)"
  done
  all_done "$1" first.kernel first.freestone second.kernel second.freestone
  same_lines "$1: both answer the same" first.kernel first.freestone
  same_lines "$1: both answer the same in a store of the other" second.kernel second.freestone; }

full_area() { many 0 256; }
two_areas() { many 1 600; }
one() { put snap1 $((C*900)) 1; put origin $((C*902)) $C; echo status snap1; }
both_snaps() { mixed; put snap2 $((C*10)) $C; put snap2 $((C*90+1)) 2; put origin $((C*88)) $((C*6)); echo status snap2; }

exchanges() {
  for size in 8 32 128; do for kind in P PO; do exchange "$kind, $((size/2))K" c1:$kind:$size mixed more; done; done
  exchange 'an area exactly full' c1:P:8 full_area one
  exchange 'three areas' c1:PO:8 two_areas one
  exchange 'two snapshots' 'c1:P:8 c2:P:32' both_snaps more
}

# ---- 4: no room ----------------------------------------------------------------------------------------------------------------

# A COW device of 12 chunks: header, area, 10 copied chunks.
fills_origin() { for at in 0 1 2 3 4 5 6 7 8 9 10 11; do put origin $((at*C)) $C; echo status snap1; done; put snap1 0 8; }
fills_snap() { for at in 0 1 2 3 4 5 6 7 8 9; do put snap1 $((at*C)) $C; done; echo status snap1; put snap1 $((C*12)) $C; }
over_snap() { fills_snap; echo status snap1; echo read snap1 got.snap1; put snap1 0 $C; put snap1 $((C*13)) 1; echo status snap1; }
over_both() { over_snap; put origin 0 $C; echo status snap1; put origin $((C*15)) 3; echo status snap1; echo read snap1 got.snap1; }

room() { # NAME KIND COW-CHUNKS LINES FINAL-STATUS RELOADED-STATUS
  C=8 SNAPS=c1:$2:8 K=0; $4 >lines
  for who in kernel freestone; do
    [ $who = kernel ] && other=freestone || other=kernel
    fresh $(($3*C)); rm -f got.*
    ${who}_run lines >first.$who; expect first.$who
    same "$1: $who ends" "$5" "$(grep '^status' first.$who | tail -n 1 | cut -d ' ' -f 3-)"
    { echo status snap1; echo read snap1 got.snap1; echo read origin got.origin; } >look
    for loads in $other $who; do
      rm -f got.*; ${loads}_run look >looked
      same "$1: $who filled, $loads loads" "$6" "$(head -n 1 looked | cut -d ' ' -f 3-)"
      if [ "$6" = Invalid ]; then same "$1: $loads cannot read it" 'read snap1 got.snap1: failed' "$(sed -n 2p looked)"
      else same_file "$1: $loads shows it" must.snap1 got.snap1; fi
      same_file "$1: the origin from $loads" must.origin got.origin
    done
  done
  same_lines "$1: both answer the same" first.kernel first.freestone; }

# A full area at the end of the device has no next area to end the list. The kernel allocates the last place and then fails to write the
# next area, which invalidates the snapshot; Freestone does not allocate it.
last_place() { # KIND KERNEL FREESTONE RELOADED-KERNEL RELOADED-FREESTONE
  C=8 SNAPS=c1:$1:8 K=0; many 0 255 >lines; echo read snap1 got.snap1 >>lines; put snap1 $((300*C)) $C >>lines; echo status snap1 >>lines
  for who in kernel freestone; do
    [ $who = kernel ] && other=freestone || other=kernel
    fresh $((258*C)); ${who}_run lines >first.$who
    eval "$who=\$(tail -n 1 first.$who | cut -d ' ' -f 3-)"
    echo status snap1 >look; ${other}_run look >looked
    [ $who = kernel ] && reloaded=$4 || reloaded=$5
    same "the last place of a full area at the end, $1: $who filled, $other loads" "$reloaded" "$(cut -d ' ' -f 3- looked)"
  done
  [ "$2" = "$3" ] && note= || note=' (a difference)'
  same "the last place of a full area at the end, $1: the kernel, Freestone$note" "$2, $3" "$kernel, $freestone"; }

rooms() {
  room 'full, P, by the origin' P 12 fills_origin Invalid Invalid
  room 'full, PO, by the origin' PO 12 fills_origin Invalid Invalid
  room 'full, P, by the snapshot' P 12 over_snap Invalid Invalid
  room 'full, PO, by the snapshot' PO 12 over_snap Overflow '96/96 16'
  room 'full, PO, by the snapshot and then the origin' PO 12 over_both Invalid Invalid
  last_place PO Invalid Overflow Invalid '2056/2064 16'; last_place P Invalid Invalid Invalid Invalid
}

# ---- 3: merges -------------------------------------------------------------------------------------------------------------------

# Many short runs of exceptions and some long ones, in two areas.
scattered() {
  put origin 0 $((C*100)); put snap1 $((C*150)) $((C*100)); at=$((SECTORS/C-112))
  for round in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do
    put origin $((at*C)) $C; put snap1 $(((at+100)*C+1)) 2; put snap1 $(((at-3)*C)) $((C*2)); at=$((at-13))
  done
  put origin $((SECTORS-4)) 4; put snap1 $((C*20)) $C; echo status snap1; }

begin_merges() { # CHUNK WHO: a store to be merged; kept for all that follows
  C=$1 SNAPS=c1:P:$1 K=0; scattered >lines
  fresh; ${2}_run lines >first; all_done "what is to be merged" first; expect first; cp must.snap1 merged; keep; }

kernel_merge() { dmsetup create merge --table "$(merging $1)"; }
kernel_finishes() { # WHAT WANTED
  kernel_merge o || failed "$1: the kernel loads it"
  dump merge got; same_file "$1: the kernel shows the snapshot meanwhile" $2 got
  merged_out merge; same "$1: the kernel finishes" "$((C*2))/32768 $((C*2))" "$(kernel_status merge)"
  dmsetup remove merge
  dump o got; same_file "$1: the origin is the snapshot" $2 got; }
freestone_finishes() { # WHAT WANTED ORIGIN COW
  printf '%s\n' 'read snap1 got.snap1' 'merge snap1' 'status snap1' 'read origin got.origin' >look
  rm -f got.*; cow_lab noise $MAP/$3 $MAP/$4 P $C <look >looked 2>&1
  same_file "$1: Freestone shows the snapshot before" $2 got.snap1
  same "$1: Freestone finishes" "merge snap1: Finished status snap1: $((C*2))/32768 $((C*2))" "$(sed -n 2,3p looked | tr '\n' ' ' | sed 's/ $//')"
  same_file "$1: Freestone shows the origin" $2 got.origin
  dump $3 got; same_file "$1: the origin is the snapshot" $2 got; }

merges_begun_here() {
  for writes in 1 2 5 17 60; do
    again; printf 'die %s\nmerge snap1\n' $writes >lines
    freestone_run lines >crash 2>&1; same "a crash of Freestone at write $writes of a merge, $((C/2))K" "134 die $writes: ok" "$? $(head -n 1 crash)"
    kernel_finishes "a crash here at write $writes, $((C/2))K" merged
  done
  again; echo merge-some snap1 >lines
  freestone_run lines >crash 2>&1; same "a merge stopped in Freestone, $((C/2))K" 'merge-some snap1: Stopped, some is merged' "$(cat crash)"
  kernel_finishes "a merge stopped here, $((C/2))K" merged; }

# Slows the kernel's origin down, so that its merge can be interrupted in the middle.
in_the_middle() { # SHARE: until this many percent are merged
  start=$(allocated merge)
  tries=0; until [ $(($(allocated merge)*100)) -le $((start*(100-$1))) ] || [ $tries = 2000 ]; do tries=$((tries+1)); sleep 0.02; done
  now=$(allocated merge)
  [ $now -lt $start ] && [ $now -gt $(metadata merge) ] && passed "$2: $now of $start sectors are left" || failed "$2: $now of $start sectors are left"; }
merges_begun_there() {
  images; again; delayed o $SECTORS; kernel_merge slow
  in_the_middle 3 "a merge of the kernel, stopped, $((C/2))K"
  dmsetup suspend merge; dmsetup remove merge; dmsetup remove slow
  freestone_finishes "a merge of the kernel, stopped, $((C/2))K" merged o c1
  for share in 1 10; do
    what="a merge of the kernel, crashed after $share %, $((C/2))K"; again; cp merged must.snap1; delayed o $SECTORS; kernel_merge slow
    # A write to the merge target is a write to the future origin; one to a merged chunk, one to a chunk that is not merged yet.
    noise $MAP/merge $((SECTORS-9)) 8 512 ,direct; noise must.snap1 $((SECTORS-9)) 8 512
    in_the_middle $share "$what"
    noise $MAP/merge $((C*40+1)) 3 1024 ,direct; noise must.snap1 $((C*40+1)) 3 1024
    # From here on no write reaches the COW device: both devices are copied in the state that a crash would leave.
    dmsetup suspend --noflush --nolockfs c1
    take $ORIGIN_AT $SECTORS oi; take $COW_AT 32768 ci
    dmsetup resume c1
    freestone_finishes "$what" must.snap1 oi ci
    dmsetup suspend merge; dmsetup remove merge; dmsetup remove slow
    freestone_finishes "$what, what went on" must.snap1 o c1
  done; }

# Another snapshot keeps its content while the first is merged.
beside() {
  C=8 K=0; { scattered; put snap2 77 5; put origin 40 90; echo merge snap1; echo status snap2; } >lines
  for who in kernel freestone; do
    [ $who = kernel ] && other=freestone || other=kernel
    SNAPS='c1:P:8 c2:PO:32'; fresh; ${who}_run lines >first.$who; expect first.$who
    printf '%s\n' 'status snap1' 'read snap1 got.snap2' 'read origin got.origin' >look
    SNAPS=c2:PO:32; rm -f got.*; ${other}_run look >looked
    what="beside a merge: $who merged, $other loads the other snapshot"
    same "$what: status" "$(tail -n 1 first.$who | cut -d ' ' -f 3-)" "$(head -n 1 looked | cut -d ' ' -f 3-)"
    same_file "$what" must.snap2 got.snap2; same_file "$what: the origin" must.snap1 got.origin
  done
  all_done 'beside a merge' first.kernel first.freestone
  same_lines 'beside a merge: both answer the same' first.kernel first.freestone; }

merges() {
  beside
  begin_merges 8 kernel; merges_begun_here; merges_begun_there
  begin_merges 32 freestone; merges_begun_here; merges_begun_there
}

# ---- marks: Freestone writes bytes 16 to 47 of the header before it merges; the kernel must ignore them -------------------------

mark_of() { dd if=$MAP/$1 bs=8 skip=2 count=1 status=none | tr -d '\0'; }
kernel_snapshot_loads() { # WHAT WANTED-STATUS: a marked store under the kernel's snapshot target
  echo status snap1 >look; kernel_run look >looked; same "$1: the kernel loads it as a snapshot" "status snap1: $2" "$(cat looked)"
  same "$1: mark after the kernel" FsMerge1 "$(mark_of c1)"; }

# A merge that begins in Freestone, continues in the kernel and ends in Freestone contains writes to the origin in between.
marks_go_on() {
  what='a merge begun in Freestone, continued by the kernel'
  again; echo merge-some snap1 >lines; freestone_run lines >first
  same "$what: partly merged by Freestone" 'merge-some snap1: Stopped, some is merged' "$(cat first)"
  same "$what: mark" FsMerge1 "$(mark_of c1)"
  cp merged must.snap1; delayed o $SECTORS; kernel_merge slow; in_the_middle 3 "$what"
  dmsetup suspend merge; dmsetup remove merge; dmsetup remove slow
  same "$what: mark after the kernel" FsMerge1 "$(mark_of c1)"
  printf '%s\n' 'read origin got.origin' "write origin $((C*40+1)) 3 1024" 'read snap1 got.snap1' 'merge snap1' >lines
  rm -f got.*; SNAPS=c1:P:$C; freestone_run lines >looked
  same_file "$what: Freestone shows the origin through the snapshot before" must.snap1 got.origin
  noise must.snap1 $((C*40+1)) 3 1024; same_file "$what: and what is written to it" must.snap1 got.snap1
  same "$what: Freestone finishes" 'merge snap1: Finished' "$(tail -n 1 looked)"
  dump o got; same_file "$what: the origin is the snapshot" must.snap1 got
  same "$what: mark at the end" '' "$(mark_of c1)"; }

marks() {
  begin_merges 8 kernel; marks_go_on
  what='a merge stopped in Freestone, finished by the kernel'
  again; echo merge-some snap1 >lines; freestone_run lines >first; kernel_finishes "$what" merged
  same "$what: mark after the kernel" FsMerge1 "$(mark_of c1)"
  echo status snap1 >look; freestone_run look >looked
  same "$what: status in Freestone" "status snap1: $((C*2))/32768 $((C*2))" "$(cat looked)"
  same "$what: mark after Freestone" '' "$(mark_of c1)"
  # Only the mark is written: the second write of a merge is its first copy, which fails.
  what='a crash of Freestone at the first copy'; C=8 SNAPS=c1:P:8 K=0; fresh $((12*C)); put snap1 $((C*5)) $C >lines
  printf 'die 2\nmerge snap1\n' >>lines; freestone_run lines >first 2>&1
  kernel_snapshot_loads "$what" "$((3*C))/$((12*C)) $((2*C))"
  { for at in 0 1 2 3 4 6 7 8 9 10 11 12; do put origin $((at*C)) $C; done; echo status snap1; } >lines
  kernel_run lines >looked; same "$what: the kernel invalidates it" 'status snap1: Invalid' "$(tail -n 1 looked)"
  same "$what: mark after the kernel" '' "$(mark_of c1)"
}

# ---- crashes during writes to the origin: the snapshot keeps the old content, however far the write got -------------------------

overwrites() { for at in 0 100 200 300 400 500; do put origin $((at*C)) $((C*100)); put origin $((at*C+1)) 3; done; }
shows_base() { # WHAT WHO: origin and snapshot as they were left
  printf '%s\n' 'status snap1' 'read snap1 got.snap1' >look
  rm -f got.*; ${2}_run look >looked; same_file "$1: $2 shows the snapshot ($(head -n 1 looked))" base got.snap1; }

crashes() {
  C=8 K=0; overwrites >writes; images
  for number in 1 2 60 101 102 103 104 160 206 260 261 262 263 310 400 500; do
    SNAPS=c1:P:8; fresh; { echo die $number; cat writes; } >lines
    freestone_run lines >crash 2>&1
    same "a crash of Freestone at write $number" "134 die $number: ok" "$? $(head -n 1 crash)"
    shows_base "a crash here at write $number" kernel
  done
  for time in 0.1 0.2 0.3 0.4 0.6 0.8; do
    SNAPS=slow:P:8; fresh; delayed c1 32768; kernel_open || failed 'the kernel loads a slow store'
    { while read -r line; do kernel_do $line; done <writes; } >done.kernel &
    sleep $time; dmsetup suspend --noflush --nolockfs slow
    [ "$(wc -l <done.kernel)" -lt 12 ] && passed "a crash of the kernel after $time s: $(wc -l <done.kernel) of 12 writes are done" ||
      failed "a crash of the kernel after $time s: all is written"
    take $COW_AT 32768 ci; take $ORIGIN_AT $SECTORS oi
    dmsetup resume slow; wait; kernel_close; dmsetup remove slow
    # Loads the images that the crash left.
    dump oi oi.image; dump ci ci.image 8; load oi.image o; load ci.image c1
    SNAPS=c1:P:8; shows_base "a crash of the kernel after $time s" freestone
  done; }

# ---- 5: refused COW devices --------------------------------------------------------------------------------------------------------

byte() { printf "$2" | dd of=c1.image bs=1 seek=$1 conv=notrunc status=none; }
try() { # NAME SNAPS KERNEL FREESTONE: what each says, the first word of it
  echo status snap1 >look; SNAPS=$2
  for who in kernel freestone; do
    load c1.image c1; answer=$(${who}_run look 2>said.$who | sed 's/^status snap1: //')
    [ "$answer" = refused ] || [ "$answer" = Invalid ] || answer="loads $answer"
    eval "$who=\$answer"
  done
  case "$3 $4" in 'refused refused'|'Invalid Invalid'|'loads loads') note=;; *) note=' (a difference)';; esac
  same "$1: the kernel, Freestone$note" "$3, $4" "${kernel%% *}, ${freestone%% *}"
  [ "$3 $4" != 'loads loads' ] || same "$1: status of both" "$kernel" "$freestone"; }
spoiled() { # NAME KERNEL FREESTONE OFFSET BYTES [OFFSET BYTES]
  name=$1 kernel_says=$2 freestone_says=$3; shift 3; cp good c1.image
  while [ $# -gt 0 ]; do byte $1 $2; shift 2; done
  try "$name" c1:P:8 $kernel_says $freestone_says; }

refusals() {
  C=8 SNAPS=c1:P:8 K=0; mixed >lines; fresh; kernel_run lines >first; dump c1 good 2
  AREA=4096
  spoiled 'as it was' loads loads
  spoiled 'magic 0: a new store' loads loads 0 '\0\0\0\0'
  spoiled 'another magic' refused refused 0 'LUKS'
  spoiled 'one bit of the magic' refused refused 0 '\122'
  spoiled 'version 2' refused refused 8 '\2'
  spoiled 'version 0' refused refused 8 '\0'
  spoiled 'the flag says invalid' Invalid Invalid 4 '\0'
  spoiled 'invalid, and version 2' refused refused 4 '\0' 8 '\2'
  spoiled 'invalid, and the chunk is no power of two' refused refused 4 '\0' 12 '\11'
  spoiled 'the flag is 2' loads refused 4 '\2'
  spoiled 'chunk in the header no power of two' refused refused 12 '\14'
  spoiled 'chunk in the header 0' refused refused 12 '\0'
  spoiled 'chunk in the header 2 GiB' refused refused 12 '\0\0\100\0'
  spoiled 'chunk in the header 1 GiB, more than the device has' refused refused 12 '\0\0\40\0'
  spoiled 'chunk in the header 2 KiB' loads refused 12 '\4'
  spoiled 'chunk in the header 512 bytes' loads refused 12 '\1'
  spoiled 'an entry preserves what the origin does not have' loads refused $((AREA+2)) '\1'
  spoiled 'an entry leads beyond the device' loads refused $((AREA+8+3)) '\1'
  spoiled 'an entry leads into an area' loads refused $((AREA+8)) '\1'
  spoiled 'two entries for one chunk' loads refused $((AREA+16)) '\0'
  spoiled 'two entries share a place' loads refused $((AREA+16+8)) '\2'
  spoiled 'a hole in the list' loads refused $((AREA+16)) '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'
  cp good c1.image
  try 'table: chunk size differs from the header' c1:P:32 loads loads
  try 'table: chunk size 0 stands for that of the header' c1:P:0 loads loads
  try 'table: chunk size not a power of two' c1:P:12 refused refused
  try 'table: chunk size 2 GiB' c1:P:4194304 refused refused
  try 'table: chunk size 2 KiB' c1:P:4 loads refused
  try 'table: letters in lower case' c1:po:8 loads loads
  try 'table: unknown letter' c1:X:8 refused refused
  try 'table: letters after P' c1:PX:8 refused refused
  try 'table: transient, without metadata' c1:N:8 loads loads
  try 'table: the origin is its own COW device' o:P:8 refused refused
  byte 0 '\0\0\0\0'
  try 'a new store without a chunk size' c1:P:0 loads loads
  endless; }

# All areas are full at the end of the device, so the list has no end mark.
endless() {
  C=8 SNAPS=c1:P:8 K=0; many 0 256 >lines; fresh; freestone_run lines >first; dump c1 c1.image 2
  truncate -s $((258*4096)) c1.image; slices $((258*8))
  try 'a list without an end' c1:P:8 refused refused; }

# ---- all parts -----------------------------------------------------------------------------------------------------------------------

modprobe dm_snapshot; modprobe dm_delay
dd if=/dev/urandom of=noise bs=1M count=16 status=none
dd if=/dev/urandom of=base bs=512 count=$SECTORS status=none
[ $# != 0 ] || set -- exchange full merge mark crash refuse
for part in "$@"; do
  read -r up _ </proc/uptime; printf '\n# %s (after %s s, kernel %s)\n' $part $up $(uname -r)
  case $part in exchange) exchanges;; full) rooms;; merge) merges;; mark) marks;; crash) crashes;; refuse) refusals;; *) failed "unknown part: $part";; esac
done
read -r up _ </proc/uptime
printf '\n==== the kernel and Freestone: %s checks, %s failed, after %s s\n' $CHECKS $FAILED $up
[ $FAILED = 0 ] && [ $CHECKS -gt 0 ]
