import ast, io, sys, tokenize, collections
from pathlib import Path
depth=int(sys.argv[1]); prefix=sys.argv[2]
def code_lines(s):
    rows=set()
    doc=set()
    t=ast.parse(s)
    for n in ast.walk(t):
        if isinstance(n,(ast.Module,ast.ClassDef,ast.FunctionDef,ast.AsyncFunctionDef)) and n.body and isinstance(n.body[0],ast.Expr) and isinstance(n.body[0].value,ast.Constant) and isinstance(n.body[0].value.value,str):
            doc.update(range(n.body[0].lineno,n.body[0].end_lineno+1))
    for tok in tokenize.generate_tokens(io.StringIO(s).readline):
        if tok.type in (tokenize.COMMENT,tokenize.NL,tokenize.NEWLINE,tokenize.INDENT,tokenize.DEDENT,tokenize.ENDMARKER): continue
        rows.update(range(tok.start[0],tok.end[0]+1))
    return len(rows-doc), sum(1 for _ in ast.walk(t))
c=collections.defaultdict(lambda:[0,0])
for p in Path(prefix).rglob("*.py"):
    l,n=code_lines(p.read_text()); key="/".join(p.parts[:depth]); c[key][0]+=l; c[key][1]+=n
for k,(l,n) in sorted(c.items(),key=lambda x:-x[1][1]): print(f"{l:6} {n:7} {k}")
print(sum(v[0] for v in c.values()),sum(v[1] for v in c.values()))
