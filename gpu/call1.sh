# serving on both GPUs; memory and profile on GPU 0 once it is free
. .carry/bundle/setup.sh
mkdir -p $SERVE_DIR/triton_cache; cp -n -r .carry/fla-tuning/. $SERVE_DIR/triton_cache/ 2>/dev/null
one() { # GPU CORES NAME LIMIT ARGS
  mkdir -p /tmp/out_$3 /tmp/work_$3
  CUDA_VISIBLE_DEVICES=$1 taskset -c $2 timeout $(($4+20)) python3 benchmarks/serve/run.py times --limit $4 --out /tmp/out_$3 --work /tmp/work_$3 "${@:5}" > /tmp/out_$3/log.txt 2>&1
  cp /tmp/out_$3/serve-times.json $OUT/serve-times-$3.json; tail -c 3300 /tmp/out_$3/log.txt
}
rows="first token,step of,count,drafting,host time,all KDA"
(one 0 0-15 k3 430 --waves 3 --rows "$rows" --cases "k3:off,k3:on,draft:off,draft:on"
 timeout 90 bash .carry/profile.sh 0
 bash .carry/memory.sh) > /tmp/a.txt 2>&1 &
one 1 16-31 linear 520 --waves 3 --rows "$rows" --cases "linear:off,linear:on,k3-24:off,k3-24:on,k3-24:fused" > /tmp/b.txt 2>&1 &
wait
tail -c 6000 /tmp/a.txt; echo; echo "#### GPU 1"; tail -c 4500 /tmp/b.txt
