here=$(dirname "$(readlink -f "$0")")
tree() { rm -rf "$here/$1"; mkdir -p "$here/$1"; git -C /work/main archive "$2" src tests benchmarks conftest.py | tar x -C "$here/$1" --exclude=benchmarks/results --exclude=tests/compile/machine_code --exclude=tests; }
for x in "$@"; do tree ${x%=*} ${x#*=}; done; du -sh $here
