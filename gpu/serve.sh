# serve.sh WHAT LIMIT: two engines' groups, one per GPU (or in turn on one)
what=$1; limit=$2
. .carry/bundle/setup.sh
cp -n -r .carry/fla-tuning/. $SERVE_DIR/triton_cache/ 2>/dev/null
gpus=$(python3 -c "import torch; print(torch.cuda.device_count())"); echo "gpus $gpus"
one() { # GPU NAME ARGS
  mkdir -p /tmp/out_$2 /tmp/work_$2
  CUDA_VISIBLE_DEVICES=$1 timeout $((limit+20)) python3 benchmarks/serve/run.py $what --limit $limit --out /tmp/out_$2 --work /tmp/work_$2 "${@:3}" > /tmp/out_$2/log.txt 2>&1
  cp /tmp/out_$2/serve-$what.json $OUT/serve-$what-$2.json; tail -c 4500 /tmp/out_$2/log.txt
}
if [ $what = times ]; then
  if [ $gpus = 2 ]; then
    one 0 k3 --waves 3 --cases "k3:off,k3:on,draft:off,draft:on" &
    one 1 linear --waves 3 --cases "linear:off,linear:on,k3-24:off,k3-24:on,k3-24:fused" &
  else
    one 0 both --waves 3 --cases "k3:off,k3:on,linear:off,linear:on" &
  fi
  wait
elif [ $gpus = 2 ]; then
  one 0 k3 --cases "k3:off,k3:on,k3:base,preempt:off,preempt:on" &
  one 1 linear --cases "linear:off,linear:on,linear:base,draft:off,draft:on" &
  wait
else
  one 0 both
fi
