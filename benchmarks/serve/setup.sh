# Unpacks a bundle on a machine without a network and sets the shell up. To be sourced in a checkout of flashdelta:
#
#     . BUNDLE/setup.sh          # into $SERVE_DIR (default: flashdelta_serve in $TMPDIR or /tmp); 40 s
#
# Needs Python 3.12 ($PYTHON) with torch 2.11, Triton 3.6 and transformers 5.17.
_bundle="$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")" && pwd)"
_python="${PYTHON:-python3}"
export SERVE_DIR="${SERVE_DIR:-${TMPDIR:-/tmp}/flashdelta_serve}"
mkdir -p "$SERVE_DIR/site" "$SERVE_DIR/plugin/flashdelta-0.dist-info"
if [ ! -e "$SERVE_DIR/site/.done" ]; then
  _unpacking=()
  for _piece in "$_bundle"/*.tar.xz; do
    "$_python" -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='data')" "$_piece" "$SERVE_DIR/site" &
    _unpacking+=($!)
  done
  wait "${_unpacking[@]}"  # not for other jobs of the shell
  "$_python" -m compileall -q -j 0 "$SERVE_DIR/site" >/dev/null 2>&1  # seconds saved in every process
  touch "$SERVE_DIR/site/.done"
fi
# the entry points by which vLLM finds flashdelta
"$_python" - "$PWD" "$SERVE_DIR/plugin/flashdelta-0.dist-info" <<'PY'
import pathlib, sys, tomllib

project, folder = tomllib.loads((pathlib.Path(sys.argv[1]) / "pyproject.toml").read_text())["project"], pathlib.Path(sys.argv[2])
(folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flashdelta\nVersion: 0\n")
groups = project["entry-points"].items()
(folder / "entry_points.txt").write_text("".join(f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for g, e in groups))
PY
export PYTHONPATH="$SERVE_DIR/site:$PWD/src:$SERVE_DIR/plugin" PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR="$SERVE_DIR/triton_cache" VLLM_CACHE_ROOT="$SERVE_DIR/vllm_cache"
if ! ldconfig -p 2>/dev/null | grep -q 'libcuda.so.1 '; then
  for _d in /usr/local/nvidia/lib64 /usr/local/cuda/compat /usr/lib/x86_64-linux-gnu; do
    [ -e "$_d/libcuda.so.1" ] && export LD_LIBRARY_PATH="$_d${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" && break
  done
fi
unset _bundle _python _piece _d
