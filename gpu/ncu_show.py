"""ncu_show.py FILE.csv.gz KERNEL [top] : SASS with stall samples; summary by stall kind, top lines, and cumulative samples per 50 lines."""
import csv, gzip, sys
name, kernel = sys.argv[1:3]; top = int(sys.argv[3]) if len(sys.argv) > 3 else 40
rows, head, on = [], None, False
for r in csv.reader(gzip.open(name, 'rt')):
    if r and r[0] == 'Kernel Name':
        if on and rows: break
        on = r[1] == kernel; continue
    if not on: continue
    if r and r[0] == 'Address': head = r; continue
    if head and len(r) >= 8: rows.append(r)
f = lambda x: float(x.replace(',', '') or 0)
S, I = head.index('# Samples') , head.index('Instructions Executed')
total = sum(f(r[S]) for r in rows); n = sum(f(r[I]) for r in rows)
print(len(rows), 'SASS lines,', total, 'samples,', n, 'warp instructions')
kinds = [i for i, h in enumerate(head) if h.startswith('stall_') and 'Not' not in h]
for i in sorted(kinds, key=lambda i: -sum(f(r[i]) for r in rows))[:12]:
    print(f'  {head[i]:24} {sum(f(r[i]) for r in rows)/total*100:5.1f} %')
W = head.index('L1 Wavefronts Shared'); print('shared wavefronts', sum(f(r[W]) for r in rows))
print('top lines (line: % samples, instr executed, main stall, SASS)')
for k in sorted(range(len(rows)), key=lambda k: -f(rows[k][S]))[:top]:
    r = rows[k]; m = max(kinds, key=lambda i: f(r[i]))
    print(f'{k:5} {f(r[S])/total*100:5.2f} {f(r[I]):12.0f} {head[m]:18} {r[1][:90]}')
print('by 50 lines:')
for k in range(0, len(rows), 50):
    b = rows[k:k+50]; print(f'{k:5} {sum(f(r[S]) for r in b)/total*100:5.1f} %  {sum(f(r[I]) for r in b)/n*100:5.1f} % instr')
