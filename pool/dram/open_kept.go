package dram

import (
	"errors"
	"fmt"
	"time"
)

// openKept opens a pool whose file outlives it.
func openKept(o *Options) (*Pool, error) {
	began := time.Now()
	f, a, err := openFile(&fileOptions{path: o.Path, bytes: o.Bytes, slabBytes: o.SlabBytes, seed: newSeed(o.HashSeed), now: o.Clock()})
	if err != nil {
		return nil, err
	}
	r := &Recovery{Path: o.Path}
	r.New, r.Cold = f.state()
	page, _ := a.page()
	adv := newAdvisor(o.Policy, o.Clock)
	c, err := o.core(f, page, adv, r)
	if errors.Is(err, errClash) || errors.Is(err, errLost) {
		r.Cold = err.Error()
		f.erase()
		c, err = o.core(f, page, adv, r)
	}
	if err != nil {
		adv.close()
		return nil, errors.Join(err, f.giveUp(), a.close())
	}
	p := start(o, a, c)
	p.keeper = startKeeper(f, adv, o.FileFaults)
	r.Took = time.Since(began)
	p.info.Recovery = r
	return p, nil
}

// core is the index of what is in a file, empty if that cannot be used.
func (o *Options) core(f *file, page int64, a *advisor, r *Recovery) (*core, error) {
	c, err := newCore(o, page, f.seed(), f)
	if err != nil {
		return nil, err
	}
	c.advisor = a
	for _, n := range f.badPages() { // of a file whose content is not used, too; no slab is cut yet
		c.slabs.retire(n * page)
	}
	r.BadPages = int(c.slabs.badStats().Pages)
	if r.New || r.Cold != "" {
		return c, nil
	}
	if err := a.learn(f); err != nil {
		r.Notes = append(r.Notes, fmt.Sprintf("what the eviction had learned is not used: %v", err))
	}
	if !f.touch(func() { err = c.restore(f, o.SlabBytes, r) }) {
		err = errLost
	}
	if err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}
