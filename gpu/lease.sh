#!/bin/bash
# Measures all, or what is named, on two GPUs at once (or one after the other on one). From the checkout on the device machine:
#     bash .carry/lease/lease.sh [which...]      which: dec portable pilot short wy train
# Logs in $OUT (or /tmp/lease_logs); tables last. About 4 min on two GPUs, 7 on one.
here=$(dirname "$(readlink -f "$0")"); out=${OUT:-/tmp/lease_logs}; mkdir -p "$out"; cd "$here"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/lease_cache}
all="dec portable pilot short wy train"; which=" ${*:-$all} "
gpus=$(nvidia-smi -L 2>/dev/null | wc -l); [ "$gpus" -ge 1 ] || echo "NO GPU SEEN"
second=$(( gpus >= 2 ? 1 : 0 ))
one() { # GPU LIMIT NAME COMMAND...
    [[ $which == *" $3 "* ]] || return 0
    CUDA_VISIBLE_DEVICES=$1 timeout -k 5 "$2" python3 "${@:4}" > "$out/$3.log" 2>&1
    local status=$?
    [ $status = 0 ] || { echo "$3: STATUS $status"; tail -n 15 "$out/$3.log"; }
}
on_first() {
    one 0 80 dec gpu_dec.py 55
    one 0 80 short gpu_short2.py 48 a=short_a/src c=short_c/src
    one 0 200 train gpu_train.py base=base/src t4=t4/src t35=t35/src t4e=t4e/src
}
on_second() {
    one $second 80 portable gpu_portable.py 55
    one $second 75 pilot gpu_pilot.py 50
    one $second 120 wy gpu_wy.py 70 base=base/src t4=t4/src t4e=t4e/src t35=t35/src
}
if [ "$second" = 1 ]; then on_first & on_second; wait; else on_first; on_second; fi
for name in $all; do
    [[ $which == *" $name "* ]] || continue
    echo "######## $name"
    case $name in
        dec | portable | pilot) sed -n '/^== /,$p' "$out/$name.log" ;;
        *) tail -n 40 "$out/$name.log" ;;
    esac | cut -c1-200 | head -c 2000
done
