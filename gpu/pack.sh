#!/bin/bash
# Makes the trees that the scripts of this folder compare, beside them, from git: pack.sh [REPOSITORY]. Then carry the folder.
set -e
here=$(dirname "$(readlink -f "$0")"); repo=${1:-.}
tree() { # NAME REVISION PATH...
    rm -rf "$here/$1"; mkdir -p "$here/$1"
    git -C "$repo" archive "$2" "${@:3}" | tar x -C "$here/$1" --exclude=benchmarks/results --exclude=tests/compile/machine_code
    git -C "$repo" rev-parse "$2" > "$here/$1/REVISION"
}
for x in base=4c6e3c97 dec=df206b64 portable=b5d44db9 pilot=7e5eacd1; do tree ${x%=*} ${x#*=} src tests benchmarks conftest.py; done
for x in t4=8897b171 t35=12c39c3e t4e=227b108b short_a=0ef841eb short_c=b5f54409; do tree ${x%=*} ${x#*=} src; done
du -sh "$here"; grep . "$here"/*/REVISION
