package dram

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pagefault"
)

// openKept opens a pool whose file outlives it.
func openKept(o *Options) (*Pool, error) {
	began := time.Now()
	f, a, r, err := openFile(o)
	if err != nil {
		return nil, err
	}
	adv := newAdvisor(o.Policy, o.Clock)
	c, err := f.core(o, adv, r)
	if errors.Is(err, errClash) || errors.Is(err, errLost) {
		r.Cold = err.Error()
		f.erase()
		c, err = f.core(o, adv, r)
	}
	if err != nil {
		adv.close()
		return nil, errors.Join(err, unix.Munmap(f.meta), a.close())
	}
	p := start(o, a, c)
	p.keeper = startKeeper(f, adv, o.FileFaults)
	r.Took = time.Since(began)
	p.info.Recovery = r
	return p, nil
}

// core is the index of what is in the file, empty if that cannot be used.
func (f *file) core(o *Options, a *advisor, r *Recovery) (*core, error) {
	c, err := newCore(o.Bytes, o.SlabBytes, f.super.seed, o.Clock)
	if err != nil {
		return nil, err
	}
	c.slabs.file, c.advisor, c.slabs.bad.page = f, a, f.super.page
	c.restoreBad(f) // of a file whose content is not used, too
	r.BadPages = int(c.slabs.bad.stats.Pages)
	if r.New || r.Cold != "" {
		return c, nil
	}
	if err := a.learn(f); err != nil {
		r.Notes = append(r.Notes, fmt.Sprintf("what the eviction had learned is not used: %v", err))
	}
	fault := pagefault.Guard(f.meta, nil, func() { err = c.restore(f, o.SlabBytes, r) })
	if fault != nil {
		f.faults.Add(1)
		err = errLost
	}
	if err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

// erase makes nothing of what the file holds count any more.
func (f *file) erase() {
	for n := range f.super.slabCount() {
		f.withdraw(int32(n))
	}
	for n := range f.spacesUsed() {
		f.touch(func() { f.spaceAt(n).remove() })
	}
	for from := 0; from < f.usable*headerBytes; from += pageBytes {
		f.touch(func() { clear(f.meta[from:min(from+pageBytes, f.usable*headerBytes)]) })
	}
}
