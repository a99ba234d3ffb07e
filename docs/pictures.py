"""The pictures of docs/kernels/: what a stage reads, does and writes; and that of docs/parallel.md, with a column per rank.
`python docs/pictures.py` writes them.

A picture is columns of boxes, left to right. Grey boxes lie in memory, blue ones are work of a CTA, orange ones stay on chip
from step to step, which an arrow from a box to itself says. Other arrows say what needs what.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
CHARACTER, LINE, PADDING, GAP, BETWEEN = 7.3, 17, 10, 18, 56
FILL = {"memory": "#e8e8e8", "work": "#d6e6fb", "carried": "#fde3c4"}


class Box(NamedTuple):
    name: str
    kind: str
    lines: tuple[str, ...]

    @property
    def height(self) -> float:
        return len(self.lines) * LINE + 2 * PADDING


Place = tuple[float, float, float, float]


def memory(name: str, *lines: str) -> Box:
    return Box(name, "memory", lines)


def work(name: str, *lines: str) -> Box:
    return Box(name, "work", lines)


def carried(name: str, *lines: str) -> Box:
    return Box(name, "carried", lines)


def placed(columns: list[list[Box]]) -> tuple[dict[str, Place], float, float]:
    """Where each box lies (left, top, width, height), and the size of the picture. Columns are centred."""
    heights = [sum(box.height for box in column) + GAP * (len(column) - 1) for column in columns]
    total, left, places = max(heights) + 2 * GAP, float(GAP), {}
    for column, height in zip(columns, heights):
        width = max(len(line) for box in column for line in box.lines) * CHARACTER + 2 * PADDING
        top = (total - height) / 2
        for box in column:
            places[box.name] = left, top, width, box.height
            top += box.height + GAP
        left += width + BETWEEN
    return places, left - BETWEEN + GAP, total


def arrow(a: Place, b: Place) -> str:
    """To another column, down or up within one, or around a box that goes on from step to step."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = a, b
    if a == b:
        right, top = ax + aw, ay
        path = f"M {right - 34:.0f} {top:.0f} c -4 -16 30 -16 26 0"
    elif ax == bx:
        down = by > ay
        begin, end = (ay + ah, by - 5) if down else (ay, by + bh + 5)
        path = f"M {ax + aw / 2:.0f} {begin:.0f} L {bx + bw / 2:.0f} {end:.0f}"
    elif ax < bx:
        path = f"M {ax + aw:.0f} {ay + ah / 2:.0f} L {bx - 5:.0f} {by + bh / 2:.0f}"
    else:
        path = f"M {ax:.0f} {ay + ah / 2:.0f} L {bx + bw + 5:.0f} {by + bh / 2:.0f}"
    return f'<path d="{path}" fill="none" stroke="#444" marker-end="url(#end)"/>'


def drawn(title: str, columns: list[list[Box]], arrows: str) -> str:
    """`arrows`: `"a>b b>c"`."""
    places, width, height = placed(columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" role="img">',
        f"<title>{escape(title)}</title>",
        '<defs><marker id="end" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        '<path d="M0 0 L8 4 L0 8 z" fill="#444"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for pair in arrows.split():
        begin, end = pair.split(">")
        parts.append(arrow(places[begin], places[end]))
    for box in (box for column in columns for box in column):
        left, top, wide, high = places[box.name]
        shape = f'x="{left:.0f}" y="{top:.0f}" width="{wide:.0f}" height="{high:.0f}" rx="4"'
        parts.append(f'<rect {shape} fill="{FILL[box.kind]}" stroke="#666"/>')
        for i, line in enumerate(box.lines):
            at = f'x="{left + PADDING:.0f}" y="{top + PADDING + LINE * (i + 0.75):.0f}"'
            parts.append(f'<text {at} font-family="monospace" font-size="12" fill="#111">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


TILES = memory("tiles", "tiles of prepare:", "w, qg, kg [C, K]", "inverse, Aqk [C, C]", "decay [K]")
ROWS = memory("rows", "q, k [C, K]", "g [C, K], beta [C]")

PICTURES: dict[str, tuple[str, list[list[Box]], str]] = {
    "token": (
        "one token: the state forgets, replaces what the key recalls by the value, and is read",
        [
            [memory("g", "g_t [K]"), memory("kv", "k_t [K]", "v_t [V], beta_t"), memory("q", "q_t [K]")],
            [
                work("forget", "forget", "S <- diag(exp(g_t)) S"),
                work("write", "write", "S <- S + beta_t k_t (v_t - k_t^T S)"),
                work("read", "read", "o_t = scale q_t^T S"),
            ],
            [carried("S", "state S [K, V]"), memory("o", "o_t [V]")],
        ],
        "g>forget kv>write q>read forget>write write>read read>o S>forget write>S S>S",
    ),
    "prepare": (
        "prepare: one CTA per chunk and value head",
        [
            [ROWS],
            [
                work("gate", "gate, L2 norm, sigmoid"),
                work("sums", "G = sums of log decays,", "exp(G - G_boundary)"),
            ],
            [
                work("pairs", "MMAs of pairs of rows:", "Akk, Aqk [C, C]"),
                work("scaled", "k exp(G), qg = scale q exp(G)", "kg = k exp(G_C - G)"),
            ],
            [
                work("solve", "(I + Akk)^-1 by", "forward substitution"),
                work("w", "w = inverse (k exp(G))"),
                memory("rest", "qg, kg [C, K], decay [K]"),
            ],
            [memory("matrices", "inverse, Aqk [C, C]"), memory("tile", "w [C, K]")],
        ],
        "rows>gate gate>sums sums>pairs sums>scaled pairs>solve solve>w scaled>w scaled>rest solve>matrices w>tile",
    ),
    "recurrence": (
        "recurrence: one CTA per sequence, value head and slice of value channels, chunk after chunk",
        [
            [TILES, memory("v", "v [C, BV]"), memory("initial", "initial state")],
            [work("new", "v_new = inverse v - w S"), carried("S", "state S [K, BV]", "S <- decay S + kg^T v_new")],
            [work("read", "o = qg S + Aqk v_new")],
            [memory("o", "o [C, BV]"), memory("final", "final state,", "checkpoints, h")],
        ],
        "tiles>new v>new initial>S S>new new>S S>S new>read S>read read>o S>final",
    ),
    "output": (
        "output: one CTA per chunk, value head and slice of value channels",
        [
            [
                memory("tiles", "tiles of prepare:", "qg [C, K], Aqk [C, C]"),
                memory("h", "S before the chunk [K, BV]"),
                memory("new", "v_new [C, BV]"),
            ],
            [work("read", "o = qg S + Aqk v_new")],
            [memory("o", "o [C, BV]")],
        ],
        "tiles>read h>read new>read read>o",
    ),
    "segments": (
        "plan, transitions, compose: a sequence of three segments",
        [
            [memory("offsets", "cu_seqlens")],
            [work("plan", "plan: how many segments", "each sequence has"), memory("tiles", "tiles of prepare, v")],
            [
                work("t0", "transitions, segment 0:", "b_0 = state after it"),
                work("t1", "transitions, segment 1:", "(M_1, b_1)"),
            ],
            [work("compose", "compose:", "S_1 = b_0", "S_2 = M_1 S_1 + b_1")],
            [
                work("r0", "recurrence, segment 0", "from the initial state"),
                work("r1", "recurrence, segment 1", "from S_1"),
                work("r2", "recurrence, segment 2", "from S_2"),
            ],
        ],
        "offsets>plan plan>t0 plan>t1 tiles>t0 tiles>t1 t0>compose t1>compose compose>r0 compose>r1 compose>r2",
    ),
    "merge": (
        "merge over three ranks or more: rank 2 of a sequence that began on rank 0",
        [
            [
                work("r0", "rank 0: transitions"),
                work("r1", "rank 1: transitions"),
                work("r2", "rank 2: transitions, if the", "sequence goes on after it"),
            ],
            [memory("packets", "exchange of packets", "(M_j, b_j) [K + V, K]")],
            [carried("S", "merge on rank 2:", "S = b_0", "S <- M_1 S + b_1")],
            [work("recurrence", "recurrence on rank 2,", "from S")],
        ],
        "r0>packets r1>packets r2>packets packets>S S>S S>recurrence",
    ),
    "reverse": (
        "reverse: one CTA per sequence, value head and slice of value channels, from the last chunk to the first",
        [
            [TILES, memory("do", "do [C, BV]"), memory("dht", "gradient of the", "final state")],
            [
                work("new", "dv_new = Aqk^T do + kg dS'"),
                carried("S", "gradient dS of the state [K, BV]", "dS = decay dS' + qg^T do", "     - w^T dv_new"),
            ],
            [
                memory("dv", "dv_new [C, BV]"),
                memory("dh", "dS' of every chunk"),
                memory("dh0", "gradient of the", "initial state"),
            ],
        ],
        "tiles>new do>new dht>S S>new new>S S>S new>dv S>dh S>dh0",
    ),
    "wy": (
        "wy: one CTA per chunk and value head",
        [
            [
                memory("rows", "q, k, g, v, beta"),
                memory("forward", "Akk_inv, v_new, S"),
                memory("back", "do, dv_new, dS'"),
            ],
            [
                work("values", "through v_new and o:", "dAqk = do v_new^T", "dw = -dv_new S^T"),
                work(
                    "inverse",
                    "through the inverse:",
                    "R, Z = Akk_inv^T (dv_new, dw)",
                    "dAkk = -Akk_inv^T (..) Akk_inv^T",
                ),
                work("states", "through qg and kg:", "do S^T, v_new dS'^T"),
            ],
            [
                memory("matrices", "dAkk, dAqk [C, C]"),
                memory("dv", "dv, dbeta"),
                memory("parts", "parts of dq, dk, dG [C, K]"),
            ],
        ],
        "rows>values forward>values back>values values>inverse forward>inverse back>states"
        " values>matrices inverse>matrices inverse>dv inverse>parts states>parts",
    ),
    "intra": (
        "intra: one CTA per chunk and value head",
        [
            [ROWS, memory("matrices", "dAkk, dAqk [C, C]"), memory("parts", "parts of dq, dk, dG")],
            [
                work("factors", "exp(G_i - G_j) as", "left_i right_j"),
                work("pairs", "MMAs of pairs:", "more of dq, dk, dbeta, dG"),
            ],
            [work("sum", "dg_t = sum of dG_i, i >= t"), work("gate", "back through gate,", "L2 norm, sigmoid")],
            [
                memory("out", "dq, dk by value head", "dg, dbeta"),
                memory("sums", "a partial sum a chunk", "of dA_log, ddt_bias"),
            ],
        ],
        "rows>factors factors>pairs matrices>pairs parts>pairs pairs>sum sum>gate gate>out gate>sums",
    ),
    "finish": (
        "finish: sums in a fixed order, without atomics",
        [
            [
                memory("heads", "dq, dk by value head", "[B, T, HV, K]"),
                memory("chunks", "partial sums by chunk", "[S, HV, K]"),
            ],
            [work("group", "sum over the value heads", "of a query head"), work("over", "sum over chunk slots")],
            [memory("dq", "dq, dk [B, T, H, K]"), memory("dA", "dA_log [HV]", "ddt_bias [HV, K]")],
        ],
        "heads>group chunks>over group>dq over>dA",
    ),
    "decode": (
        "decode: one CTA per sequence, value head and slice of value channels",
        [
            [memory("rows", "q, k, g, beta, v", "of a token")],
            [
                work("gate", "gate, norms, q^T k,", "while S is on its way"),
                memory("pool", "slot's index, then", "S^T [BV, K] in the slot"),
            ],
            [carried("S", "D = exp(g) S", "a = k^T D,  b = q^T D", "d = beta (v - a)", "S <- D + k d")],
            [memory("o", "o = scale (b + (q^T k) d)"), memory("back", "S^T to its slot, or", "one after each token")],
        ],
        "rows>gate pool>S gate>S S>S S>o S>back",
    ),
    "verify": (
        "verify and commit: drafts by replay",
        [
            [memory("rows", "q, k, g, beta, v", "of 1 + S tokens"), memory("pool", "S_0, only read")],
            [
                work("system", "A, B: pairs of tokens;", "rows decayed to S_0"),
                work("product", "one product with S_0"),
            ],
            [work("solve", "u_t and o_t by", "substitution")],
            [memory("o", "o"), memory("records", "records: exp(g), k, u", "of every token")],
            [work("commit", "commit, once the sampler", "has accepted n tokens:", "S_0 and n records")],
            [memory("new", "S_n in its slot")],
        ],
        "rows>system pool>product system>solve product>solve solve>o solve>records records>commit commit>new",
    ),
    "fused-decode": (
        "fused_decode: one CTA per sequence and query/key head, with all value heads of it",
        [
            [
                memory("x", "x of the token,", "windows of W - 1 inputs"),
                memory("gate", "g, beta"),
            ],
            [
                work("conv", "q, k, v =", "silu(convolution)"),
                work("norms", "L2 norms, gate"),
                memory("pool", "state in its slot"),
            ],
            [carried("S", "a step of decode,", "state in registers"), memory("z", "output gate z")],
            [memory("back", "state and window", "to their slots"), work("norm", "rmsnorm(o) * weight", "* sigmoid(z)")],
            [memory("o", "y")],
        ],
        "x>conv gate>norms conv>S norms>S pool>S S>S S>norm z>norm norm>o S>back",
    ),
    "around": (
        "convolution and norm: what the layer has around attention",
        [
            [memory("x", "x W_q, x W_k, x W_v", "side by side")],
            [carried("conv", "convolution: threads go over", "tokens, W - 1 inputs", "in registers")],
            [memory("qkv", "q, k, v")],
            [work("kda", "attention")],
            [memory("o", "o, z")],
            [work("norm", "norm: rmsnorm(o)", "* weight * act(z)")],
            [memory("y", "y")],
        ],
        "x>conv conv>conv conv>qkv qkv>kda kda>o o>norm norm>y",
    ),
}


RANKS: tuple[str, list[list[Box]], str] = (
    "sequences A to D over four ranks: what they send each other forward, and back",
    [
        [
            memory("tokens0", "rank 0", "all of A,", "where B starts"),
            work("send0", "forward:", "b_0 of B, to 1 and 2"),
            work("merge0", "nothing to merge", ""),
            work("grad0", "backward:", "dS = M_1^T c_2 + c_1 of B"),
        ],
        [
            memory("tokens1", "rank 1", "B alone", ""),
            work("send1", "M_1, b_1 of B, as B", "goes through; to 2"),
            work("merge1", "merge of B:", "S = b_0"),
            work("grad1", "dS = c_2 of B;", "c_1 of B, to 0"),
        ],
        [
            memory("tokens2", "rank 2", "where B ends", "and C starts"),
            work("send2", "b_2 of C, to 3", ""),
            work("merge2", "merge of B:", "S = M_1 b_0 + b_1"),
            work("grad2", "dS = c_3 of C;", "c_2 of B, to 0 and 1"),
        ],
        [
            memory("tokens3", "rank 3", "where C ends,", "all of D"),
            work("send3", "nothing to send", ""),
            work("merge3", "merge of C:", "S = b_2"),
            work("grad3", "c_3 of C, to 2", ""),
        ],
    ],
    "send0>merge1 send0>merge2 send1>merge2 send2>merge3 grad3>grad2 grad2>grad1 grad1>grad0",
)


def pictures() -> dict[Path, str]:
    stages = {FOLDER / "kernels" / f"{name}.svg": drawn(*picture) for name, picture in PICTURES.items()}
    return stages | {FOLDER / "parallel.svg": drawn(*RANKS)}


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text)
