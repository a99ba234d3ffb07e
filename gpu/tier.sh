# tier.sh SECONDS WORKERS [pytest args]
limit=$1; workers=$2; shift 2
. .carry/setup.sh
mkdir -p /tmp/tier_cache; cp -n -r .carry/fla-tuning/. /tmp/tier_cache/; export TRITON_CACHE_DIR=/tmp/tier_cache PYTHONPATH=$PYTHONPATH:$PWD/.carry
rm -f /tmp/durations.tsv /tmp/fails.txt
timeout -s INT $limit python3 -m pytest -q -m gpu -p skipdone -n $workers --maxschedchunk 1 --no-header --tb=short "${@:-tests/gpu}" > /tmp/tier.log 2>&1
tail -c 3000 /tmp/tier.log | tail -25
cp /tmp/durations.tsv /tmp/fails.txt $OUT/ 2>/dev/null
grep -c passed /tmp/durations.tsv; grep -a "^====" /tmp/fails.txt | head -60
