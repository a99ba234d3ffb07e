# GPU 1: ncu of three kernels. OUT
cd "$(dirname "$(readlink -f "$0")")"; export TRITON_CACHE_DIR=/tmp/lease_cache
NCU=$(command -v ncu || ls /usr/local/cuda*/bin/ncu | head -1)
p() { # name kernel skip count
 timeout 100 python3 gpu_ncu.py $1 || echo failed $1
 timeout 100 $NCU --clock-control none --set full --import-source no -k regex:$2 -s $3 -c $4 -f -o /tmp/$1 python3 gpu_ncu.py $1 > /tmp/$1.ncu.txt 2>&1 || tail -5 /tmp/$1.ncu.txt
 $NCU --import /tmp/$1.ncu-rep --page details > $OUT/ncu_$1.txt 2>&1
 $NCU --import /tmp/$1.ncu-rep --page source --csv --print-source sass > /tmp/$1.src.csv 2>/tmp/$1.err || $NCU --import /tmp/$1.ncu-rep --page source --csv > /tmp/$1.src.csv
 gzip -c /tmp/$1.src.csv > $OUT/ncu_$1.csv.gz; ls -l $OUT/ncu_$1*
}
p pilot prepare_scalar 2 1
p short short_kernel 2 3
p train "wy_kernel|intra_kernel" 2 2
