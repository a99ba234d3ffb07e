# sourced in the repo root on the GPU machine
python3 -m pip install -q --no-deps --no-index --find-links .carry/whl $(ls .carry/whl/*.whl) 2>&1 | tail -2 || python3 -m pip install -q --break-system-packages --no-deps .carry/whl/*.whl 2>&1 | tail -2
export PYTHONPATH=$PWD/src:$PWD
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1
