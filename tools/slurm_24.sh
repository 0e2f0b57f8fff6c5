#!/bin/sh
# Makes a folder with Slurm 24.11 of Debian 13 in it, once, and prints the folder's name. tests/e2e/slurm_bed.py runs
# its cluster in there where KEEPSTEP_SLURM names it. Needs root and debootstrap; downloads 90 MB.
set -eu
root=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/keepstep/slurm-24.11}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
# Beside Slurm what Python and torch of this machine load: they are the same ones inside.
packages=slurmctld,slurmd,slurm-client,munge,libffi8,libssl3t64,libstdc++6,zlib1g,libbz2-1.0,liblzma5,procps,ca-certificates

if [ ! -e "$root/.ready" ]; then
  [ "$(id -u)" = 0 ] || { echo "slurm_24.sh: needs root, to install packages in $root" >&2; exit 2; }
  command -v debootstrap >/dev/null || { echo "slurm_24.sh: needs debootstrap (apt-get install debootstrap)" >&2; exit 2; }
  mkdir -p "$(dirname "$root")"
  made=$(mktemp -d "$root.XXXXXX")
  trap 'rm -rf --one-file-system "$made"' EXIT
  chmod 755 "$made"  # munge makes its key as an ordinary user
  # What it mounts ends with it.
  unshare --mount debootstrap --variant=minbase "--include=$packages" trixie "$made" "$mirror" \
    >"$made/debootstrap.out" 2>&1 || {
    tail -5 "$made/debootstrap.out" >&2; exit 1; }
  rm -rf "$made"/var/cache/apt/archives/*.deb
  chmod 755 "$made/root"  # an ordinary user reaches what is bound below it
  touch "$made/etc/hosts" "$made/.ready"
  rm -rf --one-file-system "$root"
  mv "$made" "$root"
  trap - EXIT
fi
echo "$root"
