#!/usr/bin/env bash
# vla_tiny: the copy of the code on this node's own disk, in FOLDER.
#   stage.sh room FOLDER BYTES    make the folder, where the disk holds the archive and what is in it
#   stage.sh put FOLDER SHA256    check and unpack the archive FOLDER/.staged.tar
#   stage.sh take FOLDER          remove what was unpacked; what the run itself has written there stays
set -euo pipefail

fail() {
  printf 'launcher.stage.to: %s: %s\n' "$HOSTNAME" "$1" >&2
  exit 2
}

HOSTNAME="$(</proc/sys/kernel/hostname)" # srun hands on that of the job's first node
folder="$2"
archive="$folder/.staged.tar" list="$folder/.staged.list"
case "$1" in
  room)
    mkdir -p -- "$folder" || fail "$folder cannot be made. Name a folder on a disk of the node's own, which you may write to"
    read -r blocks size < <(stat -f -c '%a %S' -- "$folder")
    free=$((blocks * size))
    if ((free < 2 * $3)); then # the archive beside what is in it
      rmdir --ignore-fail-on-non-empty -- "$folder"
      fail "$folder has $((free >> 10)) KiB free, and the code takes $(($3 >> 9)) KiB while it is unpacked. Free the disk, name another folder, or leave more out with launcher.stage.exclude"
    fi
    ;;
  put)
    found="$(sha256sum <"$archive")"
    [[ ${found%% *} == "$3" ]] ||
      fail "the archive's SHA-256 is ${found%% *} there, and $3 where it was made. Launch again"
    tar --quoting-style=literal -tf "$archive" >"$list" # else it escapes what the locale lacks
    tar -xf "$archive" -C "$folder"
    # Owner, mode and time may be others here; what the files hold may not.
    if { LC_ALL=C tar -df "$archive" -C "$folder" 2>&1 || true; } | grep -E ': (Contents|Size) differ|Cannot ' >&2; then
      fail "what was unpacked in $folder differs from the archive. Is the disk sound?"
    fi
    rm -- "$archive"
    ;;
  take)
    [[ -d $folder ]] || exit 0
    if [[ -e $list ]]; then
      (cd -- "$folder" && { grep -v '/$' "$list" || true; } | tr '\n' '\0' | xargs -0 -r rm -f --)
      find "$folder" -depth -type d -name __pycache__ -exec rm -rf -- {} + # compiled from what was staged
    fi
    rm -f -- "$list" "$archive"
    find "$folder" -depth -type d -empty -delete
    if [[ -e $folder ]]; then
      printf '%s: the run has written files in %s, which stay there\n' "$HOSTNAME" "$folder" >&2
    fi
    ;;
esac
