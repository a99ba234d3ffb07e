. .carry/bundle/setup.sh
mkdir -p /tmp/out_m; timeout 140 python3 benchmarks/serve/run.py memory --limit 120 --out /tmp/out_m --work /tmp/work_m 2>&1 | tail -8; cp /tmp/out_m/*.json $OUT/
