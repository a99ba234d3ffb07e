. .carry/bundle/setup.sh
export CUDA_VISIBLE_DEVICES=${1:-0}
mkdir -p /tmp/prof
for m in off on; do
cat > /tmp/prof/start.py <<'P'
import os, sys
sys.path.insert(0, "benchmarks/serve")
import together
os.environ.update(together.environment(sys.argv[1], "/tmp/prof"))
os.execv(sys.executable, [sys.executable, ".carry/profile_host.py", "k3", sys.argv[1]])
P
timeout 150 python3 /tmp/prof/start.py $m > /tmp/prof/out_$m.txt 2>/tmp/prof/err_$m.txt &
done
wait
for m in off on; do cp /tmp/prof/out_$m.txt $OUT/prof_$m.txt; grep -a "host ms\|length new" /tmp/prof/out_$m.txt || tail -5 /tmp/prof/err_$m.txt; done
