R=$PWD
timeout 185 bash .carry/tier.sh 172 30 tests/gpu/test_parallel.py tests/gpu/test_afresh.py tests/gpu/test_steps.py tests/gpu/test_docs.py tests/gpu/test_execution.py tests/gpu/test_backward.py tests/gpu/test_stream_k.py tests/gpu/test_split.py tests/gpu/test_replay.py::test_wrapped_losses tests/gpu/test_c_library.py tests/gpu/test_short.py tests/gpu/test_chunk.py > $OUT/tier.txt 2>&1
tail -40 $OUT/tier.txt | cut -c1-150
python3 -m pip install -q --no-deps --no-index --target /tmp/gym .carry/gym/*.whl 2>&1 | tail -1
export PYTHONPATH=$R/src:$R:/tmp/gym FLASH_KDA=$R/.carry/fk/_flashkda_C.abi3.so PYTHONUNBUFFERED=1
mkdir -p /tmp/bench_cache; cp -r .carry/fla-tuning/. /tmp/bench_cache/; export TRITON_CACHE_DIR=/tmp/bench_cache
b() { g=$1; n=$2; p=$3; shift 3; a=(); for r in "$@"; do a+=(--rows "$r"); done
 CUDA_VISIBLE_DEVICES=$g timeout -s INT $SEC python3 -m benchmarks.$p --rounds 20 --out $OUT/$n.json "${a[@]}" > $OUT/$n.txt 2>&1; tail -4 $OUT/$n.txt | cut -c1-300; }
( SEC=190 b 0 pa prefill "T8192 H64" "T8192 H32" "packed 8 x 1024 H64" "packed 200 x 40 H16" "packed 64 x 100 H32" "packed 6 uneven H64" "T1024 H64" "packed 6 uneven H96" "GVA T8192 H16 HV64" "T16384 H64" "T8192 H96" ) &
( (cd .carry/lease; CUDA_VISIBLE_DEVICES=1 timeout 45 python3 gpu_first.py 30 > $OUT/first.txt 2>&1; tail -25 $OUT/first.txt | cut -c1-160)
  SEC=60 b 1 tr train "B1 T8192 H32" "B1 T8192 H64" "B4 T2048 H32"
  SEC=95 b 1 pb prefill "shard T1024 H4, random gates" "shard T2048 H12, random gates" "T8192 H32, random gates" "T8192 H8" "T8192 H4" "T8192 H12" "shard T1024 H4, slow gates" "shard T2048 H12, slow gates" "T8192 H32 softplus" ) &
wait
ls -l $OUT
