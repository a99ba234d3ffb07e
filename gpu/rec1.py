import sys, time
from tests.compile.toolchains import toolchains
from tests.compile import records
from tests.compile.__main__ import JOBS
if __name__ == "__main__":
    which = sys.argv[1]
    t0=time.time()
    for toolchain in toolchains().values():
        triton = toolchain.triton()
        if not triton.startswith(which): continue
        sources = records.sources()
        entries = toolchain.entries(); print(len(entries), 'entries', time.time()-t0, flush=True)
        known = records.read(triton)
        c = records.compare(entries, known); print(len(c.new), 'new', len(c.same), 'same', flush=True)
        done = toolchain.compile(entries, c.new, JOBS, expected=c.before, attempts=1)
        wrong = records.all_faults(done); found = c.same | done
        records.write(found, triton); records.write_sources(sources, triton)
        print(len(done), 'compiled', len(c.gone), 'dropped', time.time()-t0, flush=True); print(*records.changes(known, found), *wrong, sep='\n')
