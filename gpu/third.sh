cd "$(dirname "$(readlink -f "$0")")"; R=$PWD/../..; export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/lease_cache
( CUDA_VISIBLE_DEVICES=0 timeout 130 python3 slow_gpu.py 105 > $OUT/slow.log 2>&1; echo slow $? ) &
( CUDA_VISIBLE_DEVICES=1 timeout 120 python3 pilot4_gpu.py 75 > $OUT/pilot.log 2>&1; echo pilot $?
  CUDA_VISIBLE_DEVICES=1 timeout 110 python3 gpu_train.py base=dec/src intra=intra/src > $OUT/train.log 2>&1; echo train $? ) &
wait
CUDA_VISIBLE_DEVICES=0 timeout 60 python3 fp32_gpu.py 45 > $OUT/fp32.log 2>&1 &
wait
for x in slow pilot fp32; do sed -n '/^== /,$p' $OUT/$x.log | cut -c1-220; [ -s $OUT/$x.log ] || echo none; done; tail -22 $OUT/train.log; tail -3 $OUT/*.log | cut -c1-200 | tail -30
cd $R; bash .carry/tier.sh ${1:-200} 30 tests/gpu/test_afresh.py tests/gpu/test_steps.py tests/gpu/test_execution.py tests/gpu/test_parallel.py tests/gpu/test_docs.py tests/gpu/test_backward.py tests/gpu/test_stream_k.py tests/gpu/test_split.py tests/gpu/test_wy.py tests/gpu/test_c_library.py tests/gpu/test_chunk.py tests/gpu/test_short.py "tests/gpu/test_replay.py::test_wrapped_losses"
