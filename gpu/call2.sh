# kernels: short on GPU 0, dec on GPU 1; then gdn, F; first; training beside base
. .carry/setup.sh; python3 -m pip install -q --no-deps --no-index .carry/whl/*.whl 2>&1 | tail -1
R=$PWD
for t in short dec gdn; do mkdir -p /tmp/t/$t; tar -xf .carry/$t.tar -C /tmp/t/$t; mkdir -p /tmp/t/$t/.carry; cp -r .carry/base .carry/whl /tmp/t/$t/.carry/; done
job() { # GPU NAME SECONDS DIR CMD
  (cd $4; CUDA_VISIBLE_DEVICES=$1 PYTHONPATH=$4/src:$4 timeout $3 "${@:5}" > /tmp/log_$2.txt 2>&1; echo "rc $?" >> /tmp/log_$2.txt); cp /tmp/log_$2.txt $OUT/log_$2.txt; }
(job 0 short 120 /tmp/t/short python3 $R/.carry/gpu_short.py 80; job 0 gdn 60 /tmp/t/gdn python3 $R/.carry/gpu_gdn.py) &
(job 1 dec 120 /tmp/t/dec python3 $R/.carry/gpu_dec.py --limit 85; job 1 first 40 $R python3 .carry/first.py) &
wait
for x in short dec gdn first; do echo "#### $x"; tail -c ${1:-1900} /tmp/log_$x.txt; done
